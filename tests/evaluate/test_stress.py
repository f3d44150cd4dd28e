"""Stress: each scenario is an ordinary backtest with one thing changed."""

from __future__ import annotations

import numpy as np
import pytest

import tailguard as tg
from tailguard.errors import ConfigError
from tailguard.evaluate.stress import scaled_costs, stress_table
from tailguard.market import MarketConfig


@pytest.fixture(scope="module")
def targets(bars) -> np.ndarray:
    return np.where(np.arange(len(bars)) % 120 < 60, 0.8, -0.4)[:, None]


def test_costs_scale_kind_by_kind_while_prices_stay(bars, targets) -> None:
    config = MarketConfig(borrow_rate=0.05, leverage=0.8)
    table = dict(stress_table(targets, bars, config, delays=()))
    assert list(table) == ["costs ×0", "costs ×1", "costs ×2", "costs ×3"]
    free = table["costs ×0"]
    np.testing.assert_array_equal(free.net, free.pnl)
    np.testing.assert_array_equal(table["costs ×1"].equity, tg.backtest(targets, bars, config).equity)
    for kind in ("fee", "spread", "impact", "funding", "borrow"):
        once, thrice = (table[f"costs ×{factor}"].costs[kind].sum() for factor in (1, 3))
        assert once > 0, kind
        # The account shrinks a little faster, and the impact of its orders with it.
        assert thrice == pytest.approx(3 * once, rel=0.03), kind
    growth = [result.equity[-1] for result in table.values()]
    assert growth == sorted(growth, reverse=True)


def test_later_fills_are_the_delayed_backtest(bars, targets) -> None:
    table = dict(stress_table(targets, bars, cost_factors=(), delays=(1, 3)))
    assert list(table) == ["fills 1 bar later", "fills 3 bars later"]
    np.testing.assert_array_equal(table["fills 3 bars later"].equity, tg.backtest(targets, bars, delay=3).equity)


def test_an_agent_is_stressed_with_its_own_costs_and_with_noise() -> None:
    bars = tg.make_market(400, seed=5).bars
    config = MarketConfig(fee=0.001)
    env = tg.TradingEnv(bars, config, num_envs=4, episode_length=32, features=["return_1", "return_24"])
    agent = tg.DistributionalPPO(env, n_steps=16, hidden=(8,), memory="none", seed=1).learn(64)
    begun: list[str] = []
    table = dict(stress_table(agent, bars, cost_factors=(1.0,), delays=(1,), before_each=begun.append))
    assert list(table) == begun == ["costs ×1", "fills 1 bar later", "noise 0.1 sd", "noise 0.3 sd"]
    plain = table["costs ×1"]
    np.testing.assert_allclose(plain.costs["fee"], 0.001 * plain.turnover, rtol=1e-9)
    np.testing.assert_array_equal(plain.equity, tg.backtest(agent, bars).equity)
    changed = [np.abs(table[f"noise {level} sd"].targets - plain.targets).mean() for level in (0.1, 0.3)]
    assert 0 < changed[0] < changed[1]
    again = dict(stress_table(agent, bars, cost_factors=(), delays=(), noise_levels=(0.3,)))
    np.testing.assert_array_equal(again["noise 0.3 sd"].equity, table["noise 0.3 sd"].equity)


def test_a_factor_beyond_what_the_market_allows_says_so() -> None:
    with pytest.raises(ConfigError, match=r"costs ×3: market\.fee: 0\.09.*smaller cost factors"):
        scaled_costs(MarketConfig(fee=0.03), 3.0)
