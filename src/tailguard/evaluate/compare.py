"""Compare runs: test results, significance of the differences, and settings that differ."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console

from tailguard.config import to_dict
from tailguard.console import say
from tailguard.errors import ConfigError
from tailguard.evaluate.backtest import BacktestResult, backtest
from tailguard.evaluate.bootstrap import Interval, interval, paired_difference, sharpe_statistic
from tailguard.evaluate.formatting import growth_of, p_value, percent, with_interval
from tailguard.evaluate.report.charts import equity_chart
from tailguard.evaluate.report.collect import prices_of
from tailguard.evaluate.report.page import Page, escape
from tailguard.evaluate.report.verdict import overfitting_in_words
from tailguard.evaluate.results_table import print_rows, tail_cell
from tailguard.evaluate.significance import Overfitting, SeedSummary, iqm_over_seeds, overfitting_of
from tailguard.experiment.trained_run import open_run

HEADINGS = ("run", "test period", "growth", "Sharpe [95 % interval]", "max drawdown", "CVaR 5 %/wk", "turnover/d")
AHEAD = "ahead of first"
SEED = "training.seed"


@dataclass(frozen=True)
class Entry:
    """One run of a comparison."""

    name: str
    result: BacktestResult
    """On its own test period, net of costs."""
    sharpe: Interval
    ahead: Interval | None
    """Its Sharpe ratio minus that of the first run; None for the first, and where the test bars differ."""
    settings: Mapping[str, Any]
    """Every setting by its path."""

    @property
    def row(self) -> tuple[str, ...]:
        """The cells of its row, as `HEADINGS` and `AHEAD` name them."""
        metrics, (first, last) = self.result.metrics, self.result.time[[0, -1]].astype("datetime64[ms]")
        return (
            self.name,
            f"{first.astype('datetime64[D]')} to {last.astype('datetime64[D]')}",
            growth_of(self.result),
            with_interval(self.sharpe),
            percent(metrics["max_drawdown"]),
            tail_cell(self.result),
            f"{metrics['turnover_per_day']:.2f}",
            "–" if self.ahead is None else p_value(self.ahead.p_value),
        )


@dataclass(frozen=True)
class Comparison:
    """All runs, and their joint statistics."""

    entries: tuple[Entry, ...]
    differing: Mapping[str, tuple[str, ...]]
    """Settings that are not the same everywhere, with each run's value."""
    seeds: SeedSummary | None
    """Interquartile mean of the Sharpe ratios where the runs differ in their seed alone."""
    overfitting: Overfitting | None
    """Probability of backtest overfitting; None where the test bars differ."""

    def notes(self) -> list[str]:
        """Notes on interpretation."""
        notes = []
        if any(entry.ahead is None for entry in self.entries[1:]):
            notes.append("Runs tested on other bars than the first run are not compared with it.")
        if self.seeds is not None:
            summary = self.seeds
            few = "" if summary.seeds >= 5 else "; fewer than five seeds are weak evidence"
            notes.append(
                f"Over {summary.seeds} seeds the interquartile mean of the Sharpe ratio is {summary.iqm:.2f}, "
                f"{100 * summary.level:.0f} % interval {summary.low:.2f} to {summary.high:.2f}{few}."
            )
        elif len(self.entries) > 1:
            notes.append(
                f"The best of {len(self.entries)} runs is biased upwards by selection; tailguard report RUN corrects "
                "for all trials on its bars."
            )
        if self.overfitting is not None:
            notes.append(overfitting_in_words(self.overfitting, "run"))
        return notes


