"""Baselines on prices whose right answer is plain."""

from __future__ import annotations

import numpy as np
import pytest

import tailguard as tg
from tailguard.errors import ConfigError
from tailguard.evaluate.baselines import (
    BuyAndHold,
    Flat,
    Moment,
    MovingAverageCross,
    VolatilityTarget,
    standard_baselines,
)
from tailguard.market import MarketConfig


def moment(close: np.ndarray, weights: float = 0.0, first: bool = False) -> Moment:
    prices = close[:, None]
    return Moment(
        row=len(close) - 1,
        first=first,
        time_ms=0,
        open=prices,
        high=prices,
        low=prices,
        close=prices,
        volume=np.ones_like(prices),
        weights=np.array([weights]),
        equity=1.0,
        bars_per_year=8766.0,
    )


def test_moving_averages_go_with_the_trend_and_trade_on_a_change_only() -> None:
    rising, falling = np.linspace(100, 200, 300), np.linspace(200, 100, 300)
    cross = MovingAverageCross(fast=10, slow=50)
    assert cross(moment(rising)) == [1.0]
    assert cross(moment(falling)) == [-1.0]
    assert np.isnan(cross(moment(rising, weights=0.97)))
    assert cross(moment(rising, weights=-0.97)) == [1.0]
    assert cross(moment(rising[:49])) == [0.0]
    long_only = MovingAverageCross(fast=10, slow=50, allow_short=False)
    assert long_only(moment(falling, weights=0.97)) == [0.0]
    assert np.isnan(long_only(moment(falling)))  # flat already


def test_volatility_target_divides_by_the_trailing_volatility() -> None:
    # Log prices that step ±1 % in turn: the volatility of a bar is 1 % (ddof 1 over 168 bars: √(168/167) more).
    close = 100 * np.exp(0.01 * (np.arange(400) % 2))
    yearly = 0.01 * np.sqrt(168 / 167) * np.sqrt(8766)
    target = VolatilityTarget(target=0.2, window=168)
    assert target(moment(close)) == pytest.approx(0.2 / yearly)
    assert np.isnan(target(moment(close, weights=0.2 / yearly + 0.05)))
    assert target(moment(np.full(400, 100.0))) == [1.0]  # no movement: full exposure, not more


def test_flat_never_trades_and_buy_and_hold_trades_once(bars) -> None:
    flat = tg.backtest(Flat(), bars)
    assert (flat.equity == 1.0).all()
    held = tg.backtest(BuyAndHold(), bars, MarketConfig(funding_rate=0.0, impact=0.0))
    assert np.count_nonzero(held.turnover) == 1
    panel = bars.panel()
    # Bought with all equity at the second bar's open, costs taken from cash: final value = units · close − costs.
    expected = panel.close[-1, 0] / panel.open[1, 0] - 0.0006
    assert held.equity[-1] == pytest.approx(expected, rel=1e-12)


def test_baselines_keep_inside_the_allowed_leverage(bars) -> None:
    config = MarketConfig(leverage=0.5, allow_short=False)
    for name, policy in standard_baselines(0.5, allow_short=False).items():
        result = tg.backtest(policy, bars, config)
        targets = np.nan_to_num(result.targets)
        assert (targets >= 0).all(), name
        assert (targets <= 0.5).all(), name


def test_impossible_windows_are_refused() -> None:
    with pytest.raises(ConfigError, match="slow"):
        MovingAverageCross(fast=50, slow=50)
    with pytest.raises(ConfigError, match="window"):
        VolatilityTarget(window=1)
