"""Rules of the house that a machine can check."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

SOURCE = Path(__file__).parents[1] / "src" / "tailguard"
LAYERS: tuple[tuple[str, ...], ...] = (
    ("_version", "console", "deprecated", "device_ops", "errors", "member_axis", "memory_limits", "places"),
    ("field_docs", "plain_yaml", "plugins", "sealed", "validate"),
    ("data",),
    ("market",),
    ("envs",),
    ("returns",),
    ("models",),
    ("risk",),
    ("optim",),
    ("robust",),
    ("monitor",),
    ("algorithm",),
    ("config",),
    ("experiment",),
    ("evaluate",),
    ("runs",),
    ("population",),
    ("live",),
    ("audit",),
    ("bench",),
    ("cli",),
    ("__init__",),
)
"""Data flows this way: a module imports its own layer and the layers above this line. A name covers its submodules."""
CORE = ("market", "envs", "models", "returns", "risk", "optim", "robust", "algorithm")
EDGES = {
    "envs.gym": "gymnasium",
    "envs.gym_spaces": "gymnasium",
    "envs.gym_trading": "gymnasium",
    "envs.sb3_vec_env": "gymnasium",
    "models.recurrence_kernels": "triton",
    "algorithm.saving": "safetensors",
    "algorithm.ensemble": "safetensors",
}
"""Modules of the numeric core that adapt another library, and that library. The core runs without them."""

ONLY_TORCH_AND_NUMPY = """
import importlib
import sys

import numpy
import torch._dynamo  # torch imports it, and what it needs, when an optimiser is first made

ALLOWED = {"tailguard", *sys.stdlib_module_names, *(name.partition(".")[0] for name in sys.modules)}


class Refuse:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] not in ALLOWED:
            raise ImportError(f"{name} is not torch or numpy", name=name)


sys.meta_path.insert(0, Refuse())
"""

IMPORT_THE_CORE = (
    ONLY_TORCH_AND_NUMPY
    + """
for module in sys.argv[1:]:
    try:
        importlib.import_module(f"tailguard.{module}")
    except ImportError as error:
        print(module, error.name)
"""
)

TRAIN_ON_THE_CORE = (
    ONLY_TORCH_AND_NUMPY
    + """
import numpy as np
import tailguard as tg
from tailguard.data.panel import Panel
from tailguard.data.prepare import PreparedBars
from tailguard.data.scaling import Scaler

rows = 200
price = 100 * np.exp(np.cumsum(0.01 * np.random.default_rng(0).normal(size=(rows, 1)), axis=0))
panel = Panel(
    time=3_600_000 * np.arange(rows), open=price, high=1.01 * price, low=0.99 * price, close=price,
    volume=np.full((rows, 1), 1e6), segment=np.zeros(rows, np.int32), tradeable=np.ones(rows, bool),
    symbols=("A",), frequency_ms=3_600_000,
)
features = np.random.default_rng(1).normal(size=(rows, 2)).astype(np.float32)
scaler = Scaler(("a", "b"), ("x", "y"), np.zeros(2), np.ones(2))
bars = PreparedBars(panel, features, ("a", "b"), np.ones(rows, bool), scaler)
env = tg.TradingEnv(bars, num_envs=4, episode_length=16)
agent = tg.DistributionalPPO(env, n_steps=8, twin_critics=True)
agent.learn(64)
assert agent.num_timesteps == 64
print("learned", agent.metrics["train/loss"])
"""
)


def test_the_numeric_core_imports_only_torch_and_numpy() -> None:
    """With every other library refused, each module of the core imports but for the adapters of a named library."""
    modules = [name for name in module_names() if name.split(".")[0] in CORE]
    assert len(modules) > 40
    command = [sys.executable, "-c", IMPORT_THE_CORE, *modules]
    run = subprocess.run(command, capture_output=True, text=True, check=True)
    assert dict(line.split() for line in run.stdout.splitlines()) == EDGES


def test_the_numeric_core_trains_with_torch_and_numpy_alone() -> None:
    """As on a GPU machine that has nothing else: market, environment and learner, without any edge library."""
    run = subprocess.run([sys.executable, "-c", TRAIN_ON_THE_CORE], capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr
    assert run.stdout.startswith("learned")


def module_names() -> list[str]:
    """Every module of the package, as a dotted name without the package's own."""
    names = [".".join(path.relative_to(SOURCE).with_suffix("").parts) for path in SOURCE.rglob("*.py")]
    return sorted(name.removesuffix(".__init__") for name in names)


