"""Positions of the parts of a split on a time axis of `count` bars."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from datetime import timedelta

from tailguard.data.pace import Pace
from tailguard.errors import ConfigError

Size = int | float | str
"""Bars, a fraction strictly between 0 and 1, or a duration such as "90m", "12h", "30d", "2w"."""

UNITS = {"m": timedelta(minutes=1), "h": timedelta(hours=1), "d": timedelta(days=1), "w": timedelta(weeks=1)}


@dataclass(frozen=True)
class Windows:
    """Positions of the parts on the axis; `validation` may be empty."""

    train: range
    validation: range
    test: range


def parse_size(text: float | str) -> Size:
    """A size from the settings: a fraction written as text is a fraction."""
    try:
        return float(text)
    except ValueError:
        return text


def size_in_bars(
    name: str, size: Size, count: int, frequency: timedelta, low: int = 1, sessions: Pace | None = None
) -> int:
    """`size` as a number of bars, at least `low`; a fraction is of `count` and is rounded down.

    `sessions`: the pace of a market that closes. Days and weeks are then days of the calendar, "7d" the bars of a usual
    trading week; hours and minutes are trading time.
    """
    if isinstance(size, str):
        bars = _duration_in_bars(name, size, frequency, sessions)
    elif isinstance(size, float):
        if not 0 < size < 1:
            raise ConfigError(f"{name}={size!r}: a fraction lies between 0 and 1; write a number of bars as an int")
        # 0.29 · 100 is 28.999999999999996: round to the whole number.
        bars = math.floor(size * max(count, 0) + 1e-6)
    elif isinstance(size, int) and not isinstance(size, bool):
        bars = size
    else:
        raise ConfigError(f"{name}={size!r} must be bars (an int), a fraction (a float) or a duration such as '30d'")
    if bars < low:
        raise ConfigError(f"{name}={size!r} is {bars} bars of {count:,}; at least {low} is needed")
    return bars


def bars_beside_gaps(count: int, gap: int, gaps: int, parts: int) -> int:
    """Bars that `gaps` gaps leave to `parts` parts, at least one for each."""
    needed = gaps * gap + parts
    if needed > count:
        raise ConfigError(
            f"{gaps} × {gap:,} bars left out and {parts} parts of at least 1 bar need {needed:,} bars; there are "
            f"{count:,}. Make the embargo or the purge smaller"
        )
    return count - gaps * gap


def split_windows(count: int, *, train: int | None, validation: int, test: int, gap: int = 0) -> Windows:
    """Three parts in order, `gap` bars apart, the last one ending at `count`; `train=None` takes all that is left."""
    needed = (1 if train is None else train) + validation + test + 2 * gap
    if needed > count:
        raise ConfigError(
            f"{_sizes(train, validation, test)} with {gap:,} between the parts need {needed:,} bars; there are "
            f"{count:,}. Make a part or the embargo smaller"
        )
    test_start = count - test
    validation_start = test_start - gap - validation
    train_stop = validation_start - gap
    return Windows(
        train=range(0 if train is None else train_stop - train, train_stop),
        validation=range(validation_start, validation_start + validation),
        test=range(test_start, count),
    )


def walk_forward_windows(
    count: int,
    *,
    folds: int,
    train: int | None,
    test: int | None,
    validation: int = 0,
    gap: int = 0,
    expanding: bool = False,
) -> list[Windows]:
    """The parts of each fold, `gap` bars apart; the test windows follow each other without gaps and end at `count`.

    `train=None` takes all that the test windows leave, `test=None` an equal share of what the first training leaves.
    """
    if train is None and test is None:
        raise ConfigError("walk_forward: give the size of train or of test; the other one can be derived from it")
    between = gap + (validation + gap if validation else 0)
    needed = (1 if train is None else train) + between + folds * (1 if test is None else test)
    if needed > count:
        raise ConfigError(
            f"{folds} folds of {_sizes(train, validation, test)} with {gap:,} between the parts need {needed:,} bars; "
            f"there are {count:,}. Use fewer folds, smaller parts or smaller gaps"
        )
    tested = (count - (train or 0) - between) // folds if test is None else test
    trained = count - between - folds * tested if train is None else train
    windows = []
    for fold in range(folds):
        test_start = count - (folds - fold) * tested
        train_stop = test_start - between
        first = train_stop - trained - (fold * tested if expanding else 0)
        windows.append(
            Windows(
                train=range(first, train_stop),
                validation=range(train_stop + gap, train_stop + gap + validation),
                test=range(test_start, test_start + tested),
            )
        )
    return windows


def _duration_in_bars(name: str, size: str, frequency: timedelta, sessions: Pace | None) -> int:
    match = re.fullmatch(r"(\d+) ?([mhdw])", size)
    if match is None:
        raise ConfigError(f"{name}={size!r} is not a duration; write a number and m, h, d or w, such as '30d'")
    duration = int(match[1]) * UNITS[match[2]]
    if sessions is not None and match[2] in "dw":
        return max(min(1, int(match[1])), round(duration / UNITS["w"] * sessions.per_week))
    if duration % frequency:
        raise ConfigError(f"{name}={size!r} is not a whole number of bars of {frequency}")
    return duration // frequency


def _sizes(train: int | None, validation: int, test: int | None) -> str:
    parts = [("training", train), ("validation", validation), ("test", test)]
    return ", ".join(f"{'at least 1' if size is None else f'{size:,}'} {name}" for name, size in parts if size != 0)
