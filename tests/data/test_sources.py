from __future__ import annotations

import gzip
import io
import warnings
import zipfile
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path

import pandas as pd
import polars as pl
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from polars.testing import assert_frame_equal

from tailguard.data.bars import Bars
from tailguard.data.sources import check_source, load_bars, read_source
from tailguard.errors import BarsError, BarsWarning

HOUR = timedelta(hours=1)
CANDLE = ["time", "open", "high", "low", "close", "volume"]


def plain(bars: pl.DataFrame) -> pl.DataFrame:
    """The bars alone, without the columns that say where they come from."""
    return bars.drop("file", "row", "unreadable")


def expected(bars: pl.DataFrame) -> pl.DataFrame:
    return plain(bars).with_columns(segment=pl.lit(0, pl.Int32))


def with_everything(bars: pl.DataFrame) -> pl.DataFrame:
    """`bars` with every optional column, as Binance has them."""
    middle = (pl.col("open") + pl.col("close")) / 2
    return bars.with_columns(
        quote_volume=pl.col("volume") * middle,
        trades=pl.col("row").cast(pl.Float64) + 17,
        taker_buy_base=pl.col("volume") * 0.4,
        taker_buy_quote=pl.col("volume") * middle * 0.4,
    )


def klines(bars: pl.DataFrame, unit: str = "ms") -> pl.DataFrame:
    """Binance's twelve columns in their order, with the names of the spot documentation."""
    full = with_everything(bars)
    opened = full["time"].dt.epoch("ms") * {"ms": 1, "us": 1_000}[unit]
    length = {"ms": 3_600_000, "us": 3_600_000_000}[unit]
    return full.select(
        opened.alias("open_time"),
        *("open", "high", "low", "close", "volume"),
        (opened + length - 1).alias("close_time"),
        pl.col("quote_volume").alias("quote_asset_volume"),
        pl.col("trades").cast(pl.Int64).alias("number_of_trades"),
        pl.col("taker_buy_base").alias("taker_buy_base_asset_volume"),
        pl.col("taker_buy_quote").alias("taker_buy_quote_asset_volume"),
        pl.lit(0).alias("ignore"),
    )


def as_pandas(bars: pl.DataFrame) -> pd.DataFrame:
    """Capitalised columns and an index of naive times, as pandas users have them."""
    frame = pd.DataFrame({name.capitalize(): bars[name].to_numpy() for name in CANDLE[1:]})
    frame.index = pd.DatetimeIndex(bars["time"].dt.replace_time_zone(None).to_numpy())
    return frame


def text(frame: pl.DataFrame, **options: bool) -> bytes:
    buffer = io.BytesIO()
    frame.write_csv(buffer, **options)
    return buffer.getvalue()


def iso(bars: pl.DataFrame, layout: str) -> pl.DataFrame:
    return bars.select(CANDLE).with_columns(pl.col("time").dt.strftime(layout)).rename({"time": "date"})


