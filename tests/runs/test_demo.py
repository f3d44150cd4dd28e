"""The demo agent finds the planted signal: measured on bars it never saw, net of all costs."""

from __future__ import annotations

from pathlib import Path

import pytest
from rich.console import Console

from tailguard.config import RunConfig
from tailguard.runs.demo import demo_config, run_demo


def test_the_demo_is_a_plain_config_with_the_seed_asked_for() -> None:
    config = demo_config(7)
    assert isinstance(config, RunConfig)
    assert config.training.seed == 7
    assert config.data.path is None
    assert config.env.episode_length % config.chosen.n_steps == 0


@pytest.mark.slow
@pytest.mark.parametrize("seed", [0, 1, 2])
def test_the_agent_finds_most_of_the_planted_signal_and_keeps_its_budget(tmp_path: Path, seed: int) -> None:
    result = run_demo(tmp_path / "demo", seed, Console(quiet=True))
    assert result.captured >= 0.6
    budget = result.standing.budgets["agent"]
    assert budget.horizon == 168
    assert budget.verdict == "kept"
