from __future__ import annotations

import itertools
from datetime import timedelta

import numpy as np
import polars as pl
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tailguard.data.calendars import around_the_clock
from tailguard.data.check_bars import validate
from tailguard.data.checks import PRICES
from tailguard.data.suspicions import check_empty, check_spikes, check_stale

HOUR = timedelta(hours=1)


def at(index: int, **values: pl.Expr | float) -> list[pl.Expr]:
    """New values for columns of one row."""
    here = pl.int_range(pl.len()) == index
    return [pl.when(here).then(value).otherwise(pl.col(name)).alias(name) for name, value in values.items()]


def fall(bars: pl.DataFrame, index: int, factor: float) -> pl.DataFrame:
    """Prices times `factor` from the bar at `index` on."""
    after = pl.int_range(pl.len()) >= index
    return bars.with_columns(pl.when(after).then(factor * pl.col(name)).otherwise(name).alias(name) for name in PRICES)


def flat_bars(good_bars, volumes: list[float]) -> pl.DataFrame:
    """Bars of one price, without range: they differ in volume only."""
    return good_bars(len(volumes)).with_columns(
        *(pl.lit(100.0).alias(name) for name in PRICES), pl.Series("volume", volumes)
    )


@settings(max_examples=12, deadline=None)
@given(
    seed=st.integers(0, 10_000),
    count=st.integers(60, 700),
    minutes=st.sampled_from([1, 15, 60, 1440]),
    price=st.sampled_from([1e-5, 0.4, 30.0, 60_000.0]),
)
def test_clean_bars_raise_no_suspicion(good_bars, seed: int, count: int, minutes: int, price: float) -> None:
    report = validate(good_bars(count, seed, price=price, frequency=timedelta(minutes=minutes)), "bars")

    assert [check.name for check in report.checks if check.level != "ok"] == []


@settings(max_examples=60, deadline=None)
@given(volumes=st.lists(st.sampled_from([0.0, 1.0, 2.0]), min_size=2, max_size=60))
def test_runs_are_those_that_counting_by_hand_finds(good_bars, volumes: list[float]) -> None:
    stale, empty, start = [], [], 1
    for value, group in itertools.groupby(volumes):
        length = len(list(group))
        if value > 0 and length >= 3:
            stale.append((start, length))
        if value == 0 and length >= 5:
            empty.append((start, length))
        start += length
    bars = flat_bars(good_bars, volumes)

    for check, expected in ((check_stale(bars, around_the_clock(HOUR)), stale), (check_empty(bars), empty)):
        assert check.count == len(expected)
        found = [(offender.row, int(offender.text.split()[0])) for offender in check.offenders]
        assert found == expected[:3]


def test_a_moving_bar_that_repeats_is_stale_even_without_volume(good_bars) -> None:
    bars = good_bars(30).with_columns(volume=pl.lit(0.0))
    frozen = pl.concat([bars[:10], *[bars[10:11]] * 4, bars[14:]]).with_columns(bars["row"], bars["time"])

    check = check_stale(frozen, around_the_clock(HOUR))

    assert [(offender.row, offender.text.split(",")[0]) for offender in check.offenders] == [(11, "4 identical bars")]


def test_identical_bars_on_both_sides_of_a_gap_are_no_run(good_bars) -> None:
    bars = flat_bars(good_bars, [7.0] * 10)

    assert check_stale(pl.concat([bars[:2], bars[4:6], bars[8:]]), around_the_clock(HOUR)).count == 0


@pytest.mark.parametrize("kind", ["low", "high", "close", "close up"])
@settings(max_examples=12, deadline=None)
@given(index=st.integers(1, 298), seed=st.integers(0, 1_000), size=st.floats(0.25, 0.9))
def test_a_spike_is_named_with_its_row_and_is_not_an_extreme_return_too(
    good_bars, kind: str, index: int, seed: int, size: float
) -> None:
    bars = good_bars(300, seed)
    column = kind.split()[0]
    if kind in ("high", "close up"):
        jump = pl.col(column) / (1 - size)
        bars = bars.with_columns(at(index, **{column: jump, "high": pl.max_horizontal("high", jump)}))
    else:
        jump = pl.col(column) * (1 - size)
        bars = bars.with_columns(at(index, **{column: jump, "low": pl.min_horizontal("low", jump)}))

    report = validate(bars, "bars")

    assert report.errors == ()
    assert [check.name for check in report.warnings] == ["spikes"]
    (offender,) = report.warnings[0].offenders
    assert offender.row == index + 1
    assert offender.text.startswith(f"{column} ")


