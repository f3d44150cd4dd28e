"""What a user typed is printed as it is, in lines that are not broken; and no message names what does not exist."""

from __future__ import annotations

import ast
import io
import re
from pathlib import Path
from typing import Any

import pytest
import typer
from rich.console import Console

from tailguard.cli import app
from tailguard.console import say
from tailguard.evaluate.results_table import print_rows

SOURCE = Path(__file__).parents[1] / "src" / "tailguard"
NAMES = ["a[/b]", "[red]x", "BTC[/x]", "x[/b].csv", ":smile:", "\\[bold]", "[link=x]y"]


@pytest.mark.parametrize("name", NAMES)
def test_a_line_is_printed_as_it_is(name: str) -> None:
    out = io.StringIO()
    line = f"saved    runs/{name}  " + "1,234,567 " * 20
    say(Console(file=out, width=40, force_terminal=True, color_system=None), line)
    assert out.getvalue() == line + "\n"


@pytest.mark.parametrize("name", NAMES)
def test_a_table_shows_names_as_they_are(name: str) -> None:
    out = io.StringIO()
    print_rows(("figure", name), [("growth", f"[{name}]")], Console(file=out, width=100))
    heading, row = out.getvalue().splitlines()
    assert name in heading
    assert f"[{name}]" in row


# --- what messages suggest ------------------------------------------------------------------------------------------


def texts(path: Path) -> list[str]:
    """Every text of a module, with what is filled in left out."""
    found = []
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.JoinedStr):
            found.append("".join(str(part.value) if isinstance(part, ast.Constant) else "…" for part in node.values))
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            found.append(node.value)
    return found


def commands(group: Any, path: str = "") -> dict[str, set[str]]:
    """The options of every command by its name."""
    found = {path: {option for each in group.params for option in each.opts + each.secondary_opts} | {"--help"}}
    for name, command in getattr(group, "commands", {}).items():
        found |= commands(command, f"{path} {name}".strip())
    return found


OTHERS = {"--logdir", "--print-to-pdf", "--no-pdf-header-footer", "--screenshot", "--headless", "--disable-gpu"} | {
    "--nproc-per-node"
}
"""Options of other programs: TensorBoard, the browser that prints a report, and torchrun."""


def test_messages_name_options_and_commands_that_exist() -> None:
    known = commands(typer.main.get_command(app))
    options = set().union(*known.values())
    browser = set(re.findall(r"--[a-z][a-z-]+", (SOURCE / "evaluate/report/export.py").read_text()))
    for path in SOURCE.rglob("*.py"):
        for text in texts(path):
            wrong = set(re.findall(r"(?<![\w-])--[a-z][a-z-]+", text)) - options - browser - OTHERS
            assert not wrong, f"{path.name}: {text!r} names {wrong}"
            for command in re.findall(r"tailguard ((?:[a-z]+ ?)+)", text):
                words = command.split()
                if words[0] == "as":  # import tailguard as tg
                    continue
                data_command = len(words) > 1 and words[0] == "data" and f"data {words[1]}" in known
                assert words[0] in known or data_command, f"{path.name}: {text!r} names `tailguard {command}`"
                if words[0] == "data":
                    assert data_command or len(words) == 1, f"{path.name}: {text!r} names `tailguard {command}`"


def test_the_scan_knows_the_commands() -> None:
    known = commands(typer.main.get_command(app))
    assert {"train", "data prepare", "report", "compare"} <= set(known)
    assert "--walk-forward" in known["train"]
    assert [name for name, options in known.items() if "--yes" in options] == ["train", "population", "data prepare"]
