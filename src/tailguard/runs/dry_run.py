"""A dry run of the final evaluation on a few bars, before the first step, so that errors surface before training."""

from __future__ import annotations

from dataclasses import replace
from datetime import UTC, datetime

import numpy as np
import torch

from tailguard.data.bars import Bars
from tailguard.data.splits import Split
from tailguard.envs.spec import TradingSpec, task_for
from tailguard.errors import BarsError, ConfigError
from tailguard.evaluate.accounts import separate
from tailguard.evaluate.budget import Budget, own_budget
from tailguard.evaluate.report.collect import collect
from tailguard.evaluate.report.sections import report_page
from tailguard.evaluate.summary import EvaluationSummary
from tailguard.experiment.trained_run import TrainedRun

BARS = 32
"""Bars to trade; each takes about a millisecond per policy."""
WINDOW = 8
"""Longest window of the budget in the dry run; the few bars must hold several of them."""


def shorten_run(run: TrainedRun) -> TrainedRun:
    """The run with validation and test parts of a few bars.

    Raises `BarsError` if a part has no bar that the agent could trade.
    """
    spec = run.agent.spec
    if spec is None:
        raise ConfigError("this agent was not trained on a TradingEnv, so it cannot be judged on bars")
    validation, test = (_few_bars(run.part(name), spec, name) for name in ("validation", "test"))
    return replace(run, split=_split(run, validation, test))


def short_budget(budget: Budget | None) -> Budget | None:
    """The budget with windows that fit into a few bars."""
    if budget is None or (isinstance(budget.horizon, int) and budget.horizon <= WINDOW):
        return budget
    return replace(budget, horizon=WINDOW)


def dry_run_report(run: TrainedRun, summary: EvaluationSummary) -> None:
    """Make the report of a shortened run; nothing is written."""
    known: EvaluationSummary | None = summary
    validation, test = run.part("validation"), run.part("test")
    if run.config.env.accounts == "per_symbol" and len(test.symbols) > 1:
        # A report covers one account.
        symbol, known = test.symbols[0], None
        run = replace(run, split=_split(run, validation.select(symbol), test.select(symbol)))
    # A folder that does not exist: metrics and agent of an earlier run of this name must not be used.
    empty = replace(run, folder=run.folder / "rehearsal")
    data = collect(empty, known=known, budget=short_budget(own_budget(run.config)))
    report_page(data).html(data.name)


def _split(run: TrainedRun, validation: Bars, test: Bars) -> Split:
    # A prepared market's training part is mapped, not `Bars`; a report reads no more of it than its times.
    return Split(run.split.train, validation, test)  # type: ignore[arg-type]


def _few_bars(bars: Bars, spec: TradingSpec, name: str) -> Bars:
    """The part's first bars that every account can trade, after a lead-in that its features need."""
    accounts = separate(bars, spec.accounts)
    open_times = [_tradeable_times(part, spec) for part in accounts]
    if any(not len(times) for times in open_times):
        raise BarsError(
            f"{bars.source}: the {name} part has no two bars in a row on which all features are defined, so the agent "
            f"could not be evaluated on it. Make data.{name} longer, or choose features with a shorter warm-up"
        )
    # After a gap one account may have to wait while another trades; include the bars until all of them trade.
    first, last = (pick(int(times[0]) for times in open_times) for pick in (min, max))
    begin, stop = (datetime.fromtimestamp(moment / 1000, UTC) for moment in (first, last))
    # Bars are counted, not hours: a part may begin before a weekend.
    following = bars.frame["time"].filter(bars.frame["time"] > stop).unique().sort().head(BARS)
    end = stop if following.is_empty() else following[-1]
    return replace(bars, frame=bars.frame.filter(bars.frame["time"] <= end), first=begin)


def _tradeable_times(bars: Bars, spec: TradingSpec) -> np.ndarray:
    """Open times, in milliseconds, of the bars at whose close the agent can decide and the next of which can fill."""
    _, usable, panel = task_for(spec, bars, None, torch.float64)
    allowed = panel.tradeable & usable
    follows = allowed[:-1] & allowed[1:] & (np.diff(panel.segment) == 0)
    return np.asarray(panel.time[:-1][follows])
