"""Baselines on prices whose right answer is plain."""

from __future__ import annotations

from dataclasses import replace
from datetime import timedelta

import numpy as np
import polars as pl
import pytest

import tailguard as tg
from tailguard.errors import ConfigError
from tailguard.evaluate import baselines
from tailguard.evaluate.baselines import (
    BASELINES,
    HOLD,
    BuyAndHold,
    Flat,
    Moment,
    MovingAverageCross,
    VolatilityTarget,
    baseline,
    random_timing,
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


def test_buy_and_hold_buys_again_after_a_gap(bars) -> None:
    rows = pl.int_range(len(bars))
    after = rows >= 600
    gapped = replace(
        bars,
        frame=bars.frame.with_columns(
            time=(pl.col("time") + pl.when(after).then(timedelta(days=3)).otherwise(timedelta(0))).cast(
                bars.frame["time"].dtype
            ),
            segment=pl.col("segment") + after.cast(pl.Int32),
        ),
    )
    held = tg.backtest(BuyAndHold(), gapped)
    assert np.count_nonzero(held.turnover) == 3  # bought, sold before the gap, bought
    assert (held.weights[600:] > 0.9).all()


def smooth_targets(rows: int, seed: int) -> np.ndarray:
    """A wandering position in [−1, 1], as an agent's would be."""
    steps = np.random.default_rng(seed).normal(size=rows + 24)
    return np.tanh(np.convolve(steps, np.ones(25) / 5, "valid"))[:, None]


def test_random_timing_turns_over_what_the_agent_does(bars) -> None:
    agent = tg.backtest(smooth_targets(len(bars), 1), bars)
    moved = [tg.backtest(random_timing(agent, bars, np.random.default_rng(seed)), bars).metrics for seed in range(2)]
    for figures in moved:
        assert figures["turnover_per_day"] == pytest.approx(agent.metrics["turnover_per_day"], rel=0.03)
        assert figures["exposure"] == pytest.approx(agent.metrics["exposure"], rel=0.03)
    assert len({figures["total_return"] for figures in moved}) == 2


def test_random_timing_keeps_trades_rare_where_they_were_rare(bars) -> None:
    targets = np.full((len(bars), 1), HOLD)
    targets[100::200] = np.array([[0.5], [-0.5], [0.0], [1.0], [0.3], [-0.2]])
    agent = tg.backtest(targets, bars)
    moved = tg.backtest(random_timing(agent, bars, np.random.default_rng(0)), bars)
    assert np.count_nonzero(moved.turnover) == np.count_nonzero(agent.turnover) == 6
    assert moved.turnover.sum() == pytest.approx(agent.turnover.sum(), rel=0.25)  # −0.2 to 0.5 at the seam is new


def test_random_timing_earns_nothing_without_drift_whatever_the_agent_knew() -> None:
    """Prices without drift, an agent that knows the next bar: at other times its gross gain averages to nothing."""
    gains, known = [], []
    for seed in range(8):
        market = tg.make_market(250, seed=seed, signal=0.0)
        panel = market.bars.panel()
        targets = np.append(np.sign(panel.close[1:] - panel.open[1:]), [[0.0]], axis=0) * 0.5
        agent = tg.backtest(targets, market.bars)
        moved = tg.backtest(random_timing(agent, market.bars, np.random.default_rng(seed)), market.bars)
        known.append(agent.pnl.mean())
        gains.append(moved.pnl.mean())
    error = np.std(gains, ddof=1) / np.sqrt(len(gains))
    assert abs(np.mean(gains)) < 2.5 * error
    assert np.mean(known) > 10 * np.mean(np.abs(gains))


def test_random_timing_refuses_other_bars(bars) -> None:
    agent = tg.backtest(np.zeros((len(bars), 1)), bars)
    with pytest.raises(ConfigError, match="these bars"):
        random_timing(agent, tg.make_market(300, seed=1, frequency="15m").bars, np.random.default_rng(0))


def test_baselines_keep_inside_the_allowed_leverage(bars) -> None:
    config = MarketConfig(leverage=0.5, allow_short=False)
    for name, policy in standard_baselines(0.5, allow_short=False).items():
        result = tg.backtest(policy, bars, config)
        targets = np.nan_to_num(result.targets)
        assert (targets >= 0).all(), name
        assert (targets <= 0.5).all(), name


def test_a_registered_baseline_is_the_last_of_the_standard_ones(monkeypatch) -> None:
    monkeypatch.setattr(baselines, "BASELINES", dict(BASELINES))
    baseline("a third")(lambda exposure, _: BuyAndHold(exposure / 3))
    found = standard_baselines(0.6)
    assert list(found) == ["buy & hold", "moving-average cross", "volatility target", "flat", "a third"]
    assert found["a third"] == BuyAndHold(0.6 / 3)
    assert found["buy & hold"] == BuyAndHold(0.6)
    for name, message in (("a third", "registered already"), ("agent", "reserved"), (" ", "printable")):
        with pytest.raises(ConfigError, match=message):
            baseline(name)


def test_impossible_windows_are_refused() -> None:
    with pytest.raises(ConfigError, match="slow"):
        MovingAverageCross(fast=50, slow=50)
    with pytest.raises(ConfigError, match="window"):
        VolatilityTarget(window=1)


FREE = MarketConfig(fee=0.0, half_spread=0.0, impact=0.0, funding_rate=0.0)


def thin(bars, share: float):
    """The same bars and an account so large that one bar's volume fills this share of it, at the median volume."""
    volume = float((bars.frame["volume"] * bars.frame["open"]).median())
    return replace(FREE, participation=0.1, capital=0.1 * volume / share)


def test_buy_and_hold_asks_until_it_is_filled(bars) -> None:
    """By hand: each bar buys what its volume takes, until the target of that bar is reached; then the units stay."""
    config, panel = thin(bars, 0.03), bars.panel()
    held = tg.backtest(BuyAndHold(), bars, config)
    units, cash, full, by_hand = 0.0, 1.0, False, [1.0]
    for row in range(1, panel.rows):
        first, last = float(panel.open[row, 0]), float(panel.close[row, 0])
        if not full:
            most = 0.1 * float(panel.volume[row, 0]) * first / config.capital
            wanted = cash + units * first - units * first  # all of the equity, less what is held
            bought = min(wanted, most)
            full = bought == wanted
            units, cash = units + bought / first, cash - bought
        by_hand.append(cash + units * last)
    np.testing.assert_allclose(held.equity, by_hand, rtol=1e-9)
    assert full
    filled = int(np.flatnonzero(held.turnover).max())
    assert filled > 15
    # From there on it is what the prices are, as without a cap.
    assert held.equity[-1] / held.equity[filled + 1] == pytest.approx(panel.close[-1, 0] / panel.close[filled + 1, 0])


def test_every_asset_is_bought_to_its_own_end() -> None:
    """One asset with a hundredth of the other's volume: the liquid one is bought once and left alone."""
    market = tg.make_market(400, seed=4, assets=2).bars
    first = market.symbols[0]
    scarce = market.frame.with_columns(
        volume=pl.when(pl.col("symbol") == first).then(pl.col("volume") / 100).otherwise(pl.col("volume"))
    )
    volume = float((scarce.filter(pl.col("symbol") == first)["volume"] * scarce["open"][0]).median())
    config = replace(FREE, participation=0.1, capital=0.1 * volume / 0.02)
    held = tg.backtest(BuyAndHold(), replace(market, frame=scarce), config)
    asked = ~np.isnan(held.targets)
    assert asked[:, 1].sum() == 1
    assert 10 < asked[:, 0].sum() < 100
    last = int(np.flatnonzero(asked[:, 0]).max())
    assert held.weights[last, 0] == pytest.approx(0.5, abs=0.02)


def test_a_change_of_side_is_completed_too(bars) -> None:
    capped, free = (tg.backtest(MovingAverageCross(), bars, config) for config in (thin(bars, 0.2), FREE))
    sides = np.sign(free.weights[:, 0])
    # Twenty bars after a change of side, ten of which fill a position from −1 to 1, both hold the same.
    steady = np.array([row > 20 and abs(sides[row - 20 : row + 1].sum()) == 21 for row in range(len(sides))])
    assert steady.sum() > 100
    np.testing.assert_allclose(np.sign(capped.weights[steady, 0]), sides[steady])
    assert (np.abs(capped.weights[steady, 0]) > 0.6).mean() > 0.95


def test_what_a_gap_left_unsold_does_not_keep_it_from_buying_again(bars) -> None:
    after = pl.int_range(len(bars)) >= 600
    gapped = replace(
        bars,
        frame=bars.frame.with_columns(
            time=(pl.col("time") + pl.when(after).then(timedelta(days=3)).otherwise(timedelta(0))).cast(
                bars.frame["time"].dtype
            ),
            segment=pl.col("segment") + after.cast(pl.Int32),
        ),
    )
    held = tg.backtest(BuyAndHold(), gapped, thin(bars, 0.1))
    assert 0 < held.weights[598, 0] < 0.99  # the last bar before the gap took a part of the sale
    assert held.weights[640, 0] > 0.99