Write = Callable[[pl.DataFrame, Path], object]
CANDLES: dict[str, tuple[str, Write]] = {
    "Tailguard's own, CSV": ("BTCUSDT.csv", lambda bars, path: plain(bars).write_csv(path)),
    "Tailguard's own, Parquet": ("anything.parquet", lambda bars, path: plain(bars).write_parquet(path)),
    "Tailguard's own, Feather": ("anything.feather", lambda bars, path: plain(bars).write_ipc(path)),
    "ccxt lists without header": (
        "BTCUSDT_1h.csv",
        lambda bars, path: path.write_bytes(
            text(bars.select(CANDLE).with_columns(pl.col("time").dt.epoch("ms")), include_header=False)
        ),
    ),
    "ccxt lists through pandas": (
        "BTCUSDT.csv",
        lambda bars, path: pd.DataFrame(bars.select(pl.col("time").dt.epoch("ms"), *CANDLE[1:]).rows()).to_csv(path),
    ),
    "seconds": (
        "BTCUSDT.csv",
        lambda bars, path: bars.select(pl.col("time").dt.epoch("s").alias("timestamp"), *CANDLE[1:]).write_csv(path),
    ),
    "ISO without zone": ("BTCUSDT.csv", lambda bars, path: iso(bars, "%Y-%m-%d %H:%M:%S").write_csv(path)),
    "ISO with zone": ("BTCUSDT.csv", lambda bars, path: iso(bars, "%Y-%m-%dT%H:%M:%S%:z").write_csv(path)),
    "semicolons and spaces": (
        "BTCUSDT.csv",
        lambda bars, path: path.write_bytes(text(iso(bars, "%Y-%m-%d %H:%M")).replace(b",", b"; ")),
    ),
    "compressed": (
        "BTCUSDT-1h.csv.gz",
        lambda bars, path: path.write_bytes(gzip.compress(text(iso(bars, "%Y-%m-%d %H:%M")))),
    ),
    "pandas CSV, unnamed index": ("BTCUSDT.csv", lambda bars, path: as_pandas(bars).to_csv(path)),
    "pandas CSV, index Date": ("BTCUSDT.csv", lambda bars, path: as_pandas(bars).rename_axis("Date").to_csv(path)),
    "pandas Parquet, unnamed index": ("BTCUSDT.parquet", lambda bars, path: as_pandas(bars).to_parquet(path)),
    "pandas Parquet, index Datetime": (
        "BTCUSDT.parquet",
        lambda bars, path: as_pandas(bars).rename_axis("Datetime").tz_localize("UTC").to_parquet(path),
    ),
    "pandas Feather": (
        "BTCUSDT.feather",
        lambda bars, path: as_pandas(bars).rename_axis("Date").reset_index().to_feather(path),
    ),
    "prices as text": (
        "BTCUSDT.parquet",
        lambda bars, path: plain(bars).with_columns(pl.col(CANDLE[1:]).cast(pl.String)).write_parquet(path),
    ),
}


