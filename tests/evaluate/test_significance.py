"""Significance, against the published worked examples, brute force and markets whose truth is known."""

from __future__ import annotations

import math
from itertools import combinations

import numpy as np
import pytest
from scipy import stats

from tailguard.errors import ConfigError
from tailguard.evaluate import significance
from tailguard.evaluate.significance import backtest_overfitting, interquartile_mean, iqm_over_seeds, sharpe_evidence


@pytest.mark.parametrize(("skewness", "kurtosis", "probability"), [(0, 3, 0.942987), (-1, 6, 0.933459)])
def test_probabilistic_sharpe_by_hand(skewness: float, kurtosis: float, probability: float) -> None:
    found = significance.probabilistic_sharpe(0.1, 252, skewness=skewness, kurtosis=kurtosis)
    assert found == pytest.approx(probability, abs=5e-7)


def test_deflated_sharpe_is_the_published_example() -> None:
    """Bailey & López de Prado (2014): a yearly 2.5 over 1,250 days, the best of 100 trials of variance 0.5."""
    by_luck = significance.expected_best_sharpe(100, 0.5 / 250)
    assert by_luck == pytest.approx(0.1132, abs=5e-5)
    found = significance.probabilistic_sharpe(
        2.5 / math.sqrt(250), 1_250, benchmark=by_luck, skewness=-3.0, kurtosis=10.0
    )
    assert found == pytest.approx(0.9004, abs=5e-5)


@pytest.mark.parametrize(
    ("periods", "skewness", "kurtosis", "years"),
    [(252, 0.0, 3.0, 2.73), (52, 0.0, 3.0, 2.83), (12, 0.0, 3.0, 3.24), (12, -0.72, 5.78, 4.99)],
)
def test_minimum_track_record_is_the_published_example(
    periods: int, skewness: float, kurtosis: float, years: float
) -> None:
    """Bailey & López de Prado (2012): a yearly 2 is above 1 with 95 % confidence after this many years."""
    scale = math.sqrt(periods)
    needed = significance.minimum_track_record(2 / scale, benchmark=1 / scale, skewness=skewness, kurtosis=kurtosis)
    assert needed / periods == pytest.approx(years, abs=0.006)


def test_a_track_record_of_the_minimum_length_has_just_that_confidence() -> None:
    shape = {"skewness": -0.5, "kurtosis": 5.0}
    needed = significance.minimum_track_record(0.05, benchmark=0.01, confidence=0.9, **shape)
    below, above = (
        significance.probabilistic_sharpe(0.05, length, benchmark=0.01, **shape)
        for length in (math.floor(needed), math.ceil(needed))
    )
    assert below <= 0.9 <= above
    assert significance.minimum_track_record(-0.01) == math.inf


def test_the_best_of_many_trials_by_luck_is_what_a_simulation_gives() -> None:
    drawn = np.random.default_rng(0).normal(size=(20_000, 50)).max(1)
    assert significance.expected_best_sharpe(50, 1.0) == pytest.approx(drawn.mean(), rel=0.02)  # an asymptotic formula
    assert significance.expected_best_sharpe(1, 1.0) == 0


def test_evidence_falls_with_the_number_of_trials() -> None:
    returns = np.random.default_rng(1).standard_t(5, 2_000) * 0.01 + 6e-4
    once = sharpe_evidence(returns, 252.0)
    assert once.deflated == once.probabilistic
    ratio = returns.mean() / returns.std(ddof=1)
    variance = 1 - stats.skew(returns) * ratio + stats.kurtosis(returns, fisher=False) / 4 * ratio**2 - ratio**2 / 4
    assert once.probabilistic == pytest.approx(stats.norm.cdf(ratio * math.sqrt(1_999 / variance)))
    assert once.sharpe == pytest.approx(ratio * math.sqrt(252))
    assert once.years == pytest.approx(2_000 / 252)
    many = sharpe_evidence(returns, 252.0, trials=200)
    # Chance alone: deviation 1/√(n − 1) a bar.
    by_luck = significance.expected_best_sharpe(200, 1 / 1_999) * math.sqrt(252)
    assert many.best_by_luck == pytest.approx(by_luck)
    assert many.deflated < 0.5 < many.probabilistic
    assert not many.measured_spread
    alike = sharpe_evidence(returns, 252.0, trials=200, trial_sharpes=np.array([0.9, 0.9, 1.0, 1.1, 1.1]))
    assert alike.best_by_luck == pytest.approx(significance.expected_best_sharpe(200, 0.01))
    assert alike.measured_spread
    # A few that happen to agree say nothing; a few that are far apart do.
    few = sharpe_evidence(returns, 252.0, trials=200, trial_sharpes=np.array([0.9, 1.0, 1.1]))
    assert few == many
    apart = sharpe_evidence(returns, 252.0, trials=200, trial_sharpes=np.array([-1.0, 2.0]))
    assert apart.best_by_luck == pytest.approx(significance.expected_best_sharpe(200, 4.5))
    assert math.isnan(sharpe_evidence(np.zeros(50), 252.0).deflated)


