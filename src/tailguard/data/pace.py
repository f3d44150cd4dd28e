"""How many bars a market trades in a day, a week and a year."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from tailguard.validate import check_range

DAYS_PER_YEAR = 365.25
DAY_MS = 86_400_000
YEAR_MS = DAYS_PER_YEAR * DAY_MS


@dataclass(frozen=True)
class Pace:
    """Bars of a trading day, of a trading week and of a year; annualisation and durations follow them.

    24 hourly bars are a day where a market trades around the clock, 7 on the New York stock exchange.
    """

    per_year: float
    """Mean number of bars in a calendar year."""
    per_day: float
    """Bars of a usual trading day; below 1 where bars are longer than a day."""
    per_week: float
    """Bars of a usual trading week."""
    has_sessions: bool = False
    """Whether the market closes: bars then follow each other across nights, weekends and holidays."""

    def __post_init__(self) -> None:
        for name in ("per_year", "per_day", "per_week"):
            check_range(f"pace.{name}", getattr(self, name), low=0, low_open=True, high=math.inf, high_open=True)

    @classmethod
    def around_the_clock(cls, bars_per_year: float) -> Pace:
        """The pace of a market that never closes."""
        per_day = bars_per_year / DAYS_PER_YEAR
        return cls(bars_per_year, per_day, 7 * per_day)

    @classmethod
    def of_frequency(cls, frequency_ms: int) -> Pace:
        """The pace of a market that never closes, by the length of its bars."""
        return cls.around_the_clock(YEAR_MS / frequency_ms)

    @classmethod
    def of(cls, pace: Pace | float) -> Pace:
        """`pace`; a plain number is the bars per year of a market that never closes."""
        return pace if isinstance(pace, Pace) else cls.around_the_clock(pace)

    @classmethod
    def from_dict(cls, state: dict[str, Any]) -> Pace:
        """From `dataclasses.asdict`."""
        per_year, per_day, per_week = (float(state[name]) for name in ("per_year", "per_day", "per_week"))
        return cls(per_year, per_day, per_week, bool(state["has_sessions"]))

    @property
    def bar_days(self) -> float:
        """Mean calendar days from one bar to the next."""
        return DAYS_PER_YEAR / self.per_year
