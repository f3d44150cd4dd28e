"""Import files of any size: read and checked in pieces, written as memory-mapped columns."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from functools import reduce
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
from numpy.typing import NDArray

from tailguard.data.bars import OPTIONAL, REQUIRED, TIME_TYPE
from tailguard.data.calendars import ALWAYS, AUTO, around_the_clock
from tailguard.data.check_bars import validate
from tailguard.data.checks import Gaps, check_values, most_common_step
from tailguard.data.disk.arrays import ArrayWriter, map_array
from tailguard.data.disk.bar_store import COLUMNS, BarStore, Series, column_file, column_type, moment
from tailguard.data.disk.read_pieces import fields_of, read_pieces
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
from tailguard.data.readers import Paths, files_of, name_of
from tailguard.data.suspicions import SCALE_BARS
from tailguard.data.volume_unit import FEWEST_BARS, WEEK, VolumeUnit, typical_price
from tailguard.errors import BarsError, BarsWarning

ROWS = 2**18
"""Bars that are held in memory at a time."""

Say = Callable[[str], None]


@dataclass(frozen=True)
class _Run:
    """Rows of one symbol that came from one file."""

    file: str
    start: int
    """First of them among the symbol's rows, in the order they were read."""
    count: int
    first_time: int


@dataclass
class _Unsorted:
    """One symbol's rows as they were read."""

    writers: dict[str, ArrayWriter]
    runs: list[_Run] = field(default_factory=list)
    columns: dict[str, NDArray[Any]] = field(default_factory=dict)

    @property
    def count(self) -> int:
        return sum(run.count for run in self.runs)


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
    say: Say = lambda _: None,
) -> tuple[BarStore, dict[str, Any]]:
    """Write the bars of the files to `folder`; returns them mapped, and the entries of their files.

    Checks, errors and warnings are those of `load_bars`. Bars are checked about `rows` at a time, with two weeks of
    context on both sides, so the lower bound of robust σ is that of the piece, not of the whole series.
    `symbols`: those to keep, all if none is named. `scratch`: a folder for temporary files.
    """
    source = name_of(path)
    if calendar not in (ALWAYS, AUTO):
        raise _closes(source)
    say(f"reading {source}")
    read = _read(path, scratch, symbols, rows)
    pace = most_common_step(*(_frame(one, 0, min(rows, one.count))["time"] for one in read.values()))
    if pace is None:
        raise BarsError(f"{source}: one bar is too few to infer the frequency")
    series, outcomes, segment = [], [], 0
    entries: dict[str, Any] = {}
    for index, (symbol, unsorted) in enumerate(read.items()):
        say(f"checking {symbol}, {unsorted.count:,} bars of {frequency_label(pace)}")
        writers = {
            name: ArrayWriter(folder / column_file(index, name), column_type(name))
            for name in COLUMNS
            if name in unsorted.columns or name == "segment"
        }
        before: int | None = None
        for frame, report in _checked(symbol, unsorted, source, pace, gaps, volume_unit, rows):
            outcomes.append(report.checks)
            times = frame["time"].dt.epoch("ms").to_numpy()
            _check_grid(frame, times, before, pace)
            steps = np.diff(times, prepend=times[0] if before is None else before)
            breaks = steps != pace // timedelta(milliseconds=1)
            breaks[0] &= before is not None
            numbers = segment + np.cumsum(breaks)
            segment, before = int(numbers[-1]), int(times[-1])
            _append(writers, frame, times, numbers)
        segment += 1
        entries |= {column_file(index, name): writer.close() for name, writer in writers.items()}
        mapped = {name: map_array(writer.path, entries[writer.path.name]) for name, writer in writers.items()}
        series.append(Series(symbol, mapped))
    for check in (merge(same) for same in zip(*outcomes, strict=True)):
        if check.level == "warning":
            warnings.warn(warning_message(check), BarsWarning, stacklevel=2)
    store = BarStore(tuple(series), pace, source)
    if len(series) > 1:
        spans = [Span(s.symbol, moment(s.time[0]), moment(s.time[-1]), len(s.time), 0) for s in series]
        warn_of_uncommon_bars(source, spans, sum(map(len, store.common_times(rows))))
    return store, entries