def brute_force(returns: np.ndarray, blocks: int) -> list[float]:
    parts = np.array_split(np.arange(len(returns)), blocks)
    logits = []
    for half in combinations(range(blocks), blocks // 2):
        inside = np.concatenate([parts[index] for index in half])
        outside = np.setdiff1d(np.arange(len(returns)), inside)
        ratios = [returns[rows].mean(0) / returns[rows].std(0, ddof=1) for rows in (inside, outside)]
        rank = stats.rankdata(ratios[1])[np.argmax(ratios[0])] / (returns.shape[1] + 1)
        logits.append(math.log(rank / (1 - rank)))
    return logits


def test_overfitting_equals_brute_force() -> None:
    returns = np.random.default_rng(2).normal(0.01, 1.0, (120, 9)) * np.linspace(0.5, 2, 9)
    found = backtest_overfitting(returns, blocks=6)
    expected = brute_force(returns, 6)
    np.testing.assert_allclose(found.logits, expected, atol=1e-12)
    assert found.probability == pytest.approx(np.mean(np.array(expected) <= 0))
    assert len(found.in_sample) == math.comb(6, 3)


def test_overfitting_knows_skill_noise_and_compensation() -> None:
    draw = np.random.default_rng(3)
    noise = draw.normal(size=(640, 40))
    skilled = noise.copy()
    skilled[:, 7] += 1.0
    found = backtest_overfitting(skilled, blocks=8)
    assert found.probability == 0
    assert found.probability_of_loss == 0
    chance = [backtest_overfitting(draw.normal(size=(320, 20)), blocks=8).probability for _ in range(60)]
    assert np.mean(chance) == pytest.approx(0.5, abs=0.07)
    # Every configuration has the same mean over the whole record: what is best in one half is worst in the other.
    assert backtest_overfitting(noise - noise.mean(0), blocks=8).probability > 0.95


def test_configurations_that_never_trade_rank_as_cash() -> None:
    returns = np.random.default_rng(4).normal(-1.0, 1.0, (160, 3))
    returns[:, 1] = 0
    found = backtest_overfitting(returns, blocks=4)
    assert found.probability == 0
    assert (found.out_of_sample == 0).all()


def test_overfitting_refuses_what_it_cannot_split() -> None:
    with pytest.raises(ConfigError, match="even"):
        backtest_overfitting(np.zeros((100, 3)), blocks=7)
    with pytest.raises(ConfigError, match="2 configurations"):
        backtest_overfitting(np.zeros((100, 1)), blocks=4)


def test_interquartile_mean_is_the_trimmed_mean() -> None:
    assert interquartile_mean(np.arange(1.0, 9.0)) == 4.5
    scores = np.random.default_rng(5).normal(size=(7, 3))
    assert interquartile_mean(scores) == pytest.approx(stats.trim_mean(scores.ravel(), 0.25))


def test_seed_intervals_stay_inside_a_fold() -> None:
    """Folds far apart, seeds alike: folds are not mixed, so the interval is as narrow as the seeds."""
    seeds = np.random.default_rng(6).normal(size=8)
    found = iqm_over_seeds(np.stack([seeds, seeds + 1_000, seeds + 2_000, seeds + 3_000], 1), np.random.default_rng(0))
    assert found.iqm == pytest.approx(1_500 + seeds.mean())
    assert found.high - found.low < 2
    assert found.low < found.iqm < found.high


def test_seed_intervals_hold_the_truth() -> None:
    draw = np.random.default_rng(7)
    held = []
    for _ in range(400):
        found = iqm_over_seeds(draw.normal(size=(10, 4)), draw, resamples=200)
        held.append(found.low <= 0 <= found.high)
    assert 0.90 <= np.mean(held) <= 0.98
