"""The demo: an agent on a market with a planted signal, compared with the known optimum."""

from __future__ import annotations

from pathlib import Path

from rich.console import Console

from tailguard.config import RunConfig, load_config
from tailguard.runs.runner import RunResult, train

DEMO_SETTINGS = (
    "data.validation=180d",
    "data.test=360d",
    "data.features=[return_24, range_volatility_24, taker_imbalance_1, taker_imbalance_6, taker_imbalance_24]",
    "env.num_envs=256",
    "env.episode_length=168",
    "ppo.n_steps=56",
    "ppo.minibatch_size=4096",
    "ppo.gamma=0.95",
    "ppo.gae_lambda=0.8",
    "ppo.learning_rate=linear:1e-3:1e-4",
    "ppo.network.hidden=[32]",
    "ppo.network.lstm_size=32",
    "risk.limit=-0.1",
    "risk.alpha=0.2",
    "training.total_timesteps=1500000",
)
"""Few features and a small network: the market is small, and the policy must generalise to unseen bars. A position
gains or loses within hours, so a short horizon captures its effect with far less noise.

The budget: the worst fifth of weeks may lose a tenth on average. A test year has ten such weeks, and their mean is
known to some 5 % of equity: a tighter limit, or the worst twentieth, could not be verified within a year. The
Lagrange multiplier is above zero only at the start, while the agent explores widely and breaks the budget."""


def demo_config(seed: int) -> RunConfig:
    """The demo's settings, a plain config file that `tailguard train` could read."""
    return load_config(overrides=[*DEMO_SETTINGS, f"training.seed={seed}"])


def run_demo(folder: Path, seed: int, console: Console) -> RunResult:
    """Train for a minute or two and show the result beside the baselines and the planted optimum."""
    return train(demo_config(seed), folder, console, replace=True)
