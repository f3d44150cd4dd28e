"""The shield: a stated shock cannot break the budget, whatever the policy wants, in training and in a backtest."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import tailguard as tg
from tailguard.envs.shield import Shield
from tailguard.envs.spec import TradingSpec
from tailguard.errors import ConfigError


@given(
    equity=st.floats(0.5, 2.0),
    weights=st.lists(st.floats(-3, 3), min_size=1, max_size=3),
    shock=st.floats(0.01, 1.0),
    budget=st.floats(0.01, 1.0),
)
def test_a_shock_against_every_position_keeps_the_budget(
    equity: float, weights: list[float], shock: float, budget: float
) -> None:
    """As long as it was kept before: then E·(1 − g·shock) ≥ 1 − budget, and nothing is cut that need not be."""
    wanted = torch.tensor([weights], dtype=torch.float64)
    found, held_back = Shield(shock, budget).apply(wanted, torch.tensor([equity]), torch.ones(1))
    gross = float(found.abs().sum())
    left = equity * (1 - gross * shock)
    if equity <= 1 - budget:
        assert gross == 0
    else:
        assert left >= 1 - budget - 1e-6
    if equity * (1 - float(wanted.abs().sum()) * shock) >= 1 - budget + 1e-6:
        assert torch.equal(found, wanted)
        assert not bool(held_back)


def test_the_cap_by_hand() -> None:
    """Budget 4 %, shock 10 %: 0.4 at the start, (1 − 0.96/0.98)/0.1 = 0.204 after a loss of 2 %, 0 after 5 %."""
    cap = Shield(0.1, 0.04).cap(torch.tensor([1.0, 0.98, 0.95]), torch.ones(3))
    assert cap.tolist() == pytest.approx([0.4, 0.20408, 0.0], abs=1e-5)


@pytest.fixture(scope="module")
def bars() -> Any:
    return tg.make_market(1_200, seed=0).bars


def test_training_and_backtest_hold_back_alike(bars: Any) -> None:
    """An agent that always wants everything: the exposure at every decision is the cap's, in both."""
    shield = Shield(0.2, 0.04)
    env = tg.TradingEnv(bars, num_envs=4, episode_length=64, shield=shield)
    env.reset(0)
    assert env.state is not None
    for _ in range(20):
        before = env.state
        target, held_back = env.task.decide(torch.ones(4, 1), before)
        cap = shield.cap(before.market.equity, before.start_equity)
        assert held_back.all()
        assert torch.allclose(target[:, 0], cap.float())
        step = env.step(torch.ones(4, 1))
        assert step.outcome["shielded"].all()
    agent = tg.DistributionalPPO(
        env, n_steps=16, minibatch_size=64, hidden=(4,), lstm_size=4, squash=False, std="state"
    )
    with torch.no_grad():
        agent.policy.action_head.linear.bias.copy_(torch.tensor([50.0, 0.0]))  # type: ignore[union-attr, operator]
    result = tg.backtest(agent, bars)
    assert result.shielded.all()
    assert result.metrics["shielded"] == 1
    starts = np.arange(len(result.net)) // 64 * 64
    caps = [max((1 - 0.96 * result.equity[start] / result.equity[row]) / 0.2, 0.0) for row, start in enumerate(starts)]
    np.testing.assert_allclose(np.abs(result.targets[:, 0]), caps, atol=1e-9)
    assert agent.iterate()["data/shielded"] == 1


def test_without_a_shield_nothing_is_held_back(bars: Any) -> None:
    env = tg.TradingEnv(bars, num_envs=4, episode_length=64)
    env.reset(0)
    assert not env.step(torch.ones(4, 1)).outcome["shielded"].any()
    assert float(env.state.market.weights[0, 0]) > 0.9  # type: ignore[union-attr]


def test_the_shield_is_saved_with_the_agent(bars: Any) -> None:
    spec = TradingSpec.of(tg.TradingEnv(bars, num_envs=2, episode_length=64, shield=Shield(0.1, 0.05)))
    assert spec.shield == TradingSpec.from_dict(spec.to_dict()).shield == Shield(0.1, 0.05)


@pytest.mark.parametrize(("shock", "budget"), [(0.0, 0.1), (1.5, 0.1), (0.1, 0.0), (0.1, 2.0)])
def test_a_shield_that_makes_no_sense_is_refused(shock: float, budget: float) -> None:
    with pytest.raises(ConfigError, match="shield"):
        Shield(shock, budget)
