"""Symbols with unequal histories: what is left out is counted, and the symbol that is short is named."""

from __future__ import annotations

import warnings
from pathlib import Path

import polars as pl
import pytest

from tailguard.data.bars import Bars
from tailguard.data.disk.import_bars import import_bars
from tailguard.data.features import common_times
from tailguard.data.findings import Check
from tailguard.data.history import spans_of
from tailguard.data.readiness import check_history
from tailguard.data.sources import load_bars
from tailguard.data.splits import split_bars, walk_forward
from tailguard.errors import BarsWarning

PRICES = ("open", "high", "low", "close", "volume")


def unequal(good_bars, *cuts: tuple[int, int]) -> pl.DataFrame:
    """1,000 bars a symbol, less those before and after."""
    parts = [good_bars(1_000, seed, symbol=f"COIN{seed}")[start:stop] for seed, (start, stop) in enumerate(cuts)]
    return pl.concat(parts).select("symbol", "time", *PRICES)


def judged(frame: pl.DataFrame) -> Check:
    bars: Bars = load_bars(frame, gaps="split")
    return check_history(spans_of(bars), len(common_times(bars)))


def test_the_symbol_that_begins_late_is_named_with_what_the_others_lose(good_bars) -> None:
    found = judged(unequal(good_bars, (0, 1_000), (0, 1_000), (700, 1_000)))

    assert (found.level, found.count) == ("warning", 1_400)
    assert "COIN2 begins only at 2021-01-30 04:00" in found.fault
    assert "300 times are common; COIN0 loses 700 of 1,000, COIN1 loses 700 of 1,000" in found.fault


def test_the_symbol_that_ends_early_or_has_gaps_is_named(good_bars) -> None:
    ends = judged(unequal(good_bars, (0, 400), (0, 1_000)))
    assert "COIN0 ends at 2021-01-17 15:00. 400 times are common; COIN1 loses 600 of 1,000" in ends.fault

    frame = unequal(good_bars, (0, 1_000), (0, 1_000))
    holed = frame.filter((pl.col("symbol") == "COIN0") | (pl.int_range(pl.len()).over("symbol") % 500 != 250))
    gaps = judged(holed)
    assert (gaps.count, "COIN1 has the most gaps. 998 times are common; COIN0 loses 2 of 1,000" in gaps.fault) == (
        2,
        True,
    )


def test_equal_histories_say_nothing(good_bars) -> None:
    frame = unequal(good_bars, (0, 1_000), (0, 1_000))
    assert judged(frame).level == "ok"
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        split_bars(load_bars(frame))


def test_splits_and_preparing_warn_where_training_would_lose_bars(good_bars, tmp_path: Path) -> None:
    frame = unequal(good_bars, (0, 1_000), (700, 1_000))
    bars = load_bars(frame)
    assert bars.panel().rows == 300

    says = r"700 bars at times that not all symbols have.*COIN1 begins only at 2021-01-30 04:00.*Leave the short symbol"
    with pytest.warns(BarsWarning, match=says):
        split_bars(bars)
    with pytest.warns(BarsWarning, match=says):
        walk_forward(bars, folds=2, train=100)
    frame.write_parquet(tmp_path / "bars.parquet")
    for name in ("bars", "scratch"):
        (tmp_path / name).mkdir()
    with pytest.warns(BarsWarning, match=says):
        import_bars(tmp_path / "bars.parquet", tmp_path / "bars", tmp_path / "scratch", rows=1_000)
    # The way out that is named leads out.
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert len(split_bars(bars.select("COIN0")).train) == 700
