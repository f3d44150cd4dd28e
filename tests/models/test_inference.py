"""The policy asked step by step gives the actions of `predict`, bit for bit."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

import tailguard as tg
from tailguard.models.inference import InferencePolicy, PredictPolicy


@pytest.fixture(scope="module")
def env() -> tg.TradingEnv:
    bars = tg.make_market(1_200, assets=2, seed=3).bars
    return tg.TradingEnv(bars, num_envs=4, episode_length=16, accounts="portfolio")


@pytest.mark.parametrize(
    "network",
    [
        {},
        {"memory": "none", "hidden": (16, 8), "activation": "relu"},
        {"memory": "shared", "lstm_layers": 2, "hidden": (), "std": "state"},
        {"squash": False, "activation": "silu"},
        {"precision": "bfloat16"},
    ],
    ids=["default", "no memory", "two layers", "clipped", "bfloat16"],
)
def test_actions_are_those_of_predict(env: tg.TradingEnv, network: dict[str, Any]) -> None:
    agent = tg.DistributionalPPO(env, n_steps=8, seed=5, **network).learn(64)
    policy = agent.inference_policy()
    assert isinstance(policy, InferencePolicy)
    generator = np.random.default_rng(0)
    memory = None
    with torch.inference_mode():
        for number in range(60):
            seen = generator.normal(0, 3, (1, env.observation_size)).astype(np.float32)
            reset = number % 17 == 0
            wanted, memory = agent.predict(seen, state=memory, episode_start=np.array([reset]), deterministic=True)
            np.testing.assert_array_equal(policy(torch.from_numpy(seen), reset).numpy(), wanted)


def test_choices_are_those_of_predict() -> None:
    agent = tg.DistributionalPPO("CartPole-v1", num_envs=2, n_steps=8, seed=5).learn(32)
    policy, memory = agent.inference_policy(), None
    generator = np.random.default_rng(1)
    with torch.inference_mode():
        for number in range(40):
            seen = generator.normal(0, 1, (1, 4)).astype(np.float32)
            wanted, memory = agent.predict(seen, memory, np.array([number == 0]), deterministic=True)
            assert policy(torch.from_numpy(seen), number == 0).item() == wanted.item()


def test_a_subclass_that_predicts_in_its_own_way_is_asked_its_own_way(env: tg.TradingEnv) -> None:
    class Contrary(tg.DistributionalPPO):
        def predict(self, *args: Any, **options: Any) -> Any:
            action, memory = super().predict(*args, **options)
            return -action, memory

    agent = Contrary(env, n_steps=8, seed=5)
    policy = agent.inference_policy()
    assert isinstance(policy, PredictPolicy)
    seen = np.ones((1, env.observation_size), np.float32)
    wanted, _ = tg.DistributionalPPO.predict(agent, seen, deterministic=True)
    np.testing.assert_array_equal(policy(torch.from_numpy(seen), True).numpy(), -wanted)
