"""Calibration: predicted quantiles against outcomes, and the risk budget against realised CVaR.

Predictions are N quantiles of the future return at the midpoints (i − ½)/N, as of a quantile critic. Where
returns span several bars and are predicted at every bar, neighbouring outcomes share most of their bars; `overlap` is
the number of bars they span, and the test corrects for this dependence.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Literal, get_args

import numpy as np
import torch
from numpy.typing import NDArray

from tailguard.errors import ConfigError
from tailguard.evaluate.bootstrap import RESAMPLES, Interval, Resampled, cvar_statistic, resampled
from tailguard.evaluate.metrics import horizon_drawdowns, horizon_returns
from tailguard.evaluate.volatility import tail_deviations
from tailguard.validate import check_choice, check_count, check_range

Float = NDArray[np.float64]

Outcome = Literal["return", "drawdown"]
"""What a budget limits: the return over a window, or the maximum drawdown within it."""
BISECTIONS = 16
"""The level of an interval is found to 2⁻¹⁶, less than a tenth of what one draw tells."""


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


class Verdict(StrEnum):
    """The verdict on the budget."""

    KEPT = "kept"
    BROKEN = "broken"
    UNDECIDED = "undecided"


@dataclass(frozen=True)
class RiskBudget:
    """Realised CVaR against its limit."""

    verdict: Verdict
    """kept: the whole interval is at or above the limit; broken: all of it is below; undecided: the limit is in it."""
    cvar: Interval
    """Realised CVaR over the horizon and its interval."""
    limit: float
    alpha: float
    horizon: int
    """Bars of a window."""
    tail_windows: float
    """Number of worst windows, counted without overlap, that the estimate rests on."""
    outcome: Outcome = "return"
    """The outcome of a window: return or drawdown."""
    probability: float = math.nan
    """Probability that the true CVaR keeps the limit, from the evidence of the interval (`TailEvidence.probability`).
    With a 95 % interval, at least 97.5 % where the budget is kept, at most 2.5 % where it is broken. NaN: not known."""


@dataclass(frozen=True)
class TailEvidence:
    """What a record says about the true CVaR of its windows: its confidence interval of every level."""

    bootstrap: Resampled
    """The CVaR on resampled windows."""
    deviations: Float
    """log(estimated CVaR / true CVaR) of simulated records with the same persistence of volatility, [n]; empty where
    there are none."""

    def ends(self, level: float) -> tuple[float, float]:
        """Ends of the confidence interval: each is the wider of the bootstrap's and the simulation's."""
        low, high = self.bootstrap.ends(level)
        if len(self.deviations):
            below, above = np.quantile(self.deviations, ((1 - level) / 2, (1 + level) / 2))
            low = min(low, self.bootstrap.estimate * math.exp(-float(below)))
            high = max(high, self.bootstrap.estimate * math.exp(-float(above)))
        # An account cannot lose more than its equity.
        return max(low, -1.0), high

    def interval(self, level: float) -> Interval:
        """The confidence interval of this level."""
        low, high = self.ends(level)
        return replace(self.bootstrap.interval(level), low=low, high=high)

    def probability(self, limit: float, level: float) -> float:
        """Probability that the true CVaR is at or above the limit: the interval inverted in its level.

        (1 + L) / 2 for the highest level L at which the whole interval is at or above the limit, (1 − L) / 2 for the
        highest at which all of it is below, and ½ where the limit is inside at every level. Where the bootstrap and the
        simulation differ, it is therefore the probability that claims less, the one nearer to ½, and ½ where they
        disagree on the side. It does not increase with the limit. It is never nearer to 0 or 1 than one draw in all
        draws of the smaller of the two samples. `level`: that of the verdict, which the probability agrees with.
        """
        if not self.bootstrap.defined:
            return math.nan
        draws = min(len(each) for each in (self.bootstrap.drawn, self.deviations) if len(each))
        top = max(1 - 2 / (draws + 1), level)
        above = _highest_level(lambda each: self.ends(each)[0] >= limit, level, top)
        below = _highest_level(lambda each: self.ends(each)[1] < limit, level, top)
        return (1 + above - below) / 2


def _highest_level(holds: Callable[[float], bool], level: float, top: float) -> float:
    """The highest level from 0 to `top` at which a property holds that nested intervals lose as they widen; 0: none.

    By bisection, split at `level`, so that the result is on the same side of it as the property at `level` says.
    """
    if not holds(0.0):
        return 0.0
    if holds(top):
        return top
    begin, end = (level, top) if holds(level) else (0.0, level)
    for _ in range(BISECTIONS):
        middle = (begin + end) / 2
        begin, end = (middle, end) if holds(middle) else (begin, middle)
    return begin


def tail_evidence(
    equity: Float,
    generator: np.random.Generator,
    *,
    alpha: float = 0.05,
    horizon: int = 1,
    outcome: Outcome = "return",
    resamples: int = RESAMPLES,
) -> TailEvidence:
    """What an equity curve [T + 1] says about the CVaR of all its windows of `horizon` bars.

    Drawdowns scale with volatility as losses do, so the simulated losses (`volatility.tail_deviations`) are used for
    both outcomes.
    """
    outcomes = horizon_returns(equity, horizon) if outcome == "return" else horizon_drawdowns(equity, horizon)
    found = resampled((outcomes,), cvar_statistic(alpha), generator, resamples, overlap=horizon)
    deviations = tail_deviations(horizon_returns(equity, 1), alpha, horizon, generator)
    # The simulated deviations are factors of a loss: they say nothing about a tail without one.
    return TailEvidence(found, deviations if found.estimate < 0 else deviations[:0])


def risk_budget(
    equity: Float,
    limit: float,
    generator: np.random.Generator,
    *,
    alpha: float = 0.05,
    horizon: int = 1,
    outcome: Outcome = "return",
    level: float = 0.95,
    resamples: int = RESAMPLES,
) -> RiskBudget:
    """Compare the CVaR of all windows of `horizon` bars of an equity curve [T + 1] with the limit.

    `limit`: smallest allowed mean of the worst alpha share of windows: −0.04 is a loss of 4 %.
    `outcome`: of a window: its return, or its maximum drawdown.
    """
    check_choice("outcome", outcome, get_args(Outcome))
    check_range("limit", limit, low=-1, high=0)
    check_range("alpha", alpha, low=0, high=1, low_open=True, high_open=True)
    check_count("horizon", horizon)
    if len(equity) <= horizon + 8:
        raise ConfigError(
            f"horizon: {horizon} bars; {len(equity) - 1:,} bars of equity have too few windows of that length to judge"
        )
    evidence = tail_evidence(equity, generator, alpha=alpha, horizon=horizon, outcome=outcome, resamples=resamples)
    found = evidence.interval(level)
    if found.low >= limit:
        verdict = Verdict.KEPT
    elif found.high < limit:
        verdict = Verdict.BROKEN
    else:
        verdict = Verdict.UNDECIDED
    return RiskBudget(
        verdict=verdict,
        cvar=found,
        limit=limit,
        alpha=alpha,
        horizon=horizon,
        tail_windows=alpha * (len(equity) - 1) / horizon,
        outcome=outcome,
        probability=evidence.probability(limit, level),
    )
