"""The calendar inferred from bars: nights, weekends and holidays are closures, other holes are missing bars."""

from __future__ import annotations

import numpy as np
import pandas as pd
import pytest
from backtesting.test import EURUSD, GOOG

from tailguard.data.calendars import Timetable, timetable_of

HOUR_MS, DAY_MS = 3_600_000, 86_400_000


def milliseconds(index: pd.DatetimeIndex) -> np.ndarray:
    return index.to_numpy().astype("datetime64[ms]").astype(np.int64)


def inferred(index: pd.DatetimeIndex, step: int = HOUR_MS) -> tuple[Timetable, np.ndarray]:
    times = milliseconds(index)
    return timetable_of("auto", [times], step), times


def new_york(first: str, last: str) -> pd.DatetimeIndex:
    """Hourly bars of New York's sessions, seven a day, with summer time; four holidays and one early close."""
    closed = pd.DatetimeIndex(["2021-02-15", "2021-04-02", "2021-05-31", "2021-07-05"])
    days = pd.bdate_range(first, last).difference(closed)
    times = [
        pd.date_range(
            f"{day:%Y-%m-%d} 9:30", periods=4 if f"{day:%m-%d}" == "11-26" else 7, freq="h", tz="America/New_York"
        )
        for day in days
    ]
    return times[0].append(times[1:]).tz_convert("UTC").tz_localize(None)


def test_daily_shares_trade_five_days_a_week_less_their_holidays() -> None:
    timetable, times = inferred(GOOG.index, DAY_MS)

    assert not timetable.missing_before(times).any()
    # 445 whole weeks end with the last bar, and there are this many bars in them.
    weeks = (times[-1] - times[0]) // (7 * DAY_MS)
    bars = (times > times[-1] - weeks * 7 * DAY_MS).sum()
    assert timetable.pace.per_year == pytest.approx(bars / (7 * weeks) * 365.25, abs=1e-9)
    weekdays = len(pd.bdate_range(GOOG.index[0], GOOG.index[-1]))
    assert timetable.holidays == weekdays - len(GOOG)
    assert f"{weekdays - len(GOOG)} days without any bar taken for holidays" in timetable.describe()


def test_a_day_that_only_one_symbol_misses_is_missing() -> None:
    times = milliseconds(GOOG.index)
    other = np.delete(times, [700])
    timetable = timetable_of("auto", [times, other], DAY_MS)

    assert timetable.missing_before(other).sum() == 1
    assert not timetable.missing_before(times).any()


def test_a_month_without_bars_is_no_holiday() -> None:
    timetable, times = inferred(GOOG.index.delete(range(500, 521)), DAY_MS)
    # By the pattern of the week before, so a holiday in it counts as missing.
    assert timetable.missing_before(times).sum() == len(pd.bdate_range(GOOG.index[500], GOOG.index[520]))


def test_currencies_close_at_weekends_only() -> None:
    timetable, times = inferred(EURUSD.index)
    assert not timetable.missing_before(times).any()
    assert (timetable.pace.per_day, timetable.pace.per_week) == (24, 120)

    # An hour and three hours on Mondays and Fridays, which have neighbours in the weeks beside them only.
    hole = EURUSD.index.delete([1_000, *range(2_000, 2_003)])
    assert EURUSD.index[[1_000, 2_000]].day_name().to_list() == ["Friday", "Monday"]
    timetable, times = inferred(hole)
    assert timetable.missing_before(times).sum() == 4


def test_nights_holidays_early_closes_and_summer_time_are_closures() -> None:
    index = new_york("2021-01-04", "2021-12-30")
    timetable, times = inferred(index)

    assert not timetable.missing_before(times).any()
    assert (timetable.pace.per_day, timetable.pace.per_week) == (7, 35)
    # A bar in the middle of a session is missing.
    assert inferred(index.delete(703))[0].missing_before(np.delete(times, 703)).sum() == 1


def test_futures_pause_for_an_hour_a_day() -> None:
    every = pd.date_range("2021-02-01", "2021-05-28", freq="h", tz="America/New_York")
    # From Sunday 18:00 to Friday 17:00, less 17:00 to 18:00.
    minute = every.day_of_week * 24 + every.hour
    traded = every[(every.hour != 17) & ((minute < 4 * 24 + 17) | (minute >= 6 * 24 + 18))]
    index = traded.tz_convert("UTC").tz_localize(None)
    timetable, times = inferred(index)

    assert not timetable.missing_before(times).any()
    assert timetable.pace.per_week == 115
    assert inferred(index.delete(1_010))[0].missing_before(np.delete(times, 1_010)).sum() == 1


def test_outages_around_the_clock_stay_missing_bars() -> None:
    index = pd.date_range("2021-01-01", periods=5_000, freq="h").delete([100, 101, 102, 700, 3_000])
    timetable, times = inferred(index)

    assert not timetable.has_sessions
    assert timetable.missing_before(times).sum() == 5