def compare_runs(
    folders: Sequence[Path], *, seed: int = 0, before_each: Callable[[str], None] = lambda _: None
) -> Comparison:
    """Backtest every run on its own test period.

    `before_each`: called with a run's name before its backtest, to show progress.
    """
    if len(folders) < 2:
        raise ConfigError("compare: give at least two runs, as runs/one runs/two")
    draw = np.random.default_rng(seed)
    entries: list[Entry] = []
    first: tuple[BacktestResult, np.ndarray] | None = None
    for name, folder in zip(_names(folders), folders, strict=True):
        before_each(name)
        run = open_run(folder)
        result = backtest(run.agent, run.split.test, progress_bar=False)
        prices = prices_of(result, run.split.test.panel("portfolio"))
        statistic = sharpe_statistic(result.bars_per_year)
        ahead = None
        if first is None:
            first = result, prices
        elif np.array_equal(first[0].time, result.time) and np.array_equal(first[1], prices):
            ahead = paired_difference(result.net, first[0].net, statistic, draw)
        settings = dict(_flat(to_dict(run.config)))
        entries.append(
            Entry(name, result, interval(result.net, statistic, np.random.default_rng(seed)), ahead, settings)
        )
    differing = _differing(entries)
    ratios = np.array([entry.sharpe.estimate for entry in entries])
    seeds = iqm_over_seeds(ratios, draw) if set(differing) == {SEED} and np.isfinite(ratios).all() else None
    same = all(entry.ahead is not None for entry in entries[1:])
    overfitting = overfitting_of([entry.result.net for entry in entries]) if same else None
    return Comparison(tuple(entries), differing, seeds, overfitting)


def print_comparison(comparison: Comparison, console: Console) -> None:
    """The comparison in a terminal."""
    names, *cells_of_runs = zip(*(entry.row for entry in comparison.entries), strict=True)
    # One column per run: metric names are short, and a terminal has room for two or three runs.
    rows = [(heading, *cells) for heading, cells in zip((*HEADINGS[1:], AHEAD), cells_of_runs, strict=True)]
    print_rows(("test, net of costs", *names), rows, console)
    if comparison.differing:
        console.print()
        print_rows(("settings", *names), [(key, *values) for key, values in comparison.differing.items()], console)
    console.print()
    for note in comparison.notes():
        say(console, f"note     {note}")


def comparison_page(comparison: Comparison) -> str:
    """The comparison as one HTML file: overlaid equity curves, the table, and the settings that differ."""
    page = Page()
    names = [entry.name for entry in comparison.entries]
    page.add(f"<h1>{escape(' · '.join(names))}</h1>")
    for note in comparison.notes():
        page.paragraph(note)
    results = {entry.name: entry.result for entry in comparison.entries}
    page.chart(
        equity_chart(results, falls=names, hidden=()),
        "Equity of each agent on its own test period, net of all costs, and its drawdown.",
    )
    page.table((*HEADINGS, AHEAD), [entry.row for entry in comparison.entries], caption="Test period, net of costs.")
    if comparison.differing:
        page.heading("settings", "Settings that differ")
        page.table(("setting", *names), [(key, *values) for key, values in comparison.differing.items()])
    return page.html(f"{' · '.join(names)} · Tailguard comparison")


def _names(folders: Sequence[Path]) -> list[str]:
    """The folders' own names, or their whole paths where two are the same."""
    short = [folder.resolve().name for folder in folders]
    return short if len(set(short)) == len(short) else [str(folder) for folder in folders]


def _differing(entries: Sequence[Entry]) -> dict[str, tuple[str, ...]]:
    keys = dict.fromkeys(key for entry in entries for key in entry.settings)
    table = {key: [entry.settings.get(key) for entry in entries] for key in keys}
    return {
        key: tuple(str(value) for value in values)
        for key, values in table.items()
        if any(value != values[0] for value in values)
    }


def _flat(settings: Mapping[str, Any], prefix: str = "") -> list[tuple[str, Any]]:
    pairs: list[tuple[str, Any]] = []
    for name, value in settings.items():
        pairs += _flat(value, f"{prefix}{name}.") if isinstance(value, dict) else [(f"{prefix}{name}", value)]
    return pairs
