"""Bars that were in training or validation are found, whatever they are called and wherever they come from."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import polars as pl
import pytest

import tailguard as tg
from tailguard.config import load_config
from tailguard.data.bars import Bars
from tailguard.evaluate.overlap import overlap_of, overlap_with_run


@pytest.fixture(scope="module")
def split(bars: Bars):
    return tg.split_bars(bars, validation=0.2, test=0.2, embargo="1d")


def renamed(bars: Bars, name: str) -> Bars:
    return replace(bars, frame=bars.frame.with_columns(symbol=pl.lit(name)))


def seen_by_hand(bars: Bars, split: tg.Split) -> float:
    """Share of the times of `bars` that training or validation traded."""
    times = set(bars.frame.filter(pl.col("time") >= bars.start)["time"])
    known = {time for part in (split.train, split.validation) for time in part.frame["time"] if time >= part.start}
    return len(times & known) / len(times)


def test_the_share_of_seen_bars_is_counted_by_time(bars: Bars, split) -> None:
    found = overlap_of(bars, split.train, split.validation)
    assert found.share == pytest.approx(seen_by_hand(bars, split), abs=1e-12)
    assert 0.7 < found.share < 0.85
    assert found.parts == ("training", "validation")
    assert found.first == split.train.start
    assert found.last == split.validation.end_points[1]
    (line,) = found.lines()
    assert f"IN-SAMPLE: {100 * found.share:.1f} % of these bars" in line
    assert f"{split.train.start:%Y-%m-%d %H:%M}" in line
    assert not found.honest


def test_the_test_part_was_not_seen_although_its_lead_in_was(split) -> None:
    assert split.test.frame["time"].min() < split.test.start
    found = overlap_of(split.test, split.train, split.validation)
    assert found.share == 0
    assert found.honest
    assert found.lines() == []


def test_the_validation_part_is_named(split) -> None:
    found = overlap_of(split.validation, split.train, split.validation)
    assert (found.share, found.parts) == (1.0, ("validation",))


def test_a_new_name_does_not_hide_the_bars(bars: Bars, split) -> None:
    found = overlap_of(renamed(bars, "SECRET"), split.train, split.validation)
    assert found.share == pytest.approx(seen_by_hand(bars, split), abs=1e-12)
    assert found.strange == ("SECRET",)
    assert any("trained on SYN01, never on SECRET" in line for line in found.lines())


def test_quotes_from_elsewhere_are_the_same_market(bars: Bars, split) -> None:
    """Another venue: prices off by a premium and noise of a fifth of a bar's move."""
    noise = np.random.default_rng(0).normal(1.002, 0.001, len(bars))
    moved = replace(bars, frame=bars.frame.with_columns(close=pl.col("close") * pl.Series(noise)))
    assert overlap_of(moved, split.train, split.validation).share > 0.7


def test_other_prices_at_the_same_times_are_no_overlap(bars: Bars, split) -> None:
    other = tg.make_market(1_200, seed=99).bars
    assert other.end_points == bars.end_points
    assert overlap_of(other, split.train, split.validation).share == 0
    assert overlap_of(renamed(other, "ETH"), split.train, split.validation).strange == ("ETH",)


def test_a_run_whose_bars_are_gone_says_that_it_cannot_tell(bars: Bars, tmp_path) -> None:
    found = overlap_with_run(load_config(overrides=[f"data.path={tmp_path / 'gone.parquet'}"]), bars)
    assert not found.honest
    assert "is unknown" in found.lines()[0]
    assert "gone.parquet" in found.lines()[0]
