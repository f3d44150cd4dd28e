"""The command `config`: the settings with their descriptions."""

from __future__ import annotations

from typing import Annotated

import typer

from tailguard.cli.application import app


@app.command("config")
def show_config(
    section: Annotated[
        str | None,
        typer.Argument(help="Only this section: data, market, env, learner, ppo, pathwise, risk, training or plugins."),
    ] = None,
) -> None:
    """Print the default config with a description of each setting. Redirect it to a file as a starting point."""
    from tailguard.config import RunConfig, to_yaml

    typer.echo(to_yaml(RunConfig(), section))
