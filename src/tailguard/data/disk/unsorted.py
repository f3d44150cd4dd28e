"""Rows of files as they were read, in temporary columns: the first pass over files of any size."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from functools import reduce
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
from numpy.typing import NDArray

from tailguard.data.bars import OPTIONAL, REQUIRED, TIME_TYPE
from tailguard.data.checks import check_values
from tailguard.data.columns import symbol_of
from tailguard.data.disk.arrays import ArrayWriter, read_rows
from tailguard.data.disk.read_pieces import fields_of, read_pieces
from tailguard.data.disk.workers import Workers
from tailguard.data.findings import Report, error_message
from tailguard.data.readers import Paths, files_of, name_of
from tailguard.errors import BarsError, BarsWarning


@dataclass(frozen=True)
class Run:
    """Rows of one symbol that came from one file."""

    file: str
    columns: Path
    """Its columns are in files of this name with that of the column at its end."""
    start: int
    """First of its rows there."""
    count: int
    first_time: int


@dataclass(frozen=True)
class Unsorted:
    """One symbol's rows; its files follow each other in the order of their first times."""

    names: tuple[str, ...]
    runs: tuple[Run, ...]

    @property
    def count(self) -> int:
        return sum(run.count for run in self.runs)

    def times(self, stop: int) -> NDArray[np.int64]:
        """The first of its times, ms."""
        return np.concatenate([_column(run, "time", low, high) for run, low, high in self._parts(0, stop)])

    def frame(self, start: int, stop: int) -> pl.DataFrame:
        """Rows by their position after sorting, laid out as `tailguard.data.checks` says, less the symbol."""
        return pl.concat(
            [
                pl.DataFrame({name: _column(run, name, low, high) for name in self.names}).select(
                    pl.lit(run.file).alias("file"),
                    "row",
                    pl.lit(None, pl.String).alias("unreadable"),
                    pl.from_epoch("time", "ms").cast(TIME_TYPE),
                    pl.exclude("row", "time"),
                )
                for run, low, high in self._parts(start, stop)
            ]
        )

    def remove(self) -> None:
        """Remove the files."""
        for path in {_file(run.columns, name) for run in self.runs for name in self.names}:
            path.unlink(missing_ok=True)

    def _parts(self, start: int, stop: int) -> list[tuple[Run, int, int]]:
        """The runs that these rows lie in, and which of their rows."""
        found, passed = [], 0
        for run in self.runs:
            low, high = max(start - passed, 0), min(stop - passed, run.count)
            passed += run.count
            if low < high:
                found.append((run, low, high))
        return found


def read_unsorted(
    path: Paths, scratch: Path, symbols: Sequence[str], rows: int, workers: Workers
) -> dict[str, Unsorted]:
    """The files' rows by symbol; values that are missing or cannot be read are errors.

    Files that are named by one symbol are read by one process.
    """
    files = files_of(path)
    named: dict[str, list[Path]] = {}
    for file in files:
        named.setdefault(symbol_of(file), []).append(file)
    groups = list(named.values())
    has = [fields for found in workers.map("reading bars", _fields_of, groups) for fields in found]
    common, any_ = reduce(set.intersection, has), reduce(set.union, has)
    if dropped := [name for name in OPTIONAL if name in any_ - common]:
        text = f"{name_of(path)}: left out because only some of the files have it: {', '.join(dropped)}"
        warnings.warn(text, BarsWarning, stacklevel=4)
    names = ("row", "time", *REQUIRED, *(name for name in OPTIONAL if name in common))
    tasks = [
        _Files(tuple(group), scratch / f"{place:05d}", tuple(symbols), names, rows, name_of(path))
        for place, group in enumerate(groups)
    ]
    by_symbol: dict[str, list[Run]] = {}
    for read in workers.map("reading bars", _read, tasks):
        for symbol, runs in read.items():
            by_symbol.setdefault(symbol, []).extend(runs)
    for symbol in symbols:
        if symbol not in by_symbol:
            raise BarsError(f"{name_of(path)}: no symbol {symbol!r}; there are others")
    return {
        symbol: Unsorted(names, tuple(sorted(by_symbol[symbol], key=lambda run: run.first_time)))
        for symbol in sorted(by_symbol)
    }


@dataclass(frozen=True)
class _Files:
    """Files that one process reads."""

    files: tuple[Path, ...]
    scratch: Path
    """Beginning of the names of the columns."""
    symbols: tuple[str, ...]
    """Those to keep; all if none is named."""
    names: tuple[str, ...]
    rows: int
    source: str


def _fields_of(files: Sequence[Path]) -> list[set[str]]:
    return [fields_of(file) for file in files]


def _read(group: _Files) -> dict[str, list[Run]]:
    """The rows of each symbol; those of one file are one run, which keeps the order within a file."""
    writers: dict[str, dict[str, ArrayWriter]] = {}
    found: dict[str, list[Run]] = {}
    for file in group.files:
        for table in read_pieces(file, group.rows):
            check = check_values(table.frame)
            if check.level == "error":
                raise BarsError(error_message(Report(group.source, timedelta(0), (), (check,))))
            for part in table.frame.partition_by("symbol", maintain_order=True):
                symbol = str(part["symbol"][0])
                if group.symbols and symbol not in group.symbols:
                    continue
                if symbol not in writers:
                    columns = group.scratch.with_name(f"{group.scratch.name}-{len(writers):05d}")
                    writers[symbol] = {
                        name: ArrayWriter(_file(columns, name), _stored(name), kept=False) for name in group.names
                    }
                    found[symbol] = []
                _take(writers[symbol], found[symbol], part, str(file))
    return found


def _take(writers: dict[str, ArrayWriter], runs: list[Run], part: pl.DataFrame, file: str) -> None:
    """Add rows; rows of the same file extend its run."""
    times = part["time"].dt.epoch("ms").to_numpy()
    before = writers["time"].rows
    for name, writer in writers.items():
        writer.append(times if name == "time" else part[name].to_numpy())
    last = runs[-1] if runs else None
    if last is not None and last.file == file:
        runs[-1] = Run(file, last.columns, last.start, last.count + len(times), last.first_time)
    else:
        path = writers["time"].path
        columns = path.with_name(path.name.removesuffix("-time"))
        runs.append(Run(file, columns, before, len(times), int(times[0])))


def _file(columns: Path, name: str) -> Path:
    return columns.with_name(f"{columns.name}-{name}")


def _column(run: Run, name: str, low: int, high: int) -> NDArray[Any]:
    return read_rows(_file(run.columns, name), _stored(name), run.start + low, high - low)


def _stored(name: str) -> str:
    return "<i8" if name in ("row", "time") else "<f8"
