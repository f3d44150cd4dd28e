"""Checks for hard errors: bars that fail one of these cannot be traded on. Each takes the rows of one symbol.

A frame to check has the columns of `Bars` less `segment`, in the order of the user's file, and three that say where a
row comes from: `file`, `row` (1-based, header not counted) and `unreadable` (the text of a value that could not be
read, else null).
"""

from __future__ import annotations

from dataclasses import replace
from datetime import timedelta
from typing import Literal

import polars as pl

from tailguard.data.bars import OPTIONAL, REQUIRED
from tailguard.data.calendars import Timetable, around_the_clock
from tailguard.data.findings import SHOWN, Check, Row, judge, number, skipped, time_label
from tailguard.data.frequency import frequency_label
from tailguard.data.sessions import check_sessions

Gaps = Literal["error", "split"]

PRICES = ("open", "high", "low", "close")
ROUNDING = 1e-9
"""Relative size below which high < low, or a close above the high, is a rounding error of adjusted prices."""

CLOSE_STAMPS = (1, 1_000)
"""Milliseconds before the next bar at which exchanges stamp a bar with its close time."""


def most_common_step(*times: pl.Series) -> timedelta | None:
    """The most common difference between neighbours in any of `times`, up or down; the shortest of several."""
    steps = pl.concat([series.drop_nulls().diff().drop_nulls().abs() for series in times]).rename("step")
    counts = steps.filter(steps > timedelta(0)).value_counts(name="count")
    common = counts.sort(["count", "step"], descending=[True, False])["step"].first() if counts.height else None
    return common if isinstance(common, timedelta) else None


def check_values(bars: pl.DataFrame) -> Check:
    """Every value of every column is present and readable."""
    columns = [name for name in ("time", "symbol", *REQUIRED, *OPTIONAL) if name in bars.columns]

    def describe(row: Row) -> str:
        missing = [name for name in columns if row[name] is None]
        return str(row["unreadable"] or f"no value for {', '.join(missing)}")

    return judge(
        "values",
        "all present, all numeric",
        bars.filter(pl.any_horizontal(pl.col(columns).is_null())),
        describe,
        fault="with missing or unreadable values",
        remedy="Complete or remove these rows at the source; nothing is filled in for you.",
    )


def check_duplicates(bars: pl.DataFrame) -> Check:
    """No time occurs twice."""
    again = _not_rising(bars).filter(pl.col("repeats"))
    earlier = {}
    if again.height:
        twins = bars.filter(pl.col("time").is_in(again["time"].head(SHOWN).implode()))
        for row in twins.unique("time", keep="first", maintain_order=True).iter_rows(named=True):
            earlier[row["time"]] = (row["file"], row["row"])

    def describe(row: Row) -> str:
        file, place = earlier[row["time"]]
        return f"same time as row {place}" + ("" if file == row["file"] else f" of {file}")

    return judge(
        "duplicates",
        "no duplicate times",
        again,
        describe,
        fault="with a duplicate time",
        remedy="Keep one bar per time; where files overlap, trim one of them.",
    )


def check_order(bars: pl.DataFrame) -> Check:
    """Times increase; a bar that repeats an earlier time is left to `check_duplicates`."""
    offending = _not_rising(bars).filter((pl.col("time") < pl.col("before")) & ~pl.col("repeats"))
    backwards = offending.height > 1 and offending.height == bars.height - 1
    return judge(
        "order",
        "oldest first",
        offending,
        lambda row: f"earlier than the previous bar ({time_label(row['before'])})",
        fault="earlier than the previous one" + (": the newest come first" if backwards else ""),
        remedy="Sort the file by time, oldest first.",
    )


def _not_rising(bars: pl.DataFrame) -> pl.DataFrame:
    """`bars` with `before` (the time before) and `repeats` (an earlier time again); none if all times rise."""
    times = bars["time"].drop_nulls()
    suspects = bars.with_columns(before=pl.col("time").shift(), repeats=pl.lit(False))
    if (times.diff().drop_nulls() > timedelta(0)).all():
        return suspects.clear()
    return suspects.with_columns(repeats=pl.col("time").is_first_distinct().not_() & pl.col("time").is_not_null())


def check_frequency(bars: pl.DataFrame, frequency: timedelta, common: timedelta) -> Check:
    """Bars are one `frequency` apart and start on the grid that most of them share; `common` is their usual step."""
    label = frequency_label(frequency)
    step = pl.col("time").diff()
    if common != frequency:
        offending = bars.with_columns(step=step).filter(step != frequency)
        fault = f"not {label} after the previous one; most are {frequency_label(common)} apart"

        def describe(row: Row) -> str:
            return f"{frequency_label(row['step'])} after the previous bar, not {label}"
    else:
        length = frequency // timedelta(milliseconds=1)
        phase = bars["time"].to_physical() % length
        usual = phase.drop_nulls().mode().sort().first()
        if isinstance(usual, int) and length - usual in CLOSE_STAMPS and usual > 0:
            return _close_stamped(bars, frequency, length - usual)
        # Without a readable time there is no grid; the check of values names these rows.
        offending = bars.filter(pl.lit(False) if usual is None else phase != usual)
        fault = f"off the {label} grid"

        def describe(row: Row) -> str:
            return f"{time_label(row['time'])} is off the {label} grid of the other bars"

    return judge(
        "frequency",
        f"all on the {label} grid",
        offending,
        describe,
        fault=fault,
        remedy="All bars, of all symbols, need one frequency; resample at the source or load the files separately.",
    )


