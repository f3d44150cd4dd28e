"""The `tailguard` command: parses, calls, prints. Work is done elsewhere."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated, Literal

import typer

from tailguard._version import __version__
from tailguard.errors import TailguardError

app = typer.Typer(
    name="tailguard",
    help="Trains trading agents that respect a tail-risk budget.\n\n"
    "New here? [bold]tailguard demo[/bold] needs no data. With your own bars, start with "
    "[bold]tailguard data check FILE[/bold].",
    no_args_is_help=True,
    rich_markup_mode="rich",
    pretty_exceptions_enable=False,
)
data = typer.Typer(
    help="Bring bars: check them, make synthetic ones, fetch them from an exchange.", no_args_is_help=True
)
app.add_typer(data, name="data")


def _show_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"tailguard {__version__}")
        raise typer.Exit


@app.callback()
def _root(
    version: Annotated[
        bool, typer.Option("--version", callback=_show_version, is_eager=True, help="Print the version and stop.")
    ] = False,
) -> None:
    pass


@data.command("check")
def data_check(
    files: Annotated[
        list[Path], typer.Argument(metavar="FILE", help="CSV, Parquet or Feather files, or a folder of them.")
    ],
    symbol: Annotated[str | None, typer.Option(help="The symbol to pick, or to name when the files name none.")] = None,
    frequency: Annotated[
        str | None, typer.Option(help="The length the bars must have, like 1h. Default: the most common.")
    ] = None,
    gaps: Annotated[
        Literal["error", "split"], typer.Option(help="Missing bars: an error, or kept as the end of a segment.")
    ] = "error",
    volume_unit: Annotated[
        Literal["base", "quote"], typer.Option(help="What the volume column counts: coins (base) or money (quote).")
    ] = "base",
) -> None:
    """Check that bars can be trusted. Exit status 0: yes; 1: a check failed; 2: the files cannot be read."""
    from rich.console import Console

    from tailguard.data.report import print_report
    from tailguard.data.sources import check_source, read_source

    source = read_source(files if len(files) > 1 else files[0], symbol=symbol)
    report = check_source(source, frequency=frequency, gaps=gaps, volume_unit=volume_unit)
    print_report(report, Console())
    raise typer.Exit(1 if report.errors else 0)


def main() -> None:
    """Entry point: a user's mistake is one message and exit status 2, never a traceback."""
    try:
        app()
    except TailguardError as error:
        typer.echo(str(error), err=True)
        sys.exit(2)
