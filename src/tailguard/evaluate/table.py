"""The table a person reads after a run: the agent beside what it has to beat."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Literal

from rich.console import Console
from rich.measure import Measurement
from rich.table import Table
from rich.text import Text

if TYPE_CHECKING:
    from tailguard.evaluate.backtest import BacktestResult
    from tailguard.evaluate.bootstrap import Interval
    from tailguard.evaluate.calibration import RiskBudget
    from tailguard.evaluate.standing import Standing

TURNOVER, AHEAD, FALL = "turnover/d", "agent ahead", "max fall"
"""Columns that a narrow terminal does without, in this order. Ahead: by its Sharpe ratio, one-sided."""


def print_standing(standing: Standing, title: str, console: Console) -> None:
    """One row a policy, net of all costs; where a terminal is narrow, the columns that can be missed are left out."""
    columns = standing_columns(standing)
    for missed in ((), (TURNOVER,), (TURNOVER, AHEAD), (TURNOVER, AHEAD, FALL)):
        shown = {heading: cells for heading, cells in columns.items() if heading not in missed}
        table = Table(box=None, pad_edge=False, header_style="bold")
        table.add_column(Text(title), no_wrap=True)
        for heading in shown:
            table.add_column(Text(heading), justify="right", no_wrap=True)
        for name in standing.results:
            table.add_row(Text(name), *(Text(cells.get(name, "–")) for cells in shown.values()))
        if Measurement.get(console, console.options.update_width(1_000), table).maximum <= console.width:
            break
    console.print(table)


def standing_columns(standing: Standing) -> dict[str, dict[str, str]]:
    """The cells of each column, by its heading and the policy's name."""
    figures = {name: result.metrics for name, result in standing.results.items()}
    columns: dict[str, dict[str, str]] = {
        "growth/yr": {name: growth(each["growth_per_year"]) for name, each in figures.items()},
        "Sharpe [95 %]": {name: with_interval(found) for name, found in standing.sharpes.items()},
        FALL: {name: percent(each["max_drawdown"]) for name, each in figures.items()},
    }
    heading, tails = tail_column(standing.results, standing.budgets)
    columns[heading] = tails
    if standing.budgets:
        columns["budget"] = {name: str(found.verdict) for name, found in standing.budgets.items()}
    columns[TURNOVER] = {name: f"{each['turnover_per_day']:.2f}" for name, each in figures.items()}
    columns[AHEAD] = {
        name: p_value(standing.beaten[name].p_value) if name in standing.beaten else "" for name in standing.results
    }
    return columns


def tail_column(results: Mapping[str, BacktestResult], budgets: Mapping[str, RiskBudget]) -> tuple[str, dict[str, str]]:
    """Heading and cells of the mean of the worst windows: the budget's, or of the worst 5 % of weeks without one.

    Of the worst 5 % of bars where the record has no week.
    """
    own = next(iter(results.values()))
    if budgets:
        first = next(iter(budgets.values()))
        what = "CVaR" if first.outcome == "return" else "fall"
        heading = f"{what} {100 * first.alpha:g} %/{short_window(first.horizon, own.bars_per_year)}"
        return heading, {name: percent(found.cvar.estimate) for name, found in budgets.items()}
    span, unit = ("week", "wk") if "cvar_5_week" in own.metrics else ("bar", "bar")
    return f"CVaR 5 %/{unit}", {name: percent(result.metrics[f"cvar_5_{span}"]) for name, result in results.items()}


def print_rows(headings: Sequence[str], rows: Sequence[Sequence[str]], console: Console) -> None:
    """A plain table of texts that are shown as they are: [5.78, 9.31] is no markup."""
    table = Table(box=None, pad_edge=False, header_style="bold")
    for position, heading in enumerate(headings):
        justify: Literal["left", "right"] = "right" if position else "left"
        table.add_column(Text(heading), justify=justify, no_wrap=position == 0, overflow="fold")
    for row in rows:
        table.add_row(*map(Text, row))
    console.print(table)


def growth(value: float) -> str:
    """A year's growth in percent; as a multiple of equity where percents stop meaning anything."""
    return f"×{1 + value:,.1f}" if value >= 9.995 else percent(value)


def percent(value: float, sign: bool = True) -> str:
    """0.1234 as +12.3 %; – where there is no number."""
    if math.isnan(value):
        return "–"
    return f"{100 * value:+,.1f} %" if sign and value else f"{100 * value:,.1f} %"


def with_interval(found: Interval) -> str:
    """1.91 [0.84, 2.93]; – where there is no number."""
    return number(found.estimate) + ("" if math.isnan(found.low) else f" [{found.low:.2f}, {found.high:.2f}]")


def number(value: float) -> str:
    """Two digits after the point; – where there is no number."""
    return "–" if math.isnan(value) else f"{value:,.2f}"


def p_value(value: float) -> str:
    """p = 0.012, or p < 0.001; – where there is none."""
    if math.isnan(value):
        return "–"
    return "p < 0.001" if value < 0.001 else f"p = {value:.2g}"


def short_window(bars: int, bars_per_year: float) -> str:
    """A number of bars as a unit of time: wk, d, 3d, h, 5h, or 7 bars."""
    count, unit = whole_units(bars, bars_per_year)
    if unit == "bars":
        return f"{count} bars"
    short = {"weeks": "wk", "days": "d", "hours": "h"}[unit]
    return short if count == 1 else f"{count}{short}"


def whole_units(bars: int, bars_per_year: float) -> tuple[int, str]:
    """A number of bars as a whole number of weeks, days or hours, the longest that fits; else of bars."""
    hours = bars * 365.25 * 24 / bars_per_year
    for name, length in (("weeks", 168), ("days", 24), ("hours", 1)):
        count = hours / length
        if abs(count - round(count)) < 1e-6 and round(count) >= 1:
            return round(count), name
    return bars, "bars"
