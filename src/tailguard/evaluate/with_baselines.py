"""Backtests of an agent and of every baseline on the same bars, under the same costs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from datetime import UTC, datetime
from functools import partial
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from tailguard.algorithm.ensemble import Ensemble
from tailguard.algorithm.learner import Learner
from tailguard.evaluate.accounts import pooled, separate
from tailguard.evaluate.backtest import BacktestResult, backtest
from tailguard.evaluate.baselines import AGENT, OPTIMUM, RANDOM, random_timing, standard_baselines
from tailguard.evaluate.optimum import optimal_weights

if TYPE_CHECKING:
    from tailguard.data.bars import Bars
    from tailguard.experiment.trained_run import TrainedRun
    from tailguard.market import MarketConfig


def backtest_run(
    run: TrainedRun, bars: Bars, *, before_each: Callable[[str], None] = lambda _: None
) -> dict[str, BacktestResult]:
    """Backtests by name: the agent, the optimum of a synthetic market that knows it, and every baseline.

    `bars`: a part of the run's own split. `before_each`: called with each name, to show progress.
    """
    optimum = optimal_weights(run, bars)
    return backtest_with_baselines(run.agent, bars, run.config.market, optimum=optimum, before_each=before_each)


def backtest_with_baselines(
    agent: Learner | Ensemble,
    bars: Bars,
    market: MarketConfig,
    *,
    delay: int = 0,
    noise: float = 0.0,
    throttle: bool = True,
    optimum: NDArray[np.float64] | None = None,
    seed: int = 0,
    before_each: Callable[[str], None] = lambda _: None,
) -> dict[str, BacktestResult]:
    """Backtests by name: the agent, the best weights if they are known, and every baseline under the same costs.

    An agent that trades each symbol in an account of its own is shown as one capital, shared out equally among the
    symbols at the start, and so is every baseline. `noise` is on the agent's features, `seed` also that of the random
    times of its trades. `throttle`: whether the agent's own one acts, where it has one.
    """
    parts = separate(bars, "portfolio" if agent.spec is None else agent.spec.accounts)

    # The bar of the whole work shows its progress, and `overlap` tells more exactly what a run has seen.
    trade_bars = partial(backtest, progress_bar=False, warn_in_sample=False)

    def each(trade: Callable[[Bars, int], BacktestResult]) -> list[BacktestResult]:
        return [trade(part, number) for number, part in enumerate(parts)]

    before_each(AGENT)
    own = each(lambda part, _: trade_bars(agent, part, market, delay=delay, noise=noise, seed=seed, throttle=throttle))
    results = {AGENT: own}
    # What an agent cannot trade, for want of features, no baseline may.
    parts = [_from_first_trade(part, result) for part, result in zip(parts, own, strict=True)]
    if optimum is not None:
        before_each(OPTIMUM)
        results[OPTIMUM] = [trade_bars(optimum, bars, market, delay=delay)]
    for name, policy in standard_baselines(market.leverage, market.allow_short, len(parts[0].symbols)).items():
        before_each(name)
        results[name] = [trade_bars(policy, part, market, delay=delay) for part in parts]
    before_each(RANDOM)
    draw = np.random.default_rng(seed)
    # The agent's decisions as they filled, so a delay is in them already.
    results[RANDOM] = each(lambda part, number: trade_bars(random_timing(own[number], part, draw), part, market))
    return {name: pooled(accounts) for name, accounts in results.items()}


def _from_first_trade(bars: Bars, result: BacktestResult) -> Bars:
    """The same bars, to be traded from the bar at whose close the result's first decision was made."""
    first = datetime.fromtimestamp(int(result.time[0]) / 1000, UTC) - bars.frequency
    if bars.sessions is not None:
        # The bar before may be a weekend away.
        before = bars.frame["time"].filter(bars.frame["time"] < first + bars.frequency).max()
        first = before if isinstance(before, datetime) else first
    return replace(bars, first=first) if first > bars.start else bars
