"""Where episodes may start, found as rows come piece by piece."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray


class Stretches:
    """Usable, unbroken stretches of rows that come piece by piece."""

    def __init__(self) -> None:
        self._closed: list[tuple[int, int]] = []
        self._open: tuple[int, int, int] | None = None
        """First row for a start, last row and segment of the stretch that the next row may continue."""
        self._rows = 0

    def extend(self, segment: NDArray[Any], usable: NDArray[np.bool_], tradeable: NDArray[np.bool_]) -> None:
        ends = np.flatnonzero((np.diff(segment) != 0) | (np.diff(usable.astype(np.int8)) != 0)) + 1
        for low, high in zip([0, *ends.tolist()], [*ends.tolist(), len(segment)], strict=True):
            if not usable[low]:
                self._close()
                continue
            number, last = int(segment[low]), self._rows + high - 1
            begin = np.flatnonzero(tradeable[low:high])
            first = self._rows + low + int(begin[0]) if begin.size else last + 1
            if self._open is not None and self._open[2] == number:
                before = self._open
                # Rows before the first tradeable one only feed features; nothing may start there.
                self._open = (before[0] if before[0] <= before[1] else first, last, number)
            else:
                self._close()
                self._open = (first, last, number)
        self._rows += len(segment)

    def _close(self) -> None:
        if self._open is not None and self._open[0] <= self._open[1]:
            self._closed.append(self._open[:2])
        self._open = None

    def ranges(self) -> NDArray[np.int64]:
        """First row for a start and last row of each stretch, [S, 2]."""
        self._close()
        return np.array(self._closed, np.int64).reshape(-1, 2)
