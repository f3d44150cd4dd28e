"""What a policy function may use at the close of a bar."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from tailguard.data.pace import Pace

Float = NDArray[np.float64]

HOLD = np.nan
"""Weight that means: hold this position."""


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
    unfilled: Float | None = None
    """Unfilled part of the last order, as shares of equity, positive to buy, [A]; None: nothing."""
    listed: NDArray[np.bool_] | None = None
    """Which assets are listed, [A], where members of the universe come and go; None: all. Targets of others are 0."""
    was_listed: NDArray[np.bool_] | None = None
    """Which were listed at each bar up to this one, [row + 1, A]; None: all, always."""
    sessions: Pace | None = None
    """Bars of a day, a week and a year where the market closes; None: it trades around the clock."""

    @property
    def pace(self) -> Pace:
        """Bars of a day, a week and a year."""
        return self.sessions or Pace.around_the_clock(self.bars_per_year)

    @property
    def waiting(self) -> NDArray[np.bool_]:
        """Assets whose last order was not completely filled, [A]."""
        return np.zeros(len(self.weights), bool) if self.unfilled is None else self.unfilled != 0


Policy = Callable[[Moment], Float]
"""Target weights [A] for the next open; NaN (`HOLD`) holds a position."""
