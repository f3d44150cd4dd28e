"""Tables as people have them: wide frames, closes only, and the columns of several vendors."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import polars as pl
import pytest
from skfolio.datasets import load_sp500_dataset

import tailguard as tg
from tailguard.data.disk.read_pieces import fields_of, read_pieces, readable_in_pieces
from tailguard.data.sources import check_source, read_source
from tailguard.errors import BarsError
from tailguard.market import MarketConfig

DAYS = pd.bdate_range("2021-01-04", periods=60, name="Date")
FREE = MarketConfig(fee=0, half_spread=0, impact=0, participation=math.inf, funding_rate=0)


def prices(seed: int) -> pd.DataFrame:
    generator = np.random.default_rng(seed)
    close = 100 * np.exp(np.cumsum(generator.normal(0, 0.01, 60)))
    opened = close * np.exp(generator.normal(0, 0.002, 60))
    high, low = np.maximum(opened, close) * 1.001, np.minimum(opened, close) * 0.999
    volume = generator.integers(1_000_000, 2_000_000, 60)
    return pd.DataFrame({"Open": opened, "High": high, "Low": low, "Close": close, "Volume": volume}, index=DAYS)


TWO = {"AAPL": prices(1), "MSFT": prices(2)}


@pytest.fixture(scope="module")
def expected() -> pl.DataFrame:
    long = pd.concat([frame.assign(symbol=symbol) for symbol, frame in TWO.items()])
    return tg.load_bars(long).frame


@pytest.mark.parametrize("first", ["field", "symbol"])
def test_a_frame_of_yahoo_with_two_levels_is_read_either_way(first: str, expected: pl.DataFrame) -> None:
    wide = pd.concat(TWO, axis=1)
    wide = wide.swaplevel(axis=1).sort_index(axis=1) if first == "field" else wide
    assert tg.load_bars(wide).frame.equals(expected)


def test_a_symbol_that_is_listed_later_has_missing_values_in_two_levels() -> None:
    late = {"AAPL": TWO["AAPL"], "MSFT": TWO["MSFT"][20:]}
    bars = tg.load_bars(pd.concat(late, axis=1), universe="ragged")  # volumes of one are integers, of the other not
    assert bars.select("MSFT").frame["close"].to_list() == TWO["MSFT"]["Close"][20:].tolist()
    assert bars.select("AAPL").frame["volume"].to_list() == TWO["AAPL"]["Volume"].tolist()


def test_prices_in_billionths_are_refused_and_converted_ones_are_read(tmp_path: Path) -> None:
    frame = TWO["AAPL"].rename(columns=str.lower).rename_axis("ts_event").assign(rtype=35, publisher_id=2)
    assert tg.load_bars(frame).frame["close"].to_list() == TWO["AAPL"]["Close"].tolist()
    prices = ["open", "high", "low", "close"]
    frame[prices] = (frame[prices] * 1e9).round().astype("int64")
    frame.to_csv(tmp_path / "glbx.csv")
    for source in (frame, tmp_path / "glbx.csv"):
        with pytest.raises(
            BarsError, match=r"in billionths as Databento.*Divide open, high, low and close by 1,000,000,000"
        ):
            tg.load_bars(source)


def test_a_wide_frame_of_closes_is_one_symbol_a_column(expected: pl.DataFrame) -> None:
    wide = pd.DataFrame({symbol: frame["Close"] for symbol, frame in TWO.items()})
    from_pandas = tg.load_bars(wide)
    from_polars = tg.load_bars(pl.DataFrame({"date": list(DAYS), **{name: wide[name].to_numpy() for name in wide}}))

    assert from_pandas.frame.equals(from_polars.frame)
    assert from_pandas.symbols == ("AAPL", "MSFT")
    assert from_pandas.frame["close"].equals(expected["close"])
    for name in ("open", "high", "low"):
        assert from_pandas.frame[name].equals(expected["close"].rename(name), check_names=True)
    notes = check_source(read_source(wide)).notes
    assert any("orders fill at the next close" in note for note in notes)
    assert any("market.participation=inf" in note for note in notes)


def test_with_closes_only_an_order_fills_at_the_next_close() -> None:
    close = TWO["AAPL"]["Close"]
    bars = tg.load_bars(close.to_frame("AAPL"))
    targets = np.zeros((60, 1))
    targets[10:20] = 1.0  # decided at close 10, sold at the decision of close 20
    result = tg.backtest(targets, bars, FREE)
    assert result.equity[-1] == pytest.approx(close.iloc[21] / close.iloc[11], rel=1e-12)
    with pytest.raises(BarsError, match=r"volume is 0 in every bar.*market\.participation=inf"):
        tg.backtest(targets, bars)


def test_a_symbol_of_a_wide_frame_may_begin_later() -> None:
    wide = pd.DataFrame({symbol: frame["Close"] for symbol, frame in TWO.items()})
    wide.iloc[:25, 1] = np.nan
    bars = tg.load_bars(wide)
    assert bars.select("MSFT").frame.height == 35
    assert bars.select("AAPL").frame.height == 60


def test_twenty_stocks_of_skfolio_are_read_as_they_come() -> None:
    stocks = load_sp500_dataset()
    source = read_source(stocks)
    assert source.frame["symbol"].n_unique() == 20
    assert source.frame.height == stocks.size
    close = source.frame.filter(pl.col("symbol") == "AAPL")["close"].to_numpy()
    assert np.array_equal(close, stocks["AAPL"].to_numpy())


def test_a_table_without_closes_is_not_taken_for_a_wide_one() -> None:
    with pytest.raises(BarsError, match=r"no column for open.*close"):
        tg.load_bars(pl.DataFrame({"time": list(DAYS), "price": np.arange(60.0), "size": np.ones(60)}))


FORMS = {
    "databento.csv": "ts_event,rtype,publisher_id,instrument_id,open,high,low,close,volume,symbol\n"
    "2021-01-04T00:00:00.000000000Z,35,1,5482,1.0,2.0,0.5,1.5,10,ES\n"
    "2021-01-05T00:00:00.000000000Z,35,1,5482,1.5,2.5,1.0,2.0,11,ES\n",
    "yahoo.csv": "Date,Open,High,Low,Close,Adj Close,Volume\n"
    "2021-01-04,1,2,0.5,1.5,1.4,10\n2021-01-05,1.5,2.5,1,2,1.9,11\n",
    "metatrader.csv": "<DATE>\t<TIME>\t<OPEN>\t<HIGH>\t<LOW>\t<CLOSE>\t<TICKVOL>\t<VOL>\t<SPREAD>\n"
    "2021.01.04\t00:00:00\t1\t2\t0.5\t1.5\t7\t10\t1\n2021.01.05\t00:00:00\t1.5\t2.5\t1\t2\t8\t11\t1\n",
    "stooq.csv": "<TICKER>,<PER>,<DATE>,<TIME>,<OPEN>,<HIGH>,<LOW>,<CLOSE>,<VOL>,<OPENINT>\n"
    "AAPL.US,D,20210104,000000,1,2,0.5,1.5,10,0\nAAPL.US,D,20210105,000000,1.5,2.5,1,2,11,0\n",
    "polygon.csv": "t,o,h,l,c,v,n,vw\n1609718400000,1,2,0.5,1.5,10,3,1.2\n1609804800000,1.5,2.5,1,2,11,4,1.7\n",
    "american.csv": "Date,Close/Last,Volume,Open,High,Low\n"
    "01/13/2021,$2.00,11,$1.5,$2.5,$1\n01/12/2021,$1.50,10,$1,$2,$0.5\n",
}


@pytest.mark.parametrize("name", FORMS)
def test_files_of_vendors_are_read_as_they_come(name: str, tmp_path: Path) -> None:
    path = tmp_path / name
    path.write_text(FORMS[name])
    frame = tg.load_bars(path).frame

    assert frame["close"].to_list() == [1.5, 2.0]
    assert frame["low"].to_list() == [0.5, 1.0]
    assert frame["volume"].to_list() == [10, 11]
    assert [time.day for time in frame["time"]] == ([12, 13] if name == "american.csv" else [4, 5])


CLOSES = {"AAPL": 100.0, "C": 60.0, "V": 200.0, "T": 30.0, "O": 65.0, "L": 80.0, "H": 90.0, "LOW": 150.0, "OPEN": 5.0}


def closes_of(symbols: tuple[str, ...]) -> pd.DataFrame:
    """A wide table of closes that differ between symbols by much more than from day to day."""
    path = np.exp(0.01 * np.sin(np.arange(60)))
    return pd.DataFrame({symbol: CLOSES.get(symbol, 40.0) * path for symbol in symbols}, index=DAYS)


@pytest.mark.parametrize(
    "symbols",
    [
        ("AAPL", "C", "V"),
        ("C", "V"),
        ("AAPL", "T", "C", "V", "O", "L"),
        ("AAPL", "O", "H", "L", "C"),  # all letters of bars, and no ranges of them
        ("AAPL", "TS", "UNIX", "Index", "N", "COUNT"),
    ],
)
def test_shares_whose_names_are_letters_or_times_are_symbols(symbols: tuple[str, ...], tmp_path: Path) -> None:
    wide = closes_of(symbols)
    wide.to_csv(tmp_path / "closes.csv")
    in_polars = pl.DataFrame({"date": list(DAYS), **{name: wide[name].to_numpy() for name in wide}})
    for source in (wide, in_polars, tmp_path / "closes.csv"):
        bars = tg.load_bars(source)
        assert sorted(bars.symbols) == sorted(symbols)
        for symbol in symbols:
            assert bars.select(symbol).frame["close"].to_list() == pytest.approx(wide[symbol].to_list(), rel=1e-12)


@pytest.mark.parametrize("symbols", [("AAPL", "OPEN"), ("AAPL", "VOL"), ("MSFT", "PAIR"), ("KO", "AMOUNT"), ("c", "v")])
def test_names_that_may_be_fields_or_symbols_are_asked_about(symbols: tuple[str, ...], tmp_path: Path) -> None:
    wide = closes_of(symbols)
    wide.to_csv(tmp_path / "closes.csv")
    for source in (wide, tmp_path / "closes.csv"):
        with pytest.raises(BarsError, match=rf"no column close.*'{symbols[1]}'.*melt in pandas.*'OPEN\.US'"):
            tg.load_bars(source)
    melted = wide.reset_index().melt("Date", var_name="symbol", value_name="close")
    assert sorted(tg.load_bars(melted).symbols) == sorted(symbols)


def test_a_share_called_like_a_field_is_one_among_the_members_of_an_index() -> None:
    symbols = ("LOW", *(f"S{number:02d}" for number in range(10)))
    assert tg.load_bars(closes_of(symbols)).symbols == tuple(sorted(symbols))


def test_a_letter_is_no_field_where_another_column_hides_that_the_table_is_wide() -> None:
    noted = closes_of(("AAPL", "C", "V")).assign(note="text")
    with pytest.raises(BarsError, match=r"no column for .*close"):
        tg.load_bars(noted)


@pytest.mark.parametrize("one", [False, True])
@pytest.mark.parametrize("named", [("Price", "Ticker"), (None, None), ("Ticker", "Price")])
def test_the_csv_file_of_two_levels_is_read_like_the_frame(
    named: tuple[str | None, str | None], one: bool, tmp_path: Path
) -> None:
    """yfinance's `download(...).to_csv()` has three lines of header; another order and none of the names, too."""
    wide = pd.concat({"AAPL": TWO["AAPL"]} if one else TWO, axis=1)
    wide = wide if named[0] == "Ticker" else wide.swaplevel(axis=1).sort_index(axis=1)
    wide.columns.names = list(named)
    expected = tg.load_bars(wide).frame
    for name, frame in (("named.csv", wide), ("unnamed.csv", wide.rename_axis(None))):
        frame.to_csv(tmp_path / name)
        read = tg.load_bars(tmp_path / name).frame
        assert read.columns == expected.columns
        assert read["symbol"].to_list() == expected["symbol"].to_list()
        for column in ("open", "high", "low", "close", "volume"):
            assert read[column].to_list() == pytest.approx(expected[column].to_list(), rel=1e-12)


