"""Walk forward: one agent per fold, trained on the past and tested on what follows, and all tests combined.

Many consecutive test periods are stronger evidence than one.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from tailguard.algorithm.ensemble import Ensemble
from tailguard.algorithm.learner import Learner
from tailguard.config import RunConfig
from tailguard.data.splits import Fold, walk_forward
from tailguard.data.windows import Size
from tailguard.evaluate.accounts import pooled, separate
from tailguard.evaluate.backtest import BacktestResult, backtest
from tailguard.evaluate.baselines import HOLD, standard_baselines
from tailguard.evaluate.budget import Budget, own_budget
from tailguard.evaluate.significance import Overfitting, SeedSummary, iqm_over_seeds, overfitting_of
from tailguard.evaluate.trials import TrialCount
from tailguard.validate import check_count

if TYPE_CHECKING:
    from tailguard.data.bars import Bars


@dataclass(frozen=True)
class WalkForwardPlan:
    """Folds and seeds of a walk forward."""

    folds: int = 5
    """Test windows, one after the other, up to the last bar."""
    seeds: int = 1
    """Agents per fold, with consecutive seeds from training.seed."""
    train: Size = 0.5
    """Training bars of a fold, of the first one if `expanding`."""
    expanding: bool = False
    """Training keeps its first bar and grows with every fold; else it rolls forward."""

    def __post_init__(self) -> None:
        check_count("folds", self.folds, low=2)
        check_count("seeds", self.seeds)


@dataclass(frozen=True)
class WalkForwardResults:
    """Test results of all folds and seeds."""

    folds: tuple[Fold, ...]
    results: tuple[tuple[BacktestResult, ...], ...]
    """Test results by seed and fold, each from a flat account."""
    stitched: tuple[BacktestResult, ...]
    """One account through all test windows, by seed: the agents' decisions one after the other, positions carried."""
    baselines: dict[str, BacktestResult]
    """The baselines over the same bars."""
    budget: Budget | None = None
    """The risk budget that the agents were trained under."""
    trials: TrialCount | None = None
    """Trials on these bars, including the seeds of this walk forward; None if they are not counted."""

    @property
    def sharpes(self) -> NDArray[np.float64]:
        """Yearly Sharpe ratio of each seed and fold, [seeds, folds]; NaN where an agent never traded."""
        return np.array([[result.metrics["sharpe"] for result in each] for each in self.results])

    def over_seeds(self, generator: np.random.Generator) -> SeedSummary | None:
        """Interquartile mean of the Sharpe ratios over seeds and folds; none for one seed, or an undefined ratio."""
        defined = len(self.results) > 1 and np.isfinite(self.sharpes).all()
        return iqm_over_seeds(self.sharpes, generator) if defined else None

    @property
    def middle(self) -> BacktestResult:
        """The stitched account of the median seed by its Sharpe ratio: the best one would be biased."""
        order = sorted(self.stitched, key=lambda each: np.nan_to_num(each.metrics["sharpe"]))
        return order[(len(order) - 1) // 2]

    def overfitting(self) -> Overfitting | None:
        """Probability of backtest overfitting of selecting a seed; None for one seed."""
        return overfitting_of([result.net for result in self.stitched])


def plan_folds(config: RunConfig, bars: Bars, plan: WalkForwardPlan) -> list[Fold]:
    """The folds of a plan. An episode's length is purged, and the embargo left out, before every test window."""
    return walk_forward(
        bars,
        folds=plan.folds,
        train=plan.train,
        purge=config.env.episode_length,
        embargo=config.data.embargo,
        expanding=plan.expanding,
    )


def trade_fold(agent: Learner | Ensemble, fold: Fold) -> tuple[BacktestResult, ...]:
    """The agent on the fold's test window, from a flat account; one result an account."""
    accounts = "portfolio" if agent.spec is None else agent.spec.accounts
    return tuple(backtest(agent, part, progress_bar=False) for part in separate(fold.test, accounts))


def combine_tests(
    config: RunConfig,
    bars: Bars,
    folds: Sequence[Fold],
    results: Sequence[Sequence[Sequence[BacktestResult]]],
) -> WalkForwardResults:
    """Combine all tests: `results` by seed, fold and account, as `trade_fold` gives them."""
    tested = bars.between(folds[0].test.start, bars.end_points[1] + bars.frequency)
    parts = separate(tested, config.env.accounts)
    stitched = []
    for seed in results:
        by_account = zip(*seed, strict=True)
        stitched.append(pooled([stitch(own, part, config) for own, part in zip(by_account, parts, strict=True)]))
    return WalkForwardResults(
        folds=tuple(folds),
        results=tuple(tuple(pooled(fold) for fold in seed) for seed in results),
        stitched=tuple(stitched),
        baselines={
            name: pooled([backtest(policy, part, config.market, progress_bar=False) for part in parts])
            for name, policy in standard_baselines(
                config.market.leverage, config.market.allow_short, len(parts[0].symbols)
            ).items()
        },
        budget=own_budget(config),
    )


def stitch(results: Sequence[BacktestResult], bars: Bars, config: RunConfig) -> BacktestResult:
    """One account that follows the decisions of one result after the other.

    Moving from one agent's position to the next one's is a trade with its costs. Between the last decision
    of a fold and the first of the next, a bar, the position is held.
    """
    panel = bars.panel("portfolio")
    targets = np.full((panel.rows, panel.assets), HOLD)
    for result in results:
        rows = np.searchsorted(panel.time, result.time) - 1
        targets[rows] = result.targets
    return backtest(targets, bars, config.market, progress_bar=False)
