"""Small learners on a small market."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import pytest
import torch

import tailguard as tg
from tailguard.algorithm.ppo import DistributionalPPO
from tailguard.data.bars import Bars

SMALL: dict[str, Any] = {"n_steps": 8, "hidden": (8,), "lstm_size": 6, "critic": "scalar"}


@cache
def bars() -> Bars:
    return tg.make_market(1_200, seed=3, signal=20.0).bars


@pytest.fixture(scope="session")
def make_env() -> Callable[..., tg.TradingEnv]:
    def make(num_envs: int = 8, episode_length: int = 16) -> tg.TradingEnv:
        return tg.TradingEnv(bars(), num_envs=num_envs, episode_length=episode_length)

    return make


@pytest.fixture(scope="session")
def make_ppo(make_env: Callable[..., tg.TradingEnv]) -> Callable[..., DistributionalPPO]:
    """PPO on the small market; the head's weights are of ordinary size, so that actions answer to observations."""

    def make(**options: Any) -> DistributionalPPO:
        learner = DistributionalPPO(make_env(), **({"minibatch_size": 32, "epochs": 2, **SMALL} | options))
        with torch.no_grad():
            learner.policy.action_head.linear.weight.mul_(50.0)
        return learner

    return make


@pytest.fixture(scope="session")
def make_pathwise(make_env: Callable[..., tg.TradingEnv]) -> Callable[..., tg.PathwiseLearner]:
    def make(**options: Any) -> tg.PathwiseLearner:
        learner = tg.PathwiseLearner(make_env(), **(SMALL | options))
        with torch.no_grad():
            learner.policy.action_head.linear.weight.mul_(50.0)
        return learner

    return make
