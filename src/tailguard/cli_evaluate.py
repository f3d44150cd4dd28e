"""The commands for finished runs: `backtest`, `report` and `compare`. They parse, call and print."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from tailguard.console import say
from tailguard.errors import ConfigError, RunError
from tailguard.places import check_writable_place, replace_synced

if TYPE_CHECKING:
    from rich.console import Console

    from tailguard.algorithm.ensemble import Ensemble
    from tailguard.algorithm.learner import Learner
    from tailguard.config import RunConfig
    from tailguard.data.bars import Bars
    from tailguard.evaluate.overlap import Overlap
    from tailguard.evaluate.significance import SharpeEvidence
    from tailguard.evaluate.standing import Standing
    from tailguard.evaluate.trials import TrialCount
    from tailguard.evaluate.walk_forward import Plan
    from tailguard.runs.runner import RunResult

Run = Annotated[Path, typer.Argument(metavar="RUN", help="Folder of a finished run, like runs/demo.")]
Trials = Annotated[
    int | None,
    typer.Option(
        help="Number of configurations tried, for the deflated Sharpe ratio. Default: the entries for these bars in "
        "trials.jsonl beside the run's folder."
    ),
]
Symbol = Annotated[str | None, typer.Option(help="Trade only this symbol, for an agent with one symbol per account.")]


def backtest(
    run: Run,
    data: Annotated[
        Path | None, typer.Option(help="Bars to trade instead of the run's own: a file or a folder.")
    ] = None,
    split: Annotated[
        Literal["test", "validation", "train"] | None, typer.Option(help="Part of the run's own bars. Default: test.")
    ] = None,
    symbol: Symbol = None,
    costs: Annotated[float, typer.Option(help="Factor on all assumed costs: 2 doubles them.")] = 1.0,
    delay: Annotated[int, typer.Option(help="Extra bars between a decision and its fill.")] = 0,
    noise: Annotated[
        float, typer.Option(help="Noise on the agent's features, in standard deviations of each: 0.1.")
    ] = 0.0,
    csv: Annotated[
        Path | None,
        typer.Option(help="Write the agent's equity, weights and costs for every bar to a .csv or .parquet file."),
    ] = None,
    json_file: Annotated[
        str | None,
        typer.Option("--json", metavar="FILE", help="Write all metrics as JSON; - prints them and nothing else."),
    ] = None,
    trials: Trials = None,
) -> None:
    """Backtest a run's agent and compare it with the baselines, net of all costs."""
    from rich.console import Console

    from tailguard.data.storage import check_writable, write_frame
    from tailguard.evaluate.table import print_standing
    from tailguard.validate import check_count

    if trials is not None:
        check_count("--trials", trials)
    if csv is not None:
        check_writable(csv)
    for path in (csv, None if json_file in (None, "-") else Path(str(json_file))):
        if path is not None:
            check_writable_place(path)
    console = Console(stderr=json_file == "-")
    found = _backtests(run, data, split, symbol, (costs, delay, noise), trials, console)
    if json_file != "-":
        for line in found.seen.lines():
            console.print(line, style="bold red", soft_wrap=True, markup=False, highlight=False)
        print_standing(found.standing, found.title, console)
        console.print()
        for line in found.lines():
            say(console, line)
    if csv is not None:
        write_frame(found.standing.results["agent"].frame(), csv)
        say(console, f"saved    {csv}")
    if json_file is not None:
        stress = {"costs": costs, "delay": delay, "noise": noise}
        text = json.dumps({"run": str(run), "part": found.title, **stress, **found.figures()}, indent=2)
        if json_file == "-":
            typer.echo(text)
        else:
            replace_synced(Path(json_file), f"{text}\n".encode())
            say(console, f"saved    {json_file}")


