"""Calendars: which bars are missing, and how many there are in a day, a week and a year."""

from __future__ import annotations

import sys
from datetime import UTC, date, datetime, timedelta
from pathlib import Path
from zoneinfo import ZoneInfo

import numpy as np
import pandas as pd
import polars as pl
import pytest
from backtesting.test import EURUSD, GOOG

from tailguard.data.bars import Bars, with_segments
from tailguard.data.calendars import dates_of, timetable_of
from tailguard.data.sources import check_source, load_bars, read_source
from tailguard.data.splits import split_bars
from tailguard.data.windows import size_in_bars
from tailguard.errors import BarsError, BarsWarning

HOUR_MS, DAY_MS = 3_600_000, 86_400_000
HOUR, DAY = timedelta(hours=1), timedelta(days=1)


def milliseconds(index: pd.DatetimeIndex) -> np.ndarray:
    return index.to_numpy().astype("datetime64[ms]").astype(np.int64)


def new_york(days: pd.DatetimeIndex, minutes: int, opened: str = "9:30") -> pd.DatetimeIndex:
    """Open times of the bars of these days from 9:30 to 16:00, New York, in UTC."""
    times = [
        pd.date_range(f"{day:%Y-%m-%d} {opened}", f"{day:%Y-%m-%d} 15:59", freq=f"{minutes}min", tz="America/New_York")
        for day in days
    ]
    return times[0].append(times[1:]).tz_convert("UTC").tz_localize(None)


def weekdays(first: str, last: str, holidays: tuple[str, ...] = ()) -> pd.DatetimeIndex:
    return pd.bdate_range(first, last).difference(pd.DatetimeIndex(holidays))


def at(times: pd.DatetimeIndex, price: float = 100.0) -> pd.DataFrame:
    """Bars at these times that move enough to be no frozen feed."""
    close = price * np.exp(0.01 * np.sin(np.arange(len(times))))
    columns = {"open": close, "high": close * 1.001, "low": close * 0.999, "close": close}
    return pd.DataFrame({**columns, "volume": 1e3 + np.arange(len(times))}, index=times.rename("time"))


def test_new_york_has_the_sessions_that_the_exchange_had() -> None:
    bars = load_bars(GOOG, calendar="XNYS", symbol="GOOG")

    # 2004 to 2013: 252 + 252 + 251 + 251 + 253 + 252 + 252 + 252 + 250 + 252 sessions.
    assert bars.pace.per_year == pytest.approx(2_517 / 10, abs=1e-12)
    assert (bars.pace.per_day, bars.pace.per_week) == (1, 5)
    assert bars.frame["segment"].n_unique() == 1


def test_a_missing_session_is_missing_and_a_holiday_is_not() -> None:
    whole = load_bars(GOOG, calendar="XNYS").frame
    dropped = GOOG.drop(GOOG.index[[500, 501, 900]])

    with pytest.raises(BarsError) as refused:
        load_bars(dropped, calendar="XNYS")
    message = str(refused.value)
    assert "2 bars missing after" in message
    assert "1 bar missing after" in message
    parts = load_bars(dropped, calendar="XNYS", gaps="split").frame["segment"]
    assert parts.n_unique() == 3
    assert parts.value_counts(sort=True)["count"].sort().to_list() == [398, 500, whole.height - 901]
    report = check_source(read_source(dropped), calendar="XNYS", gaps="split")
    assert report.spans[0].missing == 3


@pytest.mark.parametrize(("minutes", "opened", "per_day"), [(60, "9:30", 7), (60, "9:00", 7), (30, "9:30", 13)])
def test_bars_start_with_the_session_or_with_the_clock(minutes: int, opened: str, per_day: int) -> None:
    # Through a change to summer time (14 March 2021); Presidents' Day and Good Friday are closed.
    days = weekdays("2021-02-01", "2021-04-30", ("2021-02-15", "2021-04-02"))
    bars = load_bars(at(new_york(days, minutes, opened)), calendar="XNYS")

    assert (bars.pace.per_day, bars.pace.per_week) == (per_day, 5 * per_day)
    assert bars.frame["segment"].n_unique() == 1
    # 252 sessions in 2021; the day after Thanksgiving closes at 13:00.
    short = {(60, "9:30"): 4, (60, "9:00"): 4, (30, "9:30"): 7}[minutes, opened]
    assert bars.pace.per_year == 251 * per_day + short


