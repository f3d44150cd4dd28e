"""An equity curve of bounded size: however long a session trades, it takes the memory of a thousand points."""

from __future__ import annotations

from dataclasses import dataclass, field

MOST_POINTS = 1_024


@dataclass
class EquityCurve:
    """Equity at the closes, in stretches of equal length that double when there are too many."""

    points: list[tuple[int, float, float, float]] = field(default_factory=list)
    """Of each stretch: the time of its last close, equity there, and the lowest and highest in it."""
    stride: int = 1
    """Closes in a stretch."""
    in_last: int = 0
    """Closes in the last stretch so far."""

    def add(self, time_ms: int, equity: float) -> None:
        """Append a close."""
        if self.points and self.in_last < self.stride:
            self.points[-1] = _merged(self.points[-1], (time_ms, equity, equity, equity))
            self.in_last += 1
            return
        if len(self.points) == MOST_POINTS:
            self.points = [_merged(*self.points[place : place + 2]) for place in range(0, MOST_POINTS, 2)]
            self.stride *= 2
        self.points.append((time_ms, equity, equity, equity))
        self.in_last = 1


Point = tuple[int, float, float, float]


def _merged(first: Point, second: Point) -> Point:
    return second[0], second[1], min(first[2], second[2]), max(first[3], second[3])
