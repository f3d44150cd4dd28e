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
"""Windows, overlapping, below which a budget is not judged."""


@dataclass(frozen=True)
class Budget:
    """The question that a risk budget asks: may the worst `alpha` of windows lose this much on average?"""

    limit: float
    """Smallest allowed mean of the worst windows: −0.04 is a loss of 4 %."""
    alpha: float = 0.05
    horizon: str | int = "7d"
    """Length of a window: a duration or bars."""
    outcome: Outcome = "return"
    """return: from the first bar of a window to its last; drawdown: the deepest fall from a high within it."""


@dataclass(frozen=True)
class Standing:
    """Results over the same bars, each with how sure it is."""

    results: Mapping[str, BacktestResult]
    """The agent, the optimum if it is known, the baselines."""
    sharpes: Mapping[str, Interval]
    """Yearly Sharpe ratio of each result."""
    beaten: Mapping[str, Interval]
    """The agent's Sharpe ratio less that of each baseline."""
    budgets: Mapping[str, RiskBudget]
    """Did the risk budget hold, for each result; empty where there is none, or too short a record to ask."""
    notes: tuple[str, ...] = ()
    """What to know about the results before reading anything into them, in words."""


def own_budget(config: RunConfig) -> Budget | None:
    """The budget that a run was trained under: over its episodes, their drawdowns, or bars; none where it has none."""
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
    """Put intervals to results over the same bars.

    `notes`: what to know about the results, as `notes.baseline_notes` gives it.
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
    """The first one's Sharpe ratio less the second's, over the bars that both traded."""
    # After a gap an agent waits for its features, and a baseline does not.
    _, mine, theirs = np.intersect1d(first.time, second.time, return_indices=True)
    statistic = sharpe_statistic(first.bars_per_year)
    return paired_difference(first.net[mine], second.net[theirs], statistic, np.random.default_rng(seed))


def judge_budget(result: BacktestResult, budget: Budget, seed: int = 0) -> RiskBudget | None:
    """The verdict on a budget; none where the record has too few windows to say anything."""
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
