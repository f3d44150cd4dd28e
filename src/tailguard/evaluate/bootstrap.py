"""Confidence intervals from a track record alone: the stationary bootstrap of Politis & Romano (1994).

Blocks of random length, drawn with replacement from the series wrapped into a circle, keep the serial dependence that
single draws destroy. The mean block length comes from the automatic rule of Politis & White (2004), for two series,
and the longer of the two is used: the metric's influence values (the linear part of each bar's contribution to it), and
the squared returns. With volatility clustering the tail is dependent although returns are not correlated, and a rule
based on returns alone draws blocks of one bar.

The ends of an interval are those of the bias-corrected accelerated bootstrap (BCa, Efron 1987), at levels widened by
Student's t: a tail consists of a few bad days, and their variance is itself estimated from these few. Intervals of
all levels come from the same resamples and are nested: a higher level contains the lower ones.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from statistics import NormalDist

import numpy as np
from numpy.typing import NDArray

from tailguard.errors import ConfigError
from tailguard.evaluate import metrics
from tailguard.validate import check_count, check_range

Float = NDArray[np.float64]

RESAMPLES = 2_000
CHUNK = 1 << 20
"""Numbers resampled at a time: small enough to stay in the cache, and memory does not grow with the resamples."""
NORMAL = NormalDist()


@dataclass(frozen=True)
class Statistic:
    """A statistic of a series, for many series at once, and the contribution of each observation."""

    of_rows: Callable[[Float], Float]
    """[..., n] -> [...]"""
    influence: Callable[[Float], Float]
    """Influence value of each observation, [n] -> [n], with mean zero."""
    share: float = 1.0
    """Share of the observations that the statistic uses: alpha for a tail, 1 for a mean."""


def mean_statistic(bars_per_year: float) -> Statistic:
    """Yearly arithmetic mean return."""
    return Statistic(
        of_rows=lambda rows: np.asarray(rows.mean(-1) * bars_per_year),
        influence=lambda returns: (returns - returns.mean()) * bars_per_year,
    )


def sharpe_statistic(bars_per_year: float) -> Statistic:
    """Yearly Sharpe ratio."""
    scale = math.sqrt(bars_per_year)

    def influence(returns: Float) -> Float:
        standard = (returns - returns.mean()) / returns.std()
        return np.asarray(scale * (standard - float(metrics.sharpe_of_rows(returns)) / 2 * (standard**2 - 1)))

    return Statistic(of_rows=lambda rows: metrics.sharpe_of_rows(rows) * scale, influence=influence)


def cvar_statistic(alpha: float) -> Statistic:
    """Mean of the worst alpha share."""

    def influence(returns: Float) -> Float:
        beyond = np.minimum(returns - metrics.value_at_risk(returns, alpha), 0) / alpha
        return np.asarray(beyond - beyond.mean())

    return Statistic(lambda rows: metrics.cvar_of_rows(rows, alpha), influence, share=alpha)


@dataclass(frozen=True)
class Interval:
    """An estimate with its confidence interval, and how it was computed."""

    estimate: float
    low: float
    high: float
    level: float
    """Share of such intervals that contain the true value."""
    p_value: float
    """One-sided: the probability of this value or more under noise alone, if the true value is zero."""
    block: float
    """Mean length of the resampled blocks, in observations."""
    resamples: int


@dataclass(frozen=True)
class Resampled:
    """A statistic on resampled series, from which its confidence interval of every level follows."""

    estimate: float
    drawn: Float
    """The statistic on each resample, [B]."""
    acceleration: float
    """Of the BCa interval."""
    freedom: float
    """Degrees of freedom of Student's t by which the interval is widened."""
    block: float
    """Mean length of the resampled blocks, in observations."""
    low_beyond: bool = False
    """Whether the low end may lie below all resamples."""
    high_beyond: bool = False
    """Whether the high end may lie above all resamples."""

    @property
    def defined(self) -> bool:
        """Whether the statistic is defined on every resample."""
        return math.isfinite(self.estimate) and bool(np.isfinite(self.drawn).all())

    def ends(self, level: float) -> tuple[float, float]:
        """Ends of the confidence interval, NaN where the statistic is not defined on every resample."""
        if not self.defined:
            return math.nan, math.nan
        width = student_quantile((1 + level) / 2, self.freedom)
        low, high = bca_ends(self.drawn, self.estimate, self.acceleration, width)
        reach = width * float(self.drawn.std(ddof=1))
        centre = 2 * self.estimate - float(self.drawn.mean())
        if self.low_beyond:
            low = min(low, centre - reach)
        if self.high_beyond:
            high = max(high, centre + reach)
        return low, high

    def interval(self, level: float = 0.95) -> Interval:
        """The confidence interval of this level."""
        check_range("level", level, low=0, high=1, low_open=True, high_open=True)
        low, high = self.ends(level)
        count = len(self.drawn)
        exceeding = int(np.count_nonzero(self.drawn - self.estimate >= self.estimate))
        p_value = (1 + exceeding) / (count + 1) if self.defined else math.nan
        return Interval(self.estimate, low, high, level, p_value, self.block, count)


