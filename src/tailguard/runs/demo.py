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
    "learner=pathwise",
    "pathwise.n_steps=24",
    "pathwise.network.hidden=[32]",
    "pathwise.network.lstm_size=32",
    "risk.limit=-0.1",
    "risk.alpha=0.2",
    "training.total_timesteps=300000",
)
"""Few features and a small network: the market is small, and the policy must generalise to unseen bars. The rest are
the defaults of gradients through the market, with windows of a day. They were fixed on seeds 10 to 12.

The budget: the worst fifth of weeks may lose a tenth on average. A test year has ten such weeks, and their mean is
known to some 5 % of equity: a tighter limit, or the worst twentieth, could not be verified within a year."""


def demo_config(seed: int) -> RunConfig:
    """The demo's settings, a plain config file that `tailguard train` could read."""
    return load_config(overrides=[*DEMO_SETTINGS, f"training.seed={seed}"])


def run_demo(folder: Path, seed: int, console: Console) -> RunResult:
    """Train for some seconds and show the result beside the baselines and the planted optimum."""
    return train(demo_config(seed), folder, console, replace=True)
