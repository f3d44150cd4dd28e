"""Features of bars on disk, one window at a time: the same numbers as from all bars in memory."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from tailguard.data.bars import Accounts
from tailguard.data.disk.bar_store import BarStore, moment
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


@dataclass(frozen=True)
class Window:
    """Rows that follow those of the previous window."""

    panel: Panel
    """`segment` numbers continue from window to window."""
    table: FeatureTable


@dataclass(frozen=True)
class Part:
    """A stretch of the bars: `start <= time < stop`, tradeable from `first` on, ms."""

    start: int
    first: int
    stop: int


def stream_features(
    store: BarStore,
    common: NDArray[np.int64],
    part: Part,
    names: Sequence[str] | None,
    accounts: Accounts,
    rows: int,
) -> Iterator[Window]:
    """The rows that `bars.panel(accounts)` and `compute_features` give for the part, about `rows` at a time.

    `common`: the times that every symbol has. Raises `FeatureError` where a feature's value depends on more history
    than a window reads, so that it would change with the size of the windows.
    """
    overlap = OVERLAP * max(longest_warmup(store.sample(), names), SEAM_ROWS) * store.step
    together = [(store.symbols, common)]
    apart = [((one.symbol,), one.time) for one in store.series]
    segment, last_time = -1, 0
    for lane, times in together if accounts == "portfolio" else apart:
        seam: _Seam | None = None
        for begin, end in _windows(times, part, max(1, rows // len(lane))):
            bars = store.bars(max(part.start, begin - overlap), end, begin, lane)
            panel, table = bars.panel(), compute_features(bars, names)
            own = int(np.searchsorted(panel.time, begin))
            kept = panel.rows_between(own, panel.rows)
            breaks = np.diff(kept.time, prepend=last_time) != store.step
            if seam is None:
                breaks[0] = True
            else:
                seam.check(panel.time, table, store.source)
            seam = _Seam(panel.time[-SEAM_ROWS:], table.values[-SEAM_ROWS:], _largest(table.values))
            numbers = segment + np.cumsum(breaks)
            segment, last_time = int(numbers[-1]), int(kept.time[-1])
            kept = replace(
                kept,
                segment=numbers.astype(np.int32),
                tradeable=kept.time >= part.first,
                symbols=store.symbols,
            )
            yield Window(kept, replace(table, values=table.values[own:], valid=table.valid[own:]))


def count_rows(store: BarStore, part: Part, accounts: Accounts, common: NDArray[np.int64]) -> int:
    """Rows that `stream_features` will give; `common` are the times that every symbol has."""
    if accounts == "portfolio":
        return int(np.searchsorted(common, part.stop) - np.searchsorted(common, part.start))
    return sum(one.row_at(part.stop) - one.row_at(part.start) for one in store.series)


def _windows(times: NDArray[np.int64], part: Part, rows: int) -> Iterator[tuple[int, int]]:
    """Stretches of the part that hold `rows` of these times each."""
    low, high = np.searchsorted(times, (part.start, part.stop))
    edges = [int(time) for time in times[low:high:rows]]
    yield from zip(edges, [*edges[1:], part.stop], strict=True)


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