@pytest.mark.parametrize("convention", CANDLES)
@settings(max_examples=5, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(seed=st.integers(0, 1_000), count=st.integers(2, 80), price=st.sampled_from([2e-6, 1.0, 61_234.5]))
def test_each_convention_gives_the_same_bars(
    good_bars, tmp_path: Path, convention: str, seed: int, count: int, price: float
) -> None:
    name, write = CANDLES[convention]
    bars = good_bars(count, seed, price=price)
    write(bars, tmp_path / name)

    loaded = load_bars(tmp_path / name)

    assert_frame_equal(loaded.frame, expected(bars), check_exact=True)
    assert loaded.frequency == HOUR
    assert loaded.source == str(tmp_path / name)


@pytest.mark.parametrize("end", ["", "\n", "\n\n\n", "\r\n"])
def test_empty_lines_at_the_end_are_no_bars(good_bars, tmp_path: Path, end: str) -> None:
    (tmp_path / "bars.csv").write_bytes(text(iso(good_bars(10), "%Y-%m-%d %H:%M")).rstrip() + end.encode())

    assert len(load_bars(tmp_path / "bars.csv")) == 10


def zipped(content: bytes, name: str) -> bytes:
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as archive:
        archive.writestr(name, content)
    return buffer.getvalue()


@pytest.mark.parametrize(
    ("name", "write"),
    [
        ("BTCUSDT-1h-2021-01.csv", lambda bars: text(klines(bars))),
        ("BTCUSDT-1h-2021-01.csv", lambda bars: text(klines(bars), include_header=False)),
        ("BTCUSDT-1h-2025-01.csv", lambda bars: text(klines(bars, "us"), include_header=False)),
        (
            "BTCUSDT-1h-2021-01.zip",
            lambda bars: zipped(text(klines(bars), include_header=False), "BTCUSDT-1h-2021-01.csv"),
        ),
        (
            "BTCUSDT-1h.csv",  # the futures' own header
            lambda bars: text(klines(bars)).replace(
                b"quote_asset_volume,number_of_trades,taker_buy_base_asset_volume,taker_buy_quote_asset_volume",
                b"quote_volume,count,taker_buy_volume,taker_buy_quote_volume",
                1,
            ),
        ),
    ],
)
def test_binance_dumps_keep_their_trades_and_taker_volumes(
    good_bars, tmp_path: Path, name: str, write: Callable[[pl.DataFrame], bytes]
) -> None:
    bars = good_bars(60)
    (tmp_path / name).write_bytes(write(bars))

    source = read_source(tmp_path / name)

    assert_frame_equal(load_bars(tmp_path / name).frame, expected(with_everything(bars)), check_exact=True)
    assert source.ignored == ("close_time", "ignore")


def test_monthly_files_of_a_symbol_are_joined_in_order_of_time(good_bars, tmp_path: Path) -> None:
    """The later month is in microseconds and its name sorts first; rows count within each file."""
    bars = good_bars(100)
    (tmp_path / "BTCUSDT-1h-b.csv").write_bytes(text(klines(bars[:60]), include_header=False))
    (tmp_path / "BTCUSDT-1h-a.csv").write_bytes(text(klines(bars[60:], "us"), include_header=False))
    (tmp_path / "notes.txt").write_text("not bars")

    assert_frame_equal(load_bars(tmp_path).frame, expected(with_everything(bars)), check_exact=True)
    assert read_source(tmp_path).frame["row"].to_list() == [*range(1, 61), *range(1, 41)]


def test_files_that_overlap_are_refused_with_both_rows(good_bars, tmp_path: Path) -> None:
    bars = plain(good_bars(100))
    bars[:60].write_parquet(tmp_path / "a.parquet")
    bars[58:].write_parquet(tmp_path / "b.parquet")

    with pytest.raises(BarsError) as caught:
        load_bars([tmp_path / "a.parquet", tmp_path / "b.parquet"])

    assert str(caught.value).startswith(
        f"{tmp_path}/b.parquet: row 1 (2021-01-03 10:00): same time as row 59 of {tmp_path}/a.parquet"
    )


def test_many_paths_have_a_short_name(good_bars, tmp_path: Path) -> None:
    bars = plain(good_bars(50))
    paths = [tmp_path / f"{part}.parquet" for part in range(5)]
    for part, path in enumerate(paths):
        bars[10 * part : 10 * part + 10].write_parquet(path)

    assert load_bars(paths[:2]).source == f"{paths[0]}, {paths[1]}"
    assert load_bars(paths).source == f"{paths[0]} … {paths[4]} (5 paths)"


def test_a_folder_of_symbols_and_a_file_of_symbols_are_the_same_bars(good_bars, tmp_path: Path) -> None:
    both = [good_bars(50, 1, symbol="BTCUSDT"), good_bars(70, 2, symbol="ETHUSDT", price=2_000.0)]
    folder = tmp_path / "many"
    folder.mkdir()
    for bars in both:
        plain(bars).drop("symbol").write_parquet(folder / f"{bars['symbol'][0]}_1h.parquet")
    joined = plain(pl.concat(both))
    # Exchanges' screeners write all symbols of an hour, then those of the next.
    joined.sort("time", "symbol", descending=[False, True]).write_parquet(tmp_path / "one.parquet")

    loaded = load_bars(folder)

    assert loaded.symbols == ("BTCUSDT", "ETHUSDT")
    assert_frame_equal(loaded.frame.drop("segment"), joined, check_exact=True)
    assert loaded.frame["segment"].to_list() == [0] * 50 + [1] * 70
    assert_frame_equal(load_bars(tmp_path / "one.parquet").frame, loaded.frame, check_exact=True)
    assert loaded.panel("portfolio").rows == 50
    assert loaded.panel("per_symbol").rows == 120


def test_a_symbol_is_picked_where_there_are_several_and_named_where_none_is(good_bars, tmp_path: Path) -> None:
    both = pl.concat([good_bars(30, 1), good_bars(30, 2, symbol="ETHUSDT")])
    plain(both).write_csv(tmp_path / "both.csv")
    plain(good_bars(30)).drop("symbol").write_csv(tmp_path / "prices.csv")

    assert load_bars(tmp_path / "both.csv", symbol="ETHUSDT").symbols == ("ETHUSDT",)
    assert load_bars(tmp_path / "prices.csv").symbols == ("prices",)
    assert load_bars(tmp_path / "prices.csv", symbol="XYZ").symbols == ("XYZ",)
    with pytest.raises(BarsError, match="no symbol 'XYZ'; there are BTCUSDT, ETHUSDT"):
        load_bars(tmp_path / "both.csv", symbol="XYZ")


def test_gaps_stop_unless_they_split(good_bars, tmp_path: Path) -> None:
    bars = plain(good_bars(40))
    pl.concat([bars[:10], bars[13:30], bars[31:]]).write_parquet(tmp_path / "gaps.parquet")

    with pytest.raises(BarsError, match=r"row 11 \(2021-01-01 13:00\): 3 bars missing after 2021-01-01 09:00"):
        load_bars(tmp_path / "gaps.parquet")
    with pytest.raises(BarsError, match=r"3 bars missing"):
        load_bars(tmp_path / "gaps.parquet", validate=False)
    split = load_bars(tmp_path / "gaps.parquet", gaps="split")
    assert split.frame["segment"].to_list() == [0] * 10 + [1] * 17 + [2] * 9


def test_quote_volume_is_divided_by_the_typical_price(tmp_path: Path) -> None:
    """A bar with high 12, low 9, close 9 has the typical price 10: 500 money are 50 coins."""
    (tmp_path / "bars.csv").write_text(
        "time,open,high,low,close,volume\n2021-01-01 00:00,10,12,9,9,500\n2021-01-01 01:00,9,9,9,9,27\n"
    )

    assert load_bars(tmp_path / "bars.csv", volume_unit="quote").frame["volume"].to_list() == [50.0, 3.0]


def test_suspicions_warn_and_the_bars_are_loaded_as_they_are(good_bars, tmp_path: Path) -> None:
    bars = plain(good_bars(200))
    spike = pl.when(pl.int_range(pl.len()) == 99).then(0.3 * pl.col("low")).otherwise("low").alias("low")
    bars.with_columns(spike).write_parquet(tmp_path / "spike.parquet")

    with pytest.warns(BarsWarning, match=r"spike\.parquet: row 100 \(2021-01-05 03:00\): low 12,") as caught:
        loaded = load_bars(tmp_path / "spike.parquet")

    assert len(caught) == 1
    assert caught[0].filename == __file__
    assert loaded.frame["low"][99] == 0.3 * bars["low"][99]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        load_bars(tmp_path / "spike.parquet", validate=False)


def test_a_column_that_only_some_files_have_is_left_out_with_a_warning(good_bars, tmp_path: Path) -> None:
    plain(good_bars(30)).with_columns(funding_rate=pl.lit(0.0001)).write_parquet(tmp_path / "a.parquet")
    plain(good_bars(30, symbol="ETHUSDT")).write_parquet(tmp_path / "b.parquet")

    with pytest.warns(BarsWarning, match="only some of the files have it: funding_rate"):
        loaded = load_bars(tmp_path)

    assert "funding_rate" not in loaded.frame.columns
    assert "funding_rate (not in every file)" in check_source(read_source(tmp_path)).ignored


def test_a_cell_that_is_no_number_is_named_with_what_stands_there(good_bars, tmp_path: Path) -> None:
    lines = text(iso(good_bars(20), "%Y-%m-%d %H:%M")).decode().splitlines()
    lines[8] = lines[8].rsplit(",", 2)[0] + ",none,n/a"
    lines[12] = "soon" + lines[12][16:]
    lines[15] = ""
    (tmp_path / "bars.csv").write_text("\n".join(lines) + "\n\n")

    with pytest.raises(BarsError) as caught:
        load_bars(tmp_path / "bars.csv")

    assert str(caught.value).splitlines()[:3] == [
        f"{tmp_path}/bars.csv: row 8 (2021-01-01 07:00): close 'none' cannot be read as a number",
        f"{tmp_path}/bars.csv: row 12: date 'soon' cannot be read as a time",
        f"{tmp_path}/bars.csv: row 15: no value for time, open, high, low, close, volume",
    ]


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("bars.xlsx", b"", "not a format Tailguard reads"),
        ("bars.csv", b"", "empty"),
        ("bars.csv", b"time,open,high,low,close,volume\n", "no bars"),
        ("bars.csv", b"1,2,3\n4,5,6\n", "no header, and 3 columns"),
        ("bars.csv", b"date,open,close,volume\n2021-01-01,1,1,1\n", "no column for high"),
        ("bars.csv", b"date,open,high,low,close,volume\n2021,1,1,1,1,1\n", "no value of column 'date' is a time"),
        ("bars.csv", b"date,open,high,low,close,volume\n2021-01-01,1,1,1,1,1\n", "one bar is too few"),
        ("bars.csv", b"date,open,high,low,close,volume\n2021-01-01,1,1,1,1,1,2,3\n", "cannot be read"),
        ("bars.csv", b"\xff\xfe\x00\x01", "cannot be read"),
        ("bars.csv.gz", b"not compressed", "cannot be read"),
        ("bars.zip", b"not compressed", "cannot be read"),
        ("bars.zip", zipped(b"hello", "readme.md"), "holds 0 CSV files"),
        ("bars.parquet", b"not a table", "cannot be read"),
        ("bars.feather", b"not a table", "cannot be read"),
    ],
)
def test_what_cannot_be_used_is_refused_in_words(tmp_path: Path, name: str, content: bytes, message: str) -> None:
    (tmp_path / name).write_bytes(content)

    with pytest.raises(BarsError, match=message) as caught:
        load_bars(tmp_path / name)

    assert str(caught.value).startswith(f"{tmp_path / name}: ")


