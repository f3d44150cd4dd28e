"""A market of 2,500 bars, members that train in milliseconds, and their workshop."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from tailguard.config import RunConfig, load_config
from tailguard.experiment.build import Experiment, build
from tailguard.population.options import PopulationSettings
from tailguard.population.space import SearchSpace
from tailguard.population.workshop import Workshop

SMALL = (
    "data.synthetic_bars=2500",
    "data.synthetic_signal=30",
    "data.features=[return_24, taker_imbalance_6]",
    "data.embargo=1d",
    "env.num_envs=8",
    "env.episode_length=32",
    "pathwise.n_steps=16",
    "pathwise.network.hidden=[8]",
    "pathwise.network.lstm_size=8",
    "ppo.n_steps=16",
    "ppo.minibatch_size=128",
    "ppo.epochs=1",
    "ppo.network.hidden=[8]",
    "ppo.network.lstm_size=8",
    "training.total_timesteps=1024",
    "training.threads=1",
)
"""Eight iterations of 128 steps."""


def is_alive(process: int) -> bool:
    """Whether there is such a process; one that has ended and waits for its parent to notice is not alive."""
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    status = Path(f"/proc/{process}/stat")
    return not status.exists() or status.read_text().rpartition(")")[2].split()[0] != "Z"


@pytest.fixture(scope="session")
def tiny_config() -> Callable[..., RunConfig]:
    return lambda *changes: load_config(overrides=[*SMALL, *changes])


@pytest.fixture(scope="session")
def experiment(tiny_config: Callable[..., RunConfig]) -> Experiment:
    return build(tiny_config())


@pytest.fixture(scope="session")
def two_settings() -> SearchSpace:
    return SearchSpace.parse(
        {"pathwise.learning_rate": {"log": [1e-4, 1e-1]}, "pathwise.max_grad_norm": {"linear": [0.1, 2.0]}}
    )


@pytest.fixture(scope="session")
def workshop(experiment: Experiment, two_settings: SearchSpace) -> Workshop:
    return Workshop.of(experiment, PopulationSettings(), two_settings)
