"""The report of a walk forward: fold by fold, and as one account with the baselines."""

from __future__ import annotations

import math

import numpy as np
import plotly.graph_objects as go
from rich.console import Console

from tailguard.console import say
from tailguard.evaluate.backtest import BacktestResult
from tailguard.evaluate.bootstrap import interval, sharpe_statistic
from tailguard.evaluate.budget import check_budget
from tailguard.evaluate.formatting import growth_of, percent, with_interval
from tailguard.evaluate.report.charts import equity_chart
from tailguard.evaluate.report.page import Page, escape
from tailguard.evaluate.report.sections import costs_per_year
from tailguard.evaluate.report.style import GREY, times
from tailguard.evaluate.report.verdict import budget_in_words, overfitting_in_words, probability
from tailguard.evaluate.results_table import budget_cell, print_rows
from tailguard.evaluate.significance import sharpe_evidence
from tailguard.evaluate.walk_forward_results import WalkForwardResults

HOLD = "buy & hold"
ACCOUNT_HEADINGS = ("all tests", "growth", "Sharpe [95 % interval]", "max drawdown", "costs/yr", "budget")
FOLD_HEADINGS = ("fold", "test period", "agent", "worst seed", "best seed", HOLD)


def accounts(walked: WalkForwardResults) -> dict[str, BacktestResult]:
    """The stitched account of every seed, then the baselines, by name."""
    seeds = walked.stitched
    names = (
        ["agent"] if len(seeds) == 1 else [f"agent, seed {number + 1} of {len(seeds)}" for number in range(len(seeds))]
    )
    return dict(zip(names, seeds, strict=True)) | walked.baselines


def account_rows(walked: WalkForwardResults, seed: int = 0) -> list[tuple[str, ...]]:
    """Cells by `ACCOUNT_HEADINGS`, a row an account; `seed` is that of the bootstrap."""
    rows: list[tuple[str, ...]] = []
    for name, result in accounts(walked).items():
        ratio = interval(result.net, sharpe_statistic(result.bars_per_year), np.random.default_rng(seed))
        judged = None if walked.budget is None else check_budget(result, walked.budget, seed)
        rows.append(
            (
                name,
                growth_of(result),
                with_interval(ratio),
                percent(result.metrics["max_drawdown"]),
                percent(costs_per_year(result), sign=False),
                "–" if judged is None else budget_cell(judged),
            )
        )
    return rows


def fold_gains(walked: WalkForwardResults) -> tuple[np.ndarray, np.ndarray]:
    """Net return over each fold's test window: of every seed, [seeds, folds], and of buy & hold, [folds]."""
    own = np.array([[result.equity[-1] - 1 for result in each] for each in walked.results])
    held = walked.baselines[HOLD]
    windows = [np.isin(held.time, result.time) for result in walked.results[0]]
    return own, np.array([np.prod(1 + held.net[window]) - 1 for window in windows])


def fold_rows(walked: WalkForwardResults) -> list[tuple[str, ...]]:
    """Cells by `FOLD_HEADINGS`, a row a fold; the agent is the median of the seeds."""
    own, held = fold_gains(walked)
    rows: list[tuple[str, ...]] = []
    for place, fold in enumerate(walked.folds):
        gains = own[:, place]
        period = f"{fold.test.start:%Y-%m-%d} to {fold.test.end_points[1]:%Y-%m-%d}"
        cells = (float(np.median(gains)), gains.min(), gains.max(), held[place])
        rows.append((str(fold.number), period, *(percent(float(value)) for value in cells)))
    return rows


def in_words(walked: WalkForwardResults) -> list[str]:
    """Sentences on the results over folds and seeds."""
    own, held = fold_gains(walked)
    middle = np.median(own, axis=0)
    count = len(held)
    sentences = [
        f"The agent gained in {int((middle > 0).sum())} of {count} folds and did better than buy & hold in "
        f"{int((middle > held).sum())}."
    ]
    seeds = walked.over_seeds(np.random.default_rng(0))
    if seeds is not None:
        few = "" if seeds.seeds >= 5 else "; fewer than five seeds are weak evidence"
        sentences.append(
            f"Over {seeds.seeds} seeds and all folds the interquartile mean of the Sharpe ratio is {seeds.iqm:.2f}, "
            f"95 % interval {seeds.low:.2f} to {seeds.high:.2f}{few}."
        )
    return [*sentences, *_luck(walked), *_budget(walked)]


def _luck(walked: WalkForwardResults) -> list[str]:
    """Sentences on luck, and on overfitting by selecting a seed."""
    sentences = []
    middle, tried = walked.middle, walked.trials
    which = "" if len(walked.stitched) == 1 else " of the median seed"
    if tried is not None:
        skill = sharpe_evidence(middle.net, middle.bars_per_year, trials=tried.count, trial_sharpes=tried.sharpes)
        if math.isfinite(skill.deflated):
            sentences.append(
                f"The probability that the Sharpe ratio{which} exceeds what luck explains is "
                f"{probability(skill.deflated)}, after {tried.count} trial{'s' * (tried.count > 1)} ({tried.source}; "
                "all folds of a seed are one trial)."
            )
    overfitting = walked.overfitting()
    if overfitting is not None:
        sentences.append(
            f"{overfitting_in_words(overfitting, 'seed')} Equally good seeds give about 50 %: do not select one."
        )
    return sentences


def _budget(walked: WalkForwardResults) -> list[str]:
    judged = None if walked.budget is None else check_budget(walked.middle, walked.budget)
    return [] if judged is None else [budget_in_words(judged, walked.middle.pace)]


def folds_chart(walked: WalkForwardResults) -> go.Figure:
    """Equity of the stitched accounts beside the baselines; every other test window is shaded."""
    results = accounts(walked)
    falls = [*list(results)[: len(walked.stitched)], HOLD]
    chart = equity_chart(results, falls=falls)
    for each in walked.results[0][1::2]:
        begin, end = times(each.time[[0, -1]])
        chart.add_vrect(x0=begin, x1=end, fillcolor=GREY, opacity=0.12, line_width=0)
    return chart


def walk_forward_page(walked: WalkForwardResults, name: str, config: str) -> str:
    """The walk forward as one HTML file."""
    page = Page()
    page.add(f"<h1>{escape(name)}: walk forward</h1>")
    for sentence in in_words(walked):
        page.paragraph(sentence)
    page.chart(
        folds_chart(walked),
        "One account through all test windows, net of all costs; the shade changes with the fold. Every agent was "
        "trained on bars before its window.",
    )
    page.table(
        ACCOUNT_HEADINGS, account_rows(walked), caption="One account through all test windows, net of all costs."
    )
    page.table(FOLD_HEADINGS, fold_rows(walked), caption="Net return over each test window; agent: median seed.")
    page.add(f"<details><summary>All settings</summary><pre>{escape(config)}</pre></details>")
    return page.html(f"{name} · Tailguard walk forward")


def print_walk_forward(walked: WalkForwardResults, console: Console) -> None:
    """The walk forward in a terminal."""
    print_rows(FOLD_HEADINGS, fold_rows(walked), console)
    console.print()
    print_rows(ACCOUNT_HEADINGS, account_rows(walked), console)
    console.print()
    for number, sentence in enumerate(in_words(walked)):
        say(console, f"{'' if number else 'verdict':<8} {sentence}")
