"""When the planted optimum is known."""

from __future__ import annotations

from dataclasses import replace

from tailguard.envs.constraints import Constraints
from tailguard.evaluate.optimum import optimal_weights, why_no_optimum
from tailguard.experiment.trained_run import TrainedRun


def test_the_optimum_is_that_of_an_account_without_limits(trained: TrainedRun) -> None:
    env = replace(trained.config.env, constraints=Constraints(asset_max=0.5))
    limited = replace(trained, config=replace(trained.config, env=env))
    part = trained.part("test")
    assert why_no_optimum(trained) is None
    assert optimal_weights(trained, part) is not None
    assert "env.constraints limits the portfolio" in str(why_no_optimum(limited))
    assert optimal_weights(limited, part) is None
