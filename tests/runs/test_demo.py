"""The demo shows a limit that binds and holds: measured on bars the agent never saw, net of all costs."""

from __future__ import annotations

from pathlib import Path

import pytest
from rich.console import Console

import tailguard as tg
from tailguard.algorithm.ensemble import Ensemble
from tailguard.config import RunConfig
from tailguard.evaluate.held_out import episodes_on
from tailguard.risk.cvar import cvar_from_samples
from tailguard.runs.demo import demo_config, run_demo


def test_the_demo_is_a_plain_config_with_the_seed_asked_for() -> None:
    config = demo_config(7)
    assert isinstance(config, RunConfig)
    assert config.training.seed == 7
    assert config.data.path is None
    assert config.env.episode_length % config.chosen.n_steps == 0


@pytest.mark.slow
@pytest.mark.parametrize("seed", [0, 1, 2])
def test_the_limit_binds_and_holds_in_years_that_nobody_has_seen(tmp_path: Path, seed: int) -> None:
    """Twenty years of the same law: the worst 5 % of weeks within 1.25 times the limit, and growth beside it."""
    result = run_demo(tmp_path / "demo", seed, Console(quiet=True))
    agent = result.agent
    assert isinstance(agent, Ensemble)
    assert result.summary.budgets["agent"].horizon == 168
    assert result.results["agent"].equity[-1] > 1
    (part,) = episodes_on(agent.spec, tg.make_market(20 * 8_766, seed=9_000 + seed, signal=8.0).bars)
    calibrated, free = (part.trade(Ensemble(agent.members, exposure)) for exposure in (agent.exposure, 1.0))
    tails = [-float(cvar_from_samples(each.measured[:, 0], 0.05)) for each in (calibrated, free)]
    assert tails[0] <= 1.25 * 0.04
    assert tails[1] > 0.04  # without the calibration the limit would not hold
    assert float(calibrated.growth.mean()) / 168 * 8_766 > 0.6