def layer_of(module: str) -> int:
    """The layer of the longest entry that covers the module."""
    found = {
        entry: rank
        for rank, layer in enumerate(LAYERS)
        for entry in layer
        if module == entry or module.startswith(f"{entry}.")
    }
    assert found, f"tailguard.{module} has no layer: add it to LAYERS"
    return found[max(found, key=len)]


def running(node: ast.AST) -> Iterator[ast.AST]:
    """The nodes below one that are there at run time: imports for type checkers alone are left out."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.If) and ast.unparse(child.test).endswith("TYPE_CHECKING"):
            for other in child.orelse:
                yield other
                yield from running(other)
            continue
        yield child
        yield from running(child)


def imports_of(module: str, known: set[str]) -> set[str]:
    """Modules of the package that one imports, at its top level or inside functions."""
    base = SOURCE.joinpath(*module.split("."))
    path = base / "__init__.py" if base.is_dir() else base.with_suffix(".py")
    package = ["tailguard", *module.split(".")]
    if not base.is_dir():
        package.pop()
    found = set()
    for node in running(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            named = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            above = package[: len(package) - node.level + 1] if node.level else []
            origin = ".".join([*above, *([node.module] if node.module else [])])
            named = [f"{origin}.{alias.name}" for alias in node.names]
        else:
            continue
        for name in named:
            if name.split(".")[0] == "tailguard":
                found.add(covering(name.removeprefix("tailguard").removeprefix("."), known))
    return found - {module}


def covering(name: str, known: set[str]) -> str:
    """The module that a dotted name lies in; the package itself where no module fits."""
    while name and name not in known:
        name = name.rpartition(".")[0]
    return name or "__init__"


def wrong_imports(module: str, known: set[str]) -> set[str]:
    return {other for other in imports_of(module, known) if layer_of(other) > layer_of(module)}


@pytest.mark.parametrize("module", module_names())
def test_a_module_imports_only_layers_upstream_of_it(module: str) -> None:
    assert not wrong_imports(module, set(module_names()))


@pytest.mark.parametrize("module", ["algorithm.learner", "algorithm.ppo", "algorithm.pathwise"])
def test_a_learner_needs_few_other_modules(module: str) -> None:
    """A loop that reads: it calls at most fifteen other modules, those imported inside functions included."""
    assert len(imports_of(module, set(module_names()))) <= 15


PARTS_OF_THEIR_OWN = {
    "models.critics": ("Critic", "DistributionalCritic", "ScalarCritic", "QuantileCritic", "CategoricalCritic"),
    "optim": ("UPGD", "UPGDW", "AdaptiveUPGD", "UtilityOptimizer", "Adam", "AdamW", "SGD"),
}
"""Rooms whose classes nobody else tells apart: what differs between them is their own behaviour."""


def told_apart(source: str) -> set[str]:
    """Names of the classes that a module asks for by isinstance, issubclass or `type(…) is`."""
    named = set()
    for node in ast.walk(ast.parse(source)):
        asked: list[ast.expr] = []
        if isinstance(node, ast.Call) and ast.unparse(node.func) in ("isinstance", "issubclass"):
            asked = node.args[1:]
        elif isinstance(node, ast.Compare):
            asked = node.comparators
        elif isinstance(node, ast.MatchClass):
            asked = [node.cls]
        for part in (name for expression in asked for name in ast.walk(expression)):
            named |= {part.id} if isinstance(part, ast.Name) else set()
            named |= {part.attr} if isinstance(part, ast.Attribute) else set()
    return named


@pytest.mark.parametrize("room", PARTS_OF_THEIR_OWN)
def test_nobody_outside_their_room_tells_critics_or_optimisers_apart(room: str) -> None:
    elsewhere = [name for name in module_names() if name != room and not name.startswith(f"{room}.")]
    found = {}
    for module in elsewhere:
        base = SOURCE.joinpath(*module.split("."))
        path = base / "__init__.py" if base.is_dir() else base.with_suffix(".py")
        if named := told_apart(path.read_text(encoding="utf-8")) & set(PARTS_OF_THEIR_OWN[room]):
            found[module] = named
    assert found == {}


def test_every_entry_of_the_layers_is_a_module() -> None:
    known = set(module_names())
    assert not [entry for layer in LAYERS for entry in layer if entry not in known]


def test_the_layer_rule_sees_lazy_nested_and_relative_imports(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A package with one wrong import of each kind: all are found, and what only type checkers read is not."""
    files = {
        "data/deep/lazy.py": "def f():\n    from tailguard.runs.folder import x\n",
        "data/relative.py": "from ..runs import folder\n",
        "data/facade.py": "import tailguard as tg\n",
        "data/named.py": "from tailguard import cli\n",
        "data/typed.py": "if TYPE_CHECKING:\n    from tailguard.runs import folder\n",
        "runs/folder.py": "from tailguard.data.relative import y\n",
        "cli.py": "",
        "__init__.py": "",
        "data/__init__.py": "",
        "data/deep/__init__.py": "",
        "runs/__init__.py": "",
    }
    for name, text in files.items():
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
    monkeypatch.setattr(sys.modules[__name__], "SOURCE", tmp_path)
    known = set(module_names())
    found = {module: wrong for module in known if (wrong := wrong_imports(module, known))}
    assert found == {
        "data.deep.lazy": {"runs.folder"},
        "data.relative": {"runs.folder"},
        "data.facade": {"__init__"},
        "data.named": {"cli"},
    }
    with pytest.raises(AssertionError, match=r"tailguard\.extra has no layer"):
        layer_of("extra")


