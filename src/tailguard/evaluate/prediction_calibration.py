"""Calibration of predictions: predicted quantiles of the return against the returns that followed.

Predictions are N quantiles of the future return at the midpoints (i − ½)/N, as of a quantile critic. Where
returns span several bars and are predicted at every bar, neighbouring outcomes share most of their bars; `overlap` is
the number of bars they span, and the test corrects for this dependence.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from tailguard.errors import ConfigError
from tailguard.validate import check_count

Float = NDArray[np.float64]


def pit_values(predicted: Float, realised: Float) -> Float:
    """Probability integral transform: the predicted probability of an outcome at or below the realised one, [n].

    Uniform on (0, 1) if predictions are calibrated. `predicted` [n, N]: quantiles at midpoints, in any order;
    `realised` [n]. Between two quantiles it is linear; beyond the first and the last, where 1/(2N) of the probability
    lies without further detail, it is the middle of that share. For tied quantiles it is the middle.
    """
    ordered = np.sort(predicted, axis=1)
    return np.asarray((_share_below(ordered, realised, ties=False) + _share_below(ordered, realised, ties=True)) / 2)


def _share_below(ordered: Float, realised: Float, *, ties: bool) -> Float:
    """Interpolated distribution function of each row at its outcome, with or without the quantiles equal to it."""
    count = ordered.shape[1]
    value = realised[:, None]
    rank = ((ordered <= value) if ties else (ordered < value)).sum(1)
    inside = (rank > 0) & (rank < count)
    upper = np.clip(rank, 1, count - 1)[:, None]
    low, high = (np.take_along_axis(ordered, index, 1)[:, 0] for index in (upper - 1, upper))
    part = np.where(inside, realised - low, 0.0) / np.where(inside & (high > low), high - low, 1.0)
    outside = np.where(rank == 0, 0.25 / count, 1 - 0.25 / count)
    share: Float = np.where(inside, (rank - 0.5 + part) / count, outside)
    return share


@dataclass(frozen=True)
class Calibration:
    """Predicted against realised, ready to plot, and a test of their agreement."""

    pit: Float
    """Probability integral transform of each outcome, [n]."""
    histogram: Float
    """Share of the outcomes in each of equally wide bins of the PIT, [bins]; 1 / bins each where predictions are right.
    Too many at both ends: risk was underestimated. Too many in the middle: overestimated."""
    levels: Float
    """Midpoints (i − ½)/N, [N]."""
    coverage: Float
    """Share of outcomes at or below the predicted quantile of each level, [N]; equal to the level where it is right."""
    predicted: Float
    """Quantiles of the returns predicted over the whole period, [N]: of all predictions taken together."""
    realised: Float
    """Quantiles of the realised returns, [N]."""
    statistic: float
    """χ² of the histogram against the uniform distribution, corrected for overlap."""
    freedom: float
    """Degrees of freedom of the statistic; bins − 1 without overlap."""
    p_value: float
    """Probability of at least this statistic if the predictions are calibrated; small: they are not."""
    effective: float
    """Effective sample size: independent outcomes with the information of these overlapping ones."""


def calibration(predicted: Float, realised: Float, *, overlap: int = 1, bins: int = 10) -> Calibration:
    """Compare predicted quantiles [n, N] at midpoints with the realised returns [n], in order of time.

    The test is Pearson's χ² on the PIT histogram with the second-order correction of Rao & Scott (1981) for dependent
    counts. Right predictions make outcomes that share no bar independent, so only lags below `overlap` count.
    """
    if predicted.ndim != 2 or realised.shape != predicted.shape[:1] or predicted.shape[1] < 2:
        raise ConfigError(
            f"predicted quantiles {predicted.shape} and realised returns {realised.shape}: they must be [n, N] with N "
            "at least 2, and [n]"
        )
    check_count("overlap", overlap)
    check_count("bins", bins, low=2)
    count, quantiles = predicted.shape
    if bins > quantiles or count < 5 * bins:
        raise ConfigError(
            f"bins: {bins} must be at most the {quantiles} quantiles and a fifth of the {count:,} outcomes"
        )
    pit = pit_values(predicted, realised)
    inside = (np.minimum((pit * bins).astype(np.int64), bins - 1)[:, None] == np.arange(bins)).astype(np.float64)
    plain = float(((inside.mean(0) - 1 / bins) ** 2).sum() * count * bins)
    first, second = _count_moments(inside, overlap)
    statistic, freedom = plain * first / second, first**2 / second
    levels = (np.arange(quantiles) + 0.5) / quantiles
    return Calibration(
        pit=pit,
        histogram=inside.mean(0),
        levels=levels,
        coverage=(realised[:, None] <= np.sort(predicted, axis=1)).mean(0),
        predicted=np.quantile(predicted, levels),
        realised=np.quantile(realised, levels),
        statistic=statistic,
        freedom=freedom,
        p_value=chi_square_tail(statistic, freedom),
        effective=count * min(1.0, (bins - 1) / first),
    )


def _count_moments(inside: Float, overlap: int) -> tuple[float, float]:
    """Sum and sum of squares of the inflation factors of the χ² terms, from indicators of the bins [n, bins].

    They are the eigenvalues of the counts' long-run covariance over what independent counts have, all 1 for those, so
    χ² is distributed as a sum of squared normals with these weights.
    """
    count, bins = inside.shape
    centred = inside - 1 / bins
    covariance = np.eye(bins) / bins - 1 / bins**2
    for lag in range(1, min(overlap, count)):
        lagged = centred[lag:].T @ centred[:-lag] / count
        covariance += lagged + lagged.T
    factors = covariance * bins
    # At least the value of independent outcomes: sums over lags from few windows can be negative.
    first = max(float(np.trace(factors)), bins - 1.0)
    return first, max(float((factors**2).sum()), first**2 / (bins - 1))


def chi_square_tail(statistic: float, freedom: float) -> float:
    """Probability that χ² with this many degrees of freedom exceeds the statistic."""
    half = torch.tensor([freedom / 2, statistic / 2], dtype=torch.float64)
    return float(torch.special.gammaincc(half[0], half[1]).item())
