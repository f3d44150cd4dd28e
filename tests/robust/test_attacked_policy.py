"""An attacked agent in the place of the agent: in backtests, in evaluations, alone and in an ensemble."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import numpy as np
import pytest
import torch

import tailguard as tg
from tailguard.errors import ConfigError
from tailguard.evaluate.held_out import episodes_on
from tailguard.robust.attacked_policy import AttackedPolicy
from tailguard.robust.attacks import Attack, attackable

SMALL: dict[str, Any] = {"hidden": (16,), "lstm_size": 8, "critic": "scalar"}


@pytest.fixture(scope="module")
def market() -> Any:
    return tg.make_market(3_000, seed=1, signal=20.0)


@pytest.fixture(scope="module")
def agents(market: Any) -> list[Any]:
    """Two agents that have learned a little on the planted market: their actions answer to the features."""
    trained = []
    for seed in range(2):
        env = tg.TradingEnv(market.bars, num_envs=64, episode_length=32)
        agent = tg.PathwiseLearner(env, n_steps=16, seed=seed, **SMALL)
        trained.append(agent.learn(64 * 16 * 20))
    return trained


def test_without_a_perturbation_it_is_the_agent(agents: list[Any], market: Any) -> None:
    bars = market.bars
    clean = tg.backtest(agents[0], bars, warn_in_sample=False)
    attacked = tg.backtest(AttackedPolicy(agents[0], Attack("random", 0.0)), bars, warn_in_sample=False)
    np.testing.assert_allclose(attacked.weights, clean.weights, atol=1e-6)


def test_a_backtest_under_attack_changes_positions_and_costs_money(agents: list[Any], market: Any) -> None:
    short = market.bars.between(market.bars.start, market.bars.start + timedelta(hours=1_000))
    results, policies = {}, {}
    for kind in ("random", "pgd"):
        policies[kind] = AttackedPolicy(agents[0], Attack(kind, 0.2, steps=5))  # type: ignore[arg-type]
        results[kind] = tg.backtest(policies[kind], short, warn_in_sample=False)
    assert policies["pgd"].mean_shift > 2 * policies["random"].mean_shift > 0
    clean = tg.backtest(agents[0], short, warn_in_sample=False)
    assert results["pgd"].equity[-1] < clean.equity[-1]


def test_the_memory_is_the_one_that_the_attacked_observations_leave(agents: list[Any]) -> None:
    """Feeding the agent what the attack showed it gives the same actions, step for step."""
    agent = agents[0]
    policy = AttackedPolicy(agent, Attack(epsilon=0.3, steps=3))
    memories, state = policy.initial_memories(4), None
    draw = torch.Generator().manual_seed(0)
    start = torch.zeros(4, dtype=torch.bool)
    for _ in range(5):
        obs = torch.randn(4, agent.env.observation_size, generator=draw)
        decision = policy.decide(obs, memories, start)
        memories = decision.memories
        expected, state = agent.predict(decision.obs.numpy(), state=state, deterministic=True)
        np.testing.assert_allclose(decision.action.numpy(), expected, atol=1e-6)
        assert (decision.obs - obs).abs().max() > 0


def test_an_ensemble_sees_one_feed(agents: list[Any]) -> None:
    """The attack is on the mean action of the members, all of which see the same observation."""
    ensemble = tg.Ensemble(agents, 0.8)
    obs = torch.randn(16, agents[0].env.observation_size, generator=torch.Generator().manual_seed(1))
    start = torch.ones(16, dtype=torch.bool)
    shifts = {}
    for kind in ("random", "pgd"):
        policy = AttackedPolicy(ensemble, Attack(kind, 0.2))  # type: ignore[arg-type]
        decision = policy.decide(obs, policy.initial_memories(16), start)
        expected, _ = ensemble.predict(decision.obs.numpy())
        np.testing.assert_allclose(decision.action.numpy(), expected, atol=1e-6)
        clean, _ = ensemble.predict(obs.numpy())
        np.testing.assert_allclose(decision.clean.numpy(), clean, atol=1e-6)
        shifts[kind] = float((decision.action - decision.clean).abs().mean())
    assert shifts["pgd"] > 2 * shifts["random"]


def test_many_episodes_at_once_through_predict(agents: list[Any], market: Any) -> None:
    (episodes,) = episodes_on(agents[0].spec, market.bars)
    clean = episodes.trade(agents[0])
    attacked = episodes.trade(AttackedPolicy(agents[0], Attack(epsilon=0.3, steps=5)))
    assert attacked.growth.mean() < clean.growth.mean()


def test_account_and_clock_are_shown_as_they_are(agents: list[Any]) -> None:
    agent = agents[0]
    policy = AttackedPolicy(agent, Attack(epsilon=0.5, target="critic"))
    obs = torch.randn(8, agent.env.observation_size)
    decision = policy.decide(obs, policy.initial_memories(8), torch.ones(8, dtype=torch.bool))
    free = attackable(agent.env) > 0
    assert torch.equal(decision.obs[:, ~free], obs[:, ~free])
    assert (decision.obs[:, free] != obs[:, free]).any(0).all()
    assert (~free).sum() >= 8


def test_a_window_cannot_be_attacked_bar_by_bar(agents: list[Any]) -> None:
    with pytest.raises(ConfigError, match="bar by bar"):
        AttackedPolicy(agents[0], Attack(through_time=True))
