"""A record by calendar months, and its worst drawdowns with their dates."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from tailguard.evaluate import metrics

Float = NDArray[np.float64]
Times = NDArray[np.int64]


def monthly_returns(time: Times, net: Float) -> dict[int, dict[int, float]]:
    """Net return by year and month, 1 to 12, UTC; a partly traded month has the return of its traded bars.

    `time`: open times of the bars in milliseconds, [T]. `net`: their net returns, [T].
    """
    months = time.astype("datetime64[ms]").astype("datetime64[M]").astype(np.int64)
    begins = np.flatnonzero(np.diff(months, prepend=months[0] - 1))
    growth = np.multiply.reduceat(1 + net, begins)
    found: dict[int, dict[int, float]] = {}
    for month, value in zip(months[begins], growth, strict=True):
        found.setdefault(1970 + int(month) // 12, {})[int(month) % 12 + 1] = float(value - 1)
    return found


def year_return(months: dict[int, float]) -> float:
    """Compound net return of the months."""
    return float(np.prod([1 + value for value in months.values()]) - 1)


def worst_drawdowns(equity: Float, count: int = 5) -> list[metrics.Drawdown]:
    """The `count` deepest drawdowns, the deepest first; they do not overlap. `equity`: [n]."""
    falls = metrics.drawdowns(equity)
    below = (falls < 0).astype(np.int8)
    begins = np.flatnonzero(np.diff(below, prepend=0) == 1)
    ends = np.flatnonzero(np.diff(below, append=0) == -1) + 1
    found = []
    for begin, end in zip(begins.tolist(), ends.tolist(), strict=True):
        trough = begin + int(np.argmin(falls[begin:end]))
        recovered = end < len(equity)
        bars = min(end, len(equity) - 1) - (begin - 1)
        found.append(metrics.Drawdown(float(falls[trough]), begin - 1, trough, end if recovered else None, bars))
    return sorted(found, key=lambda fall: fall.depth)[:count]
