"""Building blocks of the synthetic market against loops, closed forms and simulated paths."""

from __future__ import annotations

import numpy as np
import pytest

from tailguard.data.processes import (
    autoregression,
    bridge_extremes,
    flip_probability,
    heavy_tailed,
    price_extremes,
    two_state,
)


def test_autoregression_equals_the_recursion() -> None:
    normal = np.random.default_rng(0).standard_normal(5_000)
    decay = np.exp(-1 / 30)
    expected = np.empty(5_000)
    expected[0] = 0.4 * normal[0]
    for t in range(1, 5_000):
        expected[t] = decay * expected[t - 1] + 0.4 * np.sqrt(1 - decay**2) * normal[t]
    np.testing.assert_allclose(autoregression(normal, size=0.4, relaxation=30, hours=1), expected, rtol=0, atol=1e-14)


def test_autoregression_has_the_same_law_at_every_bar_length() -> None:
    rng = np.random.default_rng(1)
    for hours in (0.25, 1.0, 6.0):
        path = autoregression(rng.standard_normal(400_000), size=0.3, relaxation=12, hours=hours)
        lag = round(6 / hours)
        assert path.std() == pytest.approx(0.3, rel=0.04)
        assert np.corrcoef(path[:-lag], path[lag:])[0, 1] == pytest.approx(np.exp(-0.5), abs=0.02)


def test_two_states_last_as_long_as_asked() -> None:
    on = two_state(np.random.default_rng(2).random(2_000_000), off=200, on=50, hours=1)
    assert on.mean() == pytest.approx(0.2, abs=0.008)
    # Seen once an hour, the process forgets at the rate 1/200 + 1/50 per hour.
    forget = 1 - np.exp(-(1 / 200 + 1 / 50))
    assert np.mean(on[1:][~on[:-1]]) == pytest.approx(0.2 * forget, rel=0.02)
    assert np.mean(~on[1:][on[:-1]]) == pytest.approx(0.8 * forget, rel=0.02)


def test_flip_probability_is_the_observed_one() -> None:
    for hours in (1.0, 24.0):
        state = two_state(np.random.default_rng(3).random(1_000_000), off=60, on=60, hours=hours)
        assert np.mean(state[1:] != state[:-1]) == pytest.approx(flip_probability(60, hours), rel=0.02)


def test_shocks_have_unit_variance_and_jumps_of_the_asked_size() -> None:
    rng = np.random.default_rng(4)
    n = 2_000_000
    student, uniform, normal = rng.standard_t(6, n), rng.random(n), rng.standard_normal(n)
    for hours in (0.25, 1.0, 4.0):
        shock = heavy_tailed(student, uniform, normal, tail_index=6, jump_wait=300, jump_size=5, hours=hours)
        assert shock.var() == pytest.approx(1, rel=0.02)
        jumped = uniform < 1 - np.exp(-hours / 300)
        # In units of the shock without jumps: 1 + 25 / hours where a jump came.
        assert shock[jumped].var() / shock[~jumped].var() == pytest.approx(1 + 25 / hours, rel=0.06)


def test_extremes_have_the_law_of_a_brownian_path() -> None:
    rng = np.random.default_rng(5)
    steps = rng.standard_normal((10_000, 1_000)).cumsum(1) * (0.02 / np.sqrt(1_000))
    move = steps[:, -1]
    high, low = bridge_extremes(move, np.full(10_000, 0.02), rng.random(10_000), rng.random(10_000))
    # A path watched at 1,000 moments misses 0.5826·σ/√1000 of its maximum (Broadie, Glasserman & Kou 1997).
    missed = 0.5826 * 0.02 / np.sqrt(1_000)
    assert high.mean() == pytest.approx(np.maximum(steps.max(1), 0).mean() + missed, rel=0.02)
    assert low.mean() == pytest.approx(np.minimum(steps.min(1), 0).mean() - missed, rel=0.02)
    assert np.quantile(high, 0.95) == pytest.approx(np.quantile(steps.max(1), 0.95) + missed, rel=0.03)
    assert (high >= np.maximum(move, 0)).all()
    assert (low <= np.minimum(move, 0)).all()


def test_extremes_hold_the_body_to_the_last_bit() -> None:
    rng = np.random.default_rng(6)
    opened = rng.lognormal(8, 1, 100_000).round(2)
    closed = (opened * np.exp(rng.normal(0, 0.5, 100_000))).round(2)
    still = np.zeros(100_000)  # no movement inside the bar: the extremes are the open and the close themselves
    high, low = price_extremes(opened, closed, still, rng.random(100_000), rng.random(100_000))
    assert (high >= np.maximum(opened, closed)).all()
    assert (low <= np.minimum(opened, closed)).all()
    np.testing.assert_allclose(high, np.maximum(opened, closed), rtol=1e-14)