def test_a_spike_says_the_price_around_it(good_bars) -> None:
    bars = good_bars(200).with_columns(
        *(pl.lit(5_300.0 + wiggle).alias(name) for name, wiggle in (("open", 0), ("high", 5), ("low", -5)))
    )
    close = pl.Series("close", 5_300 + np.tile([1.0, -1.0], 100))
    spikes, _ = check_spikes(bars.with_columns(close).with_columns(at(77, low=1_800.0)), around_the_clock(HOUR))

    assert str(spikes.offenders[0]) == "bars.parquet: row 78 (2021-01-04 05:00): low 1,800 against 5,295 around it"


def test_a_crash_that_stays_is_an_extreme_return_and_no_spike(good_bars) -> None:
    fallen = fall(good_bars(300), 120, 0.6)

    report = validate(fallen, "bars")

    assert [check.name for check in report.warnings] == ["returns"]
    (offender,) = report.warnings[0].offenders
    change = fallen["close"][120] / fallen["close"][119] - 1
    assert offender.row == 121
    assert f"({100 * change:+.1f} %," in offender.text


def test_a_wick_in_a_crash_that_stays_is_no_spike(good_bars) -> None:
    fallen = fall(good_bars(300), 120, 0.92).with_columns(at(120, low=0.75 * pl.col("low")))

    assert check_spikes(fallen, around_the_clock(HOUR))[0].count == 0


def test_a_return_over_a_gap_is_not_judged(good_bars) -> None:
    bars = good_bars(300)
    later = good_bars(100, 1, price=80_000.0, start=bars["time"][-1] + 10 * HOUR)

    report = validate(pl.concat([bars, later]), "bars", gaps="split")

    assert report.warnings == ()


def test_calm_and_wild_times_are_measured_by_their_own_scale(good_bars) -> None:
    """A fall of 15 % is 50 σ among 900 calm bars (σ 0.3 %) and 5 σ among the 100 wild ones that follow (σ 3 %)."""
    generator = np.random.default_rng(3)
    moves = np.concatenate([generator.normal(0, 0.003, 900), generator.normal(0, 0.03, 100)])
    moves[[450, 950]] = -0.15
    close = 100 * np.exp(np.cumsum(moves))
    bars = good_bars(1_000).with_columns(pl.Series(name, close) for name in PRICES)

    _, returns = check_spikes(bars, around_the_clock(HOUR))

    assert [offender.row for offender in returns.offenders] == [451]


@pytest.mark.parametrize(("factor", "split"), [(0.25, "4:1"), (0.5, "2:1"), (10.0, "1:10"), (0.001, "1000:1")])
def test_a_split_is_named(good_bars, factor: float, split: str) -> None:
    # Returns twelve times as large: halving then stands out by fewer deviations than other returns must.
    wild = ((40_000.0 * (pl.col(name) / 40_000.0) ** 12).alias(name) for name in ("open", "high", "low", "close"))
    bars = good_bars(400).with_columns(wild)
    after = pl.when(pl.col("row") > 200).then(factor).otherwise(1.0)
    moved = bars.with_columns(
        *((pl.col(name) * after).alias(name) for name in ("open", "high", "low", "close")),
        volume=pl.col("volume") / after,
    )

    found = {check.name: check for check in validate(moved, "bars.parquet").checks}["returns"]

    assert (found.level, found.count, found.offenders[0].row) == ("warning", 1, 201)
    assert found.offenders[0].text.endswith(f": probably a split of {split}")
    assert "Adjust prices and volumes before a split" in found.remedy


def test_a_crash_is_not_called_a_split(good_bars) -> None:
    """Trading goes on from the last close, and the price falls by 60 % within the bar."""
    after = pl.when(pl.col("row") > 200).then(0.4).otherwise(1.0)
    opened = pl.when(pl.col("row") > 201).then(0.4).otherwise(1.0)
    crashed = good_bars(400).with_columns(
        *((pl.col(name) * after).alias(name) for name in ("low", "close")),
        *((pl.col(name) * opened).alias(name) for name in ("open", "high")),
    )

    found = {check.name: check for check in validate(crashed, "bars.parquet").checks}["returns"]

    assert found.count == 1
    assert "split" not in found.offenders[0].text