def _read(path: Paths, scratch: Path, symbols: Sequence[str], rows: int) -> dict[str, _Unsorted]:
    """The files' rows by symbol, in mapped columns; values that are missing or cannot be read are errors."""
    files = files_of(path)
    has = [fields_of(file) for file in files]
    common, any_ = reduce(set.intersection, has), reduce(set.union, has)
    if dropped := [name for name in OPTIONAL if name in any_ - common]:
        text = f"{name_of(path)}: left out because only some of the files have it: {', '.join(dropped)}"
        warnings.warn(text, BarsWarning, stacklevel=3)
    names = ["row", "time", *REQUIRED, *(name for name in OPTIONAL if name in common)]
    by_symbol: dict[str, _Unsorted] = {}
    for file in files:
        for table in read_pieces(file, rows):
            _raise_errors(check_values(table.frame), name_of(path))
            for part in table.frame.partition_by("symbol", maintain_order=True):
                symbol = str(part["symbol"][0])
                if symbols and symbol not in symbols:
                    continue
                if symbol not in by_symbol:
                    place = len(by_symbol)
                    by_symbol[symbol] = _Unsorted(
                        {name: ArrayWriter(scratch / f"{place:04d}-{name}", _stored(name)) for name in names}
                    )
                _take(by_symbol[symbol], part, str(file))
    for symbol in symbols or ():
        if symbol not in by_symbol:
            raise BarsError(f"{name_of(path)}: no symbol {symbol!r}; there are others")
    for unsorted in by_symbol.values():
        unsorted.columns = {name: map_array(writer.path, writer.close()) for name, writer in unsorted.writers.items()}
        unsorted.runs.sort(key=lambda run: run.first_time)
    return {symbol: by_symbol[symbol] for symbol in (sorted(by_symbol) if len(by_symbol) > 1 else by_symbol)}


def _stored(name: str) -> str:
    return "<i8" if name in ("row", "time") else "<f8"


def _take(unsorted: _Unsorted, part: pl.DataFrame, file: str) -> None:
    """Add rows; rows of the same file extend its run, which keeps the order within a file."""
    times = part["time"].dt.epoch("ms").to_numpy()
    for name, writer in unsorted.writers.items():
        writer.append(times if name == "time" else part[name].to_numpy())
    last = unsorted.runs[-1] if unsorted.runs else None
    if last is not None and last.file == file:
        unsorted.runs[-1] = _Run(file, last.start, last.count + len(times), last.first_time)
    else:
        unsorted.runs.append(_Run(file, unsorted.count, len(times), int(times[0])))


def _frame(unsorted: _Unsorted, start: int, stop: int) -> pl.DataFrame:
    """Rows by their position after sorting, laid out as `tailguard.data.checks` says, less the symbol."""
    frames, passed = [], 0
    for run in unsorted.runs:
        low, high = max(start - passed, 0), min(stop - passed, run.count)
        passed += run.count
        if low >= high:
            continue
        rows = slice(run.start + low, run.start + high)
        data = {name: np.array(values[rows]) for name, values in unsorted.columns.items()}
        frames.append(
            pl.DataFrame(data).select(
                pl.lit(run.file).alias("file"),
                "row",
                pl.lit(None, pl.String).alias("unreadable"),
                pl.from_epoch("time", "ms").cast(TIME_TYPE),
                pl.exclude("row", "time"),
            )
        )
    return pl.concat(frames)


def _checked(
    symbol: str, unsorted: _Unsorted, source: str, pace: timedelta, gaps: Gaps, volume_unit: VolumeUnit, rows: int
) -> Iterator[tuple[pl.DataFrame, Report]]:
    """The bars in pieces that have passed every check, volume in base units; an error stops at its piece."""
    context = 2 * max(SCALE_BARS, FEWEST_BARS, WEEK // pace)
    for start in range(0, unsorted.count, rows):
        stop = min(start + rows, unsorted.count)
        low, high = max(0, start - context), min(unsorted.count, stop + context)
        place = pl.int_range(low, high, dtype=pl.Int64)
        frame = _frame(unsorted, low, high).with_columns(
            ((place < start) | (place >= stop)).alias(CONTEXT), symbol=pl.lit(symbol)
        )
        report = validate(
            frame, source, frequency=pace, timetable=around_the_clock(pace), gaps=gaps, volume_unit=volume_unit
        )
        if any(check.name == "sessions" for check in report.errors):
            raise _closes(source)
        if report.errors:
            raise BarsError(error_message(report))
        own = frame.filter(~pl.col(CONTEXT))
        if volume_unit == "quote":
            own = own.with_columns(pl.col("volume") / typical_price())
        yield own, report


def _closes(source: str) -> BarsError:
    return BarsError(
        f"{source}: a prepared market must trade around the clock, and this one trades in sessions. Train on the files "
        "themselves, in memory: tailguard train --data FILE"
    )


def _check_grid(frame: pl.DataFrame, times: NDArray[np.int64], before: int | None, pace: timedelta) -> None:
    """Require that a piece starts on the grid of the previous piece."""
    if before is not None and (times[0] - before) % (pace // timedelta(milliseconds=1)):
        file, row = frame.select("file", "row").row(0)
        raise BarsError(
            f"{file}: row {row} ({time_label(moment(int(times[0])))}): off the {frequency_label(pace)} grid of the "
            "previous bars\nfrequency: All bars, of all symbols, need one frequency; resample at the source or load "
            "the files separately."
        )


def _append(
    writers: dict[str, ArrayWriter], frame: pl.DataFrame, times: NDArray[np.int64], segment: NDArray[np.int64]
) -> None:
    given = {"time": times, "segment": segment}
    for name, writer in writers.items():
        writer.append(given[name] if name in given else frame[name].to_numpy())


def _raise_errors(check: Check, source: str) -> None:
    if check.level == "error":
        raise BarsError(error_message(Report(source, timedelta(0), (), (check,))))
