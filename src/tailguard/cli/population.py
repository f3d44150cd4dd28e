"""The command that trains a population."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from tailguard.cli.application import app
from tailguard.cli.common import TrustPlugins, path_setting
from tailguard.cli.train import run_folder
from tailguard.errors import ConfigError


@app.command()
def population(
    config: Annotated[
        Path | None, typer.Argument(help="YAML settings of one member, as for `tailguard train`.")
    ] = None,
    search: Annotated[
        Path | None,
        typer.Option(help="YAML search space, as pathwise.learning_rate: {log: [1e-4, 1e-1]}."),
    ] = None,
    members: Annotated[int, typer.Option(help="Agents that train at once.")] = 8,
    keep: Annotated[int, typer.Option(help="Best members that become the agent, as the mean of their actions.")] = 1,
    rounds: Annotated[int, typer.Option(help="Judgements on validation, each followed by a selection.")] = 20,
    strategy: Annotated[
        str, typer.Option(help="pbt; mf_pbt, groups of several frequencies; random search; halving.")
    ] = "pbt",
    selection: Annotated[str, typer.Option(help="Who exploits whom: truncation or tournament.")] = "truncation",
    explore: Annotated[str, typer.Option(help="New values of an exploiter: perturb, resample or both.")] = "both",
    metric: Annotated[
        str, typer.Option(help="On validation: score (growth subject to the budget), growth, cvar, or a plugin's.")
    ] = "score",
    reset_optimizer: Annotated[
        bool, typer.Option("--reset-optimizer", help="An exploiter begins with fresh moments, not its parent's.")
    ] = False,
    population_seed: Annotated[int, typer.Option("--seed", help="Of the decisions; training.seed is the agents'.")] = 0,
    executor: Annotated[
        str, typer.Option(help="Where members train: local, batched, ray; auto: local or batched, by device and space.")
    ] = "auto",
    processes: Annotated[
        int, typer.Option(help="Processes of local, 0: one for each core; workers of ray, 0: all there is room for.")
    ] = 0,
    address: Annotated[
        str | None, typer.Option(help="Of the Ray cluster, HOST:PORT or auto. Default: RAY_ADDRESS, else this machine.")
    ] = None,
    storage: Annotated[
        str | None,
        typer.Option(help="Shared folder or s3://… for the checkpoints of ray. Default: the run's folder."),
    ] = None,
    worker_cpus: Annotated[float, typer.Option(help="Cores of a node that each worker of ray takes.")] = 1.0,
    worker_gpus: Annotated[
        float | None,
        typer.Option(help="GPUs, or a fraction of one, likewise. Default: 1 where training.device is one."),
    ] = None,
    worker_members: Annotated[int, typer.Option(help="Members that a worker of ray trains as one computation.")] = 1,
    bars: Annotated[Path | None, typer.Option("--data", help="File or folder of bars; short for data.path.")] = None,
    overrides: Annotated[
        list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="Change one setting: --set risk.limit=-0.04.")
    ] = None,
    name: Annotated[
        str | None, typer.Option(help="Name of the run: its folder is runs/NAME. Default: population.")
    ] = None,
    resume: Annotated[
        Path | None, typer.Option(metavar="RUN", help="Go on with the population in this folder, as it was begun.")
    ] = None,
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Answer yes: go on with a population that exists.")] = False,
    trust_plugins: TrustPlugins = False,
) -> None:
    """Train many agents at once; the worst go on from the best, with hyper-parameters near theirs.

    Members are judged on validation. The best ones become the agent of a run that backtest, report and compare take.
    Ctrl-C, or SIGTERM, stops it; the same command with --yes, or --resume, goes on after the last finished round.
    """
    from rich.console import Console

    from tailguard.config import load_config
    from tailguard.population.executors import ExecutorOptions
    from tailguard.population.options import PopulationSettings
    from tailguard.population.population_run import PopulationPlan, again_command, read_plan, train_population
    from tailguard.population.space import SearchSpace
    from tailguard.runs.folder import RunFolder
    from tailguard.runs.signals import Interrupted, interrupting

    def ask(question: str) -> bool:
        return yes or resume is not None or (sys.stdin.isatty() and typer.confirm(question))

    options = ExecutorOptions(processes, address, storage, worker_cpus, worker_gpus, worker_members)
    if resume is not None:
        if config or search or bars or overrides or name:
            raise ConfigError(f"--resume {resume}: a population goes on with its own settings; remove the others")
        folder, run = resume, RunFolder(resume)
        settings, plan = run.config(trust_plugins=trust_plugins), read_plan(run, keep, executor, options)
    else:
        if search is None:
            raise ConfigError(
                "--search: none given. Write the settings to search into a file, as the line\n"
                "  pathwise.learning_rate: {log: [1.0e-4, 1.0e-1]}\nand give it with --search space.yaml"
            )
        folder = run_folder("population" if name is None else name)
        settings = load_config(config, [*(overrides or []), *([path_setting(bars)] if bars is not None else [])])
        choices: dict[str, Any] = {"strategy": strategy, "selection": selection, "explore": explore}
        choices |= {"optimizer": "reset" if reset_optimizer else "copy", "metric": metric}
        chosen = PopulationSettings(members=members, rounds=rounds, seed=population_seed, **choices)
        plan = PopulationPlan(SearchSpace.read(search), chosen, keep, executor, options)
    try:
        with interrupting("finished rounds are kept"):
            train_population(settings, plan, folder, Console(), ask=ask)
    except Interrupted as interrupt:
        begun = f"finished rounds are kept. Go on with: {again_command(folder)}"
        words = begun if RunFolder(folder).is_population() else "before the first round; there is nothing to go on with"
        typer.echo(f"stopped  {words}", err=True)
        raise typer.Exit(128 + interrupt.number) from None