def test_a_file_of_two_levels_is_prepared_like_any_other(tmp_path: Path) -> None:
    wide = pd.concat(TWO, axis=1)
    wide.to_csv(tmp_path / "two.csv")
    tables = list(read_pieces(tmp_path / "two.csv", 10))
    assert pl.concat([table.frame for table in tables])["symbol"].to_list() == ["AAPL"] * 60 + ["MSFT"] * 60
    assert readable_in_pieces(tmp_path / "two.csv")


def test_a_wide_file_is_not_prepared_as_one_symbol(tmp_path: Path) -> None:
    closes_of(("AAPL", "C", "V")).to_csv(tmp_path / "closes.csv")
    with pytest.raises(BarsError, match=r"a wide table.*cannot be read in pieces"):
        fields_of(tmp_path / "closes.csv")


HOURS = pd.date_range("2024-01-01", periods=60, freq="h")


@pytest.mark.parametrize("kind", ["text", "objects", "polars"])
def test_a_date_and_a_time_of_day_in_two_columns_of_a_frame_are_one_time(kind: str) -> None:
    frame: Any = prices(3).reset_index(drop=True)
    days, clocks = (HOURS.strftime("%Y.%m.%d"), HOURS.strftime("%H:%M")) if kind == "text" else (HOURS.date, HOURS.time)
    frame.insert(0, "Date", days)
    frame.insert(1, "Time", clocks)
    if kind == "polars":
        values = {name: frame[name].to_numpy() for name in ("Open", "High", "Low", "Close", "Volume")}
        frame = pl.DataFrame({"date": list(days), "time": list(clocks), **values})
        assert frame.schema["time"] == pl.Time
    bars = tg.load_bars(frame, symbol="X")
    assert bars.frame["time"].dt.replace_time_zone(None).to_list() == HOURS.to_pydatetime().tolist()
