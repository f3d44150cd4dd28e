"""The result table of a run: the agent and its baselines."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Literal

from rich.console import Console
from rich.measure import Measurement
from rich.table import Table
from rich.text import Text

from tailguard.evaluate.metrics import horizons

if TYPE_CHECKING:
    from tailguard.evaluate.backtest import BacktestResult
    from tailguard.evaluate.bootstrap import Interval
    from tailguard.evaluate.calibration import RiskBudget
    from tailguard.evaluate.standing import Standing
    from tailguard.risk.exposure import Exposure

WHOLE_YEAR = 0.95
"""Shortest record in years whose growth is annualised; it allows for bars lost to warm-up and embargo."""
TOO_SHORT = "too short"
"""Shown instead of a CVaR that rests on less than one of the worst windows."""
TURNOVER, AHEAD, FALL = "turnover/d", "agent ahead", "max fall"
"""Columns left out in a narrow terminal, in this order. Ahead: by its Sharpe ratio, one-sided."""


def print_standing(standing: Standing, title: str, console: Console) -> None:
    """One row per policy, net of all costs; in a narrow terminal, the least important columns are left out."""
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
    for note in standing.notes:
        console.print(f"note     {note}", soft_wrap=True, markup=False, highlight=False)


def standing_columns(standing: Standing) -> dict[str, dict[str, str]]:
    """The cells of each column, by its heading and the policy's name."""
    figures = {name: result.metrics for name, result in standing.results.items()}
    how_long, grown = growth_column(standing.results)
    columns: dict[str, dict[str, str]] = {
        how_long: grown,
        "Sharpe [95 %]": {name: with_interval(found) for name, found in standing.sharpes.items()},
        FALL: {name: percent(each["max_drawdown"]) for name, each in figures.items()},
    }
    heading, tails = tail_column(standing.results, standing.budgets)
    columns[heading] = tails
    if standing.budgets:
        columns["budget"] = {name: budget_cell(found) for name, found in standing.budgets.items()}
    columns[TURNOVER] = {name: f"{each['turnover_per_day']:.2f}" for name, each in figures.items()}
    columns[AHEAD] = {
        name: p_value(standing.beaten[name].p_value) if name in standing.beaten else "" for name in standing.results
    }
    return columns


def growth_column(results: Mapping[str, BacktestResult]) -> tuple[str, dict[str, str]]:
    """Heading and cells of the growth: of a year, or of the whole record where it is shorter.

    A few weeks scaled to a year would mean nothing.
    """
    years = record_years(next(iter(results.values())))
    figure, heading = "growth_per_year", "growth/yr"
    if years < WHOLE_YEAR:
        days = 365.25 * years
        figure, heading = "total_return", f"growth/{f'{days:.0f}d' if days < 61 else f'{days / 30.44:.0f}mo'}"
    return heading, {name: growth(result.metrics[figure]) for name, result in results.items()}


def growth_of(result: BacktestResult, short: str = "") -> str:
    """+12.3 % a year; +1.2 % in 52 days for a record shorter than a year, or with `short` instead."""
    years = record_years(result)
    if years < WHOLE_YEAR:
        return f"{growth(result.metrics['total_return'])} {short or f'in {years_in_words(years)}'}"
    return f"{growth(result.metrics['growth_per_year'])} a year"


def record_years(result: BacktestResult) -> float:
    """Length of a record in years of traded bars."""
    return len(result.net) / result.bars_per_year


def years_in_words(value: float) -> str:
    """52 days, 7 months, 2.5 years."""
    if value < 2 / 12:
        days = round(365.25 * value)
        return f"{days} day{'s' * (days != 1)}"
    if value < 2:
        return f"{round(12 * value)} months"
    return f"{value:.1f} years" if value < 10 else f"{value:.0f} years"


def tail_column(results: Mapping[str, BacktestResult], budgets: Mapping[str, RiskBudget]) -> tuple[str, dict[str, str]]:
    """Heading and cells of the mean of the worst windows: the budget's, or of the worst 5 % of weeks without one.

    Of the worst 5 % of bars where the record has no week. A mean that rests on less than one of the worst windows,
    counted without overlap, is not shown.
    """
    own = next(iter(results.values()))
    if budgets:
        first = next(iter(budgets.values()))
        what = "CVaR" if first.outcome == "return" else "fall"
        heading = f"{what} {100 * first.alpha:g} %/{short_window(first.horizon, own.bars_per_year)}"
        return heading, {
            name: percent(found.cvar.estimate) if found.tail_windows >= 1 else TOO_SHORT
            for name, found in budgets.items()
        }
    span, unit = ("week", "wk") if "cvar_5_week" in own.metrics else ("bar", "bar")
    return f"CVaR 5 %/{unit}", {name: tail_cell(result, span) for name, result in results.items()}


def budget_cell(found: RiskBudget) -> str:
    """kept, broken, or kept? 38 % with the probability that the limit holds; undecided where it is not known."""
    if found.verdict != "undecided" or math.isnan(found.probability):
        return str(found.verdict)
    return f"kept? {100 * found.probability:.0f} %"


def tail_cell(result: BacktestResult, span: str = "week") -> str:
    """Mean of the worst 5 % of weeks, days or bars; – where the record is too short."""
    figure = result.metrics.get(f"cvar_5_{span}", math.nan)
    if math.isnan(figure):
        return percent(figure)
    return percent(figure) if 0.05 * len(result.net) / horizons(result.bars_per_year)[span] >= 1 else TOO_SHORT


def print_rows(headings: Sequence[str], rows: Sequence[Sequence[str]], console: Console) -> None:
    """A plain table of literal texts: [5.78, 9.31] is not markup."""
    table = Table(box=None, pad_edge=False, header_style="bold")
    for position, heading in enumerate(headings):
        justify: Literal["left", "right"] = "right" if position else "left"
        table.add_column(Text(heading), justify=justify, no_wrap=position == 0, overflow="fold")
    for row in rows:
        table.add_row(*map(Text, row))
    console.print(table)


def growth(value: float) -> str:
    """A year's growth in percent; as a multiple of equity where percentages become unreadable."""
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
    """p = 0.012, or p < 0.001; – where it is undefined."""
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


def describe_exposure(found: Exposure) -> str:
    """The factor with its reason, in words."""
    tail = f"the worst {100 * found.alpha:g} % of held-out episodes"
    before, after, bound = (percent(value) for value in (found.uncalibrated, found.cvar, found.bound))
    return (
        f"×{found.factor:.2f}: as learned, {tail} made {before} on average ({found.tail_episodes:.1f} independent "
        f"episodes in that tail); at ×{found.factor:.2f} they make {after}, and with {100 * found.level:g} % "
        f"confidence no less than {bound}"
    )