def test_four_hours_from_the_open_move_with_summer_time() -> None:
    days = weekdays("2021-02-01", "2021-04-30", ("2021-02-15", "2021-04-02"))
    bars = load_bars(at(new_york(days, 240)), calendar="XNYS", frequency="4h")

    assert bars.frame["segment"].n_unique() == 1
    assert bars.pace.per_week == 10


def test_a_lunch_break_closes_the_market() -> None:
    # Tokyo traded 9:00 to 11:30 and 12:30 to 15:00, which is 0:00 to 2:30 and 3:30 to 6:00 UTC.
    days = weekdays("2019-06-03", "2019-06-28")
    halves = [
        time
        for day in days
        for start in ("00:00", "03:30")
        for time in pd.date_range(f"{day:%Y-%m-%d} {start}", periods=5, freq="30min")
    ]
    bars = load_bars(at(pd.DatetimeIndex(halves)), calendar="XTKS")

    assert (bars.pace.per_day, bars.frame["segment"].n_unique()) == (10, 1)
    assert bars.panel().session_ends.sum() == 2 * len(days) - 1  # the last bar of the record ends nothing


def test_foreign_exchange_trades_from_sunday_to_friday() -> None:
    with pytest.warns(BarsWarning, match="2017-10-06 21:00 is outside the sessions of fx"):
        bars = load_bars(EURUSD, calendar="fx")

    # The weekdays of 2017 and 2018, less Christmas and New Year's Day, 24 hours each.
    days = len(
        pd.bdate_range("2017-01-01", "2018-12-31").difference(
            pd.DatetimeIndex(["2017-01-01", "2017-12-25", "2018-01-01", "2018-12-25"])
        )
    )
    assert bars.pace.per_year == pytest.approx(24 * days / 2, abs=1e-9)
    assert (bars.pace.per_day, bars.pace.per_week) == (24, 120)
    assert bars.frame["segment"].n_unique() == 1


def test_sessions_of_ones_own_come_as_a_list_or_a_file(tmp_path: Path) -> None:
    days = pd.date_range("2021-01-04", "2021-02-26")
    days = days[days.day_of_week < 4]  # Monday to Thursday
    starts = [datetime(d.year, d.month, d.day, 8, tzinfo=UTC) for d in days]
    sessions = [(start, start + 4 * HOUR) for start in starts]
    times = pd.DatetimeIndex([d + hour * HOUR for d in days for hour in (8, 9, 10, 11)])
    bars = load_bars(at(times), calendar=sessions)
    assert (bars.pace.per_day, bars.frame["segment"].n_unique()) == (4, 1)

    path = tmp_path / "sessions.csv"
    pl.DataFrame({"open": [o for o, _ in sessions], "close": [c for _, c in sessions]}).write_csv(path)
    assert load_bars(at(times), calendar=path).pace == bars.pace
    assert load_bars(at(times.delete(5)), calendar=str(path), gaps="split").frame["segment"].n_unique() == 2

    dates = [date(d.year, d.month, d.day) for d in days]
    daily = load_bars(at(days), calendar=dates, frequency="1d")
    assert daily.frame["segment"].n_unique() == 1
    assert load_bars(at(days.delete(3)), calendar=dates, frequency="1d", gaps="split").frame["segment"].n_unique() == 2


@pytest.mark.parametrize(
    ("calendar", "message"),
    [
        ("NYSEE", "'NYSEE': neither 24/7, auto, fx, a .csv or .parquet file"),
        ([], "calendar: no session is listed"),
        (["2021-01-04"], "session '2021-01-04' is neither a date nor a pair"),
        ([(datetime(2021, 1, 4, 9), datetime(2021, 1, 4, 9))], "is empty, or starts before"),
    ],
)
def test_what_is_no_calendar_is_refused_with_the_way_out(calendar: object, message: str) -> None:
    with pytest.raises(BarsError, match=message):
        load_bars(GOOG, calendar=calendar)  # type: ignore[arg-type]


