"""Notes on baselines: the funding they were charged, and what volume kept them from."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import polars as pl
import pytest

import tailguard as tg
from tailguard.evaluate.baselines import BuyAndHold
from tailguard.evaluate.formatting import percent
from tailguard.evaluate.notes import baseline_notes
from tailguard.market import MarketConfig


def held(bars, market: MarketConfig):
    return {"buy & hold": tg.backtest(BuyAndHold(), bars, market)}


def test_assumed_funding_is_named_with_its_cost_and_the_way_out(bars) -> None:
    market = MarketConfig()
    bare = replace(bars, frame=bars.frame.drop("funding_rate", strict=False))
    results = held(bare, market)
    (note,) = baseline_notes(results, bare, market)
    # 0.01 % three times a day on the whole equity: 10.96 % a year.
    assert results["buy & hold"].metrics["cost_funding_per_year"] == pytest.approx(0.0001 * 3 * 365.25, rel=0.02)
    assert "buy & hold pays 1" in note
    assert "0.01 % per eight hours" in note
    assert "market.funding_rate=0" in note
    free = replace(market, funding_rate=0.0)
    assert baseline_notes(held(bare, free), bare, free) == []


def test_observed_funding_needs_no_note(bars) -> None:
    observed = replace(bars, frame=bars.frame.with_columns(funding_rate=pl.lit(0.0001)))
    assert baseline_notes(held(observed, MarketConfig()), observed, MarketConfig()) == []
    ignored = MarketConfig(observed_funding=False)
    assert "their funding rates are not used" in baseline_notes(held(observed, ignored), observed, ignored)[0]


def test_the_exposure_that_volume_allowed_is_said(bars) -> None:
    volume = float((bars.frame["volume"] * bars.frame["open"]).sum())
    # A tenth of all volume is a fifth of the capital: it asks at every bar and never gets there.
    market = MarketConfig(capital=0.5 * volume, participation=0.1, funding_rate=0.0, impact=0.0)
    results = held(bars, market)
    (note,) = baseline_notes(results, bars, market)
    assert "buy & hold: volume cut its orders at 100.0 % of bars" in note
    reached = results["buy & hold"].weights[-1, 0]
    assert 0.1 < reached < 0.35
    assert f"exposure of {abs(results['buy & hold'].weights).max():.2g} of equity at most" in note


def test_orders_that_wait_for_a_halt_are_not_blamed_on_volume() -> None:
    days = pl.date_range(pl.date(2021, 1, 1), pl.date(2021, 3, 31), eager=True)
    halted = pl.col("date").is_between(pl.date(2021, 2, 1), pl.date(2021, 2, 10))
    closes = pl.DataFrame({"date": days}).with_columns(A=pl.when(~halted).then(10.0), B=pl.lit(20.0))
    bars = tg.load_bars(closes, universe="ragged")
    market = MarketConfig(participation=math.inf, impact=0.0, funding_rate=0.0)
    targets = np.tile([0.5, 0.5], (len(days), 1))
    targets[32:] = 0.0  # decided on 2 February: eight bars of the halt are left
    notes = baseline_notes({"seller": tg.backtest(targets, bars, market)}, bars, market)
    (note,) = [each for each in notes if each.startswith("seller")]
    assert "seller: halts of symbols kept its orders waiting at 9.0 % of bars. It reached" in note
    limited = MarketConfig(participation=0.5, impact=0.0, funding_rate=0.0)
    result = {"seller": tg.backtest(targets, bars, market)}
    assert "volume or halts of symbols cut its orders at 9.0 % of bars (" in baseline_notes(result, bars, limited)[-1]


def test_what_a_throttle_did_and_cost_is_noted(bars: tg.Bars) -> None:
    result = tg.backtest(np.ones((len(bars), 1)), bars)
    factor = np.where(np.arange(len(result.net)) < len(result.net) // 4, 0.5, 1.0)
    halved = replace(result, net=result.net * factor, throttle=factor, unthrottled_return=float(result.equity[-1] - 1))
    (note,) = baseline_notes({"agent": halved}, bars, MarketConfig(funding_rate=0))
    assert "its losses throttled it at 24.9 % of bars, to ×0.50 of its exposure at the lowest and ×0.88" in note
    assert f"would have been about {percent(float(result.equity[-1] - 1))}" in note
    assert not baseline_notes({"agent": replace(result, throttle=np.ones_like(factor))}, bars, MarketConfig())
    stopped = replace(result, throttle=np.where(factor < 1, 0.0, 1.0))
    (note,) = baseline_notes({"agent": stopped}, bars, MarketConfig())
    assert note.endswith("to ×0.00 of its exposure at the lowest and ×0.75 on average")


def test_bars_of_closes_only_are_said_to_fill_at_the_next_close(bars) -> None:
    closes = bars.frame.select("symbol", "time", "close")
    market = MarketConfig(impact=0, participation=float("inf"))
    from tailguard.data.sources import load_bars

    only = load_bars(closes)
    assert any("orders fill at the next close" in note for note in baseline_notes(held(only, market), only, market))
    assert not any("closes only" in note for note in baseline_notes(held(bars, market), bars, market))
