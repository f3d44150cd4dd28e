"""Whole lots and ticks, and settings of single symbols: by hand."""

from __future__ import annotations

import math
from dataclasses import replace
from datetime import UTC, datetime, timedelta

import numpy as np
import polars as pl
import pytest
import torch

from tailguard.config import load_config
from tailguard.data.bars import Bars
from tailguard.data.sources import load_bars
from tailguard.errors import ConfigError
from tailguard.evaluate.backtest import backtest
from tailguard.evaluate.baselines import BuyAndHold
from tailguard.market import MarketConfig, build_market, open_accounts, step

FREE = MarketConfig(fee=0, half_spread=0, impact=0, participation=math.inf, funding_rate=0)


def flat_bars(prices: dict[str, list[float]]) -> Bars:
    """Hourly bars that open and close at these prices, one list a symbol."""
    frames = []
    for symbol, values in prices.items():
        times = [datetime(2021, 1, 1, tzinfo=UTC) + timedelta(hours=hour) for hour in range(len(values))]
        frames.append(
            pl.DataFrame({"symbol": symbol, "time": times, **dict.fromkeys(("open", "high", "low", "close"), values)})
        )
    return load_bars(pl.concat(frames).with_columns(volume=pl.lit(1e6)), validate=False)


def test_orders_are_rounded_down_to_whole_lots() -> None:
    bars = flat_bars({"A": [300.0] * 5})
    config = replace(FREE, capital=1_000.0, lot=1.0)
    # 1,000 buys three shares at 300: 0.9 of the equity.
    result = backtest(BuyAndHold(), bars, config)
    assert result.weights[:, 0].tolist() == pytest.approx([0.9] * 4)
    assert result.turnover.tolist() == pytest.approx([0.9, 0, 0, 0])
    # What is left of the order does not wait: buy & hold does not trade again.
    assert result.unfilled.tolist() == [0, 0, 0, 0]
    # A target between two lots is the lower one, in both directions; 0 sells everything.
    targets = np.array([[0.7], [-0.7], [0.59], [0.0], [0.0]])
    assert backtest(targets, bars, config).weights[:, 0].tolist() == pytest.approx([0.6, -0.6, 0.3, 0.0])


def test_a_lot_grows_against_an_account_that_shrinks() -> None:
    bars = flat_bars({"A": [100.0, 100.0, 50.0, 50.0, 50.0]})
    result = backtest(np.ones((5, 1)), bars, replace(FREE, capital=1_000.0, lot=3.0))
    # Nine units for 900; at 50 the equity is 550, which holds three lots of three for 450 and no fourth.
    assert result.weights[:, 0].tolist() == pytest.approx([0.9, 450 / 550, 450 / 550, 450 / 550])
    assert result.equity.tolist() == pytest.approx([1, 1, 0.55, 0.55, 0.55])


def test_the_gradient_goes_straight_through_the_rounding() -> None:
    market = build_market(flat_bars({"A": [100.0, 110.0, 121.0]}).panel(), replace(FREE, lot=1.0), dtype=torch.float64)
    target = torch.tensor([[0.5003]], dtype=torch.float64, requires_grad=True)
    state, _ = step(market, open_accounts(torch.tensor([0]), 1, torch.float64), target)
    state, books = step(market, state, target)
    books.net.sum().backward()
    assert target.grad is not None
    # The gap of 10 % from the second close to the third open is earned by the position of the first fill: 454 shares
    # of 110 for 0.4994 capitals; its slope in the target is that of an order of any size.
    assert books.net.item() == pytest.approx(0.1 * 454 * 110 / 100_000, rel=1e-12)
    assert target.grad.item() == pytest.approx(0.1, rel=1e-9)


def test_the_half_spread_is_at_least_half_a_tick() -> None:
    bars = flat_bars({"A": [5.0] * 4, "B": [500.0] * 4})
    config = replace(FREE, half_spread=0.0005, tick=0.01)
    result = backtest(np.array([[0.5, 0.5]] * 4), bars, config)
    # Half a cent of 5 is 10 bp, of 500 a tenth of one: B pays the half spread of 5 bp.
    assert result.costs["spread"][0] == pytest.approx(0.5 * 0.001 + 0.5 * 0.0005, rel=1e-12)