def test_the_calendar_of_another_market_is_refused() -> None:
    with pytest.raises(BarsError, match="The calendar XNYS does not fit these bars"):
        load_bars(EURUSD, calendar="XNYS")


def test_without_the_library_the_message_says_how_to_install_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "exchange_calendars", None)
    with pytest.raises(BarsError, match=r"pip install 'tailguard\[calendars\]'"):
        load_bars(GOOG, calendar="XNYS")


def test_daily_bars_may_open_at_local_midnight() -> None:
    days = weekdays("2021-02-01", "2021-04-30", ("2021-02-15", "2021-04-02"))
    local = days.tz_localize("America/New_York").tz_convert("UTC").tz_localize(None)
    bars = load_bars(at(local), calendar="XNYS")

    assert bars.frame["segment"].n_unique() == 1
    tokyo = pd.DatetimeIndex(["2019-06-03"]).tz_localize("Asia/Tokyo").tz_convert("UTC").tz_localize(None)
    assert dates_of(milliseconds(tokyo), ZoneInfo("Asia/Tokyo"))[0] == milliseconds(pd.DatetimeIndex(["2019-06-03"]))[0]


def test_around_the_clock_every_number_is_that_of_the_bar_length() -> None:
    times = np.arange(0, 1_000 * HOUR_MS, HOUR_MS)
    timetable = timetable_of("auto", [times], HOUR_MS)

    assert not timetable.has_sessions
    assert timetable.pace.per_year == 365.25 * 86_400_000 / HOUR_MS
    kept = np.delete(times, [5, 6, 40])
    assert np.flatnonzero(timetable.missing_before(kept)).tolist() == [5, 38]
    assert timetable.missing_before(kept)[[5, 38]].tolist() == [2, 1]
    frame = pl.DataFrame({"time": kept, "symbol": "A"}).with_columns(
        pl.from_epoch("time", "ms").dt.replace_time_zone("UTC")
    )
    assert with_segments(frame, timetable)["segment"].max() == 2


def test_durations_are_trading_time() -> None:
    bars = load_bars(GOOG, calendar="XNYS")
    cases = {"7d": 5, "1d": 1, "30d": 21, "2w": 10, "52w": 260}
    assert {size: size_in_bars("test", size, 1_000, DAY, sessions=bars.sessions) for size in cases} == cases
    hourly = load_bars(EURUSD, calendar="auto")
    cases = {"7d": 120, "1d": 17, "12h": 12}
    assert {size: size_in_bars("test", size, 1_000, HOUR, sessions=hourly.sessions) for size in cases} == cases

    split = split_bars(bars, validation="52w", test="104w", embargo="7d")
    times = bars.frame["time"].to_list()
    assert split.test.start == times[-520]
    assert split.validation.start == times[-520 - 5 - 260]
    assert split.train.end_points[1] == times[-520 - 5 - 260 - 5 - 1]


def test_the_lead_in_counts_bars_not_hours() -> None:
    bars = load_bars(GOOG, calendar="XNYS")
    time = bars.frame["time"]
    part = bars.between(time[1_000], time[1_100], lead_in=250)

    assert part.frame.height == 350
    assert part.frame["time"][0] == time[750]
    assert part.panel().tradeable.sum() == 100