def interval(
    series: Float,
    statistic: Statistic,
    generator: np.random.Generator,
    *,
    level: float = 0.95,
    resamples: int = RESAMPLES,
    overlap: int = 1,
) -> Interval:
    """Confidence interval of a statistic of one series, [n].

    `overlap`: bars of the windows the observations are returns of, where windows overlap; blocks are not shorter.
    The ends are NaN where the statistic is not defined on every resample.
    """
    return resampled((series,), statistic, generator, resamples, overlap).interval(level)


def paired_difference(
    first: Float,
    second: Float,
    statistic: Statistic,
    generator: np.random.Generator,
    *,
    level: float = 0.95,
    resamples: int = RESAMPLES,
    overlap: int = 1,
) -> Interval:
    """Confidence interval of a statistic of `first` minus that of `second`, two series [n] over the same bars.

    Both are resampled at the same times, so common moves do not add noise to the difference.
    """
    if first.shape != second.shape:
        raise ConfigError(
            f"paired series must cover the same bars; they have {len(first):,} and {len(second):,} observations"
        )
    return resampled((first, second), statistic, generator, resamples, overlap).interval(level)


def resampled(
    series: Sequence[Float],
    statistic: Statistic,
    generator: np.random.Generator,
    resamples: int = RESAMPLES,
    overlap: int = 1,
) -> Resampled:
    """Resample a statistic of one series [n], or of the first minus that of the second of two."""
    check_count("resamples", resamples, low=100)
    check_count("overlap", overlap)
    count = len(series[0])
    check_count("observations", count, low=8)

    def combine(values: Sequence[Float]) -> Float:
        return values[0] if len(values) == 1 else values[0] - values[1]

    estimate = float(combine([statistic.of_rows(each) for each in series]))
    if not math.isfinite(estimate):
        return Resampled(estimate, np.full(resamples, math.nan), math.nan, math.nan, math.nan)
    influence = combine([statistic.influence(each) for each in series])
    memory = [influence, *((each - each.mean()) ** 2 for each in series)]
    # Slightly long blocks cost little; weak dependence that the rule takes for noise costs coverage.
    shortest = max(overlap, (statistic.share * count) ** (1 / 3))
    block = min(max(shortest, *(block_length(each) for each in memory)), count / 4)
    drawn = np.concatenate(
        [
            combine([statistic.of_rows(each[rows]) for each in series])
            for rows in stationary_rows(count, block, resamples, generator)
        ]
    )
    sums = block_sums(influence, block)
    # No resample is worse than the worst observation, so the quantiles of a tail end there; the true value may be
    # beyond.
    tail = statistic.share < 1
    return Resampled(
        estimate,
        drawn,
        acceleration(sums),
        freedom=min(degrees_of_freedom(sums), statistic.share * count / block),
        block=block,
        low_beyond=tail,
        high_beyond=tail and len(series) == 2,
    )


