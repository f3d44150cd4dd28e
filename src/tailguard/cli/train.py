"""The commands that train: `demo` and `train`."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from tailguard.cli.application import app
from tailguard.cli.common import TrustPlugins, path_setting, shown_steps
from tailguard.console import say
from tailguard.errors import ConfigError, RunError
from tailguard.experiment.layout import RUNS, RunLayout

if TYPE_CHECKING:
    from rich.console import Console

    from tailguard.audit.before_training import FastAudit
    from tailguard.config import RunConfig
    from tailguard.evaluate.walk_forward_results import WalkForwardPlan
    from tailguard.runs.outcome import RunResult


@app.command()
def demo(
    seed: Annotated[int, typer.Option(help="The same seed gives the same market and the same agent.")] = 0,
    out: Annotated[Path, typer.Option(help="Folder for the run; an earlier demo in it is replaced.")] = Path(
        RUNS, "demo"
    ),
) -> None:
    """Train an agent on a synthetic market for a minute or two and compare it with baselines. Needs no data."""
    from rich.console import Console

    from tailguard.runs.demo import run_demo

    console = Console()
    _report_after_training(run_demo(out, seed, console), console)
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
    trust_plugins: TrustPlugins = False,
    verbose: Annotated[
        bool, typer.Option("--verbose", "-v", help="Print a table of all metrics every tenth iteration.")
    ] = False,
    audit: Annotated[
        bool,
        typer.Option(
            "--audit/--no-audit",
            envvar="TAILGUARD_AUDIT",
            help="First run the fast audit of the installed code; kept for each version and machine. 0 or no in the "
            "environment turns it off for all runs.",
        ),
    ] = True,
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
        passed = _audit_installed(Console()) if audit else None
        resume_run(resume, Console(), ask, verbose, trust_plugins=trust_plugins)
        _keep_audit(passed, resume)
        return
    given = list(overrides or [])
    if bars is not None:
        given.append(path_setting(bars))
    folder = run_folder("run" if name is None else name)
    settings = load_config(config, given)
    if not walk_forward and (folds is not None or seeds is not None or expanding):
        raise ConfigError("--folds, --seeds and --expanding require --walk-forward; add it or remove them")
    passed = _audit_installed(Console()) if audit else None
    if walk_forward:
        from tailguard.evaluate.walk_forward_results import WalkForwardPlan

        _train_walk_forward(
            settings,
            folder,
            WalkForwardPlan(5 if folds is None else folds, 1 if seeds is None else seeds, expanding=expanding),
            Console(),
            ask,
        )
    else:
        train_run(settings, folder, Console(), ask=ask, verbose=verbose)
        _keep_audit(passed, folder)


def _audit_installed(console: Console) -> FastAudit:
    """The fast audit of the installed code, or what was kept of it."""
    from tailguard.audit.auditor import chosen_checks
    from tailguard.audit.before_training import fast_audit

    with shown_steps("audit", len(chosen_checks(fast=True)), console) as begin:
        passed = fast_audit(begin)
    say(console, f"audit    {passed.in_words}")
    return passed


def _keep_audit(passed: FastAudit | None, folder: Path) -> None:
    """Write the audit into the run's folder for its report; an audit of the run itself is not replaced."""
    from tailguard.places import replace_synced

    path = RunLayout(folder).audit_path
    if passed is not None and not path.exists():
        replace_synced(path, (json.dumps(passed.record, indent=2, ensure_ascii=False) + "\n").encode())


def _report_after_training(result: RunResult, console: Console) -> None:
    """Write the report of a run that has just finished, reusing its backtests."""
    from tailguard.evaluate.baselines import AGENT
    from tailguard.evaluate.report import write_report
    from tailguard.evaluate.report.collect import collect, planned_steps
    from tailguard.evaluate.report.verdict import judge, sharpe_in_words
    from tailguard.experiment.trained_run import open_run

    opened = open_run(result.folder)
    path = opened.layout.report_path
    with shown_steps("report", planned_steps(opened, result.summary), console) as begin:
        data = collect(opened, known=result.summary, before_each=begin)
    write_report(data, path)
    line = f"report   {path}: {judge(data)}, Sharpe ratio {sharpe_in_words(data.sharpes[AGENT])}"
    say(console, line)


def _train_walk_forward(
    config: RunConfig, folder: Path, plan: WalkForwardPlan, console: Console, ask: Callable[[str], bool]
) -> None:
    """Train and test fold by fold, print the result and write its page; the same call resumes an interrupted one."""
    from tailguard.config import to_yaml
    from tailguard.evaluate.report import write_page
    from tailguard.evaluate.report.walk_forward_page import print_walk_forward, walk_forward_page
    from tailguard.experiment.build import load_bars_in_memory
    from tailguard.runs.folder import RunFolder
    from tailguard.runs.walk_forward import run_walk_forward

    bars, run = load_bars_in_memory(config), RunFolder(folder)
    try:
        with run.claimed():
            walked = run_walk_forward(config, bars, folder, plan, console, ask=ask)
    except KeyboardInterrupt:
        say(console, f"stopped  finished folds are kept in {folder}; the same command resumes with the others")
        raise typer.Exit(130) from None
    except OSError as error:
        raise RunError(
            f"{error.filename or folder}: {error.strerror}. Finished folds are kept; free disk space and run the same "
            "command again"
        ) from error
    console.print()
    print_walk_forward(walked, console)
    page = run.walk_forward_page_path
    write_page(walk_forward_page(walked, folder.resolve().name, to_yaml(config)), page)
    say(console, f"page     {page}")


def run_folder(name: str) -> Path:
    """The folder of a run by its name, which may have parts, like btc/wide, but stays within runs/."""
    parts = name.split("/")
    odd = any(part in ("", ".", "..", RUNS) or not part.isprintable() for part in parts)
    if odd or name.startswith("~"):
        raise ConfigError(f"--name {name!r}: the run's folder is runs/NAME; choose a plain name, like btc or btc/wide")
    folder = Path(RUNS, *parts)
    for above in folder.parents:
        layout = RunLayout(above)
        if layout.config_path.exists() or layout.plan_path.exists():
            raise ConfigError(f"--name {name}: {above} is itself a run; choose a name outside it")
    return folder
