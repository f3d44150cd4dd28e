"""Round trips against hand calculation, against vectorbt, and against the equity they add up to."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pandas as pd
import polars as pl
import pytest

import tailguard as tg
from tailguard.errors import ConfigError
from tailguard.evaluate.trades import round_trips
from tailguard.market import MarketConfig

FREE = MarketConfig(fee=0, half_spread=0, impact=0, participation=float("inf"), funding_rate=0)


@pytest.fixture(scope="module")
def prices():
    """Seven bars: closes 100, opens that equal the close before but for one gap."""
    bars = tg.make_market(7, seed=0).bars
    opens = [100.0, 100.0, 110.0, 121.0, 120.0, 108.0, 108.0]
    closes = [100.0, 110.0, 121.0, 121.0, 108.0, 108.0, 108.0]
    return replace(
        bars,
        frame=bars.frame.with_columns(
            open=pl.Series(opens),
            close=pl.Series(closes),
            high=pl.Series(np.maximum(opens, closes)),
            low=pl.Series(np.minimum(opens, closes)),
            volume=pl.lit(1e9),
        ),
    )


def test_trades_by_hand(prices) -> None:
    """Long from 100 to 120 with a fee of 1 %, then short from 120 to 108 until the end."""
    # At the closes of bars 0, 3: long all, then short half; nothing else is touched.
    targets = np.array([1.0, np.nan, np.nan, -0.5, np.nan, np.nan, np.nan])[:, None]
    result = tg.backtest(targets, prices, replace(FREE, fee=0.01))
    first, second = round_trips(result, prices.panel())
    times = prices.panel().time
    assert (first.side, first.entry_time, first.exit_time, first.bars) == ("long", times[1], times[4], 3)
    assert (first.entry_price, first.exit_price) == (100.0, 120.0)
    # One unit of capital buys 1.00 and pays 0.01. At 120 it is worth 1.20 and pays 0.012 to be sold.
    assert first.pnl == pytest.approx(0.20 - 0.01 - 0.012)
    assert first.costs == pytest.approx(0.022)
    assert first.return_ == pytest.approx(first.pnl)
    # Equity before the sale is 1.19, so 0.595 is sold short and pays 0.00595; the price falls by 10 %.
    assert (second.side, second.entry_time, second.exit_time, second.bars) == ("short", times[4], None, 3)
    assert (second.entry_price, second.exit_price) == (120.0, 108.0)
    assert second.pnl == pytest.approx(0.0595 - 0.00595)
    assert first.pnl + second.pnl == pytest.approx(result.equity[-1] - 1, abs=1e-15)


@pytest.mark.parametrize("assets", [1, 3])
def test_trades_of_random_targets_are_vectorbts_positions(assets: int) -> None:
    """Resized, reversed and closed at random, with a fee."""
    vectorbt = pytest.importorskip("vectorbt")
    bars = tg.make_market(300, assets=assets, seed=4).bars
    panel = bars.panel("portfolio")
    generator = np.random.default_rng(assets)
    sides = generator.choice([-1, 0, 1], (30, assets)).repeat(10, axis=0)
    targets = sides * generator.uniform(0.05, 0.9 / assets, sides.shape)
    result = tg.backtest(targets, bars, replace(FREE, fee=0.001))
    theirs = vectorbt.Portfolio.from_orders(
        close=pd.DataFrame(panel.close),
        price=pd.DataFrame(panel.open),
        size=pd.DataFrame(np.vstack([np.full(assets, np.nan), targets[:-1]])),
        size_type="targetpercent",
        fees=0.001,
        init_cash=1e8,
        group_by=True,
        cash_sharing=True,
        call_seq="auto",
    ).positions.records
    mine = round_trips(result, panel)
    assert len(mine) == len(theirs) > 10 * assets
    column = [panel.symbols.index(trade.symbol) for trade in mine]
    order = np.lexsort([[trade.entry_time for trade in mine], column])
    mine, theirs = [mine[i] for i in order], theirs.sort_values(["col", "entry_idx"], kind="stable")
    rows = np.searchsorted(panel.time, [trade.entry_time for trade in mine])
    np.testing.assert_array_equal(rows, theirs["entry_idx"])
    np.testing.assert_array_equal([trade.side == "short" for trade in mine], theirs["direction"])
    np.testing.assert_array_equal([trade.exit_time is None for trade in mine], theirs["status"] == 0)
    ended = [trade.exit_time for trade in mine if trade.exit_time is not None]
    np.testing.assert_array_equal(np.searchsorted(panel.time, ended), theirs.loc[theirs["status"] == 1, "exit_idx"])
    np.testing.assert_allclose([trade.pnl for trade in mine], theirs["pnl"] / 1e8, rtol=1e-6, atol=1e-10)
    np.testing.assert_allclose(
        [trade.costs for trade in mine], (theirs["entry_fees"] + theirs["exit_fees"]) / 1e8, rtol=1e-6
    )


@pytest.mark.parametrize("assets", [1, 2])
@pytest.mark.parametrize("config", [MarketConfig(), MarketConfig(leverage=90.0, borrow_rate=0.1)])
def test_all_trades_together_are_the_record(assets: int, config: MarketConfig) -> None:
    """With every cost, with partial fills, and through a liquidation."""
    bars = tg.make_market(400, assets=assets, seed=6).bars
    targets = np.random.default_rng(0).uniform(-1, 1, (len(bars.panel("portfolio").time), assets)) / assets
    result = tg.backtest(targets * config.leverage, bars, config)
    trades = round_trips(result, bars.panel("portfolio"))
    assert result.liquidated == (config.leverage > 1)
    assert sum(trade.pnl for trade in trades) == pytest.approx(result.equity[-1] - 1, abs=1e-12)
    paid = sum((result.equity[:-1] * cost).sum() for cost in result.costs.values())
    assert sum(trade.costs for trade in trades) == pytest.approx(paid, rel=1e-9)
    if result.liquidated:
        assert all(trade.exit_time is not None for trade in trades)


def test_bars_of_another_backtest_are_refused(prices) -> None:
    result = tg.backtest(np.ones((7, 1)), prices, FREE)
    with pytest.raises(ConfigError, match="not computed on these bars"):
        round_trips(result, tg.make_market(7, seed=0, frequency="4h").bars.panel())


def test_an_account_that_never_held_anything_has_no_trades(prices) -> None:
    assert round_trips(tg.backtest(np.zeros((7, 1)), prices, FREE), prices.panel()) == []
