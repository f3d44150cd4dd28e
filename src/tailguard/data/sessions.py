"""Detect markets with trading sessions, and bars outside those of their calendar."""

from __future__ import annotations

from datetime import timedelta
from typing import TYPE_CHECKING

import numpy as np
import polars as pl
from numpy.typing import NDArray

from tailguard.data.findings import Check, Row, judge, time_label

if TYPE_CHECKING:
    from tailguard.data.calendars import Timetable

DAY, WEEK = timedelta(days=1), timedelta(weeks=1)
FINEST_SLOT = timedelta(hours=1)
"""Shorter bars are counted by the hour: a minute without a trade is not a closed market."""
CLOSED = 0.1
"""Share of the best slot's bars below which a slot of the day or week counts as closed."""
LEAST_CLOSED = 0.05
"""Share of the day or week that must be closed. Weekly maintenance of an exchange takes less."""
LEAST_PERIODS = {DAY: 3, WEEK: 2}
"""Fewest days or weeks of data for a pattern to count as regular."""
MOST_OUTSIDE = 0.01
"""Share of bars outside the sessions beyond which the calendar is not that of the bars."""
_DAYS = ("Mon", "Tue", "Wed", "Thu", "Fri", "Sat", "Sun")
_MONDAY_MS = 4 * 86_400_000
"""1970-01-05 was a Monday."""


def check_sessions(bars: pl.DataFrame, timetable: Timetable) -> Check:
    """The bars lie in the sessions of their calendar; around the clock, no hour or day of the week is always empty.

    `bars`: of one symbol, in the order of their times. Outages, however long, do not
    recur in the same slot every day or week; weekends and nights do.
    """
    times = bars["time"].drop_nulls().dt.epoch("ms").to_numpy()
    if timetable.has_sessions:
        return _check_inside(bars, times, timetable)
    closed = closed_slots(times, timetable.step)
    if closed is None:
        return Check("sessions", "ok", timetable.describe())
    frequency = timedelta(milliseconds=timetable.step)
    gaps = bars.with_columns(step=pl.col("time").diff(), before=pl.col("time").shift()).filter(
        pl.col("step") >= 2 * frequency
    )

    def describe(row: Row) -> str:
        return f"closed since {time_label(row['before'])}"

    step = timetable.step
    share = 1 - len(times) * step / (int(times[-1]) - int(times[0]) + step)
    return judge(
        "sessions",
        "trades around the clock",
        gaps,
        describe,
        noun="gap",
        fault="in which the market is closed",
        remedy=(
            f"This market trades in sessions: {gaps.height:,} gaps in all cover {100 * share:.0f} % of the calendar, "
            f"and there is no bar on {closed}. Under the calendar 24/7 every metric would be wrong: positions would be "
            "closed before every gap, overnight and weekend moves would be lost, and returns would be annualised as if "
            "the market traded 24 hours on 365 days. Name its calendar: data.calendar=auto, or XNYS, CMES, fx, …"
        ),
    )


def _check_inside(bars: pl.DataFrame, times: NDArray[np.int64], timetable: Timetable) -> Check:
    """Few bars lie outside the sessions: they are kept. Many mean that the calendar is another market's."""
    at_time = bars.filter(pl.col("time").is_not_null())
    outside = at_time.filter(pl.Series(timetable.outside(times)))
    many = outside.height > MOST_OUTSIDE * max(1, len(times))
    return judge(
        "sessions",
        timetable.describe(),
        outside,
        lambda row: f"{time_label(row['time'])} is outside the sessions of {timetable.name}",
        fault=f"outside the sessions of {timetable.describe()}",
        remedy=(
            f"The calendar {timetable.name} does not fit these bars: choose another one, or data.calendar=auto."
            if many
            else "They are kept, as bars of the session before them."
        ),
        level="error" if many else "warning",
    )


def closed_slots(times: NDArray[np.int64], step: int) -> str | None:
    """Where the day or the week is closed, in words; none if it is not. `times` in ms, of bars of `step` ms."""
    frequency = timedelta(milliseconds=step)
    gaps = int((np.diff(times) >= 2 * step).sum())
    for period in (WEEK, DAY):
        slot = max(frequency, FINEST_SLOT)
        if slot >= period or period % slot or len(times) == 0:
            continue
        periods = (int(times[-1]) - int(times[0])) // (period // timedelta(milliseconds=1)) + 1
        # Gaps that come once a day or week, holidays aside: one long gap is not regular.
        if periods < LEAST_PERIODS[period] or gaps < max(2, periods // 2):
            continue
        closed = _coverage(times, slot, period)
        if closed.mean() >= LEAST_CLOSED:
            return _in_words(closed, slot, period)
    return None


def _coverage(times: NDArray[np.int64], slot: timedelta, period: timedelta) -> NDArray[np.bool_]:
    """Which slots of the period are closed, [S]: those that have far fewer bars than the best."""
    length, whole = (span // timedelta(milliseconds=1) for span in (slot, period))
    place = (times - _MONDAY_MS) % whole // length
    counts = np.bincount(place, minlength=whole // length)
    # Slots at the ends of the record were passed once less than the others, or not at all.
    first, last = (int(time - _MONDAY_MS) // length for time in (times[0], times[-1]))
    slots = np.arange(whole // length)
    passed = (last - slots) // len(slots) - (first - 1 - slots) // len(slots)
    share = counts / np.maximum(passed, 1)
    return np.asarray((share <= CLOSED * share.max()) & (passed > 1))


def _in_words(closed: NDArray[np.bool_], slot: timedelta, period: timedelta) -> str:
    """Days without any bar, or else the hours of the day."""
    if period == WEEK:
        days = (
            [] if DAY % slot else [name for name, part in zip(_DAYS, closed.reshape(7, -1), strict=True) if part.all()]
        )
        if days:
            return ", ".join(days)
        return f"{closed.sum() * slot / timedelta(hours=1):.0f} of the week's 168 hours"
    return f"{closed.sum() * slot / timedelta(hours=1):.0f} of the day's 24 hours"