def test_no_pickle_and_no_unsafe_loading_anywhere() -> None:
    for path in SOURCE.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Import | ast.ImportFrom):
                names = [alias.name for alias in node.names] + [getattr(node, "module", None) or ""]
                assert not {"pickle", "cloudpickle", "dill", "marshal", "shelve"} & set(names), path
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
                called = ast.unparse(node.func)
                assert called not in ("torch.load", "yaml.load", "np.load"), f"{path}: {called}"


RUN_FILES = {
    *("config.yaml", "settings.json", "settings.yaml", "metrics.jsonl", "trials.jsonl", "report.html"),
    *("robustness.html", "audit.html", "audit.json", "audit.sarif"),
    *("walk_forward.json", "walk_forward.html", "tensorboard", "checkpoints", "latest", ".lock"),
}
AMBIGUOUS = {"agent", "members", "runs"}
"""Names of folders that are also names of other things; they count where they are part of a path."""


def run_paths_in(source: str) -> list[str]:
    """Names of a run's files in a module: a whole string, or a part of a path as in `folder / "agent"` or `Path(…)`."""
    named = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Constant) and node.value in RUN_FILES:
            named.append(str(node.value))
        parts: list[ast.expr] = []
        if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Div):
            parts = [node.left, node.right]
        elif isinstance(node, ast.Call) and ast.unparse(node.func).split(".")[-1] in ("Path", "with_name", "joinpath"):
            parts = node.args
        for part in parts:
            words = part.value.split("/") if isinstance(part, ast.Constant) and isinstance(part.value, str) else []
            named += [word for word in words if word in AMBIGUOUS or (len(words) > 1 and word in RUN_FILES)]
            if isinstance(part, ast.JoinedStr) and ast.unparse(part)[2:].startswith(("step_", "fold_", "seed_")):
                named.append(ast.unparse(part))
    return named


def test_only_the_layout_names_the_files_of_a_run() -> None:
    layout = SOURCE / "experiment" / "layout.py"
    assert set(run_paths_in(layout.read_text(encoding="utf-8"))) >= RUN_FILES
    elsewhere = {
        str(path.relative_to(SOURCE)): named
        for path in SOURCE.rglob("*.py")
        if path != layout and (named := run_paths_in(path.read_text(encoding="utf-8")))
    }
    assert not elsewhere


def test_names_of_run_files_are_seen_in_every_form() -> None:
    code = 'a = folder / "agent"; b = Path("runs/demo"); c = f / f"step_{n}"; d = "latest"; e = results["agent"]'
    assert sorted(run_paths_in(code)) == ["agent", "f'step_{n}'", "latest", "runs"]


