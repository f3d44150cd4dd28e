"""The command line application, its groups of commands, and its entry point.

A command is a function registered on `app`, or on a group such as `data`, in a module of this package or in a plugin
that `tailguard --plugin FILE` names.
"""

from __future__ import annotations

import importlib
import sys
from typing import Annotated

import typer

from tailguard._version import __version__
from tailguard.console import steady_output
from tailguard.errors import RunError, TailguardError
from tailguard.memory_limits import explain_out_of_memory

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
    help="Check bars, make synthetic ones, fetch them from an exchange, or prepare them for training from disk.",
    no_args_is_help=True,
)
app.add_typer(data, name="data")


def _show_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"tailguard {__version__}")
        raise typer.Exit


def _load_plugins(context: typer.Context, names: list[str] | None) -> list[str] | None:
    """Run plugins before the command is looked up, so that it can be one of theirs."""
    if names and not context.resilient_parsing:  # completion in a shell must not run code
        from tailguard.plugins import load_plugins

        # Built-in features come first, or the name clash of a plugin would be found in their module and not in its own.
        importlib.import_module("tailguard.data.features")
        load_plugins(names)
        whole, group = typer.main.get_command(app), context.command
        if isinstance(whole, typer.core.TyperGroup) and isinstance(group, typer.core.TyperGroup):
            group.commands.update(whole.commands)
    return names


@app.callback()
def _root(
    plugins: Annotated[
        list[str] | None,
        typer.Option(
            "--plugin",
            metavar="NAME",
            callback=_load_plugins,
            is_eager=True,
            help="Module or Python file with commands of your own; it runs code. A run names its parts in the setting "
            "plugins.",
        ),
    ] = None,
    version: Annotated[
        bool, typer.Option("--version", callback=_show_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    pass


def main() -> None:
    """Entry point: a user error gives one message and exit status 2, never a traceback."""
    with steady_output():
        try:
            with explain_out_of_memory(
                "Reduce env.num_envs, ppo.n_steps, ppo.minibatch_size or the network; for bars that do not fit, train "
                "from disk: tailguard data prepare"
            ):
                app()
        except TailguardError as error:
            typer.echo(str(error), err=True)
            sys.exit(1 if isinstance(error, RunError) else 2)
        except OSError as error:
            # A full or read-only disk. Training reports this error itself and says how to resume.
            typer.echo(f"{error.filename or 'the disk'}: {error.strerror or error}", err=True)
            sys.exit(1)
