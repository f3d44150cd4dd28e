"""Statistical significance of a result, given the length of the record, its tails and the number of trials.

Sharpe ratios here are per observation, not yearly, unless a name says otherwise.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import combinations
from statistics import NormalDist

import numpy as np
from numpy.typing import NDArray

from tailguard.errors import ConfigError
from tailguard.evaluate import metrics
from tailguard.evaluate.bootstrap import RESAMPLES
from tailguard.validate import check_count, check_range

Float = NDArray[np.float64]

NORMAL = NormalDist()
ENOUGH_TRIALS = 5
"""With fewer trials, the variance is at least that of noise alone."""
OVERFITTING_BLOCKS = 16
"""Blocks of a record for the probability of backtest overfitting; their halves give 12,870 splits."""


def _sharpe_variance(sharpe: float, skewness: float, kurtosis: float) -> float:
    """Variance of an estimated Sharpe ratio, times the number of observations less one (Mertens 2002)."""
    return 1 - skewness * sharpe + (kurtosis - 1) / 4 * sharpe**2


def probabilistic_sharpe(
    sharpe: float, observations: int, *, benchmark: float = 0.0, skewness: float = 0.0, kurtosis: float = 3.0
) -> float:
    """Probability that the true Sharpe ratio is above the benchmark (Bailey & López de Prado 2012).

    PSR = Φ((SR − SR*) √(n − 1) / √(1 − γ₃·SR + (γ₄ − 1)/4·SR²)); `kurtosis` is 3 for a normal distribution.
    """
    check_count("observations", observations, low=2)
    deviation = math.sqrt(_sharpe_variance(sharpe, skewness, kurtosis) / (observations - 1))
    return NORMAL.cdf((sharpe - benchmark) / deviation)


def minimum_track_record(
    sharpe: float,
    *,
    benchmark: float = 0.0,
    skewness: float = 0.0,
    kurtosis: float = 3.0,
    confidence: float = 0.95,
) -> float:
    """Observations after which a Sharpe ratio like this one is above the benchmark with this confidence.

    Infinite where it is not above the benchmark (Bailey & López de Prado 2012).
    """
    check_range("confidence", confidence, low=0.5, high=1, high_open=True)
    if not sharpe > benchmark:
        return math.nan if math.isnan(sharpe) else math.inf
    needed = NORMAL.inv_cdf(confidence) / (sharpe - benchmark)
    return 1 + _sharpe_variance(sharpe, skewness, kurtosis) * needed**2


def expected_best_sharpe(trials: int, variance: float) -> float:
    """Expected largest Sharpe ratio of this many independent trials without skill, whose ratios have this variance.

    SR₀ = √V ((1 − γ) Φ⁻¹(1 − 1/N) + γ Φ⁻¹(1 − 1/(N·e))), γ Euler's constant (Bailey & López de Prado 2014).
    """
    check_count("trials", trials)
    if trials == 1:
        return 0.0
    normal_best = (1 - np.euler_gamma) * NORMAL.inv_cdf(1 - 1 / trials)
    gumbel_spread = np.euler_gamma * NORMAL.inv_cdf(1 - 1 / (trials * math.e))
    return math.sqrt(variance) * float(normal_best + gumbel_spread)


@dataclass(frozen=True)
class SharpeEvidence:
    """Evidence of skill from the Sharpe ratio of a track record."""

    sharpe: float
    """Yearly."""
    best_by_luck: float
    """Expected yearly Sharpe ratio of the best of all trials without skill."""
    probabilistic: float
    """Probability that the true Sharpe ratio is above zero, for a single trial."""
    deflated: float
    """Probability that it exceeds that of the best of all trials without skill."""
    needed_years: float
    """Length of record at which a ratio like this is above zero with 95 % confidence; infinite below zero."""
    years: float
    """Length of this record."""
    trials: int
    measured_spread: bool = False
    """Whether the spread of the trials was measured rather than assumed to be that of noise."""


def sharpe_evidence(
    returns: Float, bars_per_year: float, *, trials: int = 1, trial_sharpes: Float | None = None
) -> SharpeEvidence:
    """Probabilistic and deflated Sharpe ratio of per-bar returns, [n].

    `trials`: every configuration that was tried on the way to this one, population members included.
    `trial_sharpes`: their yearly Sharpe ratios, as far as they are kept, [k]: their variance measures the spread of the
    trials. Noise alone gives 1 / (n − 1), which is used with fewer than two ratios; below `ENOUGH_TRIALS`, where the
    variance is unreliable, it is the minimum.
    """
    count = len(returns)
    check_count("observations", count, low=2)
    ratio = metrics.sharpe(returns, 1.0)
    years = count / bars_per_year
    if math.isnan(ratio):
        return SharpeEvidence(math.nan, math.nan, math.nan, math.nan, math.nan, years, trials)
    shape = {"skewness": metrics.skewness(returns), "kurtosis": metrics.kurtosis(returns)}
    by_chance, known = 1 / (count - 1), np.zeros(0) if trial_sharpes is None else trial_sharpes
    measured = float(np.var(known, ddof=1)) / bars_per_year if len(known) >= 2 else 0.0
    is_measured = len(known) >= ENOUGH_TRIALS or measured > by_chance
    variance = measured if is_measured else by_chance
    by_luck = expected_best_sharpe(trials, variance)
    return SharpeEvidence(
        sharpe=ratio * math.sqrt(bars_per_year),
        best_by_luck=by_luck * math.sqrt(bars_per_year),
        probabilistic=probabilistic_sharpe(ratio, count, **shape),
        deflated=probabilistic_sharpe(ratio, count, benchmark=by_luck, **shape),
        needed_years=minimum_track_record(ratio, **shape) / bars_per_year,
        years=years,
        trials=trials,
        measured_spread=is_measured,
    )


@dataclass(frozen=True)
class Overfitting:
    """Out-of-sample performance of the best configuration, over all splits of the record into halves."""

    probability: float
    """Share of splits in which the best of one half is in the lower half of the other: PBO."""
    logits: Float
    """Logit of the out-of-sample rank of each split's choice, [C]; 0 or below: no better than the median."""
    in_sample: Float
    """Sharpe ratio per observation of each split's choice where it was chosen, [C]."""
    out_of_sample: Float
    """… and in the other half, [C]."""

    @property
    def probability_of_loss(self) -> float:
        """Share of splits whose choice loses money out of sample."""
        return float((self.out_of_sample < 0).mean())


