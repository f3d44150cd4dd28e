from __future__ import annotations

from datetime import timedelta

import numpy as np
import polars as pl
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tailguard.data.check_bars import validate
from tailguard.data.volume_unit import check_volume_unit, find_unit_switches, typical_price

HOUR = timedelta(hours=1)


def check(bars: pl.DataFrame, frequency: timedelta = HOUR, unit: str = "base"):
    return check_volume_unit(bars, frequency, unit)


def in_quote_units(bars: pl.DataFrame, start: int, stop: int | None = None) -> pl.DataFrame:
    """Volume counts money from the bar at `start` to the one before `stop`, and coins elsewhere."""
    row = pl.int_range(pl.len())
    inside = (row >= start) & (row < (bars.height if stop is None else stop))
    return bars.with_columns(volume=pl.col("volume") * pl.when(inside).then(typical_price()).otherwise(1.0))


def times_volume(bars: pl.DataFrame, factors: np.ndarray) -> pl.DataFrame:
    return bars.with_columns(volume=pl.col("volume") * pl.Series(factors))


@settings(max_examples=25, deadline=None, derandomize=True)
@given(
    index=st.integers(100, 900),
    seed=st.integers(0, 1_000),
    price=st.sampled_from([1e-4, 300.0, 8_700.0, 60_000.0]),
    quote_first=st.booleans(),
    minutes=st.sampled_from([15, 60, 1440]),
)
def test_a_change_between_coins_and_money_is_named_with_its_row(
    good_bars, index: int, seed: int, price: float, quote_first: bool, minutes: int
) -> None:
    bars = good_bars(1_000, seed, price=price, frequency=timedelta(minutes=minutes))
    bars = in_quote_units(bars, 0, index) if quote_first else in_quote_units(bars, index)

    report = validate(bars, "bars.parquet")

    assert [check.name for check in report.errors] == ["volume unit"]
    (offender,) = report.errors[0].offenders
    assert offender.row == index + 1
    before, after = ("quote", "base") if quote_first else ("base", "quote")
    assert f"{before} units before, {after} units after?" in offender.text


def test_the_message_gives_the_size_of_the_jump(good_bars) -> None:
    """Without noise the medians are exact: 5 coins at 2,000 after 10,000 money."""
    bars = good_bars(400).with_columns(
        *(pl.lit(2_000.0).alias(name) for name in ("open", "high", "low", "close")),
        volume=pl.when(pl.int_range(pl.len()) < 150).then(10_000.0).otherwise(5.0),
    )

    assert check(bars).offenders[0].text == (
        "median volume falls 2,000× from here on, at a price of 2,000: quote units before, base units after?"
    )


def test_a_month_in_the_wrong_unit_has_two_changes(good_bars) -> None:
    bars = in_quote_units(good_bars(3_000), 1_000, 1_720)

    assert [offender.row for offender in check(bars).offenders] == [1_001, 1_721]


def test_two_days_in_the_wrong_unit_are_enough_at_a_high_price(good_bars) -> None:
    bars = in_quote_units(good_bars(500), 200, 248)

    assert [offender.row for offender in check(bars).offenders] == [201, 249]


def test_a_thousandfold_jump_is_an_error_whatever_the_price(good_bars) -> None:
    bars = good_bars(600, price=1.0)
    jump = np.where(np.arange(600) < 311, 1.0, 2_000.0)

    found = check(times_volume(bars, jump))

    assert (found.level, found.count, found.offenders[0].row) == ("error", 1, 312)
    assert "contracts or lots" in found.offenders[0].text


def test_a_hundredfold_jump_that_the_price_does_not_explain_is_a_suspicion(good_bars) -> None:
    """A zero-fee promotion can do this to a real market."""
    jump = np.where(np.arange(600) < 300, 1.0, 100.0)

    assert check(times_volume(good_bars(600, price=28_000.0), jump)).level == "warning"


def test_volume_that_jumps_with_the_price_is_news_and_no_change_of_unit(good_bars) -> None:
    """At a price of 0.01 a hundredfold rise is as large as that from money to coins; the price tells them apart."""
    after = np.arange(1_000) >= 400
    bars = times_volume(good_bars(1_000, price=0.01), np.where(after, 100.0, 1.0))
    rally = pl.Series(np.where(after, 1.5, 1.0))

    assert check(bars).level == "error"
    assert check(bars.with_columns(pl.col("open", "high", "low", "close") * rally)).level == "warning"


