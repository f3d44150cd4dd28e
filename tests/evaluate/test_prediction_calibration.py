"""Calibration of predictions whose truth is known."""

from __future__ import annotations

import numpy as np
import pytest
from scipy import stats

from tailguard.errors import ConfigError
from tailguard.evaluate.prediction_calibration import calibration, chi_square_tail, pit_values

LEVELS = (np.arange(32) + 0.5) / 32


def windows(draw: np.random.Generator, count: int, length: int) -> np.ndarray:
    """Standard normal returns of overlapping windows, [count]."""
    path = np.concatenate([[0.0], np.cumsum(draw.normal(size=count + length - 1))])
    return (path[length:] - path[:-length]) / np.sqrt(length)


def normal_quantiles(count: int, deviation: float | np.ndarray = 1.0) -> np.ndarray:
    return np.broadcast_to(stats.norm.ppf(LEVELS), (count, 32)) * np.reshape(deviation, (-1, 1))


def test_pit_interpolates_between_midpoints() -> None:
    predicted = np.array([[4.0, 1.0, 3.0, 2.0]]).repeat(6, 0)  # quantiles at 1/8, 3/8, 5/8, 7/8, out of order
    realised = np.array([1.0, 1.5, 2.0, 3.9, 0.5, 4.5])
    # Between 1 and 2 lie the levels 1/8 to 3/8; half of the outer 1/8 is left beyond each end. On a quantile itself
    # both sides meet, but for the outer ones, where the middle of 1/16 and 1/8 is taken.
    expected = [(1 / 16 + 1 / 8) / 2, 2 / 8, 3 / 8, 5 / 8 + 0.9 / 4, 1 / 16, 15 / 16]
    np.testing.assert_allclose(pit_values(predicted, realised), expected, rtol=1e-12)


def test_pit_of_a_tie_is_its_middle() -> None:
    flat = np.zeros((1, 8))  # no position: nothing can happen, and nothing did
    np.testing.assert_allclose(pit_values(flat, np.zeros(1)), 0.5)
    partly = np.array([[-1.0, 0.0, 0.0, 1.0]])  # levels 3/8 and 5/8 both at 0
    np.testing.assert_allclose(pit_values(partly, np.zeros(1)), 0.5)


def test_pit_of_right_predictions_is_the_distribution_function() -> None:
    draw = np.random.default_rng(0)
    deviation = np.exp(draw.normal(size=4_000))
    realised = deviation * draw.normal(size=4_000)
    pit = pit_values(normal_quantiles(4_000, deviation), realised)
    np.testing.assert_allclose(pit, stats.norm.cdf(realised / deviation), atol=1 / 64)
    assert stats.kstest(pit, "uniform").pvalue > 0.01


def test_without_overlap_the_test_is_pearsons() -> None:
    realised = 1.1 * np.random.default_rng(1).normal(size=1_000)
    found = calibration(normal_quantiles(1_000), realised)
    expected = stats.chisquare(np.histogram(found.pit, np.linspace(0, 1, 11))[0])
    assert found.statistic == pytest.approx(expected.statistic)
    assert found.p_value == pytest.approx(expected.pvalue)
    assert found.freedom == pytest.approx(9)
    assert found.effective == pytest.approx(1_000)
    np.testing.assert_allclose(found.histogram.sum(), 1)


def test_chi_square_tail_equals_scipys() -> None:
    for statistic, freedom in ((0.5, 9), (16.9, 9), (40.0, 3.7)):
        assert chi_square_tail(statistic, freedom) == pytest.approx(stats.chi2.sf(statistic, freedom), rel=1e-9)


def test_underestimated_risk_is_seen_and_named() -> None:
    realised = 1.4 * np.random.default_rng(2).normal(size=2_000)
    found = calibration(normal_quantiles(2_000), realised)
    assert found.p_value < 1e-6
    assert found.histogram[0] > 0.13  # too many outcomes in the predicted worst tenth …
    assert found.histogram[-1] > 0.13  # … and in the best
    # The share below the predicted 5th quantile of 32 (level 0.1406) is Φ(z / 1.4).
    assert found.coverage[4] == pytest.approx(stats.norm.cdf(stats.norm.ppf(LEVELS[4]) / 1.4), abs=0.02)
    assert (found.realised[:4] < 1.2 * found.predicted[:4]).all()


def test_predicted_quantiles_of_the_period_mix_calm_and_wild() -> None:
    draw = np.random.default_rng(3)
    deviation = np.where(np.arange(4_000) % 2, 3.0, 0.5)
    realised = deviation * draw.normal(size=4_000)
    found = calibration(normal_quantiles(4_000, deviation), realised)
    assert found.p_value > 0.01
    np.testing.assert_allclose(found.predicted[2:-2], found.realised[2:-2], atol=0.25)


def rejected(count: int, length: int, samples: int, overlap: int, seed: int) -> float:
    draw = np.random.default_rng(seed)
    found = [
        calibration(normal_quantiles(count), windows(draw, count, length), overlap=overlap) for _ in range(samples)
    ]
    return float(np.mean([each.p_value < 0.05 for each in found]))


def test_right_predictions_of_overlapping_windows_are_rarely_rejected() -> None:
    assert rejected(1_000, 12, 150, overlap=12, seed=4) <= 0.10
    assert rejected(1_000, 12, 40, overlap=1, seed=4) > 0.5  # what happens when overlap is ignored


@pytest.mark.slow
def test_the_size_of_the_test_is_its_level() -> None:
    assert 0.02 <= rejected(2_000, 8, 600, overlap=8, seed=5) <= 0.08
    assert rejected(8_766, 168, 200, overlap=168, seed=6) <= 0.09


def test_wrong_shapes_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"\(100, 32\).*\(90,\)"):
        calibration(normal_quantiles(100), np.zeros(90))
    with pytest.raises(ConfigError, match="bins: 40"):
        calibration(normal_quantiles(1_000), np.zeros(1_000), bins=40)