def backtest_overfitting(returns: Float, blocks: int = OVERFITTING_BLOCKS) -> Overfitting:
    """Probability of backtest overfitting by combinatorially symmetric cross-validation (Bailey et al. 2017).

    `returns` [T, N]: per-bar returns of N configurations over the same bars. They are cut into an even number of blocks
    of equal length (give or take a bar); each half of the blocks in turn selects the configuration with the highest
    Sharpe ratio, and the other half evaluates it. With `blocks` at the number of equal folds, a block is a fold.
    """
    check_count("blocks", blocks, low=2)
    bars, configurations = returns.shape
    if blocks % 2 or blocks > 20:
        raise ConfigError(f"blocks: {blocks} must be even and at most 20, whose halves give 184,756 splits")
    if configurations < 2 or bars < 2 * blocks:
        raise ConfigError(
            f"returns of shape {returns.shape}: at least 2 configurations and {2 * blocks} bars are needed, 2 a block"
        )
    begins = np.linspace(0, bars, blocks, endpoint=False).astype(np.int64)
    moments = [np.add.reduceat(returns**power, begins, axis=0) for power in (0, 1, 2)]
    halves = np.array(list(combinations(range(blocks), blocks // 2)))
    chosen = np.zeros((len(halves), blocks))
    np.put_along_axis(chosen, halves, 1.0, axis=1)
    inside = _sharpe_from_sums(*(chosen @ sums for sums in moments))
    outside = _sharpe_from_sums(*((1 - chosen) @ sums for sums in moments))
    best = inside.argmax(1)[:, None]
    judged = np.take_along_axis(outside, best, 1)
    # Ties count half, so a configuration among equals ranks in their middle.
    rank = (outside < judged).sum(1) + ((outside == judged).sum(1) + 1) / 2
    logits = np.log(rank / (configurations + 1 - rank))
    return Overfitting(
        probability=float((logits <= 0).mean()),
        logits=logits,
        in_sample=np.take_along_axis(inside, best, 1)[:, 0],
        out_of_sample=judged[:, 0],
    )


def overfitting_of(candidates: Sequence[Float], blocks: int = OVERFITTING_BLOCKS) -> Overfitting | None:
    """`backtest_overfitting` of records over the same bars, [T] each; none for one alone, or for too few bars."""
    shortest = min(len(each) for each in candidates)
    if len(candidates) < 2 or shortest < 2 * blocks:
        return None
    return backtest_overfitting(np.stack(candidates, axis=1), blocks)


def _sharpe_from_sums(count: Float, total: Float, squares: Float) -> Float:
    """Sharpe ratio from the sums of x⁰, x¹ and x²; 0 where returns do not vary, as cash has."""
    mean = total / count
    variance = (squares - count * mean**2) / (count - 1)
    varies = variance > 1e-14 * squares / count
    return np.where(varies, mean / np.sqrt(np.where(varies, variance, 1.0)), 0.0)


def interquartile_mean(scores: Float) -> float:
    """Mean of the middle half: the lowest and the highest quarter (rounded down) are left out (Agarwal et al. 2021)."""
    return float(_interquartile_means(scores.reshape(-1)))


def _interquartile_means(scores: Float) -> Float:
    """[..., n] -> [...]"""
    cut = scores.shape[-1] // 4
    return np.asarray(np.sort(scores, axis=-1)[..., cut : scores.shape[-1] - cut].mean(-1))


@dataclass(frozen=True)
class SeedSummary:
    """The interquartile mean over seeds and its confidence interval."""

    iqm: float
    low: float
    high: float
    level: float
    seeds: int
    """With fewer than five, the interval is little more than the range."""


def iqm_over_seeds(
    scores: Float, generator: np.random.Generator, *, level: float = 0.95, resamples: int = RESAMPLES
) -> SeedSummary:
    """Interquartile mean of scores [seeds] or [seeds, folds] with a stratified bootstrap interval.

    Seeds are resampled within each fold, so no resample has more of an easy fold (Agarwal et al. 2021).
    """
    check_range("level", level, low=0, high=1, low_open=True, high_open=True)
    table = scores[:, None] if scores.ndim == 1 else scores
    seeds, folds = table.shape
    drawn = generator.integers(seeds, size=(resamples, seeds, folds))
    means = _interquartile_means(table[drawn, np.arange(folds)].reshape(resamples, -1))
    low, high = np.quantile(means, ((1 - level) / 2, (1 + level) / 2))
    return SeedSummary(interquartile_mean(table), float(low), float(high), level, seeds)
