"""Infer when a market is closed from the times of its bars."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from tailguard.data.pace import DAY_MS
from tailguard.data.sessions import closed_slots

Times = NDArray[np.int64]

LONGEST_CLOSURE = 12 * DAY_MS
"""Longer stretches without bars are gaps in the data: no exchange closes for more than about ten days."""
HOLIDAY = 23 * 3_600_000
"""Intraday bars: stretches from this length on are taken for a holiday."""
SAMPLES = 64
"""Times of a stretch that are compared with the days and weeks beside it."""


def inferred_grid(times: Times, step: int) -> tuple[Times, int] | None:
    """Open times that the market should have, from those it has (all symbols together), and the holidays among them.

    None: it trades around the clock. Otherwise a stretch without bars is a closure where it holds a time of the week
    or of the day that is usually without bars, or a whole day. Daily bars: a day that no symbol has is a closure. All
    other times, and stretches of more than 12 days, are missing bars and part of the grid.
    """
    if closed_slots(times, step) is None:
        return None
    steps = np.diff(times)
    holes = np.flatnonzero(steps > step)
    if step >= DAY_MS:
        closed = steps[holes] <= LONGEST_CLOSURE
    else:
        closed = np.array([_is_closure(times, int(hole), step) for hole in holes], bool)
    missing = [_missing(times, int(hole), step) for hole in holes[~closed]]
    grid = np.unique(np.concatenate([times, *missing])) if missing else times
    return grid, _holidays(times, holes[closed])


def _is_closure(times: Times, hole: int, step: int) -> bool:
    """Whether the stretch after this row holds a time that is usually without bars, or is a whole day."""
    start, stop = int(times[hole]) + step, int(times[hole + 1])
    if stop - start > LONGEST_CLOSURE:
        return False
    if stop - start >= HOLIDAY:
        return True
    count = (stop - start) // step
    slots = start + step * np.unique(np.linspace(0, count - 1, min(count, SAMPLES)).astype(np.int64))
    for offsets in ((-3, -2, -1, 1, 2, 3), (-21, -14, -7, 7, 14, 21)):
        beside = slots[:, None] + DAY_MS * np.array(offsets)
        inside = (beside >= times[0]) & (beside <= times[-1])
        place = np.minimum(np.searchsorted(times, beside), len(times) - 1)
        found = (times[place] == beside) & inside
        # Half of them, so that summer time, which moves a closure by an hour, does not hide it.
        if ((2 * found.sum(1) <= inside.sum(1)) & (inside.sum(1) > 1)).any():
            return True
    return False


def _missing(times: Times, hole: int, step: int) -> Times:
    """The times missing after this row: every one, or in a long stretch those that the week before it had."""
    start, stop = int(times[hole]) + step, int(times[hole + 1])
    if stop - start <= LONGEST_CLOSURE:
        return np.arange(start, stop, step)
    week = 7 * DAY_MS
    pattern = times[(times > times[hole] - week) & (times <= times[hole])]
    weeks = 1 + np.arange((stop - start) // week + 2)
    tiled = np.unique((pattern[None, :] + week * weeks[:, None]).ravel())
    return np.asarray(tiled[(tiled >= start) & (tiled < stop)])


def _holidays(times: Times, closures: NDArray[np.int64]) -> int:
    """Days inside closures whose weekday usually has bars."""
    days = np.unique(times // DAY_MS)
    per_weekday = np.bincount((days + 3) % 7, minlength=7)  # 1970-01-01 was a Thursday
    usual = per_weekday > 0.5 * per_weekday.max()
    inside = [np.arange(times[row] // DAY_MS + 1, times[row + 1] // DAY_MS) for row in closures]
    return sum(int(usual[(between + 3) % 7].sum()) for between in inside)
