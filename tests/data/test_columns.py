from __future__ import annotations

from datetime import UTC, date, datetime, timedelta, timezone
from pathlib import Path

import polars as pl
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tailguard.data.columns import positional_names, read_numbers, read_times, recognise, symbol_of
from tailguard.errors import BarsError

MOMENT = datetime(2021, 2, 13, 9, 30, tzinfo=UTC)
SECONDS = int(MOMENT.timestamp())


@pytest.mark.parametrize(
    "value",
    [
        *(SECONDS * scale for scale in (1, 10**3, 10**6, 10**9)),
        float(SECONDS),
        str(SECONDS * 1_000),
        "2021-02-13 09:30",
        "2021-02-13T09:30",
        "2021-02-13 09:30:00",
        "2021-02-13 09:30:00.000",
        " 2021-02-13 09:30:00 ",
        "2021-02-13T09:30:00Z",
        "2021-02-13 09:30:00 UTC",
        "2021-02-13 09:30:00+00:00",
        "2021-02-13T09:30:00.000+0000",
        "2021-02-13 17:30:00+08:00",
        "2021-02-13T04:30:00-05:00",
        MOMENT,
        MOMENT.replace(tzinfo=None),
        MOMENT.astimezone(timezone(timedelta(hours=3))),
    ],
)
def test_one_moment_written_in_many_ways_is_read_as_one(value: object) -> None:
    assert read_times(pl.Series("time", [value])).to_list() == [MOMENT]


def test_dates_are_midnight_utc() -> None:
    midnight = datetime(2021, 2, 13, tzinfo=UTC)
    assert read_times(pl.Series("time", ["2021-02-13"])).to_list() == [midnight]
    assert read_times(pl.Series("time", [date(2021, 2, 13)])).to_list() == [midnight]


@given(st.integers(100_000_001, 4_000_000_000), st.sampled_from([1, 10**3, 10**6, 10**9]))
def test_the_size_of_a_count_betrays_its_unit(seconds: int, scale: int) -> None:
    found = read_times(pl.Series("time", [seconds * scale], dtype=pl.Int64))

    assert found.dt.epoch("s").to_list() == [seconds]


@pytest.mark.parametrize(
    "values",
    [
        pytest.param([SECONDS * 1_000, SECONDS * 10**6, SECONDS * 1_000], id="another unit"),
        pytest.param(["2021-02-13 09:30", "13/02/2021 09:30", "2021-02-13 10:30"], id="another layout"),
        pytest.param(["2021-02-13 09:30", "2021-02-30 09:30", "2021-02-13 10:30"], id="no such day"),
        pytest.param(["2021-02-13 09:30", "0", "2021-02-13 10:30"], id="a number among dates"),
        pytest.param([SECONDS * 10**6, SECONDS * 10**6 + 1, SECONDS * 10**6], id="finer than a millisecond"),
    ],
)
def test_a_time_that_cannot_be_read_is_null_and_spoils_no_other(values: list[object]) -> None:
    assert read_times(pl.Series("time", values)).is_null().to_list() == [False, True, False]


def test_row_numbers_are_no_times() -> None:
    assert read_times(pl.Series("time", [0, 1, 2])).null_count() == 3


def test_numbers_saved_as_text_are_numbers_and_other_text_is_null() -> None:
    found = read_numbers(pl.Series("close", ["46800.10", " 1e3", "n/a", None, "46,800"]))

    assert found.to_list() == [46800.10, 1000.0, None, None, None]


@pytest.mark.parametrize(
    "columns",
    [
        ["ts_ms", "symbol", "open", "high", "low", "close", "volume", "number_of_trades", "taker_buy_base"],
        ["Open time", "Open", "High", "Low", "Close", "Volume", "Number of trades", "Taker buy base asset volume"],
        ["open_time", "open", "high", "low", "close", "volume", "count", "taker_buy_volume"],
        ["openTime", "open", "high", "low", "close", "volume", "trades", "takerBaseAssetVolume"],
    ],
)
def test_binance_names_in_all_their_spellings_are_recognised(columns: list[str]) -> None:
    fields = recognise(columns, "bars.csv").fields

    assert fields["time"] == columns[0]
    assert fields["close"].lower() == "close"
    assert fields["trades"] == columns[-2]
    assert fields["taker_buy_base"] == columns[-1]


