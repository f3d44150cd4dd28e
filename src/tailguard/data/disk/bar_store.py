"""Memory-mapped bars on disk: any period can be read as `Bars` without reading the rest."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any, overload

import numpy as np
import polars as pl
from numpy.typing import NDArray

from tailguard.data.bars import OPTIONAL, REQUIRED, TIME_TYPE, Bars
from tailguard.data.disk.arrays import ArrayWriter, map_array
from tailguard.data.pace import Pace
from tailguard.errors import BarsError

COLUMNS = ("time", *REQUIRED, *OPTIONAL, "segment")
"""Columns of a symbol, each in its own file; those of `OPTIONAL` if the source has them."""


def column_type(name: str) -> str:
    """How a column is stored."""
    return {"time": "<i8", "segment": "<i4"}.get(name, "<f8")


def column_file(index: int, name: str) -> str:
    """The file of a column of the symbol number `index`."""
    return f"{index:04d}-{name}"


class MappedColumns(Mapping[str, NDArray[Any]]):
    """Columns that are mapped when they are read: no file stays open, however many symbols a store has."""

    def __init__(self, folder: Path, files: Mapping[str, tuple[str, Mapping[str, Any]]]) -> None:
        self._folder, self._files = folder, dict(files)

    def __getitem__(self, name: str) -> NDArray[Any]:
        file, entry = self._files[name]
        return map_array(self._folder / file, entry)

    def __iter__(self) -> Iterator[str]:
        return iter(self._files)

    def __len__(self) -> int:
        return len(self._files)


@dataclass(frozen=True)
class Series:
    """One symbol's bars."""

    symbol: str
    columns: Mapping[str, NDArray[Any]]
    """By name, [R] each; times in ms. Segments are counted from any number."""

    @property
    def time(self) -> NDArray[np.int64]:
        return self.columns["time"]

    def row_at(self, time_ms: int) -> int:
        """The first row at this time or later."""
        return int(np.searchsorted(self.time, time_ms))

    def frame(self, start: int, stop: int) -> pl.DataFrame:
        """These rows as `Bars.frame` has them."""
        data = {name: np.array(values[start:stop]) for name, values in self.columns.items()}
        return pl.DataFrame(data).select(
            pl.lit(self.symbol).alias("symbol"), pl.from_epoch("time", "ms").cast(TIME_TYPE), pl.exclude("time")
        )


@dataclass(frozen=True)
class BarStore:
    """All symbols' bars, sorted by symbol and time."""

    series: tuple[Series, ...]
    frequency: timedelta
    source: str
    sessions: Pace | None = None
    """Bars of a day, a week and a year where the market closes; None: it trades around the clock."""

    @classmethod
    def open(
        cls,
        folder: Path,
        symbols: Sequence[str],
        files: Mapping[str, Any],
        frequency: timedelta,
        source: str,
        sessions: Pace | None = None,
    ) -> BarStore:
        """The columns that the manifest's `files` name."""
        series = []
        for index, symbol in enumerate(symbols):
            named = {name: column_file(index, name) for name in COLUMNS if column_file(index, name) in files}
            columns = MappedColumns(folder, {name: (file, files[file]) for name, file in named.items()})
            if not {"time", "segment", *REQUIRED} <= set(columns) or len({len(rows) for rows in columns.values()}) != 1:
                raise BarsError(f"{folder}: the columns of {symbol} are incomplete or of different lengths")
            series.append(Series(symbol, columns))
        return cls(tuple(series), frequency, source, sessions)

    @property
    def symbols(self) -> tuple[str, ...]:
        return tuple(one.symbol for one in self.series)

    @property
    def step(self) -> int:
        """Milliseconds of a bar."""
        return self.frequency // timedelta(milliseconds=1)

    def only(self, index: int) -> BarStore:
        """One symbol alone."""
        return replace(self, series=self.series[index : index + 1])

    def bars(self, start: int, stop: int, first: int | None = None) -> Bars:
        """Bars with `start <= time < stop` (ms), in memory; tradeable from `first` on."""
        return self._bars([one.frame(one.row_at(start), one.row_at(stop)) for one in self.series], first)

    def sample(self) -> Bars:
        """The first bar of each symbol, which shows the available columns."""
        return self._bars([one.frame(0, 1) for one in self.series])

    def _bars(self, frames: Sequence[pl.DataFrame], first: int | None = None) -> Bars:
        numbered, segments = [], 0
        for frame in frames:
            if frame.height:  # each symbol has segments of its own
                marks = frame["segment"]
                numbered.append(frame.with_columns(marks - marks[0] + segments))
                segments += marks[-1] - marks[0] + 1
        joined = pl.concat(numbered or frames)
        start = None if first is None else moment(first)
        return Bars(joined, self.frequency, self.source, start, self.sessions)

    def lead_in(self, first: int, bars: int) -> int:
        """Time of the bar that `bars` bars before this time only feed features from, as `Bars.between` has it."""
        if self.sessions is None:
            return first - bars * self.step
        # Bars are counted where the market closes: those of all symbols together.
        before = [one.time[max(0, one.row_at(first) - bars) : one.row_at(first)] for one in self.series]
        times = np.unique(np.concatenate(before))
        return int(times[-bars] if 0 < bars <= len(times) else times[0] if bars and len(times) else first)

    def common_times(self, rows: int) -> Iterator[NDArray[np.int64]]:
        """The times that every symbol has, rising, in blocks of up to `rows`."""
        first, *others = self.series
        for start in range(0, len(first.time), rows):
            times = np.array(first.time[start : start + rows])
            for other in others:
                if len(times):
                    low, high = other.row_at(int(times[0])), other.row_at(int(times[-1]) + 1)
                    times = times[np.isin(times, other.time[low:high], assume_unique=True)]
            yield times

    def write_common_times(self, path: Path, rows: int) -> NDArray[np.int64]:
        """The times that every symbol has, mapped: where there are several symbols, from this temporary file."""
        if len(self.series) == 1:
            return self.series[0].time
        writer = ArrayWriter(path, "<i8", kept=False)
        for times in self.common_times(rows):
            writer.append(times)
        return map_array(writer.path, writer.close())


def moment(time_ms: int) -> datetime:
    """The time as UTC."""
    return datetime.fromtimestamp(0, UTC) + timedelta(milliseconds=int(time_ms))


class Times(Sequence[datetime]):
    """Times in ms [T], converted to datetimes one by one."""

    def __init__(self, values: NDArray[np.int64]) -> None:
        self.values = values

    def __len__(self) -> int:
        return len(self.values)

    @overload
    def __getitem__(self, index: int) -> datetime: ...
    @overload
    def __getitem__(self, index: slice) -> Times: ...
    def __getitem__(self, index: int | slice) -> datetime | Times:
        return Times(self.values[index]) if isinstance(index, slice) else moment(int(self.values[index]))
