"""The risk budget against what an account realised: CVaR of its windows, its interval, and the verdict."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from datetime import timedelta
from enum import StrEnum
from typing import TYPE_CHECKING, Literal, get_args

import numpy as np
from numpy.typing import NDArray

from tailguard.data.windows import size_in_bars
from tailguard.errors import ConfigError
from tailguard.evaluate.bootstrap import RESAMPLES, Interval, Resampled, cvar_statistic, resampled
from tailguard.evaluate.metrics import horizon_drawdowns, horizon_returns
from tailguard.evaluate.tail_simulation import tail_deviations
from tailguard.validate import check_choice, check_count, check_range

if TYPE_CHECKING:
    from tailguard.config import RunConfig
    from tailguard.evaluate.backtest import BacktestResult

Float = NDArray[np.float64]

Outcome = Literal["return", "drawdown"]
"""What a budget limits: the return over a window, or the maximum drawdown within it."""
BISECTIONS = 16
"""The level of an interval is found to 2⁻¹⁶, less than a tenth of what one draw tells."""
FEWEST_WINDOWS = 8
"""Fewest overlapping windows for a verdict on a budget."""


@dataclass(frozen=True)
class Budget:
    """A risk budget: the largest average loss of the worst `alpha` of windows."""

    limit: float
    """Smallest allowed mean of the worst windows: −0.04 is a loss of 4 %."""
    alpha: float = 0.05
    horizon: str | int = "7d"
    """Length of a window: a duration or bars."""
    outcome: Outcome = "return"
    """return: from the first bar of a window to its last; drawdown: the maximum drawdown within it."""


def own_budget(config: RunConfig) -> Budget | None:
    """The budget that a run was trained under: on episodes, their drawdowns, or bars; None without a budget."""
    risk = config.risk
    if risk.limit is None:
        return None
    horizon = 1 if risk.measure == "bar" else config.env.episode_length
    return Budget(risk.limit, risk.alpha, horizon, "drawdown" if risk.measure == "drawdown" else "return")


class BudgetVerdict(StrEnum):
    """The verdict on the budget."""

    KEPT = "kept"
    BROKEN = "broken"
    UNDECIDED = "undecided"


@dataclass(frozen=True)
class BudgetCheck:
    """Realised CVaR against its limit."""

    verdict: BudgetVerdict
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

    Drawdowns scale with volatility as losses do, so the simulated losses (`tail_simulation.tail_deviations`) are used
    for both outcomes.
    """
    outcomes = horizon_returns(equity, horizon) if outcome == "return" else horizon_drawdowns(equity, horizon)
    bootstrap = resampled((outcomes,), cvar_statistic(alpha), generator, resamples, overlap=horizon)
    deviations = tail_deviations(horizon_returns(equity, 1), alpha, horizon, generator)
    # The simulated deviations are factors of a loss: they say nothing about a tail without one.
    return TailEvidence(bootstrap, deviations if bootstrap.estimate < 0 else deviations[:0])


def check_limit(
    equity: Float,
    limit: float,
    generator: np.random.Generator,
    *,
    alpha: float = 0.05,
    horizon: int = 1,
    outcome: Outcome = "return",
    level: float = 0.95,
    resamples: int = RESAMPLES,
) -> BudgetCheck:
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
    cvar = evidence.interval(level)
    if cvar.low >= limit:
        verdict = BudgetVerdict.KEPT
    elif cvar.high < limit:
        verdict = BudgetVerdict.BROKEN
    else:
        verdict = BudgetVerdict.UNDECIDED
    return BudgetCheck(
        verdict=verdict,
        cvar=cvar,
        limit=limit,
        alpha=alpha,
        horizon=horizon,
        tail_windows=alpha * (len(equity) - 1) / horizon,
        outcome=outcome,
        probability=evidence.probability(limit, level),
    )


def check_budget(result: BacktestResult, budget: Budget, seed: int = 0) -> BudgetCheck | None:
    """The verdict on a budget; None where the record has too few windows."""
    frequency = timedelta(days=result.pace.bar_days)
    if result.sessions is not None and len(result.time) > 1:
        frequency = timedelta(milliseconds=int(np.diff(result.time).min()))
    horizon = size_in_bars("horizon", budget.horizon, len(result.net), frequency, sessions=result.sessions)
    if len(result.equity) <= horizon + FEWEST_WINDOWS:
        return None
    return check_limit(
        result.equity,
        budget.limit,
        np.random.default_rng(seed),
        alpha=budget.alpha,
        horizon=horizon,
        outcome=budget.outcome,
    )