def stationary_rows(
    count: int, block: float, resamples: int, generator: np.random.Generator
) -> Iterator[NDArray[np.int64]]:
    """Rows of the stationary bootstrap, `resamples` times `count` of them in pieces [b, count].

    At each step a new block starts with probability 1 / block, at a row drawn evenly; else the next row follows, the
    first after the last.
    """
    piece = max(CHUNK // count, 1)
    for begin in range(0, resamples, piece):
        size = min(piece, resamples - begin)
        starts_here = generator.random((size, count), dtype=np.float32) < 1 / block
        starts_here[:, 0] = True
        at = np.flatnonzero(starts_here)
        shift = generator.integers(count, size=len(at)) - at
        rows = np.arange(size * count) + np.repeat(shift, np.diff(at, append=size * count))
        yield np.mod(rows, count).reshape(size, count)


def block_length(values: Float) -> float:
    """Mean block length that estimates the variance of the mean best (Politis & White 2004, Patton et al. 2009).

    b = (2 G² / D)^⅓ n^⅓ with G = Σ λ(k/M)|k|R(k), D = 2 g(0)², g(0) = Σ λ(k/M)R(k), the flat-top window λ of Politis &
    Romano (1995) and M twice the last significant lag; at least 1 and at most min(3√n, n/3).
    """
    count = len(values)
    if not np.ptp(values) > 0:
        return 1.0
    width = min(2 * max(metrics.significant_lags(values), 1), count - 1)
    lags = np.arange(1, width + 1)
    window = np.clip(2 * (1 - lags / width), 0, 1)
    correlations = window * metrics.autocorrelations(values, width)
    slope, spectrum = 2 * float((lags * correlations).sum()), 1 + 2 * float(correlations.sum())
    longest = math.ceil(min(3 * math.sqrt(count), count / 3))
    if spectrum <= 0:
        return float(longest)
    return float(np.clip((slope**2 / spectrum**2 * count) ** (1 / 3), 1, longest))


def block_sums(influence: Float, block: float) -> Float:
    """Centred sums of the influence values over adjoining blocks of about this length, [m]."""
    blocks = int(len(influence) / block)
    begins = np.linspace(0, len(influence), blocks, endpoint=False).astype(np.int64)
    sums = np.add.reduceat(influence, begins)
    return np.asarray(sums - sums.mean())


def acceleration(sums: Float) -> float:
    """How fast the statistic's deviation changes with the statistic (Efron 1987): a sixth of the skewness."""
    scale = float((sums**2).sum())
    return float((sums**3).sum()) / (6 * scale**1.5) if scale > 0 else 0.0


def degrees_of_freedom(sums: Float) -> float:
    """Of a variance estimated from these block sums, after Satterthwaite: 2m / (kurtosis − 1)."""
    spread = metrics.kurtosis(sums) - 1
    return 2 * len(sums) / spread if spread > 0 else math.inf


def student_quantile(probability: float, freedom: float) -> float:
    """Quantile above the median of Student's t; below one degree of freedom that of one.

    With t = √ν·tan θ the density is proportional to cos^(ν − 1) θ on (−π/2, π/2), which is summed on a grid.
    """
    if freedom > 1_000:
        return NORMAL.inv_cdf(probability)
    freedom = max(freedom, 1.0)
    edges = np.linspace(0, math.pi / 2, 20_001)
    mass = np.concatenate([[0.0], np.cumsum(np.cos((edges[1:] + edges[:-1]) / 2) ** (freedom - 1))])
    angle = np.interp((2 * probability - 1) * mass[-1], mass, edges)
    return math.sqrt(freedom) * math.tan(float(angle))


def bca_ends(drawn: Float, estimate: float, accelerated: float, width: float) -> tuple[float, float]:
    """Ends of the BCa interval from resampled statistics [B]: `width` normal deviations to both sides."""
    share = (np.count_nonzero(drawn < estimate) + np.count_nonzero(drawn == estimate) / 2) / len(drawn)
    bias = NORMAL.inv_cdf(float(np.clip(share, 1 / (len(drawn) + 1), len(drawn) / (len(drawn) + 1))))

    def level(deviations: float) -> float:
        moved = bias + deviations
        stretch = 1 - accelerated * moved
        return NORMAL.cdf(bias + moved / stretch) if stretch > 0 else float(deviations > 0)

    low, high = np.quantile(drawn, (level(-width), level(width)))
    return float(low), float(high)