def test_the_time_until_the_next_bar_spans_nights_and_weekends() -> None:
    panel = load_bars(GOOG[:10], calendar="XNYS").panel()  # Thursday, 19 August 2004, and what follows
    assert panel.held_ms is not None
    assert (panel.held_ms[:7] // DAY_MS).tolist() == [1, 3, 1, 1, 1, 1, 3]
    gapped = load_bars(GOOG[:10].drop(GOOG.index[5]), calendar="XNYS", gaps="split").panel()
    assert gapped.held_ms is not None
    assert gapped.held_ms[4] == DAY_MS  # nothing is carried into a gap


def test_bars_without_sessions_have_none() -> None:
    bars: Bars = load_bars(at(pd.date_range("2021-01-01", periods=500, freq="h")))
    assert bars.sessions is None
    assert bars.panel().held_ms is None
    assert not bars.panel().session_ends.any()


FX_DAYS = pd.bdate_range("2021-06-01", periods=120)
IN_NEW_YORK = ZoneInfo("America/New_York")


def daily(index: pd.DatetimeIndex) -> pd.DataFrame:
    close = 1.2 + 0.01 * np.sin(np.arange(len(index)))
    return pd.DataFrame({"close": close}, index=index)


@pytest.mark.parametrize(
    "stamps",
    [
        FX_DAYS,
        (FX_DAYS - pd.Timedelta(days=1)).map(lambda day: day.replace(hour=17).tz_localize("America/New_York")),
        FX_DAYS.tz_localize("Europe/London"),  # as yfinance stamps EURUSD=X: 23:00 UTC of the day before
        FX_DAYS.tz_localize("America/New_York"),
    ],
    ids=["date", "17:00 New York the day before", "London", "New York"],
)
def test_daily_bars_of_currencies_belong_to_their_session_however_they_are_stamped(stamps: pd.DatetimeIndex) -> None:
    bars = load_bars(daily(stamps), calendar="fx", symbol="EURUSD")
    assert bars.panel().segment.max() == 0
    closes = bars.close_times.to_list()
    assert closes[:-1] == [
        datetime(day.year, day.month, day.day, 17, tzinfo=IN_NEW_YORK).astimezone(UTC) for day in FX_DAYS[:-1]
    ]
    without = load_bars(daily(stamps.delete(50)), calendar="fx", symbol="EURUSD", gaps="split")
    assert np.flatnonzero(np.diff(without.panel().segment)).tolist() == [49]


@pytest.mark.parametrize("kind", [list, lambda days: days, lambda days: days.to_numpy(), lambda days: list(days.date)])
def test_sessions_may_come_as_pandas_and_numpy_have_dates(kind) -> None:
    days = FX_DAYS[FX_DAYS.day_of_week != 4]
    bars = load_bars(daily(days), calendar=kind(days), symbol="X")
    assert (bars.pace.per_week, bars.panel().segment.max()) == (4, 0)
    with pytest.raises(BarsError, match="bar missing"):
        load_bars(daily(days.delete(9)), calendar=kind(days), symbol="X")


def test_pairs_of_timestamps_are_sessions() -> None:
    days = FX_DAYS[:3]
    times = [day + pd.Timedelta(hours=hour) for day in days for hour in range(10, 16)]
    pairs = [(day + pd.Timedelta(hours=10), day + pd.Timedelta(hours=16)) for day in days]
    assert load_bars(daily(pd.DatetimeIndex(times)), calendar=pairs, symbol="X").pace.per_day == 6


def test_a_daily_bar_of_shares_closes_with_its_session_and_an_hourly_one_by_the_next() -> None:
    days = pd.bdate_range("2023-11-20", "2023-12-08").drop("2023-11-23")
    closes = load_bars(daily(days), calendar="XNYS", symbol="SPY").close_times
    assert [closes[number].hour for number in (2, 3, 4)] == [21, 18, 21]  # 24 November closes at 13:00 in New York
    # Sessions of five hours in bars of two: the last bar of each is cut short where the next one opens.
    noon = datetime(2021, 6, 7, 10, tzinfo=UTC)
    pairs = [(noon + 5 * number * HOUR, noon + 5 * (number + 1) * HOUR) for number in range(4)]
    opens = [begin + hour * HOUR for begin, _ in pairs for hour in (0, 2, 4)]
    cut = load_bars(pl.DataFrame({"time": opens, "close": [1.0, 2.0] * 6}), calendar=pairs, symbol="X")
    assert cut.close_times.to_list()[:-1] == opens[1:]
