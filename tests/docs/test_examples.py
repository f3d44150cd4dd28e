"""Every code block of every page and of the README runs as a reader would run it: in order, in one folder."""

from __future__ import annotations

import ast
import json
import re
import shlex
import shutil
from pathlib import Path
from typing import Any

import pytest
import typer
import yaml

from tailguard.cli import app
from tailguard.config import flat_settings, load_config
from tailguard.population.space import SearchSpace

from .blocks import ROOT, RUN, Block, blocks, pages
from .conftest import Command, Given, quick

SLOW = {"docs/robustness.md", "docs/budget.md", "docs/faq.md", "docs/report.md"}
"""Pages with heavy blocks. Every run of the tests reads these, and the slow tests execute them too."""
HEAVY = re.compile(
    r"--walk-forward|--feed|--attack|--pdf|--trials|--csv|--parquet|--benchmark|--outcome|bench "
    r"|AttackedPolicy|CertifiedPolicy|train_adversary"
)
"""Commands and Python of these pages that take more than a few seconds, and that other tests execute as well."""
LARGEST = {
    "learn": 256, "timesteps": 256, "num_envs": 8, "make_market": 3_000, "minibatch_size": 128, "folds": 2, "seeds": 2,
    "bars": 3_000, "probes": 3, "CheckpointCallback": 32, "eval_freq": 16,
}  # fmt: skip
"""Sizes of the examples in the tests: larger ones are replaced, so that a block takes about a second."""
SIZE = re.compile(rf"(?<![\w.])(?:\w+\.)?({'|'.join(LARGEST)})(=|\(| |: )([\d_]+(?:e\d+)?)\b")
RENAMED = {"rl_model_8000_steps": "rl_model_256_steps"}
"""Names of files that follow from a size."""
ELSEWHERE = ("pip", "git", "source", "pre-commit", "tensorboard", "ray", "docker")
"""Programs that an example may name and that are not ours."""


def quickly(text: str) -> str:
    """The same with sizes that a test can afford."""

    def smaller(found: re.Match[str]) -> str:
        written = int(float(found[3]))
        size = min(written, LARGEST[found[1]])
        return found[0] if size == written else found[0][: -len(found[3])] + str(size)

    for name, now in RENAMED.items():
        text = text.replace(name, now)
    return SIZE.sub(smaller, text)


def parse(arguments: list[str]) -> None:
    """Read a command line as the command does, down to its options and their values, and stop there."""
    command: Any = typer.main.get_command(app)
    rest = list(arguments)
    while hasattr(command, "commands"):
        command = command.commands[rest.pop(0)]
    command.make_context(command.name, rest)


