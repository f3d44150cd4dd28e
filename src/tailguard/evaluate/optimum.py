"""The best policy on a synthetic market's planted signal, and the agent's share of what it earns."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from tailguard.errors import TailguardError
from tailguard.evaluate.baselines import AGENT, OPTIMUM

if TYPE_CHECKING:
    from tailguard.config import RunConfig
    from tailguard.data.bars import Bars
    from tailguard.evaluate.backtest import BacktestResult
    from tailguard.experiment.trained_run import TrainedRun


def optimal_weights(run: TrainedRun, bars: Bars) -> NDArray[np.float64] | None:
    """Target weights of the best policy on these bars, a part of the run's split, [R, A]; None where it is unknown."""
    if run.synthetic is None or run.synthetic.signal == 0 or why_no_optimum(run) is not None:
        return None
    weights = run.synthetic.oracle_weights(*_optimum_settings(run.config))
    times = run.synthetic.bars.frame["time"].unique(maintain_order=True)
    first, last = bars.end_points
    return np.asarray(weights[np.flatnonzero(((times >= first) & (times <= last)).to_numpy())])


def why_no_optimum(run: TrainedRun) -> str | None:
    """Why the best policy on a synthetic market's planted signal is unknown for these settings; None where it is not.

    Settings that the dynamic programme does not cover, such as costs of a large part of the equity, are legal.
    """
    if run.synthetic is None or run.synthetic.signal == 0:
        return None
    if run.config.env.constraints.active:
        return "env.constraints limits the portfolio, and the optimum is that of an account without limits"
    try:
        run.synthetic.optimum(*_optimum_settings(run.config))
    except TailguardError as error:
        return str(error)
    return None


def share_of_optimum(results: Mapping[str, BacktestResult]) -> float:
    """The agent's log-growth as a share of the planted optimum's on the same bars.

    NaN where no optimum is known, where it did not grow, and where the agent is ruined.
    """
    if OPTIMUM not in results:
        return math.nan
    mine, best = (float(results[name].equity[-1]) for name in (AGENT, OPTIMUM))
    return math.log(mine) / math.log(best) if mine > 0 and best > 1 else math.nan


def _optimum_settings(config: RunConfig) -> tuple[float, float, float, bool]:
    """Cost of a trade, leverage, funding rate and whether shorts are allowed, as the planted optimum takes them."""
    market = config.market
    return market.fee + market.half_spread, market.leverage, market.funding_rate, market.allow_short
