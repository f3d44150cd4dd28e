"""A budget on the synthetic market: it holds the tail where the same agent without one breaks it by far."""

from __future__ import annotations

import numpy as np
import pytest

import tailguard as tg
from tailguard.data.prepare import PreparedBars, prepare
from tailguard.monitor.callbacks import EveryIteration

EPISODE, YEAR = 256, 8_766
FEATURES = ("return_24", "range_volatility_24", "taker_imbalance_1", "taker_imbalance_6", "taker_imbalance_24")


@pytest.fixture(scope="module")
def years() -> PreparedBars:
    """A hundred years with a planted signal."""
    return prepare(tg.make_market(100 * YEAR, seed=0, signal=8.0).bars, FEATURES)


def last_metrics(years: PreparedBars, limit: float, iterations: int = 200) -> list[dict[str, float]]:
    """Of the last thirty iterations of an agent that learns by gradients through whole episodes."""
    envs = 512
    agent = tg.PathwiseLearner(
        tg.TradingEnv(years, num_envs=envs, episode_length=EPISODE, seed=0),
        seed=0,
        risk=tg.RiskConfig(limit=limit),
        n_steps=EPISODE,
    )
    course: list[dict[str, float]] = []
    agent.learn(envs * EPISODE * iterations, callback=EveryIteration(lambda _: course.append(dict(agent.metrics))))
    return course[-30:]


@pytest.mark.slow
def test_a_budget_holds_the_tail_that_is_six_times_as_deep_without(years: PreparedBars) -> None:
    """26 M steps each: a limit of 2 %, and one of 99 % that nothing can break."""
    metrics = {limit: last_metrics(years, limit) for limit in (-0.02, -0.99)}
    mean = {
        limit: {name: np.mean([row[name] for row in rows]) for name in rows[0] if name.startswith("risk/")}
        for limit, rows in metrics.items()
    }
    with_limit, without = mean[-0.02], mean[-0.99]
    assert -0.025 < with_limit["risk/cvar_realised"] < -0.016
    assert with_limit["risk/lambda"] > 1
    assert with_limit["risk/mean_realised"] > 0.03
    assert without["risk/lambda"] == 0
    assert without["risk/cvar_realised"] < -0.1
    assert without["risk/mean_realised"] > 0.1