def test_symbols_have_settings_of_their_own() -> None:
    bars = flat_bars({"A": [100.0] * 5, "B": [100.0] * 5})
    table = {"B": {"fee": 0.002, "half_spread": 0.001, "funding_rate": 0.0004, "borrow_rate": 0.5}}
    config = replace(FREE, fee=0.001, funding_rate=0.0002, borrow_rate=0.1, per_symbol=table)
    result = backtest(np.array([[0.25, -0.5]] * 5), bars, config)

    assert result.costs["fee"][0] == pytest.approx(0.25 * 0.001 + 0.5 * 0.002, rel=1e-12)
    assert result.costs["spread"][0] == pytest.approx(0.5 * 0.001, rel=1e-12)
    # The short in B pays its own rate for an hour; nothing is borrowed in cash.
    assert result.costs["borrow"][0] == pytest.approx(0.5 * 0.5 / (365.25 * 24), rel=1e-9)
    hours = flat_bars({"A": [100.0] * 9, "B": [100.0] * 9})
    held = backtest(
        np.array([[0.25, -0.5]] * 9),
        hours,
        replace(config, fee=0, borrow_rate=0, per_symbol={"B": {"funding_rate": 0.0004}}),
    )
    assert held.costs["funding"][6] == pytest.approx(0.25 * 0.0002 + 0.5 * 0.0004, rel=1e-3)  # the bar that ends at 08


def test_participation_impact_and_margin_may_differ_too() -> None:
    bars = flat_bars({"A": [100.0] * 4, "B": [100.0] * 4})
    capped = replace(FREE, capital=1e9, participation=0.1, per_symbol={"B": {"participation": 0.05}})
    result = backtest(np.array([[0.5, 0.5]] * 4), bars, capped)
    # A tenth and a twentieth of a volume of 1e6 units at 100, of a capital of 1e9.
    assert result.weights[0].tolist() == pytest.approx([0.01, 0.005])

    panel = bars.panel()
    impact = build_market(panel, replace(FREE, impact=1.0, per_symbol={"B": {"impact": 2.0}}), dtype=torch.float64)
    assert torch.equal(impact.table[4, :, 1], 2 * impact.table[4, :, 0])

    # A falls by 40 %: equity 1 − 0.95·0.4 = 0.62, of which A needs 0.1·0.57 and B its own share of 0.95.
    wild = flat_bars({"A": [100.0, 100.0, 60.0], "B": [100.0] * 3})
    for margin in (0.4, 0.5):
        config = replace(FREE, leverage=1.9, maintenance_margin=0.1, per_symbol={"B": {"maintenance_margin": margin}})
        assert not backtest(np.array([[0.95, 0.95]] * 3), wild, config).liquidated
    # At a price of 45: equity 0.4775 against 0.1·0.4275 + 0.5·0.95 = 0.51775.
    wild = flat_bars({"A": [100.0, 100.0, 45.0], "B": [100.0] * 3})
    assert backtest(np.array([[0.95, 0.95]] * 3), wild, config).liquidated


@pytest.mark.parametrize(
    ("table", "message"),
    [
        ({"A": {"fees": 0.1}}, "market.per_symbol.A: no setting 'fees'; there are fee, "),
        ({"A": {"fee": 0.1}}, "market.per_symbol.A.fee"),
        ({"A": 0.1}, "must be a table such as"),
    ],
)
def test_wrong_tables_are_refused(table: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        replace(FREE, per_symbol=table)


def test_the_table_of_symbols_is_a_setting_like_the_others() -> None:
    config = load_config(
        overrides=["market.per_symbol={ES: {lot: 50, tick: 0.25}}", "market.per_symbol.ES.fee=0.00001"]
    )
    assert config.market.per_symbol == {"ES": {"lot": 50, "tick": 0.25, "fee": 0.00001}}
    both = flat_bars({"A": [100.0] * 4, "B": [100.0] * 4})
    with pytest.raises(ConfigError, match=r"need env\.accounts=portfolio"):
        build_market(both.panel("per_symbol"), replace(FREE, per_symbol={"B": {"fee": 0.001}}))
