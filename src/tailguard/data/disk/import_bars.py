"""Import files of any size: read and checked in pieces, written as memory-mapped columns."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
from numpy.typing import NDArray

from tailguard.data.calendars import ALWAYS, AUTO, Timetable, around_the_clock, timetable_of
from tailguard.data.check_bars import validate
from tailguard.data.checks import Gaps, most_common_step
from tailguard.data.disk.arrays import ArrayWriter
from tailguard.data.disk.bar_store import COLUMNS, BarStore, column_file, column_type, moment
from tailguard.data.disk.unsorted import Unsorted, read_unsorted
from tailguard.data.disk.workers import Workers
from tailguard.data.findings import (
    CONTEXT,
    Check,
    Report,
    Span,
    error_message,
    merge,
    time_label,
    warning_message,
)
from tailguard.data.frequency import frequency_label
from tailguard.data.history import warn_of_uncommon_bars
from tailguard.data.readers import Paths, name_of
from tailguard.data.suspicions import SCALE_BARS
from tailguard.data.volume_unit import FEWEST_BARS, WEEK, VolumeUnit, typical_price
from tailguard.errors import BarsError, BarsWarning

ROWS = 2**18
"""Bars that are held in memory at a time."""
SAMPLE = 2**21
"""Bars of each symbol in which `calendar="auto"` looks for closures; where it finds some, it reads all times."""
FEWEST_STEPS = 1_000
"""Bars of each symbol, at least, that say how long a bar is."""

Say = Callable[[str], None]


def import_bars(
    path: Paths,
    folder: Path,
    scratch: Path,
    *,
    symbols: Sequence[str] = (),
    calendar: str = AUTO,
    gaps: Gaps = "error",
    volume_unit: VolumeUnit = "base",
    rows: int = ROWS,
    workers: Workers | None = None,
    say: Say = lambda _: None,
) -> tuple[BarStore, Timetable, dict[str, Any]]:
    """Write the bars of the files to `folder`; returns them mapped, when they trade, and the entries of their files.

    Checks, errors and warnings are those of `load_bars`. Bars are checked about `rows` at a time, with two weeks of
    context on both sides, so the lower bound of robust σ and the share of bars outside the sessions are those of the
    piece, not of the whole series.
    `symbols`: those to keep, all if none is named. `scratch`: a folder for temporary files. `workers`: the processes
    that read files and check symbols.
    """
    imported = check_files(
        path,
        folder,
        scratch,
        symbols=symbols,
        calendar=calendar,
        gaps=gaps,
        volume_unit=volume_unit,
        rows=rows,
        workers=workers,
        say=say,
    )
    report, store = imported.report, imported.store
    assert store is not None  # an error was raised
    assert report.timetable is not None
    for check in report.warnings:
        warnings.warn(warning_message(check), BarsWarning, stacklevel=2)
    if len(report.spans) > 1:
        warn_of_uncommon_bars(report.source, report.spans, sum(map(len, store.common_times(rows))))
    return store, report.timetable, imported.entries


@dataclass(frozen=True)
class Imported:
    """Files that were checked in pieces."""

    report: Report
    store: BarStore | None
    """Their bars; None where a check has failed."""
    entries: dict[str, Any]
    """Of the files of the store."""


def check_files(
    path: Paths,
    folder: Path,
    scratch: Path,
    *,
    symbols: Sequence[str] = (),
    frequency: timedelta | None = None,
    calendar: str = AUTO,
    gaps: Gaps = "error",
    volume_unit: VolumeUnit = "base",
    rows: int = ROWS,
    workers: Workers | None = None,
    all_errors: bool = False,
    say: Say = lambda _: None,
) -> Imported:
    """Check files in pieces and write their bars; see `import_bars`.

    `all_errors`: report all failed checks; else the first piece that fails one raises `BarsError`.
    """
    source, workers = name_of(path), workers or Workers()
    say(f"reading {source}")
    read = read_unsorted(path, scratch, symbols, rows, workers)
    few = max(FEWEST_STEPS, rows // len(read))
    pace = frequency or most_common_step(*(one.frame(0, min(few, one.count))["time"] for one in read.values()))
    if pace is None:
        raise BarsError(f"{source}: one bar is too few to infer the frequency")
    timetable = _timetable(calendar, read, pace // timedelta(milliseconds=1))
    tasks = [
        _Symbol(index, symbol, unsorted, folder, source, timetable, gaps, volume_unit, rows, all_errors)
        for index, (symbol, unsorted) in enumerate(read.items())
    ]
    entries: dict[str, Any] = {}
    outcomes: list[tuple[Check, ...]] = []
    spans = []
    for task, (own, pieces, span) in zip(tasks, workers.map("checking bars", _import_symbol, tasks), strict=True):
        say(f"checked {task.symbol}, {task.unsorted.count:,} bars of {frequency_label(pace)}")
        entries |= own
        outcomes += pieces
        spans.append(span)
    checks = tuple(merge(same) for same in zip(*outcomes, strict=True))
    report = Report(source, pace, tuple(spans), checks, timetable=timetable)
    if report.errors:
        return Imported(report, None, {})
    sessions = timetable.pace if timetable.has_sessions else None
    return Imported(report, BarStore.open(folder, list(read), entries, pace, source, sessions), entries)


def _timetable(calendar: str, read: Mapping[str, Unsorted], step: int) -> Timetable:
    """When the market trades. Only the times of one that closes are held in memory, those of all symbols once."""
    always = around_the_clock(timedelta(milliseconds=step))
    if calendar == ALWAYS:
        return always
    if calendar == AUTO:
        first = timetable_of(AUTO, (one.times(min(one.count, SAMPLE)) for one in read.values()), step)
        if not first.has_sessions or max(one.count for one in read.values()) <= SAMPLE:
            return first
    return timetable_of(calendar, (one.times(one.count) for one in read.values()), step)


@dataclass(frozen=True)
class _Symbol:
    """A symbol that one process checks and writes."""

    index: int
    symbol: str
    unsorted: Unsorted
    folder: Path
    source: str
    timetable: Timetable
    gaps: Gaps
    volume_unit: VolumeUnit
    rows: int
    all_errors: bool


def _import_symbol(task: _Symbol) -> tuple[dict[str, Any], list[tuple[Check, ...]], Span]:
    """Check and write a symbol's bars; returns the entries of its files, the checks of each piece, and its extent.

    Segments are counted from 0 in each symbol.
    """
    timetable = task.timetable
    writers = {
        name: ArrayWriter(task.folder / column_file(task.index, name), column_type(name))
        for name in COLUMNS
        if name in task.unsorted.names or name == "segment"
    }
    outcomes, segment, missing, sound = [], 0, 0, True
    first = before = None
    for frame, report in _checked(task):
        outcomes.append(report.checks)
        sound &= not report.errors
        times = frame["time"].dt.epoch("ms").to_numpy()
        known = times if before is None else np.concatenate([[before], times])
        missing += int(timetable.missing_before(known).sum())
        if sound:
            if before is not None and not timetable.has_sessions:
                _check_grid(frame, times, before, timetable.step)
            numbers = segment + np.cumsum(timetable.breaks(known)[len(known) - len(times) :])
            segment = int(numbers[-1])
            _append(writers, frame, times, numbers)
        first, before = int(times[0]) if first is None else first, int(times[-1])
    task.unsorted.remove()
    assert first is not None  # a symbol has rows
    assert before is not None
    entries = {column_file(task.index, name): writer.close() for name, writer in writers.items()}
    return entries, outcomes, Span(task.symbol, moment(first), moment(before), task.unsorted.count, missing)


def _checked(task: _Symbol) -> Iterator[tuple[pl.DataFrame, Report]]:
    """The bars in pieces that have passed every check, volume in base units; an error stops at its piece."""
    unsorted, rows, timetable = task.unsorted, task.rows, task.timetable
    pace = timedelta(milliseconds=timetable.step)
    context = 2 * max(SCALE_BARS, FEWEST_BARS, WEEK // pace)
    for start in range(0, unsorted.count, rows):
        stop = min(start + rows, unsorted.count)
        low, high = max(0, start - context), min(unsorted.count, stop + context)
        place = pl.int_range(low, high, dtype=pl.Int64)
        frame = unsorted.frame(low, high).with_columns(
            ((place < start) | (place >= stop)).alias(CONTEXT), symbol=pl.lit(task.symbol)
        )
        report = validate(
            frame, task.source, frequency=pace, timetable=timetable, gaps=task.gaps, volume_unit=task.volume_unit
        )
        if report.errors and not task.all_errors:
            raise BarsError(error_message(report))
        own = frame.filter(~pl.col(CONTEXT))
        if task.volume_unit == "quote":
            own = own.with_columns(pl.col("volume") / typical_price())
        yield own, report


def _check_grid(frame: pl.DataFrame, times: NDArray[np.int64], before: int, step: int) -> None:
    """Require that a piece starts on the grid of the previous piece."""
    if (times[0] - before) % step:
        file, row = frame.select("file", "row").row(0)
        label = frequency_label(timedelta(milliseconds=step))
        raise BarsError(
            f"{file}: row {row} ({time_label(moment(int(times[0])))}): off the {label} grid of the "
            "previous bars\nfrequency: All bars, of all symbols, need one frequency; resample at the source or load "
            "the files separately."
        )


def _append(
    writers: dict[str, ArrayWriter], frame: pl.DataFrame, times: NDArray[np.int64], segment: NDArray[np.int64]
) -> None:
    given = {"time": times, "segment": segment}
    for name, writer in writers.items():
        writer.append(given[name] if name in given else frame[name].to_numpy())
