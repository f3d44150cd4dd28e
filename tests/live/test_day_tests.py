"""Probabilities beside SciPy's, brute force, and their own promise: how often they find something where nothing is."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import scipy.stats

from tailguard.evaluate.metrics import cvar
from tailguard.live.day_tests import (
    block_means,
    cvar_probability,
    holm,
    lower_share,
    prediction_probability,
    student_two_sided,
)


@pytest.mark.parametrize("freedom", [1, 2, 3, 4.5, 9, 30, 200, 2_000])
def test_student_is_scipys(freedom: float) -> None:
    for value in (0.0, 0.1, 1.0, -2.5, 4.0, 8.0):
        expected = 2 * scipy.stats.t.sf(abs(value), freedom)
        assert student_two_sided(value, freedom) == pytest.approx(expected, rel=1e-8, abs=1e-13)


def test_a_prediction_is_scipys_test_of_one_value_against_many() -> None:
    """Student's test of two samples, one of which has one value: then it pools the variance of the other alone."""
    draw = np.random.default_rng(0)
    for count in (5, 12, 60):
        reference, value = draw.normal(size=count), float(draw.normal() * 2)
        expected = scipy.stats.ttest_ind([value], reference).pvalue
        assert prediction_probability(value, reference) == pytest.approx(expected, rel=1e-9)
    assert prediction_probability(1.0, np.zeros(4)) is None
    assert prediction_probability(1.0, np.zeros(9)) is None


@pytest.mark.parametrize("kind", ["normal", "t4", "autocorrelated"])
def test_a_prediction_errs_as_often_as_it_says(kind: str) -> None:
    """4,000 sessions of a week beside 30 weeks of the same process: how many have p < 5 %? Binomial limits of 4 sd
    around 5 % for normal days; for heavy tails and days that follow each other (0.6), up to 7 %. Without blocks the
    last would be far off."""
    draw, count, weeks, days = np.random.default_rng(1), 4_000, 31, 7
    shape = (count, weeks * days)
    values = draw.standard_t(4, shape) if kind == "t4" else draw.normal(size=shape)
    if kind == "autocorrelated":
        for day in range(1, shape[1]):
            values[:, day] = 0.6 * values[:, day - 1] + 0.8 * values[:, day]
    found = [prediction_probability(row[-days:].mean(), block_means(row[:-days], days)) < 0.05 for row in values]
    low, high = 0.05 - 4 * np.sqrt(0.05 * 0.95 / count), 0.05 + 4 * np.sqrt(0.05 * 0.95 / count)
    assert low < np.mean(found) < (high if kind == "normal" else 0.07)
    if kind == "autocorrelated":
        singly = [prediction_probability(row[-days:].mean(), row[:-days] / np.sqrt(days)) < 0.05 for row in values]
        assert np.mean(singly) > 0.2


def test_blocks_are_counted_from_the_end() -> None:
    np.testing.assert_array_equal(block_means(np.arange(8.0), 3), [3.0, 6.0])
    np.testing.assert_array_equal(block_means(np.arange(3.0), 1), [0.0, 1.0, 2.0])
    assert lower_share(2.0, np.array([1.0, 2.0, 3.0, 4.0])) == 0.375


def test_a_tails_probability_is_that_of_all_choices() -> None:
    """All 2,002 ways to choose the 5 live windows out of 14: the permutation test draws from them."""
    draw = np.random.default_rng(2)
    live, reference = draw.normal(-0.3, 1, 5), draw.normal(0, 1, 9)
    together, observed = np.concatenate((live, reference)), cvar(live, 0.3)
    worse = [cvar(together[list(chosen)], 0.3) <= observed + 1e-12 for chosen in itertools.combinations(range(14), 5)]
    exact = float(np.mean(worse))
    assert 0.05 < exact < 0.95
    assert cvar_probability(live, reference, 0.3) == pytest.approx(exact, abs=4 * np.sqrt(exact * (1 - exact) / 4_999))
    assert cvar_probability(live[:4], reference, 0.3) is None


def test_a_tail_test_errs_as_often_as_it_says_and_finds_a_worse_tail(monkeypatch) -> None:
    """300 sessions of 20 windows beside 80 of the same heavy-tailed distribution: p < 10 % in about 30; and twice the
    losses are found far more often."""
    monkeypatch.setattr("tailguard.live.day_tests.PERMUTATIONS", 99)
    draw = np.random.default_rng(3)
    alike, worse = [], []
    for _ in range(300):
        live, reference = draw.standard_t(4, 20), draw.standard_t(4, 80)
        alike.append(cvar_probability(live, reference, 0.1) <= 0.1)
        worse.append(cvar_probability(2 * live, reference, 0.1) <= 0.1)
    assert abs(np.mean(alike) - 0.1) < 4 * np.sqrt(0.1 * 0.9 / 300)
    assert np.mean(worse) > 0.35


def test_holm_by_hand_and_its_promise() -> None:
    """0.01 · 4, 0.015 · 3, then the largest so far; and of 5,000 families of six uniform p, 5 % have one below 5 %."""
    assert holm([0.04, 0.01, 0.9, 0.015]) == pytest.approx([0.08, 0.04, 0.9, 0.045])
    assert holm([]) == []
    draw = np.random.default_rng(4).uniform(size=(5_000, 6))
    found = np.mean([min(holm(row)) < 0.05 for row in draw.tolist()])
    assert abs(found - (1 - (1 - 0.05 / 6) ** 6)) < 4 * np.sqrt(0.05 * 0.95 / 5_000)
