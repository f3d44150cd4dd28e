"""The result table of a run: the agent and its baselines."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Literal

from rich.console import Console
from rich.measure import Measurement
from rich.table import Table
from rich.text import Text

from tailguard.evaluate.formatting import (
    WHOLE_YEAR,
    growth,
    p_value,
    percent,
    record_years,
    short_window,
    with_interval,
)
from tailguard.evaluate.metrics import horizons

if TYPE_CHECKING:
    from tailguard.evaluate.backtest import BacktestResult
    from tailguard.evaluate.budget import BudgetCheck
    from tailguard.evaluate.summary import EvaluationSummary

TOO_SHORT = "too short"
"""Shown instead of a CVaR that rests on less than one of the worst windows."""
TURNOVER, AHEAD, FALL = "turnover/d", "agent ahead", "max fall"
"""Columns left out in a narrow terminal, in this order. Ahead: by its Sharpe ratio, one-sided."""


def print_summary(summary: EvaluationSummary, title: str, console: Console) -> None:
    """One row per policy, net of all costs; in a narrow terminal, the least important columns are left out."""
    columns = summary_columns(summary)
    for missed in ((), (TURNOVER,), (TURNOVER, AHEAD), (TURNOVER, AHEAD, FALL)):
        shown = {heading: cells for heading, cells in columns.items() if heading not in missed}
        table = Table(box=None, pad_edge=False, header_style="bold")
        table.add_column(Text(title), no_wrap=True)
        for heading in shown:
            table.add_column(Text(heading), justify="right", no_wrap=True)
        for name in summary.results:
            table.add_row(Text(name), *(Text(cells.get(name, "–")) for cells in shown.values()))
        if Measurement.get(console, console.options.update_width(1_000), table).maximum <= console.width:
            break
    console.print(table)
    for note in summary.notes:
        console.print(f"note     {note}", soft_wrap=True, markup=False, highlight=False)


def summary_columns(summary: EvaluationSummary) -> dict[str, dict[str, str]]:
    """The cells of each column, by its heading and the policy's name."""
    metrics = {name: result.metrics for name, result in summary.results.items()}
    how_long, grown = growth_column(summary.results)
    columns: dict[str, dict[str, str]] = {
        how_long: grown,
        "Sharpe [95 %]": {name: with_interval(ratio) for name, ratio in summary.sharpes.items()},
        FALL: {name: percent(each["max_drawdown"]) for name, each in metrics.items()},
    }
    heading, tails = tail_column(summary.results, summary.budgets)
    columns[heading] = tails
    if summary.budgets:
        columns["budget"] = {name: budget_cell(check) for name, check in summary.budgets.items()}
    columns[TURNOVER] = {name: f"{each['turnover_per_day']:.2f}" for name, each in metrics.items()}
    columns[AHEAD] = {
        name: p_value(summary.beaten[name].p_value) if name in summary.beaten else "" for name in summary.results
    }
    return columns


def growth_column(results: Mapping[str, BacktestResult]) -> tuple[str, dict[str, str]]:
    """Heading and cells of the growth: of a year, or of the whole record where it is shorter.

    A few weeks scaled to a year would mean nothing.
    """
    years = record_years(next(iter(results.values())))
    metric, heading = "growth_per_year", "growth/yr"
    if years < WHOLE_YEAR:
        days = 365.25 * years
        metric, heading = "total_return", f"growth/{f'{days:.0f}d' if days < 61 else f'{days / 30.44:.0f}mo'}"
    return heading, {name: growth(result.metrics[metric]) for name, result in results.items()}


def tail_column(
    results: Mapping[str, BacktestResult], budgets: Mapping[str, BudgetCheck]
) -> tuple[str, dict[str, str]]:
    """Heading and cells of the mean of the worst windows: the budget's, or of the worst 5 % of weeks without one.

    Of the worst 5 % of bars where the record has no week. A mean that rests on less than one of the worst windows,
    counted without overlap, is not shown.
    """
    own = next(iter(results.values()))
    if budgets:
        first = next(iter(budgets.values()))
        what = "CVaR" if first.outcome == "return" else "fall"
        heading = f"{what} {100 * first.alpha:g} %/{short_window(first.horizon, own.pace)}"
        return heading, {
            name: percent(check.cvar.estimate) if check.tail_windows >= 1 else TOO_SHORT
            for name, check in budgets.items()
        }
    span, unit = ("week", "wk") if "cvar_5_week" in own.metrics else ("bar", "bar")
    return f"CVaR 5 %/{unit}", {name: tail_cell(result, span) for name, result in results.items()}


def budget_cell(check: BudgetCheck) -> str:
    """kept, broken, or kept? 38 % with the probability that the limit holds; undecided where it is not known."""
    if check.verdict != "undecided" or math.isnan(check.probability):
        return str(check.verdict)
    return f"kept? {100 * check.probability:.0f} %"


def tail_cell(result: BacktestResult, span: str = "week") -> str:
    """Mean of the worst 5 % of weeks, days or bars; – where the record is too short."""
    tail = result.metrics.get(f"cvar_5_{span}", math.nan)
    if math.isnan(tail):
        return percent(tail)
    return percent(tail) if 0.05 * len(result.net) / horizons(result.pace)[span] >= 1 else TOO_SHORT


def print_rows(headings: Sequence[str], rows: Sequence[Sequence[str]], console: Console) -> None:
    """A plain table of literal texts: [5.78, 9.31] is not markup."""
    table = Table(box=None, pad_edge=False, header_style="bold")
    for position, heading in enumerate(headings):
        justify: Literal["left", "right"] = "right" if position else "left"
        table.add_column(Text(heading), justify=justify, no_wrap=position == 0, overflow="fold")
    for row in rows:
        table.add_row(*map(Text, row))
    console.print(table)