def test_nothing_to_read_is_refused(tmp_path: Path) -> None:
    with pytest.raises(BarsError, match="no such file or folder"):
        load_bars(tmp_path / "missing.csv")
    with pytest.raises(BarsError, match="no bars in this folder"):
        load_bars(tmp_path)
    with pytest.raises(BarsError, match="no file of bars was given"):
        load_bars([])


def test_one_bar_can_be_loaded_when_its_frequency_is_said(good_bars, tmp_path: Path) -> None:
    plain(good_bars(1)).write_parquet(tmp_path / "one.parquet")

    loaded: Bars = load_bars(tmp_path / "one.parquet", frequency="1h")

    assert (len(loaded), loaded.frequency) == (1, HOUR)


def test_a_file_of_cryptodatadownload_is_read_as_it_comes(good_bars, tmp_path: Path) -> None:
    """An address first, newest bars first, and volumes named after what they count."""
    bars = with_everything(good_bars(60))
    table = bars.select(
        pl.col("time").dt.epoch("ms").alias("Unix"),
        pl.col("time").dt.strftime("%Y-%m-%d %H:%M:%S").alias("Date"),
        pl.col("symbol").alias("Symbol"),
        *(pl.col(name).alias(name.capitalize()) for name in CANDLE[1:5]),
        pl.col("volume").alias("Volume BTC"),
        pl.col("quote_volume").alias("Volume USDT"),
        pl.col("trades").alias("tradecount"),
    )
    path = tmp_path / "Binance_BTCUSDT_1h.csv"
    path.write_bytes(b"https://www.CryptoDataDownload.com\n" + text(table[::-1]))

    loaded = load_bars(path).frame
    assert loaded["time"].to_list() == bars["time"].to_list()
    assert loaded["volume"].to_list() == bars["volume"].to_list()
    assert loaded["quote_volume"].to_list() == bars["quote_volume"].to_list()
