"""Splits by time, once or walking forward: parts that never overlap, with gaps between them.

Sizes are bars (an int), fractions (a float) or durations (`"30d"`). A duration counts bars that exist: `"1d"` of hourly
bars is 24 bars, with or without a hole in the data. Where the market closes, days and weeks are those of the calendar:
"7d" is a usual trading week. All counting is on the times that every symbol has.
"""

from __future__ import annotations

import re
from bisect import bisect_left
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from datetime import UTC, date, datetime, timedelta

from tailguard.data.bars import Bars
from tailguard.data.features import common_times, longest_warmup
from tailguard.data.history import spans_of, warn_of_uncommon_bars
from tailguard.data.pace import Pace
from tailguard.data.windows import (
    Size,
    Windows,
    bars_beside_gaps,
    size_in_bars,
    split_windows,
    walk_forward_windows,
)
from tailguard.errors import ConfigError


@dataclass(frozen=True)
class Split:
    """Training, validation and test bars."""

    train: Bars
    validation: Bars
    test: Bars

    def describe(self) -> str:
        """One line: period and number of bars of each part, and the time left out between them."""
        return _describe({"train": self.train, "validation": self.validation, "test": self.test})


@dataclass(frozen=True)
class Fold:
    """One step of a walk forward; its test window starts where that of the fold before ended."""

    number: int
    """Counts from 1."""
    train: Bars
    validation: Bars | None
    test: Bars

    def describe(self) -> str:
        """One line: period and number of bars of each part, and the time left out between them."""
        return f"fold {self.number}: " + _describe(
            {"train": self.train, "validation": self.validation, "test": self.test}
        )


def split_bars(
    bars: Bars,
    *,
    train: Size | date | None = None,
    validation: Size | date = 0.15,
    test: Size | date = 0.15,
    embargo: Size = 0,
    lead_in: Size | None = None,
    warn: bool = True,
) -> Split:
    """Training, validation and test bars in this order, with `embargo` bars unused between one and the next.

    The test part ends with the last bar. Sizes: fractions are of the bars that the two embargoes leave; where they add
    up to 1 every bar is used, and training takes the rounding. Bars before the training part, if any, stay unused.
    Dates: each part starts on its date, and the embargo is cut off the end of the part before it.

    Args:
        bars: where they are themselves a part of a split, only their traded bars are split.
        train: size, or the date it starts on; None: all bars that are left.
        validation: size, or the date it starts on ("2022-01-31", a date or a datetime, UTC).
        test: size, or the date it starts on.
        embargo: bars left out between two parts, so the end of one carries no information about the start of the next.
        lead_in: bars before each part that feed its features and are never traded. They may reach across the embargo
            into the previous part, which is in the past. None: the longest warm-up of the features these bars allow.
        warn: issue a `BarsWarning` for bars that are left out because not all symbols have them.
    """
    times = traded_times(bars)
    if warn and bars.universe is None:
        warn_of_uncommon_bars(bars.source, spans_of(bars), len(common_times(bars)))
    windows = split_times(
        times,
        bars.frequency,
        train=train,
        validation=validation,
        test=test,
        embargo=embargo,
        sessions=bars.sessions,
    )
    history = _lead_in(bars, lead_in, times)
    return Split(*(_part(bars, times, part, history) for part in (windows.train, windows.validation, windows.test)))


def split_times(
    times: Sequence[datetime],
    frequency: timedelta,
    *,
    train: Size | date | None = None,
    validation: Size | date = 0.15,
    test: Size | date = 0.15,
    embargo: Size = 0,
    sessions: Pace | None = None,
) -> Windows:
    """Where the parts lie among the traded times, which rise; the arguments are those of `split_bars`."""
    gap = size_in_bars("embargo", embargo, len(times), frequency, 0, sessions)
    if any(_is_date(part) for part in (train, validation, test)):
        return _windows_at(times, train, validation, test, gap)
    usable = bars_beside_gaps(len(times), gap, gaps=2, parts=3)
    fractions = [part for part in (train, validation, test) if isinstance(part, float)]
    if len(fractions) == 3 and abs(sum(fractions) - 1) < 1e-9:
        train = None
    return split_windows(
        len(times),
        train=None if train is None else _bars("train", train, usable, frequency, sessions),
        validation=_bars("validation", validation, usable, frequency, sessions),
        test=_bars("test", test, usable, frequency, sessions),
        gap=gap,
    )