def test_a_named_time_is_preferred_to_an_unnamed_index() -> None:
    found = recognise(["", "Date", "Open", "High", "Low", "Close", "Adj Close", "Volume"], "bars.csv")

    assert found.fields["time"] == "Date"
    assert found.ignored == ("", "Adj Close")


def test_a_missing_column_names_file_columns_and_what_would_do() -> None:
    with pytest.raises(BarsError) as caught:
        recognise(["date", "open", "high", "low", "last", "volume"], "btc.csv")

    assert str(caught.value) == (
        "btc.csv: no column for close (accepted: close, c, close_price, close/last). "
        "Columns found: date, open, high, low, last, volume"
    )


def test_columns_named_by_their_place_are_candles_or_klines() -> None:
    assert positional_names([str(place) for place in range(6)]) == (
        "timestamp",
        "open",
        "high",
        "low",
        "close",
        "volume",
    )
    indexed = positional_names(["", *(str(place) for place in range(12))])
    assert indexed is not None
    assert indexed[1] == "open_time"
    assert indexed[9] == "number_of_trades"
    assert positional_names(["0", "1", "2"]) is None


@pytest.mark.parametrize(
    ("name", "symbol"),
    [
        ("BTCUSDT.parquet", "BTCUSDT"),
        ("BTCUSDT-1h-2021-01.csv", "BTCUSDT"),
        ("BTCUSDT-1h-2021-01.zip", "BTCUSDT"),
        ("BTCUSDT_1h_2021.parquet", "BTCUSDT"),
        ("BTCUSDT_20210131.csv.gz", "BTCUSDT"),
        ("BTCUSDT-1mo-2020.csv", "BTCUSDT"),
        ("BTC-USDT_15min.feather", "BTC-USDT"),
        ("1INCHUSDT-1d.csv", "1INCHUSDT"),
        ("BTCUSDT_240628-1h.csv", "BTCUSDT_240628"),
        ("1h.csv", "1h"),
    ],
)
def test_a_file_is_named_after_its_symbol(name: str, symbol: str) -> None:
    assert symbol_of(Path("folder.with.dots") / name) == symbol


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        (["1/4/1999", "1/5/1999", "1/15/1999"], [(1, 4, 0, 0), (1, 5, 0, 0), (1, 15, 0, 0)]),
        (["4/1/1999", "15/1/1999"], [(1, 4, 0, 0), (1, 15, 0, 0)]),
        (["31.12.1999", "01.02.1999"], [(12, 31, 0, 0), (2, 1, 0, 0)]),
        (["01/04/1999 9:30", "01/13/1999 16:00"], [(1, 4, 9, 30), (1, 13, 16, 0)]),
        (["1/4/1999 9:30:00 AM", "1/13/1999 12:15:00 PM"], [(1, 4, 9, 30), (1, 13, 12, 15)]),
    ],
)
def test_dates_with_the_year_last_are_read_where_a_day_tells_their_order(
    values: list[str], expected: list[tuple[int, int, int, int]]
) -> None:
    found = read_times(pl.Series("date", values)).to_list()
    assert found == [datetime(1999, *fields, tzinfo=UTC) for fields in expected]


def test_dates_that_can_be_read_in_two_ways_are_refused() -> None:
    with pytest.raises(BarsError, match=r"'1/4/1999' is ambiguous \(month/day or day/month\).*1999-01-31"):
        read_times(pl.Series("date", ["1/4/1999", "1/5/1999"]))


def test_a_date_in_the_other_order_is_unreadable_and_spoils_no_other() -> None:
    found = read_times(pl.Series("date", ["1/14/1999", "14/1/1999", "1/15/1999"]))
    assert found.is_null().to_list() == [False, True, False]


@pytest.mark.parametrize("symbol", ["BTC/USDT", "BTCUSDT"])
def test_volumes_named_after_their_currency_are_told_apart_by_the_symbol(symbol: str) -> None:
    columns = ["unix", "date", "symbol", "open", "high", "low", "close", "Volume BTC", "Volume USDT", "tradecount"]

    fields = recognise(columns, "bars.csv", symbol).fields

    assert (fields["volume"], fields["quote_volume"]) == ("Volume BTC", "Volume USDT")
    with pytest.raises(BarsError, match="no column for volume"):
        recognise(columns, "bars.csv", "ETHEUR")
