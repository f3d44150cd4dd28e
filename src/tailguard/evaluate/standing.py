"""The agent compared with its baselines, with intervals, and with its risk budget."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING

import numpy as np

from tailguard.data.windows import size_in_bars
from tailguard.evaluate.bootstrap import Interval, interval, paired_difference, sharpe_statistic
from tailguard.evaluate.calibration import Outcome, RiskBudget, risk_budget
from tailguard.evaluate.metrics import DAYS_PER_YEAR
from tailguard.evaluate.trained import AGENT, OPTIMUM

if TYPE_CHECKING:
    from tailguard.config import RunConfig
    from tailguard.evaluate.backtest import BacktestResult

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


@dataclass(frozen=True)
class Standing:
    """Results over the same bars, with confidence intervals."""

    results: Mapping[str, BacktestResult]
    """The agent, the optimum if it is known, the baselines."""
    sharpes: Mapping[str, Interval]
    """Yearly Sharpe ratio of each result."""
    beaten: Mapping[str, Interval]
    """The agent's Sharpe ratio minus that of each baseline."""
    budgets: Mapping[str, RiskBudget]
    """Verdict on the risk budget for each result; empty without a budget, or where the record is too short."""
    notes: tuple[str, ...] = ()
    """Notes on the results."""


def own_budget(config: RunConfig) -> Budget | None:
    """The budget that a run was trained under: on episodes, their drawdowns, or bars; None without a budget."""
    risk = config.risk
    if risk.limit is None:
        return None
    horizon = 1 if risk.measure == "bar" else config.env.episode_length
    return Budget(risk.limit, risk.alpha, horizon, "drawdown" if risk.measure == "drawdown" else "return")


def standing(
    results: Mapping[str, BacktestResult],
    budget: Budget | None = None,
    *,
    seed: int = 0,
    notes: Sequence[str] = (),
    before_each: Callable[[str], None] = lambda _: None,
) -> Standing:
    """Compute confidence intervals for results over the same bars.

    `notes`: notes on the results, as from `notes.baseline_notes`.
    `seed`: of the resampling; the same seed gives the same intervals everywhere.
    `before_each`: called with the name of each result, to show progress.
    """
    own = results[AGENT]
    statistic = sharpe_statistic(own.bars_per_year)
    sharpes, beaten, budgets = {}, {}, {}
    for name, result in results.items():
        before_each(f"intervals: {name}")
        sharpes[name] = interval(result.net, statistic, np.random.default_rng(seed))
        if name not in (AGENT, OPTIMUM):
            beaten[name] = _ahead(own, result, seed)
        judged = None if budget is None else judge_budget(result, budget, seed)
        if judged is not None:
            budgets[name] = judged
    return Standing(results, sharpes, beaten, budgets, tuple(notes))


def _ahead(first: BacktestResult, second: BacktestResult, seed: int) -> Interval:
    """Sharpe ratio of the first minus that of the second, over the bars that both traded."""
    # After a gap an agent waits for its features, and a baseline does not.
    _, mine, theirs = np.intersect1d(first.time, second.time, return_indices=True)
    statistic = sharpe_statistic(first.bars_per_year)
    return paired_difference(first.net[mine], second.net[theirs], statistic, np.random.default_rng(seed))


def judge_budget(result: BacktestResult, budget: Budget, seed: int = 0) -> RiskBudget | None:
    """The verdict on a budget; None where the record has too few windows."""
    frequency = timedelta(days=DAYS_PER_YEAR / result.bars_per_year)
    horizon = size_in_bars("horizon", budget.horizon, len(result.net), frequency)
    if len(result.equity) <= horizon + FEWEST_WINDOWS:
        return None
    return risk_budget(
        result.equity,
        budget.limit,
        np.random.default_rng(seed),
        alpha=budget.alpha,
        horizon=horizon,
        outcome=budget.outcome,
    )
