"""A tiny learner on a tiny market, and runs of a second."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from tailguard.algorithm.ppo import DistributionalPPO
from tailguard.config import RunConfig, load_config
from tailguard.data.bars import Bars
from tailguard.envs.trading import TradingEnv

SMALL = (
    "data.synthetic_bars=2500",
    "data.synthetic_signal=30",
    "data.features=[return_24, taker_imbalance_6]",
    "data.embargo=1d",
    "env.num_envs=8",
    "env.episode_length=32",
    "learner=ppo",
    "ppo.n_steps=16",
    "ppo.minibatch_size=64",
    "ppo.epochs=1",
    "ppo.learning_rate=linear:1e-2:0",
    "ppo.network.hidden=[8]",
    "ppo.network.lstm_size=8",
    "training.total_timesteps=768",
    "training.checkpoint_steps=256",
    "training.evaluation_steps=256",
    "training.threads=1",
)
"""Six iterations of 128 steps, a checkpoint after every other one."""


@pytest.fixture(scope="session")
def small_config() -> Callable[..., RunConfig]:
    """The config of a run of a second, with changes such as `training.seed=3`."""
    return lambda *changes: load_config(overrides=[*SMALL, *changes])


@pytest.fixture
def quiet() -> Console:
    return Console(quiet=True)


@pytest.fixture
def make_agent(bars: Bars) -> Callable[..., DistributionalPPO]:
    """A learner that learns in milliseconds, on a market of 1,200 bars or others."""

    def make(market: Bars | None = None, **options: Any) -> DistributionalPPO:
        env = TradingEnv(bars if market is None else market, num_envs=4, episode_length=24, stagger=12)
        sizes = {"n_steps": 12, "minibatch_size": 24, "hidden": (6,), "lstm_size": 5, "quantiles": 4, "epochs": 1}
        return DistributionalPPO(env, **(sizes | options))

    return make


@pytest.fixture
def lines_of() -> Callable[[Path], list[dict[str, Any]]]:
    """A run's figures without those of the clock."""
    import json

    def read(folder: Path) -> list[dict[str, Any]]:
        lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
        return [{name: value for name, value in line.items() if name != "time/fps"} for line in lines]

    return read
