"""Black-box checks of a pipeline: later bars are removed, moved or shuffled, and nothing before them may change.

The pipeline is the user's own: features, those of plugins included, their scaling, the account, the agent's decisions
and the baselines'. Of a run it is the run's agent on its test bars; otherwise a small learner on synthetic bars.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray

from tailguard.audit.registry import Measurement, at_most, none_of, register_check
from tailguard.audit.subject import Subject
from tailguard.envs.spec import task_for
from tailguard.envs.trading import TradingEnv
from tailguard.evaluate.backtest import BacktestAgent, BacktestResult, backtest
from tailguard.evaluate.baselines import BASELINES

if TYPE_CHECKING:
    from datetime import datetime

    from tailguard.data.bars import Bars

TRADED = 240
"""Bars that are traded, after those that features warm up on."""
CUTS = 3
"""Places at which the bars are cut."""


@dataclass(frozen=True)
class Pipeline:
    """An agent and the bars that it trades."""

    agent: BacktestAgent
    bars: Bars

    @classmethod
    def of(cls, subject: Subject) -> Pipeline:
        """The run's agent on the first of its test bars; a small learner on the last of the synthetic ones."""
        from tailguard.data.features import longest_warmup
        from tailguard.data.splits import traded_times

        if subject.run is not None:
            bars = subject.run.part("test")
            spec = subject.run.agent.spec
            if spec is not None and spec.accounts == "per_symbol":
                bars = bars.select(bars.symbols[0])
            times = traded_times(bars)
            return cls(subject.run.agent, until(bars, times[min(TRADED, len(times)) - 1]))
        # Volatility scaling, as under a limit: a forecast that knew the next bar would be in every weight.
        env = TradingEnv(
            subject.bars, num_envs=6, episode_length=48, stagger=8, volatility_half_life=24, seed=subject.seed
        )
        learner = subject.learner(env)
        learner.iterate()
        bars = subject.bars
        begin = longest_warmup(bars)
        times = traded_times(bars)[begin : begin + TRADED]
        return cls(learner, replace(until(bars, times[-1]), first=times[0]))

    def traded(self, bars: Bars | None = None) -> Course:
        """What the pipeline makes of these bars, its own by default."""
        bars = self.bars if bars is None else bars
        spec = self.agent.spec
        assert spec is not None  # it was trained on bars
        task, usable, panel = task_for(spec, bars, None, torch.float64)
        rows = panel.tradeable & usable
        results = {"agent": backtest(self.agent, bars, progress_bar=False, warn_in_sample=False)}
        config = task.market.config
        for name, make in BASELINES.items():
            results[name] = backtest(make(config.leverage, config.allow_short), bars, config, progress_bar=False)
        return Course(panel.time[rows], task.features.float().numpy()[rows], results)

    def cuts(self, seed: int) -> list[datetime]:
        """Times of the last bars that stay."""
        from tailguard.data.splits import traded_times

        times = traded_times(self.bars)
        draw = np.random.default_rng(seed)
        first = len(times) // 4
        return [times[int(row)] for row in draw.integers(first, max(first + 1, len(times) - 3), size=CUTS)]


@dataclass(frozen=True)
class Course:
    """What a pipeline computed, bar by bar."""

    time: NDArray[np.int64]
    """Of each bar with features, ms."""
    features: NDArray[np.float32]
    """Scaled, as the agent reads them."""
    results: dict[str, BacktestResult]
    """Backtests by the name of who decides."""

    def changed(self, other: Course, cut_ms: int) -> Iterator[str]:
        """What differs between two courses up to this bar."""
        known, also = self.time <= cut_ms, other.time <= cut_ms
        if known.sum() != also.sum():
            yield f"rows with features ({known.sum()} and {also.sum()})"
        elif not np.array_equal(self.features[known], other.features[also], equal_nan=True):
            columns = np.flatnonzero((self.features[known] != other.features[also]).any(axis=0))
            yield f"features {columns[:5].tolist()}"
        for name, mine in self.results.items():
            theirs = other.results[name]
            # A decision at the close of the cut fills at the open after it: it knows nothing that was changed.
            filled = int((mine.time <= cut_ms).sum())
            decided = min(filled + 1, len(mine.targets), len(theirs.targets))
            if not np.array_equal(mine.targets[:decided], theirs.targets[:decided], equal_nan=True):
                yield f"decisions of {name}"
            if not np.array_equal(mine.equity[: filled + 1], theirs.equity[: filled + 1]):
                yield f"the account of {name}"


# --- bars after a cut ------------------------------------------------------------------------------------------------


def until(bars: Bars, time: datetime) -> Bars:
    """The bars up to this one."""
    import polars as pl

    return replace(bars, frame=bars.frame.filter(pl.col("time") <= time))


