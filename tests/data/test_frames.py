"""Frames in memory are bars like those of files, checked in the same way."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import polars as pl
import pytest
from polars.testing import assert_frame_equal

import tailguard as tg
from tailguard.data.features import FEATURES, compute_features, leaking_features
from tailguard.data.prepare import prepare
from tailguard.data.splits import split_bars
from tailguard.errors import BarsError, ConfigError

PRICES = ["open", "high", "low", "close", "volume"]


def as_pandas(bars: pl.DataFrame) -> pd.DataFrame:
    frame = pd.DataFrame({name: bars[name].to_numpy() for name in PRICES})
    frame["time"] = bars["time"].dt.replace_time_zone(None).to_numpy()
    return frame


FORMS: dict[str, Callable[[pl.DataFrame], Any]] = {
    "Polars": lambda bars: bars.select("time", *PRICES),
    "Polars, lazy": lambda bars: bars.lazy().select("time", *PRICES),
    "Polars, naive": lambda bars: bars.select(pl.col("time").dt.replace_time_zone(None), *PRICES),
    "pandas, column": as_pandas,
    "pandas, index": lambda bars: as_pandas(bars).set_index("time"),
    "pandas, unnamed index": lambda bars: as_pandas(bars).set_index("time").rename_axis(None),
    "pandas, index of another name": lambda bars: as_pandas(bars).set_index("time").rename_axis("bar"),
    "pandas, New York": lambda bars: (
        as_pandas(bars).set_index("time").tz_localize("UTC").tz_convert("America/New_York")
    ),
    "pandas, text": lambda bars: as_pandas(bars).assign(time=lambda frame: frame["time"].astype(str)),
    "pandas, milliseconds": lambda bars: as_pandas(bars).assign(time=bars["time"].dt.epoch("ms").to_numpy()),
    "pandas, capitals": lambda bars: as_pandas(bars).rename(columns=str.capitalize),
    "pandas, nullable": lambda bars: as_pandas(bars).convert_dtypes(),
    "pandas, filtered": lambda bars: as_pandas(pl.concat([bars[:7], bars])).iloc[7:],
    "pandas, periods": lambda bars: (
        as_pandas(bars).set_index(pd.PeriodIndex(as_pandas(bars)["time"], freq="h")).drop(columns="time")
    ),
}


@pytest.mark.parametrize("form", FORMS)
def test_each_form_gives_the_bars_of_the_file(good_bars, tmp_path: Path, form: str) -> None:
    bars = good_bars(50)
    bars.select("time", *PRICES).write_parquet(tmp_path / "BTC.parquet")

    loaded = tg.load_bars(FORMS[form](bars), symbol="BTC")

    assert_frame_equal(loaded.frame, tg.load_bars(tmp_path / "BTC.parquet").frame, check_exact=True)
    assert loaded.frequency == timedelta(hours=1)


def test_symbols_in_a_column_or_in_the_index_are_kept_apart(good_bars) -> None:
    both = pl.concat([good_bars(30, 1), good_bars(30, 2, symbol="ETHUSDT")]).select("symbol", "time", *PRICES)
    frame = both.to_pandas()

    expected = tg.load_bars(both).frame
    assert expected["symbol"].unique(maintain_order=True).to_list() == ["BTCUSDT", "ETHUSDT"]
    assert_frame_equal(tg.load_bars(frame).frame, expected, check_exact=True)
    assert_frame_equal(tg.load_bars(frame.set_index(["symbol", "time"])).frame, expected, check_exact=True)
    assert tg.load_bars(good_bars(5).select("time", *PRICES)).symbols == ("bars",)


def test_a_fault_is_named_with_its_row(good_bars) -> None:
    frame = as_pandas(good_bars(50))
    frame.loc[20, "high"] = frame.loc[20, "low"] / 2

    with pytest.raises(BarsError, match=r"^pandas frame: row 21 \(2021-01-01 20:00\): high .* < low"):
        tg.load_bars(frame)
    frame.loc[20, "high"] = np.nan
    with pytest.raises(BarsError, match=r"^pandas frame: row 21 \(2021-01-01 20:00\): no value for high"):
        tg.load_bars(frame)
    with pytest.raises(BarsError, match=r"^Polars frame: no column for close"):
        tg.load_bars(good_bars(50).drop("close"))


def test_frames_that_cannot_be_bars_are_refused_in_words(good_bars) -> None:
    frame = as_pandas(good_bars(5))
    wide = pd.concat({"BTC-USD": frame}, axis=1).rename(columns=lambda name: f"x{name}")

    with pytest.raises(BarsError, match=r"columns have 2 levels.*frame\.xs"):
        tg.load_bars(wide)
    with pytest.raises(BarsError, match="two columns are named 'open'"):
        tg.load_bars(frame.rename(columns={"close": "open"}))
    with pytest.raises(BarsError, match="both named 'time'"):
        tg.load_bars(frame.set_index("time", drop=False))
    with pytest.raises(BarsError, match=r"pandas or Polars frame, not from int"):
        tg.load_bars(17)
    with pytest.raises(BarsError, match=r"pandas or Polars frame, not from Series"):
        tg.load_bars(frame["open"])


@pytest.fixture
def own_feature() -> Iterator[None]:
    """A feature of a column that bars do not usually have."""

    @tg.feature("own_mood", warmup=2, needs=("sentiment",), replace=True)
    def own_mood() -> pl.Expr:
        return pl.col("sentiment").rolling_mean(3)

    yield
    del FEATURES["own_mood"]


def with_sentiment(bars: pl.DataFrame) -> pl.DataFrame:
    mood = np.random.default_rng(3).normal(size=bars.height)
    return bars.select("time", *PRICES).with_columns(sentiment=pl.Series(mood), note=pl.lit("text"))


@pytest.mark.parametrize("form", ["file", "CSV", "Polars", "pandas"])
@pytest.mark.usefixtures("own_feature")
def test_a_feature_reads_a_column_of_ones_own(good_bars, tmp_path: Path, form: str) -> None:
    frame = with_sentiment(good_bars(1_200))
    frame.write_parquet(tmp_path / "bars.parquet")
    frame.write_csv(tmp_path / "bars.csv")
    given = {
        "file": tmp_path / "bars.parquet",
        "CSV": tmp_path / "bars.csv",
        "Polars": frame,
        "pandas": frame.to_pandas(),
    }

    bars = tg.load_bars(given[form])
    table = compute_features(bars, ["own_mood"])

    mood = frame["sentiment"].to_numpy()
    expected = np.convolve(mood, np.ones(3) / 3, mode="valid")
    assert np.allclose(table.values[2:, 0], expected, rtol=0, atol=1e-12)
    assert table.valid.tolist() == [False, False, *[True] * 1_198]
    # It is part of the default set, goes through a split into an environment's features, and sees no future.
    train = split_bars(bars, validation=0.1, test=0.1).train
    assert "own_mood" in prepare(train).names
    assert leaking_features(bars, ["own_mood"], probes=5) == []


@pytest.mark.usefixtures("own_feature")
def test_a_feature_that_sees_the_future_of_its_own_column_is_found(good_bars) -> None:
    @tg.feature("own_mood", needs=("sentiment",), replace=True)
    def own_mood() -> pl.Expr:
        return pl.col("sentiment").shift(-1).fill_null(0.0)

    leaks = leaking_features(tg.load_bars(with_sentiment(good_bars(300))), ["own_mood"], probes=5)

    assert [leak.feature for leak in leaks] == ["own_mood"]


@pytest.mark.usefixtures("own_feature")
def test_a_column_that_is_missing_or_has_holes_is_named(good_bars) -> None:
    frame = with_sentiment(good_bars(300))

    with pytest.raises(ConfigError, match="'own_mood' needs the column 'sentiment', which Polars frame does not have"):
        compute_features(tg.load_bars(frame.drop("sentiment")), ["own_mood"])
    holed = frame.with_columns(sentiment=pl.when(pl.int_range(pl.len()) != 40).then("sentiment"))
    expected = r"'sentiment', which feature 'own_mood' needs, has no value for bars at 2021-01-02 16:00.* one: 1\."
    with pytest.raises(tg.TailguardError, match=expected):
        compute_features(tg.load_bars(holed), ["own_mood"])


def test_a_feature_the_command_line_cannot_know_says_where_it_works() -> None:
    with pytest.raises(ConfigError, match=r"@tailguard\.feature; for the command line, in a file"):
        compute_features(tg.make_market(1_000).bars, ["own_unknown"])
