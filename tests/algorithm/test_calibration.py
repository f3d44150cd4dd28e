"""Ranks of realised returns in what was predicted: uniform if the prediction is right, and counted exactly."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

import tailguard as tg
from tailguard.algorithm.calibration import PredictedReturns
from tailguard.risk import RiskConfig


@pytest.fixture(scope="module")
def bars() -> Any:
    return tg.make_market(1_500, seed=0).bars


def test_ranks_are_those_of_whole_episodes_by_hand(bars: Any) -> None:
    """Four rollouts of a trading agent, followed step by step in numpy, bootstraps included."""
    env = tg.TradingEnv(bars, num_envs=6, episode_length=24, stagger=8)
    learner = tg.DistributionalPPO(
        env, n_steps=8, minibatch_size=48, hidden=(8,), lstm_size=8, quantiles=8, gamma=0.9, twin_critics=True,
        risk=RiskConfig(limit=-0.5, alpha=0.5),
    )  # fmt: skip
    assert learner.risk is not None
    assert learner.risk.predictions is not None
    expected: list[float] = []
    begun: dict[int, tuple[np.ndarray, float, float]] = {}
    for _ in range(6):
        learner.iterate()
        assert learner.snapshot is not None
        rollout, views = learner.snapshot.rollout, learner.snapshot.estimates.views
        for row in range(8):
            for n in range(6):
                if rollout.episode_start[row, n]:
                    said = np.mean([view.quantiles[row, n].numpy() for view in views], axis=0)  # type: ignore[index]
                    begun[n] = (said, 0.0, 1.0)
                said, earned, discount = begun[n]
                earned += discount * float(rollout.rewards[row, n])
                discount *= 0.9
                begun[n] = (said, earned, discount)
                if rollout.ended[row, n]:
                    tail = np.mean([float(view.next_baseline[row, n]) for view in views])
                    rest = 0.0 if rollout.terminated[row, n] else discount * tail
                    expected.append(float(np.mean(said < earned + rest)))
    ranks = learner.risk.predictions.ranks
    assert int(ranks.count) == len(expected) > 6
    found = ranks.losses[:-1][ranks.weights.bool()].tolist()
    assert sorted(found) == pytest.approx(sorted(expected[-ranks.size :]), abs=1e-6)


def ranked(values: np.ndarray) -> dict[str, float]:
    found = PredictedReturns(1, 4, 1.0, len(values), torch.device("cpu"))
    found.ranks.add(torch.tensor(values), torch.ones(len(values), dtype=torch.bool))
    return {name: float(value) for name, value in found.metrics(0.05).items()}


def test_the_distance_is_that_of_kolmogorov_and_smirnov() -> None:
    from scipy.stats import kstest

    values = np.random.default_rng(0).beta(2, 1, 400)
    metrics = ranked(values)
    assert metrics["risk/calibration"] == pytest.approx(kstest(values, "uniform").statistic, abs=1e-9)
    assert metrics["risk/tail_share"] == pytest.approx((values < 0.05).mean(), abs=1e-9)
    assert ranked((np.arange(400) + 0.5) / 400)["risk/calibration"] < 0.01


def test_before_the_first_episode_ends_nothing_is_said() -> None:
    found = PredictedReturns(2, 4, 1.0, 10, torch.device("cpu")).metrics(0.05)
    assert all(bool(value.isnan()) for value in found.values())