def walk_forward(
    bars: Bars,
    *,
    folds: int,
    train: Size | None = None,
    test: Size | None = None,
    validation: Size = 0,
    purge: Size = 0,
    embargo: Size = 0,
    expanding: bool = False,
    lead_in: Size | None = None,
) -> list[Fold]:
    """Train, then test on what follows, `folds` times; the test windows cover the end of the bars without gaps.

    `purge + embargo` bars lie unused before the validation and before the test window of every fold. Sizes are exact:
    purged bars do not count as training bars. The last test window ends with the last bar; bars before the first
    training window, if any, stay unused. Fractions are of the bars that one fold's gaps leave, rounded down.

    Args:
        bars: where they are themselves a part of a split, only their traded bars are split.
        folds: number of folds.
        train: training bars of a fold, of the first one if `expanding`; None: all that the test windows leave.
        test: test bars of a fold; None: an equal share of all that the first fold's training leaves.
        validation: validation bars between training and test, 0 for none.
        purge: longest horizon of an episode or a label; a training bar closer to the next part would reach into it.
        embargo: further bars left out, for dependence that outlasts the horizon.
        expanding: keep the first training bar in place, so that training grows by one test window a fold.
        lead_in: as in `split_bars`.
    """
    times = traded_times(bars)
    if bars.universe is None:
        warn_of_uncommon_bars(bars.source, spans_of(bars), len(common_times(bars)))
    if isinstance(folds, bool) or not isinstance(folds, int) or folds < 1:
        raise ConfigError(f"folds={folds!r} must be a whole number, 1 or more")
    gap = sum(
        size_in_bars(name, size, len(times), bars.frequency, 0, bars.sessions)
        for name, size in (("purge", purge), ("embargo", embargo))
    )
    gaps = 1 if validation == 0 else 2
    usable = bars_beside_gaps(len(times), gap, gaps, parts=folds + gaps)
    scale = (bars.frequency, bars.sessions)
    windows = walk_forward_windows(
        len(times),
        folds=folds,
        train=None if train is None else _bars("train", train, usable, *scale),
        test=None if test is None else _bars("test", test, usable, *scale),
        validation=0 if validation == 0 else _bars("validation", validation, usable, *scale),
        gap=gap,
        expanding=expanding,
    )
    history = _lead_in(bars, lead_in, times)
    return [
        Fold(
            number=number,
            train=_part(bars, times, window.train, history),
            validation=_part(bars, times, window.validation, history) if window.validation else None,
            test=_part(bars, times, window.test, history),
        )
        for number, window in enumerate(windows, start=1)
    ]


def traded_times(bars: Bars) -> list[datetime]:
    """The times that every symbol has, from the first traded bar on."""
    times = common_times(bars)
    traded: list[datetime] = times.filter(times >= bars.start).to_list()
    if not traded:
        raise ConfigError(f"{bars.source}: the symbols {', '.join(bars.symbols)} have no traded time in common")
    return traded


def _windows_at(
    times: Sequence[datetime], train: Size | date | None, validation: Size | date, test: Size | date, gap: int
) -> Windows:
    """The parts that start on these dates."""
    starts = {"train": times[0] if train is None else _date("train", train)}
    starts |= {"validation": _date("validation", validation), "test": _date("test", test)}
    at = {name: bisect_left(times, start) for name, start in starts.items()}
    windows = Windows(
        train=range(at["train"], at["validation"] - gap),
        validation=range(at["validation"], at["test"] - gap),
        test=range(at["test"], len(times)),
    )
    for name, window in (("train", windows.train), ("validation", windows.validation), ("test", windows.test)):
        if not window:
            raise ConfigError(
                f"{name} starting on {starts[name]:%Y-%m-%d %H:%M} has no bar left: the parts must start in order, "
                f"more than the embargo of {gap:,} bars apart, between {times[0]:%Y-%m-%d %H:%M} and "
                f"{times[-1]:%Y-%m-%d %H:%M}"
            )
    return windows


def _is_date(boundary: Size | date | None) -> bool:
    return isinstance(boundary, date) or (isinstance(boundary, str) and re.match(r"\d{4}-\d", boundary) is not None)


def _date(name: str, boundary: Size | date) -> datetime:
    if isinstance(boundary, str):
        try:
            boundary = datetime.fromisoformat(boundary)
        except ValueError:
            raise ConfigError(
                f"{name}={boundary!r} is not a date such as '2022-01-31'; give dates or sizes, not both"
            ) from None
    if not isinstance(boundary, date):
        raise ConfigError(f"{name}={boundary!r} is not a date; give the starts of all parts as dates, or sizes for all")
    if not isinstance(boundary, datetime):
        boundary = datetime(boundary.year, boundary.month, boundary.day)
    return boundary.replace(tzinfo=UTC) if boundary.tzinfo is None else boundary.astimezone(UTC)


def _bars(name: str, size: Size | date, usable: int, frequency: timedelta, sessions: Pace | None) -> int:
    assert not isinstance(size, date)
    return size_in_bars(name, size, usable, frequency, sessions=sessions)


def _lead_in(bars: Bars, lead_in: Size | None, times: list[datetime]) -> int:
    if lead_in is None:
        return longest_warmup(bars)
    return size_in_bars("lead_in", lead_in, len(times), bars.frequency, 0, bars.sessions)


def _part(bars: Bars, times: list[datetime], window: range, lead_in: int) -> Bars:
    return bars.between(times[window[0]], times[window[-1]] + bars.frequency, lead_in=lead_in)


def _describe(parts: dict[str, Bars | None]) -> str:
    periods = []
    for name, bars in parts.items():
        if bars is not None:
            times = traded_times(bars)
            periods.append((name, times[0], times[-1] + bars.frequency, len(times)))
    return describe_periods(periods)


def describe_periods(periods: Iterable[tuple[str, datetime, datetime, int]]) -> str:
    """Parts in one line: name, start, end and number of bars of each, and the time left out between them."""
    words: list[str] = []
    before: datetime | None = None
    for name, start, end, count in periods:
        if before is not None and start > before:
            words.append(_in_words(start - before))
        before = end
        words.append(f"{name} {start:%Y-%m-%d %H:%M} to {end:%Y-%m-%d %H:%M}, {count:,} bars")
    return " │ ".join(words)


def _in_words(duration: timedelta) -> str:
    minutes = duration // timedelta(minutes=1)
    parts = ((minutes // 1440, "d"), (minutes // 60 % 24, "h"), (minutes % 60, "min"))
    return " ".join(f"{number:,} {unit}" for number, unit in parts if number)
