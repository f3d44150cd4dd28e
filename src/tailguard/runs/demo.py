"""The demo: an agent on a market with a planted signal, compared with the known optimum."""

from __future__ import annotations

from pathlib import Path

from rich.console import Console

from tailguard.config import RunConfig, load_config
from tailguard.runs.outcome import RunResult
from tailguard.runs.runner import train

DEMO_SETTINGS = (
    "data.validation=180d",
    "data.test=360d",
    "env.episode_length=168",
    "risk.limit=-0.04",
    "risk.alpha=0.05",
    "training.total_timesteps=1500000",
)
"""The defaults of a run with a limit, on weeks, with three quarters of the steps. The limit binds: without it the worst
5 % of weeks lose three times as much. A test year holds 2.6 such weeks, too few for a verdict without doubt."""


def demo_config(seed: int) -> RunConfig:
    """The demo's settings, a plain config file that `tailguard train` could read."""
    return load_config(overrides=[*DEMO_SETTINGS, f"training.seed={seed}"])


def run_demo(folder: Path, seed: int, console: Console) -> RunResult:
    """Train for some seconds and show the result beside the baselines and the planted optimum."""
    return train(demo_config(seed), folder, console, replace=True)
