"""Numbers in words and as cells of a table: percentages, growth, intervals, p-values, spans of time."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from tailguard.data.pace import Pace

if TYPE_CHECKING:
    from tailguard.evaluate.backtest import BacktestResult
    from tailguard.evaluate.bootstrap import Interval
    from tailguard.risk.exposure import Exposure

WHOLE_YEAR = 0.95
"""Shortest record in years whose growth is annualised; it allows for bars lost to warm-up and embargo."""


def growth(value: float) -> str:
    """A year's growth in percent; as a multiple of equity where percentages become unreadable."""
    return f"×{1 + value:,.1f}" if value >= 9.995 else percent(value)


def percent(value: float, sign: bool = True) -> str:
    """0.1234 as +12.3 %; – where there is no number."""
    if math.isnan(value):
        return "–"
    return f"{100 * value:+,.1f} %" if sign and value else f"{100 * value:,.1f} %"


def with_interval(value: Interval) -> str:
    """1.91 [0.84, 2.93]; – where there is no number."""
    return number(value.estimate) + ("" if math.isnan(value.low) else f" [{value.low:.2f}, {value.high:.2f}]")


def number(value: float) -> str:
    """Two digits after the point; – where there is no number."""
    return "–" if math.isnan(value) else f"{value:,.2f}"


def p_value(value: float) -> str:
    """p = 0.012, or p < 0.001; – where it is undefined."""
    if math.isnan(value):
        return "–"
    return "p < 0.001" if value < 0.001 else f"p = {value:.2g}"


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


def short_window(bars: int, pace: Pace | float) -> str:
    """A number of bars as a unit of time: wk, d, 3d, h, 5h, or 7 bars."""
    count, unit = whole_units(bars, pace)
    if unit == "bars":
        return f"{count} bars"
    short = {"weeks": "wk", "days": "d", "hours": "h"}[unit]
    return short if count == 1 else f"{count}{short}"


def whole_units(bars: int, pace: Pace | float) -> tuple[int, str]:
    """A number of bars as a whole number of weeks, days or hours, the longest that fits; else of bars.

    Weeks and days are those in which the market trades. `pace`: see `metrics.horizons`.
    """
    pace = Pace.of(pace)
    if pace.has_sessions:
        for name, length in (("weeks", pace.per_week), ("days", pace.per_day)):
            if bars % length == 0:
                return round(bars / length), name
        return bars, "bars"
    hours = bars * 365.25 * 24 / pace.per_year
    for name, length in (("weeks", 168), ("days", 24), ("hours", 1)):
        count = hours / length
        if abs(count - round(count)) < 1e-6 and round(count) >= 1:
            return round(count), name
    return bars, "bars"


def describe_exposure(exposure: Exposure) -> str:
    """The factor with its reason, in words."""
    tail = f"the worst {100 * exposure.alpha:g} % of held-out episodes"
    before, after, bound = (percent(value) for value in (exposure.uncalibrated, exposure.cvar, exposure.bound))
    return (
        f"×{exposure.factor:.2f}: as learned, {tail} made {before} on average "
        f"({exposure.tail_episodes:.1f} independent episodes in that tail); at ×{exposure.factor:.2f} they make "
        f"{after}, with a nominal {100 * exposure.level:g} % bound of {bound}"
    )