class Reader:
    """Runs the blocks of one page, one after the other."""

    def __init__(self, folder: Path, given: Given, tailguard: Command, capsys: pytest.CaptureFixture[str]) -> None:
        self.folder, self.given, self.tailguard, self.capsys = folder, given, tailguard, capsys
        self.heavy = True  # whether what is heavy is executed, too
        self.names: dict[str, Any] = {"__name__": "page"}
        self.trained: set[str] = set()

    def run(self, block: Block) -> None:
        getattr(self, block.language)(block)

    def python(self, block: Block) -> None:
        code = quickly(block.text)
        if block.file:
            (self.folder / block.file).write_text(code, encoding="utf-8")
            return
        tree = ast.parse(code)
        if not self.heavy and HEAVY.search(code):
            return
        used = {node.id for node in ast.walk(tree) if isinstance(node, ast.Name)}
        made = {node.id for node in ast.walk(tree) if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)}
        first = {name for name in made & used if self._read_before_it_is_made(tree, name)}
        for name in ((used - made) | first) & self.given.names() - set(self.names):
            self.names[name] = self.given.get(name)
        exec(compile(tree, block.place, "exec", dont_inherit=True), self.names)

    @staticmethod
    def _read_before_it_is_made(tree: ast.Module, name: str) -> bool:
        """Whether the first statement with the name reads it."""
        for statement in tree.body:
            found = [node for node in ast.walk(statement) if isinstance(node, ast.Name) and node.id == name]
            if found:
                return any(isinstance(node.ctx, ast.Load) for node in found)
        return False

    def bash(self, block: Block) -> None:
        for command in block.commands():
            self.command(quickly(command), block)

    console = bash

    def command(self, command: str, block: Block) -> None:
        line, _, out = command.partition(">")
        program, *arguments = shlex.split(line)
        if program == "make":
            targets = re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE)
            assert set(arguments) - set(targets) == set(), f"{block.place}: {command}"
        elif program == "python":
            assert (ROOT / arguments[0]).is_file(), f"{block.place}: {command}"
        elif program == "cat":
            assert all((self.folder / name).is_file() for name in arguments), f"{block.place}: {command}"
        elif program not in ELSEWHERE:
            assert program == "tailguard", f"{block.place}: {command}"
            if arguments[0] == "demo" or (not self.heavy and HEAVY.search(command)):  # runs/demo is prepared
                parse(arguments)
                return
            self.capsys.readouterr()
            given = self._arguments(arguments)
            self.tailguard(*given)
            if arguments[0] == "train" and "--walk-forward" not in arguments and "--resume" not in arguments:
                self._check_settings(arguments, given[len(arguments) :])
            if out:
                (self.folder / out.strip()).write_text(self.capsys.readouterr().out, encoding="utf-8")

    def _arguments(self, arguments: list[str]) -> list[str]:
        """With small sizes, and without the questions that a terminal would answer."""
        if arguments[0] == "train" and "--resume" not in arguments:
            name = arguments[arguments.index("--name") + 1] if "--name" in arguments else "run"
            if name not in self.trained or "--name" not in arguments:  # prepared for pages that begin with a run
                shutil.rmtree(self.folder / "runs" / name, ignore_errors=True)
            self.trained.add(name)
            learner = "ppo" if "learner=ppo" in arguments else "pathwise"
            own = any("features" in part for part in arguments) or self._features_in(arguments)
            return [*arguments, *quick(learner, features=not own)]
        if arguments[0] == "population" and "--resume" not in arguments:
            steps = ["--set", "training.total_timesteps=512"]  # a rollout for each round
            return [*arguments, *quick(), *steps, "--members", "2", "--rounds", "2", "--processes", "1"]
        if arguments[0] == "audit" and "--only" not in arguments:  # all of it is seconds, and tests/audit has each
            return (
                [*arguments, "--only", "F1", "--only", "T"] if "--fast" in arguments else [*arguments, "--only", "E2"]
            )
        return arguments

    def _check_settings(self, arguments: list[str], small: list[str]) -> None:
        """The run was made of the page's settings, but for those that make it small."""
        name = arguments[arguments.index("--name") + 1] if "--name" in arguments else "run"
        found = dict(flat_settings(yaml.safe_load((self.folder / "runs" / name / "config.yaml").read_text())))
        wanted = [arguments[k + 1].partition("=") for k, part in enumerate(arguments) if part == "--set"]
        if "--data" in arguments:
            wanted.append(("data.path", "=", arguments[arguments.index("--data") + 1]))
        for key, _, value in wanted:
            if not any(part.startswith(f"{key}=") for part in small):
                assert found[key] == yaml.safe_load(value), f"{name}: {key} is {found[key]}"

    def _features_in(self, arguments: list[str]) -> bool:
        """Whether the settings on the command line or in their file name features, or bars have them already."""
        files = [self.folder / part for part in arguments if part.endswith(".yaml")]
        return any("features: [r" in file.read_text() for file in files) or "market" in arguments

    def yaml(self, block: Block) -> None:
        file = self.folder / (block.file or "run.yaml")
        file.write_text(block.text, encoding="utf-8")
        if file.name == "space.yaml":
            SearchSpace.read(file)
        else:
            load_config(file)

    def json(self, block: Block) -> None:
        for line in block.text.splitlines():
            json.loads(line)


def runnable() -> list[Any]:
    """Pages with blocks to run, and whether to run the heavy ones; with them some are slow."""
    found = []
    for page in pages():
        if any(block.language in RUN and not block.not_run for block in blocks(page)):
            name = str(page.relative_to(ROOT))
            if name in SLOW:
                found.append(pytest.param(page, False, id=f"{name} without its heavy blocks"))
            found.append(pytest.param(page, True, id=name, marks=[pytest.mark.slow] if name in SLOW else []))
    return found


@pytest.mark.usefixtures("own_parts")
@pytest.mark.filterwarnings("ignore::tailguard.errors.BarsWarning")
@pytest.mark.parametrize(("page", "heavy"), runnable())
def test_every_block_of_the_page_runs(
    page: Path, heavy: bool, folder: Path, given: Given, tailguard: Command, capsys: pytest.CaptureFixture[str]
) -> None:
    reader = Reader(folder, given, tailguard, capsys)
    reader.heavy = heavy
    for block in blocks(page):
        if block.language in RUN and not block.not_run:
            try:
                reader.run(block)
            except Exception as error:
                raise AssertionError(f"{block.place}: {type(error).__name__}: {error}") from error


def test_every_block_says_what_it_is() -> None:
    """A block without a language, or of an unknown one, would not be run by anybody."""
    found = [block for page in pages() for block in blocks(page)]
    assert len(found) > 80
    unknown = [block.place for block in found if block.language not in (*RUN, "text")]
    assert unknown == []
    excused = [block for block in found if block.not_run]
    assert len(excused) < len(found) / 10
    assert all(len(block.not_run or "") > 10 for block in excused)


@pytest.mark.parametrize("notebook", sorted((ROOT / "examples").glob("*.ipynb")), ids=lambda path: path.name)
def test_a_notebook_is_stored_as_it_ran_once(notebook: Path) -> None:
    """In order, without an error and without a path of somebody's machine, and small enough for a repository."""
    text = notebook.read_text(encoding="utf-8")
    cells = [cell for cell in json.loads(text)["cells"] if cell["cell_type"] == "code"]
    assert [cell["execution_count"] for cell in cells] == list(range(1, len(cells) + 1))
    outputs = [output for cell in cells for output in cell["outputs"]]
    assert {output["output_type"] for output in outputs} <= {"stream", "display_data", "execute_result"}
    assert sum("image/png" in output.get("data", {}) for output in outputs) == 2
    assert not re.search(r"/tmp/|/home/|/root/|\\u001b", text)
    assert len(text) < 200_000