def report(
    run: Run,
    out: Annotated[Path | None, typer.Option(help="HTML file to write. Default: report.html in the run.")] = None,
    symbol: Symbol = None,
    limit: Annotated[
        float | None,
        typer.Option(help="Evaluate this risk budget: -0.04 allows the worst windows to lose 4 % on average."),
    ] = None,
    alpha: Annotated[float, typer.Option(help="Share of worst windows that the limit applies to.")] = 0.05,
    horizon: Annotated[str, typer.Option(help="Length of a window for the limit: 7d, 24h.")] = "7d",
    outcome: Annotated[
        Literal["return", "drawdown"],
        typer.Option(help="What the limit applies to: the return of a window, or its maximum drawdown."),
    ] = "return",
    trials: Trials = None,
    pdf: Annotated[bool, typer.Option("--pdf", help="Also write the report as a PDF file.")] = False,
    png: Annotated[bool, typer.Option("--png", help="Also write the report as a PNG image.")] = False,
    csv: Annotated[
        bool, typer.Option("--csv", help="Also write bars, trades, months and drawdowns as CSV files.")
    ] = False,
) -> None:
    """Write one HTML page about a run: verdict, equity, risk, stress, behaviour, training. The page works offline."""
    from rich.console import Console

    from tailguard.evaluate.report import check_place, write_report
    from tailguard.evaluate.report.collect import collect, work_ahead
    from tailguard.evaluate.report.export import find_browser, save_pdf, save_png
    from tailguard.evaluate.report.tables import write_csv
    from tailguard.evaluate.report.verdict import verdict
    from tailguard.evaluate.standing import Budget
    from tailguard.evaluate.trained import open_run, run_config
    from tailguard.validate import check_count, check_range

    if trials is not None:
        check_count("--trials", trials)
    if limit is not None:
        check_range("--limit", limit, low=-1, high=0)
        check_range("--alpha", alpha, low=0, high=1, low_open=True, high_open=True)
    run_config(run)
    path = out or run / "report.html"
    check_place(path)
    exports = [(suffix, save) for suffix, wanted, save in ((".pdf", pdf, save_pdf), (".png", png, save_png)) if wanted]
    if exports:
        find_browser()  # a missing browser is an error before the work, not after it
    console = Console()
    opened = open_run(run)
    _one_account(opened.agent, opened.split.test, symbol)
    if symbol is not None:
        opened = opened.select(symbol)
    budget = None if limit is None else Budget(limit, alpha, horizon, outcome)
    with shown_steps("report", work_ahead(opened), console) as begin:
        evidence = collect(opened, budget=budget, trials=trials, before_each=begin)
    write_report(evidence, path)
    say(console, f"verdict  {verdict(evidence)}")
    say(console, f"report   {path}")
    if csv:
        data = path.with_name(f"{path.stem}_data")
        write_csv(evidence, data)
        say(console, f"saved    {data}")
    for suffix, save in exports:
        save(path, path.with_suffix(suffix))
        say(console, f"saved    {path.with_suffix(suffix)}")


def report_after_training(result: RunResult, console: Console) -> None:
    """Write the report of a run that has just finished, reusing its backtests."""
    from tailguard.evaluate.report import write_report
    from tailguard.evaluate.report.collect import collect, work_ahead
    from tailguard.evaluate.report.verdict import judge, sharpe_in_words
    from tailguard.evaluate.trained import open_run

    opened, path = open_run(result.folder), result.folder / "report.html"
    with shown_steps("report", work_ahead(opened, result.standing), console) as begin:
        evidence = collect(opened, known=result.standing, before_each=begin)
    write_report(evidence, path)
    line = f"report   {path}: {judge(evidence)}, Sharpe ratio {sharpe_in_words(evidence.sharpes['agent'])}"
    say(console, line)


def compare(
    runs: Annotated[list[Path], typer.Argument(metavar="RUN RUN…", help="Folders of finished runs.")],
    out: Annotated[Path, typer.Option(help="HTML file with all equity curves in one chart.")] = Path("compare.html"),
) -> None:
    """Compare runs: metrics, significance of the difference, settings that differ, and a chart."""
    from rich.console import Console

    from tailguard.evaluate.compare import compare_runs, comparison_page, print_comparison
    from tailguard.evaluate.report import check_place, write_page

    check_place(out)
    console = Console()
    with shown_steps("compare", len(runs), console) as begin:
        comparison = compare_runs(runs, before_each=begin)
    print_comparison(comparison, console)
    write_page(comparison_page(comparison), out)
    say(console, f"chart    {out}")


def walk_forward(config: RunConfig, folder: Path, plan: Plan, console: Console, ask: Callable[[str], bool]) -> None:
    """Train and test fold by fold, print the result and write its page; the same call resumes an interrupted one."""
    from tailguard.config import to_yaml
    from tailguard.evaluate.report import write_page
    from tailguard.evaluate.report.folds import print_walk_forward, walk_forward_page
    from tailguard.evaluate.trained import bars_in_memory
    from tailguard.runs.folder import RunFolder
    from tailguard.runs.walk_forward import run_walk_forward

    bars = bars_in_memory(config)
    try:
        with RunFolder(folder).claimed():
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
    page = folder / "walk_forward.html"
    write_page(walk_forward_page(walked, folder.resolve().name, to_yaml(config)), page)
    say(console, f"page     {page}")


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


