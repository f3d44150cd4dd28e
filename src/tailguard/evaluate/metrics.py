"""Figures of a track record: pure functions of per-bar net returns or of equity. Returns are fractions, 0.01 is 1 %."""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray

Float = NDArray[np.float64]


def growth_per_year(equity: Float, bars_per_year: float) -> float:
    """Compound yearly growth of an equity curve with its starting value in front; −1 for a ruined account."""
    total = float(equity[-1] / equity[0])
    years = (len(equity) - 1) / bars_per_year
    if total <= 0:
        return -1.0
    exponent = math.log(total) / years
    return math.expm1(exponent) if exponent < 700 else math.inf


def volatility(returns: Float, bars_per_year: float) -> float:
    """Yearly standard deviation of returns (ddof 1)."""
    return float(np.std(returns, ddof=1) * math.sqrt(bars_per_year))


def sharpe(returns: Float, bars_per_year: float) -> float:
    """Yearly Sharpe ratio against cash at zero interest; NaN when returns do not vary."""
    deviation = float(np.std(returns, ddof=1))
    return float(np.mean(returns)) / deviation * math.sqrt(bars_per_year) if deviation > 0 else math.nan


def sortino(returns: Float, bars_per_year: float) -> float:
    """Yearly mean return over downside deviation (root mean square of losses over all bars); NaN without losses."""
    downside = math.sqrt(float(np.mean(np.minimum(returns, 0.0) ** 2)))
    return float(np.mean(returns)) / downside * math.sqrt(bars_per_year) if downside > 0 else math.nan


def drawdowns(equity: Float) -> Float:
    """Fall from the highest equity so far, at each point, as a fraction (0 or negative)."""
    return np.asarray(equity / np.maximum.accumulate(equity) - 1.0)


def max_drawdown(equity: Float) -> float:
    """Deepest fall from a previous high, as a negative fraction."""
    return float(drawdowns(equity).min())


def value_at_risk(returns: Float, alpha: float) -> float:
    """The alpha-quantile of returns: the best of the worst alpha share."""
    return float(np.quantile(returns, alpha, method="inverted_cdf"))


def cvar(returns: Float, alpha: float) -> float:
    """Mean of the worst alpha share of returns, the boundary observation weighted by the part that belongs to it."""
    ordered = np.sort(returns)
    share = alpha * len(ordered)
    whole = math.floor(share)
    tail = float(ordered[:whole].sum())
    if whole < len(ordered):
        tail += (share - whole) * float(ordered[whole])
    return tail / share


def horizon_returns(equity: Float, bars: int) -> Float:
    """Returns over all overlapping windows of this many bars, oldest first."""
    return np.asarray(equity[bars:] / equity[:-bars] - 1.0)
