"""The commands for finished runs: `backtest`, `report` and `compare`."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from tailguard.cli.application import app
from tailguard.cli.common import TrustPlugins, shown_steps
from tailguard.console import say
from tailguard.errors import ConfigError
from tailguard.places import check_writable_place, replace_synced

if TYPE_CHECKING:
    from contextlib import AbstractContextManager

    from rich.console import Console

    from tailguard.evaluate.backtest import BacktestResult
    from tailguard.evaluate.benchmark import OverRate, Relative
    from tailguard.evaluate.overlap import Overlap
    from tailguard.evaluate.robustness_of_run import RobustnessOfRun

Run = Annotated[Path, typer.Argument(metavar="RUN", help="Folder of a finished run, like runs/demo.")]
Trials = Annotated[
    int | None,
    typer.Option(
        help="Number of configurations tried, for the deflated Sharpe ratio. Default: the entries for these bars in "
        "trials.jsonl beside the run's folder."
    ),
]
Symbol = Annotated[str | None, typer.Option(help="Trade only this symbol, for an agent with one symbol per account.")]


Benchmark = Annotated[
    Path | None, typer.Option(help="Bars of one symbol to compare the agent with: any frequency, closes are enough.")
]
RiskFree = Annotated[
    float, typer.Option(help="Risk-free rate a year, 0.03: Sharpe ratios over it, and the comparison with --benchmark.")
]


@app.command()
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
    throttle: Annotated[
        bool, typer.Option(help="Let losses reduce the agent's exposure, where it was trained to have a throttle.")
    ] = True,
    csv: Annotated[
        Path | None,
        typer.Option(help="Write the agent's equity, weights and costs for every bar to a .csv or .parquet file."),
    ] = None,
    json_file: Annotated[
        str | None,
        typer.Option("--json", metavar="FILE", help="Write all metrics as JSON; - prints them and nothing else."),
    ] = None,
    trials: Trials = None,
    feed: Annotated[
        list[str] | None,
        typer.Option(
            help="Show the agent clean and under a fault of its feed: late:2, bad_tick:0.05@0.01, late:2+frozen, all. "
            "May be given several times."
        ),
    ] = None,
    feed_seed: Annotated[int, typer.Option(help="Seed of the random faults of --feed; reports use 0.")] = 0,
    attack: Annotated[
        list[str] | None,
        typer.Option(help="Show it clean and under an attack on what it sees: pgd, fgsm, sgld, random. Repeatable."),
    ] = None,
    epsilon: Annotated[
        list[str] | None,
        typer.Option(help="Size of the attack in standard deviations of each feature: 0.05, or 0.02,0.05,0.1."),
    ] = None,
    norm: Annotated[Literal["linf", "l2"], typer.Option(help="What epsilon bounds: each feature, or all.")] = "linf",
    target: Annotated[
        Literal["action", "reverse", "kl", "critic"],
        typer.Option(help="What the attack spoils: the size of a position, its side, the policy, or the value."),
    ] = "action",
    attack_steps: Annotated[int, typer.Option(help="Gradient steps of pgd and sgld at each bar.")] = 10,
    out: Annotated[
        Path | None,
        typer.Option(help="HTML file for --feed and --attack. Default: robustness.html in the run."),
    ] = None,
    benchmark: Benchmark = None,
    risk_free: RiskFree = 0.0,
    trust_plugins: TrustPlugins = False,
) -> None:
    """Backtest a run's agent and compare it with the baselines, net of all costs.

    With --feed or --attack: the agent beside itself, clean and disturbed.
    """
    from rich.console import Console

    from tailguard.data.storage import check_writable, write_frame
    from tailguard.evaluate.baselines import AGENT
    from tailguard.evaluate.benchmark import finite_values
    from tailguard.evaluate.results_table import print_summary
    from tailguard.evaluate.robustness_of_run import Disturbances, disturb_saved_run, parse_epsilons
    from tailguard.evaluate.stressed_backtest import Stress, backtest_saved_run
    from tailguard.experiment.layout import RunLayout
    from tailguard.experiment.trained_run import read_run_config
    from tailguard.validate import check_count

    if trials is not None:
        check_count("--trials", trials)
    if csv is not None:
        check_writable(csv)
    for path in (csv, None if json_file in (None, "-") else Path(str(json_file))):
        if path is not None:
            check_writable_place(path)
    console = Console(stderr=json_file == "-")
    disturbances = Disturbances(
        tuple(feed or ()), tuple(attack or ()), parse_epsilons(epsilon or ()), norm, attack_steps, target, feed_seed
    )
    read_run_config(run, trust_plugins=trust_plugins)
    stress = Stress(costs, delay, noise, throttle)
    about = {"run": str(run), "costs": costs, "delay": delay, "noise": noise, "throttle": throttle}
    if disturbances:
        if not throttle:
            raise ConfigError("--no-throttle: is for a backtest without --feed and --attack; leave it out")
        if csv is not None:
            raise ConfigError("--csv: holds the bars of one backtest; with --feed or --attack use --json")
        if benchmark is not None or risk_free:
            raise ConfigError("--benchmark and --risk-free: are for one backtest, without --feed and --attack")
        disturbed = _show_disturbed(
            out or RunLayout(run).robustness_path,
            partial(disturb_saved_run, run, data, split, symbol, stress, disturbances),
            lambda: shown_steps("backtest", 1 + disturbances.count, console),
            None if json_file == "-" else console,
        )
        _write_json(json_file, about | disturbed, console)
        return
    if out is not None:
        raise ConfigError("--out: is the page of --feed and --attack; name one of them")
    backtested = backtest_saved_run(
        run, data, split, symbol, stress, trials, lambda: shown_steps("backtest", 12, console)
    )
    relative = _relative(backtested.summary.results[AGENT], benchmark, risk_free)
    if json_file != "-":
        _print_warnings(backtested.seen, console)
        print_summary(backtested.summary, backtested.title, console)
        console.print()
        for line in backtested.lines():
            say(console, line)
        if relative is not None:
            say(console, f"relative {relative.describe()}")
    if csv is not None:
        write_frame(backtested.summary.results[AGENT].frame(), csv)
        say(console, f"saved    {csv}")
    key = "risk_free" if benchmark is None else "benchmark"
    beside = {} if relative is None else {key: finite_values(relative)}
    _write_json(json_file, about | {"part": backtested.title} | backtested.to_json() | beside, console)


def _relative(result: BacktestResult, benchmark: Path | None, risk_free: float) -> Relative | OverRate | None:
    """The result beside a benchmark, or over a risk-free rate alone; None where neither is given."""
    from tailguard.data.sources import load_bars
    from tailguard.evaluate.benchmark import compare_with, compare_with_rate

    if benchmark is not None:
        return compare_with(result, load_bars(benchmark), risk_free)
    return compare_with_rate(result, risk_free) if risk_free else None


def _show_disturbed(
    page: Path,
    work: Callable[[Callable[[], AbstractContextManager[Callable[[str], None]]]], RobustnessOfRun],
    progress: Callable[[], AbstractContextManager[Callable[[str], None]]],
    console: Console | None,
) -> dict[str, Any]:
    """Compare the clean and the disturbed agent: write the page, print the table where there is a console."""
    from tailguard.evaluate.report import check_place, write_page
    from tailguard.evaluate.results_table import print_rows

    check_place(page)
    disturbed = work(progress)
    write_page(disturbed.page(), page)
    if console is not None:
        _print_warnings(disturbed.seen, console)
        print_rows(*disturbed.rows(), console)
        console.print()
        for line in (*disturbed.lines(), f"page     {page}"):
            say(console, line)
    return {"part": disturbed.title, **disturbed.to_json()}


def _print_warnings(seen: Overlap, console: Console) -> None:
    for line in seen.lines():
        console.print(line, style="bold red", soft_wrap=True, markup=False, highlight=False)


def _write_json(place: str | None, figures: dict[str, Any], console: Console) -> None:
    """Write figures to a file, print them for -, or do nothing."""
    if place is None:
        return
    text = json.dumps(figures, indent=2)
    if place == "-":
        typer.echo(text)
    else:
        replace_synced(Path(place), f"{text}\n".encode())
        say(console, f"saved    {place}")


@app.command()
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
        bool,
        typer.Option("--csv", help="Also write bars, trades, months, drawdowns, exposures and a benchmark as CSV."),
    ] = False,
    parquet: Annotated[bool, typer.Option("--parquet", help="The same tables as Parquet files.")] = False,
    benchmark: Benchmark = None,
    risk_free: RiskFree = 0.0,
    trust_plugins: TrustPlugins = False,
) -> None:
    """Write one HTML page about a run: verdict, equity, risk, stress, behaviour, training. The page works offline."""
    from rich.console import Console

    from tailguard.evaluate.budget import Budget
    from tailguard.evaluate.report import check_place, write_report
    from tailguard.evaluate.report.collect import collect, planned_steps
    from tailguard.evaluate.report.export import find_browser, save_pdf, save_png
    from tailguard.evaluate.report.record_tables import write_tables
    from tailguard.evaluate.report.verdict import verdict
    from tailguard.evaluate.stressed_backtest import select_account
    from tailguard.experiment.layout import RunLayout
    from tailguard.experiment.trained_run import open_run, read_run_config
    from tailguard.validate import check_count, check_range

    if trials is not None:
        check_count("--trials", trials)
    if limit is not None:
        check_range("--limit", limit, low=-1, high=0)
        check_range("--alpha", alpha, low=0, high=1, low_open=True, high_open=True)
    read_run_config(run, trust_plugins=trust_plugins)
    path = out or RunLayout(run).report_path
    check_place(path)
    exports = [(suffix, save) for suffix, wanted, save in ((".pdf", pdf, save_pdf), (".png", png, save_png)) if wanted]
    if exports:
        find_browser()  # a missing browser is an error before the work, not after it
    console = Console()
    opened = open_run(run)
    select_account(opened.agent, opened.split.test, symbol)
    if symbol is not None:
        opened = opened.select(symbol)
    budget = None if limit is None else Budget(limit, alpha, horizon, outcome)
    with shown_steps("report", planned_steps(opened), console) as begin:
        data = collect(opened, budget=budget, trials=trials, before_each=begin)
    data = replace(data, relative=_relative(data.agent, benchmark, risk_free))
    write_report(data, path)
    say(console, f"verdict  {verdict(data)}")
    say(console, f"report   {path}")
    folder = path.with_name(f"{path.stem}_data")
    for wanted, suffix in ((csv, "csv"), (parquet, "parquet")):
        if wanted:
            write_tables(data, folder, suffix)  # type: ignore[arg-type]  # both are in the list above
            say(console, f"saved    {folder} ({suffix})")
    for suffix, save in exports:
        save(path, path.with_suffix(suffix))
        say(console, f"saved    {path.with_suffix(suffix)}")


@app.command()
def compare(
    runs: Annotated[list[Path], typer.Argument(metavar="RUN RUN…", help="Folders of finished runs.")],
    out: Annotated[Path, typer.Option(help="HTML file with all equity curves in one chart.")] = Path("compare.html"),
    trust_plugins: TrustPlugins = False,
) -> None:
    """Compare runs: metrics, significance of the difference, settings that differ, and a chart."""
    from rich.console import Console

    from tailguard.evaluate.compare import compare_runs, comparison_page, print_comparison
    from tailguard.evaluate.report import check_place, write_page
    from tailguard.experiment.trained_run import read_run_config

    check_place(out)
    for run in runs:
        read_run_config(run, trust_plugins=trust_plugins)
    console = Console()
    with shown_steps("compare", len(runs), console) as begin:
        comparison = compare_runs(runs, before_each=begin)
    print_comparison(comparison, console)
    write_page(comparison_page(comparison), out)
    say(console, f"chart    {out}")
