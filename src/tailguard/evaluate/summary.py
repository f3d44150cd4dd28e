"""The agent compared with its baselines, with intervals, and with its risk budget."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from tailguard.evaluate.baselines import AGENT, OPTIMUM
from tailguard.evaluate.bootstrap import Interval, interval, paired_difference, sharpe_statistic
from tailguard.evaluate.budget import Budget, BudgetCheck, check_budget
from tailguard.evaluate.notes import baseline_notes
from tailguard.evaluate.with_baselines import backtest_run

if TYPE_CHECKING:
    from tailguard.data.bars import Bars
    from tailguard.evaluate.backtest import BacktestResult
    from tailguard.experiment.trained_run import TrainedRun


@dataclass(frozen=True)
class EvaluationSummary:
    """Results over the same bars, with confidence intervals."""

    results: Mapping[str, BacktestResult]
    """The agent, the optimum if it is known, the baselines."""
    sharpes: Mapping[str, Interval]
    """Yearly Sharpe ratio of each result."""
    beaten: Mapping[str, Interval]
    """The agent's Sharpe ratio minus that of each baseline."""
    budgets: Mapping[str, BudgetCheck]
    """Verdict on the risk budget for each result; empty without a budget, or where the record is too short."""
    notes: tuple[str, ...] = ()
    """Notes on the results."""


def evaluate_run(
    run: TrainedRun,
    bars: Bars,
    budget: Budget | None = None,
    *,
    seed: int = 0,
    before_each: Callable[[str], None] = lambda _: None,
) -> EvaluationSummary:
    """Backtest the run's agent and all baselines on a part of its split, and summarise the results.

    `budget`: the risk budget to check; none is checked by default.
    """
    results = backtest_run(run, bars, before_each=before_each)
    notes = baseline_notes(results, bars, run.config.market)
    return summarise(results, budget, seed=seed, notes=notes, before_each=before_each)


def summarise(
    results: Mapping[str, BacktestResult],
    budget: Budget | None = None,
    *,
    seed: int = 0,
    notes: Sequence[str] = (),
    before_each: Callable[[str], None] = lambda _: None,
) -> EvaluationSummary:
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
        checked = None if budget is None else check_budget(result, budget, seed)
        if checked is not None:
            budgets[name] = checked
    return EvaluationSummary(results, sharpes, beaten, budgets, tuple(notes))


def _ahead(first: BacktestResult, second: BacktestResult, seed: int) -> Interval:
    """Sharpe ratio of the first minus that of the second, over the bars that both traded."""
    # After a gap an agent waits for its features, and a baseline does not.
    _, mine, theirs = np.intersect1d(first.time, second.time, return_indices=True)
    statistic = sharpe_statistic(first.bars_per_year)
    return paired_difference(first.net[mine], second.net[theirs], statistic, np.random.default_rng(seed))