@dataclass(frozen=True)
class _Backtests:
    """What `backtest` shows."""

    title: str
    standing: Standing
    trials: TrialCount | None
    """None on bars that were not used to choose between trials."""
    seen: Overlap
    """Which of the bars the run has seen."""

    @property
    def skill(self) -> SharpeEvidence | None:
        """None also where the agent was trained or selected on the bars."""
        from tailguard.evaluate.significance import sharpe_evidence

        if self.trials is None or not self.seen.honest:
            return None
        own = self.standing.results["agent"]
        tried = self.trials
        return sharpe_evidence(own.net, own.bars_per_year, trials=tried.count, trial_sharpes=tried.sharpes)

    def lines(self) -> list[str]:
        """The lines below the table."""
        from tailguard.evaluate.report.verdict import budget_in_words, probability

        lines, skill = [], self.skill
        if skill is not None and self.trials is not None and math.isfinite(skill.deflated):
            lines.append(
                f"luck     the probability that its Sharpe ratio exceeds what luck explains is "
                f"{probability(skill.deflated)}"
            )
            lines.append(f"trials   {self.trials.source}")
        budget = self.standing.budgets.get("agent")
        if budget is not None:
            lines.append(f"budget   {budget_in_words(budget, self.standing.results['agent'].bars_per_year)}")
        return lines

    def figures(self) -> dict[str, Any]:
        """Everything as JSON values; NaN and infinity become null."""
        skill = self.skill
        return {
            "trials": None if self.trials is None else self.trials.count,
            "seen_in_training_or_validation": None if self.seen.unknown else self.seen.share,
            "warnings": [line.removeprefix("WARNING  ") for line in self.seen.lines()],
            "deflated_sharpe": None if skill is None else _finite(skill.deflated),
            "sharpe_interval": {
                name: [_finite(found.low), _finite(found.high)] for name, found in self.standing.sharpes.items()
            },
            "budget": {name: str(found.verdict) for name, found in self.standing.budgets.items()},
            "budget_probability": {name: _finite(found.probability) for name, found in self.standing.budgets.items()},
            "results": {
                name: {figure: _finite(value) for figure, value in result.metrics.items()}
                for name, result in self.standing.results.items()
            },
        }


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None


def _backtests(
    folder: Path,
    data: Path | None,
    split: Literal["test", "validation", "train"] | None,
    symbol: str | None,
    stress: tuple[float, int, float],
    trials: int | None,
    console: Console,
) -> _Backtests:
    """The stressed agent and the baselines with the same costs, and the budget that the run was trained with."""
    from tailguard.evaluate.notes import baseline_notes
    from tailguard.evaluate.overlap import Overlap, overlap_of, overlap_with_run
    from tailguard.evaluate.report.collect import trials_of
    from tailguard.evaluate.standing import own_budget, standing
    from tailguard.evaluate.stress import scaled_costs
    from tailguard.evaluate.trained import agent_and_baselines, load_agent, open_run, run_config
    from tailguard.evaluate.trials import given_trials

    costs, delay, noise = stress
    config, opened = run_config(folder), None
    if data is None:
        opened = open_run(folder)
        agent, bars, title = opened.agent, opened.part(split or "test"), f"{split or 'test'}, net of costs"
    elif split is not None:
        raise ConfigError(
            f"--split {split}: names a part of the run's own bars, but --data {data} gives other bars. Choose one"
        )
    else:
        agent, bars, title = load_agent(folder), _other_bars(data, folder, symbol), f"{data.name}, net"
    bars = _one_account(agent, bars, symbol, pool=True)
    if opened is None:
        seen = overlap_with_run(config, bars)
    elif split in (None, "test"):
        seen = Overlap(0.0)
    else:
        seen = overlap_of(bars, opened.part("train"), opened.part("validation"))
    market = scaled_costs(config.market, costs)
    with shown_steps("backtest", 12, console) as begin:
        results = agent_and_baselines(agent, bars, market, delay=delay, noise=noise, before_each=begin)
        notes = baseline_notes(results, bars, market)
        found = standing(results, own_budget(config), notes=notes, before_each=begin)
    tried = None if trials is None else given_trials(trials)
    if opened is not None and split in (None, "test"):
        tried = trials_of(opened, results["agent"], trials)
    return _Backtests(title, found, tried, seen)


def _one_account(agent: Learner | Ensemble, bars: Bars, symbol: str | None, pool: bool = False) -> Bars:
    """The bars of the symbols that the agent can trade in one account; only those of `symbol` if it is given.

    `pool`: also accept several accounts side by side, for an agent with one account per symbol.
    """
    if symbol is not None:
        bars = bars.select(symbol)
    scaled = () if agent.spec is None else agent.spec.scaler.names
    known = {name.partition(":")[2] for name in scaled} - {""}
    found = ", ".join(bars.symbols)
    if known and known != set(bars.symbols):
        raise ConfigError(f"the agent trades {', '.join(sorted(known))} in one account; these bars have {found}")
    side_by_side = pool and agent.spec is not None and agent.spec.accounts == "per_symbol"
    if not known and len(bars.symbols) > 1 and not side_by_side:
        raise ConfigError(
            f"the agent trades one symbol per account; choose one of {found} with --symbol {bars.symbols[0]}"
        )
    return bars


def _other_bars(path: Path, folder: Path, symbol: str | None) -> Bars:
    """Bars from another source, of the symbols in the run's settings."""
    from tailguard.data.sources import load_bars
    from tailguard.evaluate.trained import run_config

    data = run_config(folder).data
    bars = load_bars(path, gaps=data.gaps, volume_unit=data.volume_unit)
    return bars.select(*data.symbols) if data.symbols and symbol is None else bars
