"""Features of a symbol's bars on disk, one window at a time: the same numbers as from all bars in memory."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from tailguard.data.disk.bar_store import BarStore, Series, moment
from tailguard.data.features import FeatureError, compute_features, longest_warmup
from tailguard.data.panel import FeatureTable, Panel

Float = NDArray[np.float64]

OVERLAP = 8
"""Longest warm-ups of history that each window reads before its first bar: by then, exponential averages have decayed
below the last bit of a number."""
SEAM_ROWS = 64
"""Bars before a seam whose features are computed on both sides and compared."""
SEAM_TOLERANCE = 1e-6
"""Largest difference there, as a share of the feature's largest value in the window."""
SCANNED = 65_536
"""Bars that are looked at together in the search for the beginning of a session."""


@dataclass(frozen=True)
class Part:
    """A stretch of the bars: `start <= time < stop`, tradeable from `first` on, ms."""

    start: int
    first: int
    stop: int


@dataclass(frozen=True)
class Window:
    """Rows that follow those of the previous window."""

    start: int
    """First of them among the rows of the part."""
    panel: Panel
    """Their prices; its segments are the window's own."""
    table: FeatureTable


def stream_features(
    store: BarStore, times: NDArray[np.int64], part: Part, names: Sequence[str] | None, rows: int
) -> Iterator[Window]:
    """The rows at these times of the part, `rows` at a time, as `bars.panel()` and `compute_features` give them.

    `store`: of one symbol, which has a bar at each of `times`. Raises `FeatureError` where a feature's value depends on
    more history than a window reads, so that it would change with the size of the windows.
    """
    (series,) = store.series
    overlap = OVERLAP * max(longest_warmup(store.sample(), names), SEAM_ROWS)
    seam: _Seam | None = None
    for start in range(0, len(times), rows):
        own = np.array(times[start : start + rows])
        stop = int(times[start + rows]) if start + rows < len(times) else part.stop
        low = max(series.row_at(part.start), series.row_at(int(own[0])) - overlap)
        if store.sessions is not None:
            low = max(series.row_at(part.start), _before_session(series, low, store.step))
        bars = store.bars(int(series.time[low]), stop, int(own[0]))
        panel, table = bars.panel(), compute_features(bars, names)
        if seam is not None:
            seam.check(panel.time, table, store.source)
        seam = _Seam(panel.time[-SEAM_ROWS:], table.values[-SEAM_ROWS:], _largest(table.values))
        places = np.searchsorted(panel.time, own)
        kept = replace(table, values=table.values[places], valid=table.valid[places])
        yield Window(start, panel.rows_at(places), kept)


def _before_session(series: Series, row: int, step: int) -> int:
    """The row before the session of this one: features may count bars from its beginning, and know the closure."""
    while row > 0:
        low = max(0, row - SCANNED)
        opens = np.flatnonzero(np.diff(series.time[low : row + 1]) > step)
        if len(opens):
            return low + int(opens[-1])
        row = low
    return 0


def _largest(values: Float) -> Float:
    return np.asarray(np.max(np.abs(values), axis=0, initial=0.0, where=np.isfinite(values)))


@dataclass(frozen=True)
class _Seam:
    """The last rows of a window, to compare with the same rows in the history of the next window."""

    time: NDArray[np.int64]
    values: Float
    largest: Float

    def check(self, time: NDArray[np.int64], table: FeatureTable, source: str) -> None:
        again = np.searchsorted(time, self.time)
        there = (again < len(time)) & (time[np.minimum(again, len(time) - 1)] == self.time)
        mine, theirs = self.values[there], table.values[again[there]]
        close = np.abs(mine - theirs) <= SEAM_TOLERANCE * np.maximum(self.largest, 1e-12)
        # A row near the start of the history may still be warming up in the next window.
        wrong = np.argwhere(~close & np.isfinite(theirs))
        if len(wrong):
            row, column = wrong[-1]
            raise FeatureError(
                f"{source}: feature {table.names[column]!r} at {moment(int(self.time[there][row])):%Y-%m-%d %H:%M} is "
                f"{mine[row, column]:.9g} with more bars before it and {theirs[row, column]:.9g} with {OVERLAP} times "
                "the longest warm-up: it depends on more history than its warm-up declares, so bars on disk cannot be "
                "prepared with it. Raise its warmup=, shorten its memory, or remove it from data.features"
            )
