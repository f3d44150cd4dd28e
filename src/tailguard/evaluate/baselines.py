"""Policies to beat. Each sees a `Moment`, all that is known once a bar has closed, and returns target weights."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from tailguard.validate import check_count, check_range

Float = NDArray[np.float64]

HOLD = np.nan
"""Weight that means: leave this position alone."""


@dataclass(frozen=True)
class Moment:
    """What a policy function may use: the bars up to now and its account. Later bars are not in it."""

    row: int
    """Number of the bar that has just closed, counted from the first bar given."""
    first: bool
    """Whether this is the first decision of the backtest."""
    time_ms: int
    """Open time of that bar, milliseconds UTC."""
    open: Float
    """Prices and volumes of all bars up to this one, [row + 1, A] each."""
    high: Float
    low: Float
    close: Float
    volume: Float
    weights: Float
    """Current position values as shares of equity, [A]."""
    equity: float
    """Equity as a multiple of the starting capital."""
    bars_per_year: float


Policy = Callable[[Moment], Float]
"""Target weights [A] for the next open; NaN (`HOLD`) leaves a position alone."""


@dataclass(frozen=True)
class Flat:
    """Never trades: what cash does."""

    def __call__(self, moment: Moment) -> Float:
        return np.zeros_like(moment.weights)


@dataclass(frozen=True)
class BuyAndHold:
    """Buys all assets in equal parts at the start and leaves them alone."""

    exposure: float = 1.0
    """Gross weight bought."""

    def __call__(self, moment: Moment) -> Float:
        if moment.first:
            return np.full_like(moment.weights, self.exposure / len(moment.weights))
        return np.full_like(moment.weights, HOLD)


@dataclass(frozen=True)
class MovingAverageCross:
    """Long an asset while its fast average is above the slow one, else short (or flat without shorts)."""

    fast: int = 24
    slow: int = 168
    exposure: float = 1.0
    allow_short: bool = True

    def __post_init__(self) -> None:
        check_count("fast", self.fast)
        check_count("slow", self.slow, low=self.fast + 1)

    def __call__(self, moment: Moment) -> Float:
        if moment.row + 1 < self.slow:
            return np.zeros_like(moment.weights)
        above = moment.close[-self.fast :].mean(0) > moment.close[-self.slow :].mean(0)
        other = -1.0 if self.allow_short else 0.0
        wanted = np.where(above, 1.0, other) * self.exposure / len(moment.weights)
        # Trades on a change of side only, not to undo the drift of the weights.
        return np.where(np.sign(wanted) == np.sign(moment.weights), HOLD, wanted)


@dataclass(frozen=True)
class VolatilityTarget:
    """Long every asset, scaled so that its trailing volatility meets a yearly target, up to full exposure."""

    target: float = 0.2
    """Yearly volatility aimed at, all assets together if they moved as one."""
    window: int = 168
    exposure: float = 1.0
    """Largest gross weight."""
    band: float = 0.1
    """Trades only when a weight is off by more than this share of the full exposure, to save costs."""

    def __post_init__(self) -> None:
        check_range("target", self.target, low=0, low_open=True)
        check_count("window", self.window, low=2)

    def __call__(self, moment: Moment) -> Float:
        if moment.row < self.window:
            return np.zeros_like(moment.weights)
        assets = len(moment.weights)
        returns = np.diff(np.log(moment.close[-self.window - 1 :]), axis=0)
        deviation = returns.std(0, ddof=1) * np.sqrt(moment.bars_per_year)
        scale = np.minimum(self.target / np.maximum(deviation, 1e-12), self.exposure)
        wanted = scale / assets
        return np.where(np.abs(wanted - moment.weights) > self.band * self.exposure / assets, wanted, HOLD)


def standard_baselines(leverage: float = 1.0, allow_short: bool = True) -> dict[str, Policy]:
    """The baselines every agent is shown beside."""
    full = min(leverage, 1.0)
    return {
        "buy & hold": BuyAndHold(exposure=full),
        "moving-average cross": MovingAverageCross(exposure=full, allow_short=allow_short),
        "volatility target": VolatilityTarget(exposure=full),
        "flat": Flat(),
    }