@pytest.mark.parametrize(
    "factors",
    [
        pytest.param(np.geomspace(1, 1e4, 26_280), id="ten thousand times in three years"),
        pytest.param(np.geomspace(1e4, 1, 26_280), id="a market that dies"),
        pytest.param(np.where(np.arange(26_280) // 24 == 500, 60.0, 1.0), id="a busy day"),
        pytest.param(np.where(np.arange(26_280) // 24 == 1_094, 60.0, 1.0), id="a busy last day"),
        pytest.param(np.where(np.arange(26_280) < 24, 60.0, 1.0), id="a busy first day"),
        pytest.param(np.where((np.arange(26_280) // 168) % 9 == 0, 12.0, 1.0), id="busy weeks"),
        pytest.param(1 + 400 * np.exp(-np.arange(26_280) / 30.0), id="a rush after listing"),
        pytest.param(np.where(np.arange(26_280) % 3 == 0, 0.0, 1.0), id="every third bar without trade"),
    ],
)
@pytest.mark.parametrize("price", [60.0, 40_000.0])
def test_what_markets_do_is_no_change_of_unit(good_bars, factors: np.ndarray, price: float) -> None:
    found = check(times_volume(good_bars(26_280, 5, price=price), factors))

    assert (found.level, found.count) == ("ok", 0)


def test_a_price_that_grows_a_thousandfold_is_no_change_of_unit(good_bars) -> None:
    bars = good_bars(10_000)
    growth = pl.Series(np.geomspace(1, 1_000, 10_000))
    bars = bars.with_columns(pl.col("open", "high", "low", "close") * growth, volume=pl.col("volume") / growth)

    assert check(bars).level == "ok"


@settings(max_examples=20, deadline=None)
@given(seed=st.integers(0, 10_000), spread=st.floats(0.3, 1.5))
def test_noisy_volume_has_no_switches(seed: int, spread: float) -> None:
    volume = np.exp(np.random.default_rng(seed).normal(0, spread, 2_000))

    assert find_unit_switches(volume, np.full(2_000, 50.0), HOUR) == []


def test_a_switch_among_bars_without_trade_is_found(good_bars) -> None:
    bars = in_quote_units(good_bars(2_000), 777)
    sparse = bars.with_columns(volume=pl.when(pl.int_range(pl.len()) % 4 == 0).then(0.0).otherwise("volume"))

    assert [offender.row for offender in check(sparse).offenders] == [778]


def test_a_market_that_mostly_stands_still_can_still_be_judged(good_bars) -> None:
    """Two of three bars repeat the close before; the usual move is then the mean, as the median is zero."""
    bars = good_bars(1_200, price=300.0)
    seldom = bars["close"].gather((pl.int_range(1_200, eager=True) // 3) * 3)
    still = bars.with_columns(seldom.alias(name) for name in ("open", "high", "low", "close"))

    found = check(in_quote_units(still, 600))

    assert (found.level, found.offenders[0].row) == ("error", 601)


@pytest.mark.parametrize(
    ("counts", "claimed", "level"),
    [("base", "base", "ok"), ("quote", "quote", "ok"), ("quote", "base", "error"), ("base", "quote", "error")],
)
def test_a_quote_volume_column_tells_which_unit_volume_has(good_bars, counts: str, claimed: str, level: str) -> None:
    bars = good_bars(300).with_columns(quote_volume=pl.col("volume") * (pl.col("open") + pl.col("close")) / 2)
    if counts == "quote":
        bars = bars.with_columns(volume=pl.col("quote_volume"))

    found = check(bars, unit=claimed)

    assert found.level == level
    if level == "error":
        assert found.remedy == f'Choose volume_unit="{counts}" (--volume-unit {counts}).'


def test_near_a_price_of_one_the_unit_cannot_be_told(good_bars) -> None:
    bars = good_bars(300, price=1.0).with_columns(quote_volume=pl.col("volume"))

    assert check(bars).level == "ok"
