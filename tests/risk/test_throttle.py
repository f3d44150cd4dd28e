"""The throttle: its bound on every path, what it does when a market changes, and what it costs while nothing does."""

from __future__ import annotations

import numpy as np
import pytest

from tailguard.errors import ConfigError
from tailguard.evaluate.metrics import cvar
from tailguard.risk.throttle import CREDIT, Throttle


def traded(outcomes: np.ndarray, limit: float = -0.02, alpha: float = 0.05) -> tuple[np.ndarray, np.ndarray, Throttle]:
    """Returns of windows at the throttle's exposure, the exposures, and the throttle afterwards."""
    throttle, made, exposures = Throttle(limit, alpha), [], []
    for outcome in outcomes:
        exposures.append(throttle.factor)
        made.append(throttle.factor * outcome)
        throttle.observe(made[-1])
    return np.array(made), np.array(exposures), throttle


def test_a_step_follows_the_formula() -> None:
    throttle = Throttle(-0.02, 0.05)
    assert throttle.aim == pytest.approx(0.019)
    assert throttle.threshold == pytest.approx(0.0095)
    assert throttle.cost(0.03) == throttle.threshold  # a gain costs ν
    assert throttle.cost(-0.019) == pytest.approx(0.0095 + 0.0095 / 0.05)
    assert throttle.step == pytest.approx(0.1 / (0.1995 - 0.019))
    throttle.observe(-0.019)
    assert throttle.standing == pytest.approx(1 + CREDIT - 0.1)  # what it aims at costs a tenth
    throttle.observe(0.0)
    assert throttle.standing == pytest.approx(1 + CREDIT - 0.1 + throttle.step * 0.0095)
    for _ in range(100):
        throttle.observe(0.05)
    assert throttle.standing == 1 + CREDIT


@pytest.mark.parametrize("kind", ["normal", "heavy", "crash first", "greedy", "alternating", "always the worst"])
@pytest.mark.parametrize("alpha", [0.05, 0.2])
def test_the_realised_tail_is_within_the_bound_on_every_path(kind: str, alpha: float) -> None:
    draw = np.random.default_rng(3)
    for repeat in range(40):
        count = int(draw.integers(1, 400))
        outcomes = {
            "normal": lambda n: 0.05 * draw.standard_normal(n),
            "heavy": lambda n: np.clip(0.03 * draw.standard_t(2, n), -1, 5),
            "crash first": lambda n: np.concatenate([[-0.9], 0.02 * draw.standard_normal(n)])[:n],
            "greedy": lambda n: np.where(draw.random(n) < 0.1, -0.5, 0.001),
            "alternating": lambda n: np.where(np.arange(n) % 2, 0.3, -0.3),
            "always the worst": lambda n: np.full(n, -1.0),
        }[kind](count)
        limit = -float(draw.uniform(0.002, 0.2))
        made, _, throttle = traded(outcomes, limit, alpha)
        worst = max(0.0, -made.min())
        assert -cvar(made, alpha) <= throttle.bound(count, worst) + 1e-12, (kind, repeat)


def test_an_agent_that_keeps_its_limit_is_hardly_touched() -> None:
    """A tail of 85 % of the limit, the usual one after calibration: less than 3 % of the exposure over 200 years."""
    draw = np.random.default_rng(5)
    outcomes = 0.012 + 0.85 * 0.02 / (2.0627 - 0.8) * draw.standard_normal(9_000)  # weekly, mean 0.8 deviations
    outcomes += 0.85 * 0.02 / (2.0627 - 0.8) * 0.8 - 0.012
    assert -cvar(outcomes, 0.05) == pytest.approx(0.85 * 0.02, rel=0.06)
    _, exposures, _ = traded(outcomes)
    assert exposures.mean() > 0.97


@pytest.mark.parametrize("factor", [1.5, 2.0, 4.0])
def test_a_tail_that_multiplies_overnight_is_back_at_the_limit(factor: float) -> None:
    """Ten years as calibrated, then a market in which everything moves more: within the limit after two years of it."""
    draw = np.random.default_rng(6)
    deviation = 0.85 * 0.02 / (2.0627 - 0.5)
    outcomes = deviation * (0.5 + draw.standard_normal(460 + 4_000))
    outcomes[460:] = factor * outcomes[460:]
    free = -cvar(outcomes[460 + 92 :], 0.05)
    made, exposures, _ = traded(outcomes)
    held = -cvar(made[460 + 92 :], 0.05)
    assert free > 1.2 * 0.02
    assert held <= 1.02 * 0.02
    assert exposures[:460].mean() > 0.97
    assert exposures[460 + 92 :].mean() < 1.1 / (0.85 * factor)


def test_settings_that_make_no_sense_are_refused() -> None:
    for limit, alpha in ((0.0, 0.05), (0.01, 0.05), (-2.0, 0.05), (-0.02, 0.0), (-0.02, 1.5)):
        with pytest.raises(ConfigError, match="throttle"):
            Throttle(limit, alpha)