def _close_stamped(bars: pl.DataFrame, frequency: timedelta, early: int) -> Check:
    """Bars whose time is the last millisecond or second of the bar: every feature would be a bar late."""
    label, shift = frequency_label(frequency), frequency - timedelta(milliseconds=early)
    return judge(
        "frequency",
        f"all on the {label} grid",
        bars.filter(pl.col("time").is_not_null()),
        lambda row: f"{row['time']:%Y-%m-%d %H:%M:%S.%f}"[:-3] + " is the close time of a bar, not its open time",
        fault="stamped with their close time",
        remedy=f"Times must be open times: subtract {shift} from every time.",
    )


def check_gaps(bars: pl.DataFrame, timetable: Timetable, gaps: Gaps) -> Check:
    """No bar of the calendar is missing; with `gaps="split"` gaps are counted, not faults."""
    after_gaps = with_missing(bars, timetable).with_columns(before=pl.col("time").shift()).filter(pl.col("missing") > 0)

    def describe(row: Row) -> str:
        missing = row["missing"]
        return f"{missing:,} bar{'' if missing == 1 else 's'} missing after {time_label(row['before'])}"

    check = judge(
        "gaps",
        "no bar missing",
        after_gaps,
        describe,
        noun="gap",
        fault="",
        remedy='Fill them at the source, or choose gaps="split" (--gaps split): no episode then crosses a gap.',
    )
    if check.count and gaps == "split":
        return replace(check, level="ok", fault="kept: a new segment starts after each", remedy="")
    return check


def with_missing(bars: pl.DataFrame, timetable: Timetable) -> pl.DataFrame:
    """`bars` of one symbol with `missing`: bars of the calendar that are missing before each; null for the first."""
    times = bars["time"].dt.epoch("ms").forward_fill().fill_null(0).to_numpy()
    missing = pl.Series("missing", timetable.missing_before(times), dtype=pl.Int64)
    known = pl.col("time").is_not_null() & pl.col("time").shift().is_not_null()
    return bars.with_columns(missing).with_columns(pl.when(known).then(pl.col("missing")))


def check_prices(bars: pl.DataFrame) -> Check:
    """Open, high, low and close are finite and positive."""

    def describe(row: Row) -> str:
        name = next(name for name in PRICES if row[name] is not None and not 0 < row[name] < float("inf"))
        return f"{name} {number(row[name])} is not a positive number"

    return judge(
        "prices",
        "finite, positive",
        bars.filter(sound_prices().not_()),
        describe,
        fault="with a price that is not finite and positive",
        remedy="Correct or remove these bars at the source.",
    )


def sound_prices() -> pl.Expr:
    """Whether the four prices of a bar are finite and positive; null where one is missing and the others are."""
    return pl.all_horizontal(pl.col(name).is_finite() & (pl.col(name) > 0) for name in PRICES)


def check_ranges(bars: pl.DataFrame) -> Check:
    """low ≤ open, close ≤ high, beyond rounding."""
    top, bottom = pl.col("high") * (1 + ROUNDING), pl.col("low") * (1 - ROUNDING)
    # With high < low, open and close are always outside.
    outside = pl.any_horizontal((pl.col(name) > top) | (pl.col(name) < bottom) for name in ("open", "close"))
    # `check_prices` handles invalid prices.
    judged = sound_prices()

    def describe(row: Row) -> str:
        high, low = row["high"], row["low"]
        if high < low:
            return f"high {number(high)} < low {number(low)}"
        name = next(name for name in ("open", "close") if not low <= row[name] <= high)
        side = f"> high {number(high)}" if row[name] > high else f"< low {number(low)}"
        return f"{name} {number(row[name])} {side}"

    return judge(
        "ranges",
        "low ≤ open, close ≤ high",
        bars.filter(outside & judged),
        describe,
        fault="with high < low, or open or close outside them",
        remedy="Check the order of the columns, or correct these bars at the source.",
    )


def check_volume(bars: pl.DataFrame) -> Check:
    """Volume and the other amounts are finite and not negative; a funding rate is finite."""
    amounts = [name for name in ("volume", *OPTIONAL) if name in bars.columns]
    signed = [name for name in amounts if name != "funding_rate"]

    def describe(row: Row) -> str:
        name = next(
            name
            for name in amounts
            if row[name] is not None and not (abs(row[name]) < float("inf") and (row[name] >= 0 or name not in signed))
        )
        return f"{name} {number(row[name])} is not " + ("zero or a positive number" if name in signed else "finite")

    broken = [pl.col(name).is_finite().not_() for name in amounts] + [pl.col(name) < 0 for name in signed]
    return judge(
        "volume",
        "finite, not negative",
        bars.filter(pl.any_horizontal(expression.fill_null(False) for expression in broken)),
        describe,
        fault="with an amount that is negative or not finite",
        remedy="Correct or remove these bars at the source.",
    )


def check_times(bars: pl.DataFrame, timetable: Timetable, gaps: Gaps, holes: Timetable | None = None) -> list[Check]:
    """The checks that the times of one symbol must pass before its bars can be used.

    `holes`: the timetable that says which bars are missing, where it is another.
    """
    frequency = timedelta(milliseconds=timetable.step)
    checks = [check_order(bars), check_duplicates(bars)]
    if any(check.level == "error" for check in checks):
        return [*checks, skipped("frequency"), skipped("gaps"), skipped("sessions")]
    common = most_common_step(bars["time"]) or frequency
    sessions = check_sessions(bars, timetable if common == frequency else around_the_clock(common))
    missing = check_gaps(bars, holes or timetable, gaps) if common == frequency else skipped("gaps")
    if sessions.level == "error":
        missing = Check("gaps", "skipped", "those of the sessions")
    if timetable.has_sessions and common == frequency:
        # Summer time moves the sessions against the clock, so the calendar is the grid.
        pace = Check("frequency", "ok", f"bars of {frequency_label(frequency)}")
    else:
        pace = check_frequency(bars, frequency, common)
    return [*checks, pace, missing, sessions]