def test_the_learner_is_imported_without_what_only_some_of_its_users_need() -> None:
    """Each would add to the wait for the first `tailguard.DistributionalPPO`; PyTorch itself is all of it."""
    code = """
import sys
import torch
import tailguard
before = set(sys.modules)
tailguard.DistributionalPPO
print(*sorted({name.split(".")[0] for name in set(sys.modules) - before} - set(sys.stdlib_module_names)))
print("torch._dynamo" in sys.modules, "tensorboard" in sys.modules, "polars" in sys.modules)
"""
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert run.stdout.split() == ["tailguard", "False", "False", "False"]


ELSEWHERE = re.compile(
    r"\b(LEDGER|FINDINGS|DESIGN|MATH|UX|STYLE|BRIEF)\b"  # documents that the repository does not hold
    r"|\([A-Z]\d{1,2}(, ?[A-Z]\d{1,2})*\)|\"\"\"[A-Z]\d{1,2}\b"  # numbers of entries in them
    r"|/work/"
)


def test_nothing_refers_to_documents_outside_the_repository() -> None:
    root = SOURCE.parents[1]
    folders = ("src", "tests", "docs", "examples", "benchmarks")
    paths = [
        path for folder in folders for path in (root / folder).rglob("*") if path.suffix in (".py", ".md", ".yaml")
    ]
    paths += [
        root / name
        for name in (
            "README.md",
            "Makefile",
            "pyproject.toml",
            "mkdocs.yml",
            "CONTRIBUTING.md",
            "CHANGELOG.md",
            "SECURITY.md",
        )
    ]
    assert len(paths) > 250
    found = [
        f"{path.relative_to(root)}:{number}: {match.group()}"
        for path in paths
        if path != Path(__file__)
        for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1)
        for match in ELSEWHERE.finditer(line)
    ]
    assert not found


SAME_IN_EVERY_ROOM = {"config", "registry"}
"""Names of modules that mean the same wherever they stand: a room's settings, a room's table of parts."""


def test_no_two_classes_have_one_name() -> None:
    places: dict[str, list[str]] = {}
    for path in SOURCE.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.ClassDef):
                places.setdefault(node.name, []).append(str(path.relative_to(SOURCE)))
    assert {name: paths for name, paths in places.items() if len(paths) > 1} == {}


def test_no_two_modules_have_one_name_but_for_the_commands_of_a_room() -> None:
    """`cli/data.py` holds the commands of `data/`, and so on; everything else can be named without its folder."""
    places: dict[str, list[str]] = {}
    for module in module_names():
        if not module.startswith("cli."):
            places.setdefault(module.rpartition(".")[2], []).append(module)
    twice = {name: modules for name, modules in places.items() if len(modules) > 1}
    assert twice.keys() <= SAME_IN_EVERY_ROOM, twice


def test_every_file_and_module_that_the_documents_name_exists() -> None:
    root = SOURCE.parents[1]
    named_file = re.compile(r"(?<![\w/.])((?:tests|benchmarks|examples|docs|src)/[\w/]+\.(?:py|md|jsonl?|png)\b)")
    room_file = re.compile(rf"`((?:{'|'.join(name for layer in LAYERS[2:] for name in layer)})/[\w/]+\.py)`")
    named_module = re.compile(r"\btailguard((?:\.[a-z_0-9]+)+)")
    known = {*module_names(), ""}
    missing = []
    for path in [
        *root.glob("*.md"),
        *(root / "docs").rglob("*.md"),
        *SOURCE.rglob("*.py"),
        *root.glob("tests/**/*.py"),
    ]:
        if path in (Path(__file__), SOURCE / "deprecated.py", root / "tests/test_deprecated.py", root / "CHANGELOG.md"):
            continue
        text = path.read_text(encoding="utf-8")
        missing += [f"{path.name}: {name}" for name in named_file.findall(text) if not (root / name).exists()]
        if path.suffix == ".md":
            missing += [f"{path.name}: {name}" for name in room_file.findall(text) if not (SOURCE / name).exists()]
            # A name in `tailguard` itself, a function or a method may follow the module.
            missing += [
                f"{path.name}: tailguard{name}"
                for name in named_module.findall(text)
                if name.count(".") > 1 and name[1:] not in known and name[1:].rpartition(".")[0] not in known
            ]
    assert not missing
