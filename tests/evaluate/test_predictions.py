"""Predictions beside outcomes: the critics' own words at each bar, and the discounted rewards that followed."""

from __future__ import annotations

import numpy as np
import pytest
import torch

import tailguard as tg
from tailguard.data.bars import Bars
from tailguard.evaluate.predictions import discounted_returns, predictions


@pytest.fixture(scope="module")
def market() -> Bars:
    return tg.make_market(1_500, seed=5, signal=20).bars


def agent_on(market: Bars, reward: str = "log", **options: object) -> tg.DistributionalPPO:
    env = tg.TradingEnv(
        market, num_envs=4, episode_length=48, features=["return_24", "taker_imbalance_6"], reward=reward
    )
    sizes = {"n_steps": 16, "hidden": (8,), "lstm_size": 8, "quantiles": 10, "gamma": 0.9, "epochs": 1}
    return tg.DistributionalPPO(env, **(sizes | options)).learn(256)


def test_returns_are_the_discounted_sums_of_what_followed() -> None:
    rewards = np.random.default_rng(0).normal(size=30)
    expected = [sum(0.9**k * rewards[t + k] for k in range(7)) for t in range(24)]
    np.testing.assert_allclose(discounted_returns(rewards, 0.9, 7), expected)


@pytest.mark.parametrize("memory", ["none", "separate"])
def test_what_is_said_at_a_bar_is_what_the_critics_say_step_by_step(market: Bars, memory: str) -> None:
    agent = agent_on(market, memory=memory, twin_critics=True)
    found = predictions(agent, market)
    assert found is not None
    result = tg.backtest(agent, market)
    assert found.horizon == 44  # 0.9^44 is the first power below 0.01
    assert len(found.realised) == len(result.net) - 43
    rewards = np.log1p(result.net)
    assert found.realised[100] == pytest.approx(sum(0.9**k * rewards[100 + k] for k in range(44)))
    # The same observations, one row at a time: memories are cleared where the backtest cleared them.
    shown: list[np.ndarray] = []
    original = agent.predict

    def watched(observation, state=None, episode_start=None, deterministic=False):
        shown.append(np.array(observation[0]))
        return original(observation, state, episode_start, deterministic)

    agent.predict = watched
    tg.backtest(agent, market)
    moments, network = agent.observation_moments, agent.policy
    state = list(network.initial_state(1))
    for row, observation in enumerate(shown[:120]):
        start = torch.tensor([row % 48 == 0])
        scaled = ((torch.as_tensor(observation) - moments.mean.float()) / moments.std.float())[None]
        scaled = scaled.clamp(-agent.config.observation_clip, agent.config.observation_clip)
        said, after = [], list(state)
        for critic, trunk in zip(network.each_critic(), network.critic_trunks, strict=True):
            with torch.no_grad():
                features, after[trunk] = network.each_trunk()[trunk].step(scaled, state[trunk], start)
                said.append(agent.return_moments.denormalise(critic.distribution(features)))
        state = after
        np.testing.assert_allclose(found.predicted[row], torch.stack(said).mean(0)[0].numpy(), rtol=2e-4, atol=2e-6)


def test_where_there_is_nothing_to_compare_there_is_nothing(market: Bars) -> None:
    assert predictions(agent_on(market, critic="scalar"), market) is None
    assert predictions(agent_on(market, reward="pnl"), market) is None
    assert predictions(agent_on(market, gamma=1.0), market) is None
    assert predictions(agent_on(market, gamma=0.999), market) is None  # 4,603 bars until a reward is forgotten
