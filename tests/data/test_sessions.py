"""Markets that close are recognised; markets with outages are not taken for them."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from pathlib import Path

import numpy as np
import pandas as pd
import polars as pl
import pytest
from backtesting.test import EURUSD, GOOG

from tailguard.config import RunConfig, load_config
from tailguard.data.calendars import around_the_clock
from tailguard.data.check_bars import validate
from tailguard.data.disk.import_bars import import_bars
from tailguard.data.sessions import check_sessions
from tailguard.data.sources import load_bars
from tailguard.errors import BarsError
from tailguard.experiment.build import load_market

HOUR, DAY, WEEK = timedelta(hours=1), timedelta(days=1), timedelta(weeks=1)


def write(frame: pd.DataFrame, path: Path) -> Path:
    frame.rename_axis("Date").to_csv(path)
    return path


def closed_share(frame: pd.DataFrame, step: timedelta) -> float:
    """Share of the calendar from the first bar to the last that has no bar, counted on the index."""
    span = frame.index[-1] - frame.index[0] + step
    return 1 - len(frame) * step / span


@pytest.mark.parametrize(("frame", "step", "days"), [(GOOG, DAY, "Sat, Sun"), (EURUSD, HOUR, "Sat")])
@pytest.mark.parametrize("gaps", ["error", "split"])
def test_shares_and_currencies_are_refused_as_markets_around_the_clock(
    frame: pd.DataFrame, step: timedelta, days: str, gaps: str, tmp_path: Path
) -> None:
    path = write(frame, tmp_path / "bars.csv")

    with pytest.raises(BarsError) as refused:
        load_bars(path, calendar="24/7", gaps=gaps)

    message = str(refused.value)
    gap_count = int((np.diff(frame.index.to_numpy()) > np.timedelta64(step)).sum())
    assert f"{gap_count:,} gaps in all" in message
    assert f"{100 * closed_share(frame, step):.0f} % of the calendar" in message
    assert days in message
    assert "closed before every gap" in message
    assert "data.calendar=auto" in message
    # Splitting at gaps is no way out, so it is not offered.
    assert "--gaps" not in message


def test_training_takes_them_in_memory_and_on_disk(tmp_path: Path) -> None:
    path = write(GOOG, tmp_path / "goog.csv")
    config: RunConfig = load_config(overrides=[f"data.path={path}"])

    assert load_market(config).bars.pace.per_week == 5  # type: ignore[union-attr]
    for calendar in ("auto", "XNYS"):
        for name in ("bars", "scratch"):
            (tmp_path / calendar / name).mkdir(parents=True)
        places = (tmp_path / calendar / "bars", tmp_path / calendar / "scratch")
        store, timetable, _ = import_bars(path, *places, calendar=calendar, rows=1_000)
        bars = load_bars(path, calendar=calendar)
        assert store.sessions == timetable.pace == bars.sessions
        assert store.bars(0, 2**60).frame.equals(bars.frame)


def at_times(good_bars, times: list[datetime], step: timedelta) -> pl.DataFrame:  # type: ignore[no-untyped-def]
    bars = good_bars(len(times), frequency=step)
    return bars.with_columns(time=pl.Series(times, dtype=pl.Datetime("ms", "UTC")))


def exchange_hours(days: int, step: timedelta, opened: timedelta, closed: timedelta, weekdays: int) -> list[datetime]:
    """Bars from `opened` to `closed` of every day that is one of the first `weekdays` of its week."""
    first = datetime(2021, 1, 4, tzinfo=UTC)  # a Monday
    found = []
    for day in range(days):
        if day % 7 < weekdays:
            at = opened
            while at < closed:
                found.append(first + day * DAY + at)
                at += step
    return found


@pytest.mark.parametrize(
    ("days", "step", "opened", "closed", "weekdays"),
    [
        (60, timedelta(minutes=30), timedelta(hours=14, minutes=30), timedelta(hours=21), 5),
        (4, timedelta(minutes=1), timedelta(hours=14, minutes=30), timedelta(hours=21), 5),
        (30, HOUR, 0 * HOUR, 24 * HOUR, 5),
        (60, 4 * HOUR, 8 * HOUR, 16 * HOUR, 5),
        (30, HOUR, 6 * HOUR, 22 * HOUR, 7),
        (29, DAY, 0 * HOUR, DAY, 5),
    ],
    ids=["half hours", "minutes, four days", "five days around the clock", "4 h", "day sessions", "daily, a month"],
)
def test_sessions_are_recognised_at_any_frequency(
    good_bars, days: int, step: timedelta, opened: timedelta, closed: timedelta, weekdays: int
) -> None:
    bars = at_times(good_bars, exchange_hours(days, step, opened, closed, weekdays), step)

    assert check_sessions(bars, around_the_clock(step)).level == "error"
    assert [check.name for check in validate(bars, "bars.csv", calendar="24/7", gaps="split").errors] == ["sessions"]


def test_summer_time_and_holidays_do_not_hide_sessions(good_bars) -> None:
    times = exchange_hours(300, HOUR, 14 * HOUR, 21 * HOUR, 5)
    shifted = [time - HOUR if 70 < (time - times[0]).days < 230 else time for time in times]
    kept = [time for time in shifted if (time - times[0]).days % 41]

    assert check_sessions(at_times(good_bars, kept, HOUR), around_the_clock(HOUR)).level == "error"


@pytest.mark.parametrize(
    ("step", "count", "holes"),
    [
        # Outages of an exchange over a year: an hour here, a few there.
        (HOUR, 8_760, [(at, 1 + at % 5) for at in range(97, 8_700, 431)]),
        # A hole of three months, and one of nine days in two weeks.
        (HOUR, 8_760, [(2_000, 2_160)]),
        (HOUR, 14 * 24, [(60, 216)]),
        # Maintenance of two hours, every week at the same time.
        (HOUR, 8_760, [(at, 2) for at in range(50, 8_700, 168)]),
        (DAY, 1_000, [(100, 3), (300, 1), (500, 2)]),
        (WEEK, 300, [(50, 2)]),
        (timedelta(minutes=1), 20_000, [(3_000, 90), (9_000, 60), (15_000, 5)]),
    ],
    ids=["outages", "three months", "nine days of fourteen", "weekly maintenance", "daily", "weekly bars", "minutes"],
)
def test_outages_are_not_sessions(good_bars, step: timedelta, count: int, holes: list[tuple[int, int]]) -> None:
    bars = good_bars(count, frequency=step)
    missing = {row for start, length in holes for row in range(start, start + length)}
    kept = bars[[row for row in range(count) if row not in missing]]

    assert check_sessions(kept, around_the_clock(step)).level == "ok"


def test_bars_that_are_missing_at_random_are_not_sessions(good_bars) -> None:
    bars = good_bars(4_000)
    kept = bars.filter(pl.Series(np.random.default_rng(5).random(4_000) > 0.3))

    assert check_sessions(kept, around_the_clock(HOUR)).level == "ok"