def later_values(bars: Bars, cut: datetime, change: Callable[[Any], Any]) -> Bars:
    """The same times, with the numbers of all bars after the cut changed, symbol by symbol."""
    import polars as pl

    names = [name for name in bars.frame.columns if name not in ("symbol", "time", "segment")]
    parts = []
    for part in bars.frame.partition_by("symbol", maintain_order=True):
        before, after = part.filter(pl.col("time") <= cut), part.filter(pl.col("time") > cut)
        parts += [before, after.with_columns(change(after.select(names)))]
    return replace(bars, frame=pl.concat(parts))


def _moved(values: Any) -> Any:
    """Each bar takes the place of the next one, at twice its price."""
    prices = [name for name in ("open", "high", "low", "close") if name in values.columns]
    return values.with_columns([values[name] * 2.0 for name in prices])[[0, *range(values.height - 1)]]


def _wrong(subject: Subject, changed: Callable[[Bars, datetime], Bars]) -> list[str]:
    """What changes before the cuts."""
    pipeline = Pipeline.of(subject)
    whole, wrong = pipeline.traded(), []
    for cut in pipeline.cuts(subject.seed):
        other = pipeline.traded(changed(pipeline.bars, cut))
        wrong += [f"{what} up to {cut:%Y-%m-%d %H:%M}" for what in whole.changed(other, int(cut.timestamp() * 1000))]
    return wrong


WHY = (
    "A pipeline that knows what comes later earns in a backtest what nobody can earn. Where a feature is clean by "
    "itself, its scaling, the account or the decision may still look ahead."
)
REMEDY = (
    "The first difference names the place: a feature (tailguard.data.features.leaking_features), the scaling (fit it "
    "on training bars), the account or the decision. See docs/features.md."
)


@register_check(
    "U1",
    "Does nothing in your pipeline change when later bars are removed?",
    why=WHY,
    remedy=REMEDY,
    fast=True,
    reads_run=True,
)
def truncation_changes_nothing(subject: Subject) -> Measurement:
    return none_of(f"changes of features, decisions and accounts by removing the bars after {CUTS} cuts",
                   _wrong(subject, until))  # fmt: skip


@register_check(
    "U2", "Does nothing in your pipeline change when later bars are moved to other times and prices?", why=WHY,
    remedy=REMEDY, fast=True,
    reads_run=True,
)  # fmt: skip
def shift_changes_nothing(subject: Subject) -> Measurement:
    return none_of(f"changes of features, decisions and accounts by moving the bars after {CUTS} cuts",
                   _wrong(subject, lambda bars, cut: later_values(bars, cut, _moved)))  # fmt: skip


@register_check(
    "U3",
    "Does nothing in your pipeline change when later bars are shuffled?",
    why=WHY,
    remedy=REMEDY,
    fast=True,
    reads_run=True,
)
def shuffling_changes_nothing(subject: Subject) -> Measurement:
    def shuffled(values: Any) -> Any:
        return values.sample(fraction=1.0, shuffle=True, seed=subject.seed)

    return none_of(f"changes of features, decisions and accounts by shuffling the bars after {CUTS} cuts",
                   _wrong(subject, lambda bars, cut: later_values(bars, cut, shuffled)))  # fmt: skip


@register_check(
    "U4",
    "Do your features have the same values wherever the history begins?",
    why="A feature that sums from the first bar on, or averages without end, has other values in a backtest, in "
    "training and in trading, whose histories begin at other bars.",
    remedy="Give the feature a window, or a warm-up long enough that the beginning is forgotten (warmup=).",
    fast=True,
    reads_run=True,
)
def features_forget_the_beginning(subject: Subject) -> Measurement:
    import polars as pl

    from tailguard.data.features import longest_warmup
    from tailguard.data.splits import traded_times

    pipeline = Pipeline.of(subject)
    spec = pipeline.agent.spec
    assert spec is not None  # it was trained on bars
    names = list(dict.fromkeys(name.split(":")[0] for name in spec.scaler.names))
    whole = pipeline.bars
    warmup = longest_warmup(whole, names)
    times = traded_times(replace(whole, first=None))
    dropped = min(max(1, warmup // 3), TRADED // 2, len(times) // 4)
    later = replace(whole, frame=whole.frame.filter(pl.col("time") >= times[dropped]), first=None)
    courses = []
    for bars in (replace(whole, first=None), later):
        task, usable, panel = task_for(spec, bars, None, torch.float64)
        courses.append((panel.time[usable], task.features.float().numpy()[usable]))
    common = np.intersect1d(courses[0][0], courses[1][0])
    values = [features[np.isin(time, common)] for time, features in courses]
    gaps = np.abs(values[0] - values[1]).max(axis=0)
    worst_column = int(gaps.argmax())
    # In standard deviations of the feature. Windows are exact up to the rounding of rolling sums; exponential averages
    # have forgotten all but this after their warm-up.
    return at_most(f"largest change of a feature, in standard deviations, without the first {dropped} bars",
                   float(gaps.max()), 1e-3, f"column {worst_column}, {task.feature_names[worst_column]}")  # fmt: skip
