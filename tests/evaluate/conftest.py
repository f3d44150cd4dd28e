"""A run of a second, to look at from all sides."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from rich.console import Console

from tailguard.config import load_config
from tailguard.experiment.trained_run import TrainedRun, open_run
from tailguard.runs.runner import train

SMALL = (
    "data.synthetic_bars=2000",
    "data.synthetic_signal=30",
    "data.features=[return_24, taker_imbalance_6]",
    "data.embargo=1d",
    "data.validation=0.1",
    "env.num_envs=8",
    "env.episode_length=32",
    "learner=ppo",
    "ppo.n_steps=16",
    "ppo.minibatch_size=64",
    "ppo.epochs=1",
    "ppo.gamma=0.95",
    "ppo.network.hidden=[8]",
    "ppo.network.lstm_size=8",
    "training.total_timesteps=384",
    "training.threads=1",
)


@pytest.fixture(scope="session")
def train_small() -> Callable[..., Path]:
    """Train a small run in a folder, with changes such as `ppo.gamma=0.9`, and return the folder."""

    def small(folder: Path, *changes: str) -> Path:
        train(load_config(overrides=[*SMALL, *changes]), folder, Console(quiet=True))
        return folder

    return small


@pytest.fixture(scope="session")
def run_folder(tmp_path_factory: pytest.TempPathFactory, train_small: Callable[..., Path]) -> Path:
    return train_small(tmp_path_factory.mktemp("runs") / "small")


@pytest.fixture(scope="session")
def other_folder(tmp_path_factory: pytest.TempPathFactory, train_small: Callable[..., Path]) -> Path:
    """The same market, learned from with another discount."""
    return train_small(tmp_path_factory.mktemp("runs") / "other", "ppo.gamma=0.9")


@pytest.fixture(scope="session")
def trained(run_folder: Path) -> TrainedRun:
    return open_run(run_folder)
