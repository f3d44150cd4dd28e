"""The `tailguard` command: parses, calls, prints. Work is done elsewhere."""

from __future__ import annotations

import sys
from typing import Annotated

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
data = typer.Typer(help="Bring bars: check them, make synthetic ones, fetch them from an exchange.", no_args_is_help=True)
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


def main() -> None:
    """Entry point: a user's mistake is one message and exit status 2, never a traceback."""
    try:
        app()
    except TailguardError as error:
        typer.echo(str(error), err=True)
        sys.exit(2)
