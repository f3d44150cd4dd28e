"""What several commands share: a display of progress, and options that are settings."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from tailguard.errors import ConfigError

if TYPE_CHECKING:
    from rich.console import Console

TrustPlugins = Annotated[
    bool, typer.Option("--trust-plugins", help="Run the plugins that the run names: they run code with your rights.")
]


@contextmanager
def shown_steps(label: str, total: int, console: Console) -> Iterator[Callable[[str], None]]:
    """Show which of `total` steps is running; call the yielded function with a step's name when it starts."""
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    columns = (
        TextColumn("{task.description}", markup=False),
        BarColumn(bar_width=24),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
    )
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as bar:
        task = bar.add_task(label, total=total, completed=-1)

        def begin(name: str) -> None:
            bar.update(task, advance=1, description=f"{label}  {name}")

        yield begin


def path_setting(bars: Path) -> str:
    """--data as a setting; quoted, since YAML would not read a path such as `1.5` or `[a]` as text."""
    return f"data.path={json.dumps(str(bars))}"


def named_numbers(option: str, texts: list[str], example: str) -> dict[str, float]:
    """An option of the form name=number that may be given several times."""
    numbers = {}
    for text in texts:
        name, _, value = text.partition("=")
        try:
            numbers[name.strip()] = float(value)
        except ValueError:
            raise ConfigError(f"{option} {text}: write a name and a number, such as {example}") from None
    return numbers
