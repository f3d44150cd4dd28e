"""The `tailguard` command: parses, calls, prints. Work is done elsewhere."""

from __future__ import annotations

import json
import shlex
import sys
from pathlib import Path
from typing import Annotated, Literal

import typer

from tailguard import cli_bench, cli_evaluate
from tailguard._version import __version__
from tailguard.console import say, steady_output
from tailguard.errors import ConfigError, RunError, TailguardError
from tailguard.memory import told_when_out_of_memory
from tailguard.places import check_writable_place

RUNS = "runs"
"""Folder of all runs, in the working folder."""

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


@app.callback()
def _root(
    version: Annotated[
        bool, typer.Option("--version", callback=_show_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    pass


@app.command()
def demo(
    seed: Annotated[int, typer.Option(help="The same seed gives the same market and the same agent.")] = 0,
    out: Annotated[Path, typer.Option(help="Folder for the run; an earlier demo in it is replaced.")] = Path(
        "runs/demo"
    ),
) -> None:
    """Train an agent on a synthetic market for a minute or two and compare it with baselines. Needs no data."""
    from rich.console import Console

    from tailguard.runs.demo import run_demo

    console = Console()
    cli_evaluate.report_after_training(run_demo(out, seed, console), console)
    say(console, "next     tailguard data check your_bars.parquet, then tailguard train --data your_bars.parquet")


@app.command()
def train(
    config: Annotated[Path | None, typer.Argument(help="YAML settings; `tailguard config` prints all of them.")] = None,
    bars: Annotated[Path | None, typer.Option("--data", help="File or folder of bars; short for data.path.")] = None,
    overrides: Annotated[
        list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="Change one setting: --set ppo.gamma=0.995.")
    ] = None,
    name: Annotated[str | None, typer.Option(help="Name of the run: its folder is runs/NAME. Default: run.")] = None,
    resume: Annotated[
        Path | None, typer.Option(metavar="RUN", help="Resume the run in this folder, with its own settings.")
    ] = None,
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Answer yes: resume a run that exists already.")] = False,
    verbose: Annotated[
        bool, typer.Option("--verbose", "-v", help="Print a table of all metrics every tenth iteration.")
    ] = False,
    walk_forward: Annotated[
        bool, typer.Option("--walk-forward", help="Train a new agent for each of several consecutive test windows.")
    ] = False,
    folds: Annotated[int | None, typer.Option(help="With --walk-forward: number of test windows. Default: 5.")] = None,
    seeds: Annotated[int | None, typer.Option(help="With --walk-forward: agents per window. Default: 1.")] = None,
    expanding: Annotated[
        bool, typer.Option("--expanding", help="With --walk-forward: the training window grows instead of rolling.")
    ] = False,
) -> None:
    """Train an agent on bars and evaluate it on the test part. Without bars: a synthetic market.

    Ctrl-C saves a checkpoint and stops; the same command, or --resume, resumes exactly where it stopped.
    """
    from rich.console import Console

    from tailguard.config import load_config
    from tailguard.runs.runner import resume_run
    from tailguard.runs.runner import train as train_run

    def ask(question: str) -> bool:
        return yes or (sys.stdin.isatty() and typer.confirm(question))

    if resume is not None:
        if config or bars or overrides or name:
            raise ConfigError(f"--resume {resume}: the run resumes with its own settings; remove the other settings")
        resume_run(resume, Console(), ask, verbose)
        return
    given = list(overrides or [])
    if bars is not None:
        given.append(_path_setting(bars))
    folder = _run_folder("run" if name is None else name)
    settings = load_config(config, given)
    if walk_forward:
        from tailguard.evaluate.walk_forward import Plan

        cli_evaluate.walk_forward(
            settings,
            folder,
            Plan(5 if folds is None else folds, 1 if seeds is None else seeds, expanding=expanding),
            Console(),
            ask,
        )
    elif folds is not None or seeds is not None or expanding:
        raise ConfigError("--folds, --seeds and --expanding require --walk-forward; add it or remove them")
    else:
        train_run(settings, folder, Console(), ask=ask, verbose=verbose)


app.command()(cli_evaluate.backtest)
app.command()(cli_evaluate.report)
app.command()(cli_evaluate.compare)
app.command()(cli_bench.bench)


@app.command("config")
def show_config(
    section: Annotated[
        str | None,
        typer.Argument(help="Only this section: data, market, env, learner, ppo, pathwise, risk or training."),
    ] = None,
) -> None:
    """Print the default config with a description of each setting. Redirect it to a file as a starting point."""
    from tailguard.config import RunConfig, to_yaml

    typer.echo(to_yaml(RunConfig(), section))


@data.command("check")
def data_check(
    files: Annotated[
        list[Path], typer.Argument(metavar="FILE", help="CSV, Parquet or Feather files, or a folder of them.")
    ],
    symbol: Annotated[str | None, typer.Option(help="Symbol to select, or its name if the files have none.")] = None,
    frequency: Annotated[
        str | None, typer.Option(help="Required bar length, like 1h. Default: the most common one.")
    ] = None,
    gaps: Annotated[
        Literal["error", "split"], typer.Option(help="Missing bars: an error, or the start of a new segment.")
    ] = "error",
    volume_unit: Annotated[
        Literal["base", "quote"], typer.Option(help="What the volume column counts: coins (base) or money (quote).")
    ] = "base",
) -> None:
    """Check that bars are valid and sufficient for training with default settings.

    Exit status 0: yes; 1: a check failed; 2: the files cannot be read.
    """
    from rich.console import Console

    from tailguard.config import RunConfig
    from tailguard.data.readiness import ready_report
    from tailguard.data.report import print_report
    from tailguard.data.sources import bars_of, check_source, read_source
    from tailguard.envs.mapped_market import is_prepared_market, open_market

    if len(files) == 1 and is_prepared_market(files[0]):
        open_market(files[0]).verify()
        typer.echo(f"{files[0]}: a prepared market; all files are intact")
        return
    source = read_source(files if len(files) > 1 else files[0], symbol=symbol)
    report = check_source(source, frequency=frequency, gaps=gaps, volume_unit=volume_unit)
    if not report.errors:
        run = RunConfig()
        report = ready_report(
            report,
            bars_of(source, report, volume_unit),
            validation=run.data.validation,
            test=run.data.test,
            embargo=run.data.embargo,
            episode_length=run.env.episode_length,
            funding_rate=run.market.funding_rate,
        )
    print_report(report, Console())
    raise typer.Exit(1 if report.errors else 0)


@data.command("prepare")
def data_prepare(
    out: Annotated[Path, typer.Argument(metavar="OUT", help="Folder to write; train on it with --data OUT.")],
    config: Annotated[Path | None, typer.Argument(help="YAML settings of the runs that will use it.")] = None,
    bars: Annotated[Path | None, typer.Option("--data", help="File or folder of bars; short for data.path.")] = None,
    overrides: Annotated[
        list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="Change one setting, as for train.")
    ] = None,
    rows: Annotated[int | None, typer.Option(help="Bars in memory at a time. Default: 262,144.")] = None,
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Replace an existing prepared market.")] = False,
) -> None:
    """Check bars, split them and compute features once, for training from disk on bars larger than memory.

    The split, the features and the volume-dependent costs come from the settings; runs must use the same ones.
    """
    from rich.console import Console
    from rich.markup import escape

    from tailguard.config import load_config
    from tailguard.data.import_bars import ROWS
    from tailguard.runs.preparing import prepare_market
    from tailguard.validate import check_count

    size = ROWS if rows is None else rows
    check_count("--rows", size, low=1_000)
    settings = load_config(config, [*(overrides or []), *([] if bars is None else [_path_setting(bars)])])
    console = Console()
    with console.status("") as status:
        market = prepare_market(settings, out, rows=size, replace=yes, say=lambda line: status.update(escape(line)))
    say(console, f"split    {market.describe()}")
    say(console, f"prepared {len(market):,} bars in {out}")
    given = "" if config is None else f"{shlex.quote(str(config))} "
    say(console, f"next     tailguard train {given}--data {shlex.quote(str(out))}")


@data.command("make")
def data_make(
    out: Annotated[Path, typer.Argument(metavar="OUT", help="File to write: .parquet, .csv or .feather.")],
    bars: Annotated[int, typer.Option(help="Bars for each asset; 26280 hourly bars are 3 years.")] = 26_280,
    assets: Annotated[int, typer.Option(help="Number of assets.")] = 1,
    frequency: Annotated[str, typer.Option(help="Length of a bar, like 15m, 1h or 1d.")] = "1h",
    seed: Annotated[int, typer.Option(help="The same seed gives the same market.")] = 0,
    signal: Annotated[
        float, typer.Option(help="Planted signal: yearly Sharpe ratio, before costs, of a trader who sees it. 0: none.")
    ] = 0.0,
    correlation: Annotated[float, typer.Option(help="Correlation of any two assets' returns, 0 to 0.9.")] = 0.6,
) -> None:
    """Make a synthetic market with the stylised facts of crypto and an optional planted signal."""
    from tailguard.data.storage import check_writable
    from tailguard.data.synthetic import describe, make_market

    check_writable(out)
    check_writable_place(out)
    market = make_market(bars, assets=assets, frequency=frequency, seed=seed, signal=signal, correlation=correlation)
    market.save(out)
    typer.echo(f"{out}: {describe(market)}")


@data.command("fetch")
def data_fetch(
    exchange: Annotated[str, typer.Argument(help="Name of the exchange in ccxt, like binance.")],
    symbol: Annotated[str, typer.Argument(help="BTC/USDT is spot, BTC/USDT:USDT the perpetual.")],
    timeframe: Annotated[str, typer.Argument(help="Length of a bar, like 1h.")],
    out: Annotated[Path, typer.Option(help="Parquet file to create or to extend.")],
    start: Annotated[str, typer.Option(help="First bar: 2021-01-31, 2021-01-31T08:00 (UTC), or how long ago: 90d.")],
    stop: Annotated[str, typer.Option(help="End, not included: same formats, or now.")] = "now",
) -> None:
    """Fetch bars from an exchange. The same command continues an interrupted download or extends a finished one."""
    from tailguard.data.fetch import FetchError, fetch

    try:
        fetched = fetch(exchange, symbol, timeframe, out=out, start=start, stop=stop, progress=True)
    except FetchError as error:
        typer.echo(str(error), err=True)
        raise typer.Exit(1) from None
    typer.echo(fetched)


def main() -> None:
    """Entry point: a user error gives one message and exit status 2, never a traceback."""
    with steady_output():
        try:
            with told_when_out_of_memory(
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


def _run_folder(name: str) -> Path:
    """The folder of a run by its name, which may have parts, like btc/wide, but stays within runs/."""
    parts = name.split("/")
    odd = any(part in ("", ".", "..", RUNS) or not part.isprintable() for part in parts)
    if odd or name.startswith("~"):
        raise ConfigError(f"--name {name!r}: the run's folder is runs/NAME; choose a plain name, like btc or btc/wide")
    folder = Path(RUNS, *parts)
    for above in folder.parents:
        if (above / "config.yaml").exists() or (above / "walk_forward.json").exists():
            raise ConfigError(f"--name {name}: {above} is itself a run; choose a name outside it")
    return folder


def _path_setting(bars: Path) -> str:
    """--data as a setting; quoted, since YAML would not read a path such as `1.5` or `[a]` as text."""
    return f"data.path={json.dumps(str(bars))}"
