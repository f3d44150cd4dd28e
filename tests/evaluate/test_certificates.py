"""Certificates on bars: every decision is bounded, and no attack of that size does more."""

from __future__ import annotations

import pytest

import tailguard as tg
from tailguard.errors import ConfigError
from tailguard.evaluate.certificates import certify
from tailguard.evaluate.held_out import HeldOutEpisodes, episodes_on, spaced_starts
from tailguard.robust.attacked_policy import AttackedPolicy
from tailguard.robust.attacks import Attack


def test_no_attack_moves_decisions_further_than_the_certificate() -> None:
    bars = tg.make_market(1_200, seed=4, signal=20).bars
    features = ["return_24", "taker_imbalance_6"]
    env = tg.TradingEnv(bars, num_envs=16, episode_length=32, features=features)
    settings = {"n_steps": 16, "hidden": (8,), "lstm_size": 6, "learning_rate": "linear:2e-2:2e-3", "critic_epochs": 1}
    agent = tg.PathwiseLearner(env, **settings).learn(16 * 16 * 20)
    ensemble = tg.Ensemble([agent], 0.7)
    small, large = certify(ensemble, bars, (0.05, 0.2))
    (part,) = episodes_on(agent.spec, bars)
    episodes = HeldOutEpisodes(part.task, spaced_starts(part.starts, 32), 32)
    assert small.decisions == large.decisions == 32 * len(episodes)
    assert 0 < small.mean < large.mean <= large.p95 <= large.largest
    assert 1 >= small.sign_fixed >= large.sign_fixed >= 0
    attacked = AttackedPolicy(ensemble, Attack("pgd", 0.2, steps=5))
    episodes.trade(attacked)
    # Near to the bound, and never beyond it.
    assert 0.3 * large.mean < attacked.mean_shift <= large.mean
    assert attacked.flips <= 1 - large.sign_fixed
    assert "wrong by up to 0.2 standard deviations" in str(large)
    assert f"{32 * len(episodes):,} decisions" in str(large)


def test_bars_shorter_than_an_episode_have_no_certificate() -> None:
    bars = tg.make_market(1_000, seed=4).bars
    env = tg.TradingEnv(bars, num_envs=4, episode_length=64, features=["return_24"])
    agent = tg.DistributionalPPO(env, n_steps=16, hidden=(8,), lstm_size=6)
    assert certify(agent, bars.between(bars.end_points[1] - 40 * bars.frequency, bars.end_points[1], 200)) == []
    assert len(certify(agent, bars, (0.1,))) == 1


def test_a_policy_without_bounds_says_why() -> None:
    bars = tg.make_market(1_000, seed=4).bars
    env = tg.TradingEnv(bars, num_envs=4, episode_length=64, features=["return_24"], shared_scaling=True)
    agent = tg.DistributionalPPO(env, n_steps=16, hidden=(8,), lstm_size=6, encoder="shared")
    with pytest.raises(ConfigError, match=r"certificates are for network\.encoder=flat"):
        certify(agent, bars, (0.1,))
