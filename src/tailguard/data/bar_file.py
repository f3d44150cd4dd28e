"""The file of a download: complete bars of one symbol, and which bars are missing."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path

import numpy as np
import polars as pl
from numpy.typing import NDArray

from tailguard.data.bars import TIME_TYPE
from tailguard.data.storage import write_frame
from tailguard.errors import BarsError

VALUES = ("open", "high", "low", "close", "volume")
_COLUMNS: dict[str, pl.DataType] = {
    "open_time": TIME_TYPE,
    "symbol": pl.String(),
    **{name: pl.Float64() for name in VALUES},
}

Row = tuple[int, float, float, float, float, float]
"""Open time in milliseconds, open, high, low, close, volume."""


@dataclass(frozen=True)
class Gap:
    """Requested bars that are missing: `start <= open time < stop`, milliseconds."""

    start: int
    stop: int
    step: int

    @property
    def bars(self) -> int:
        return (self.stop - self.start) // self.step


def missing_ranges(times: NDArray[np.int64], start: int, stop: int, step: int) -> list[Gap]:
    """The stretches of `step`-spaced bars in [start, stop) that the sorted `times` lack.

    `start` and `stop` are first moved up to the next multiple of `step`, or of the spacing that `times` shows.
    """
    phase = int(times[0]) % step if len(times) else 0
    start, stop = (phase - (phase - moment) // step * step for moment in (start, stop))
    inside = times[(times >= start) & (times < stop)]
    before = np.concatenate([[start - step], inside])
    after = np.concatenate([inside, [stop]])
    return [
        Gap(int(left) + step, int(right), step)
        for left, right in zip(before, after, strict=True)
        if right - left > step
    ]


class BarFile:
    """The bars of one symbol in a Parquet file, and those fetched since it was last written."""

    def __init__(self, path: Path, symbol: str, frame: pl.DataFrame) -> None:
        self._path = path
        self._symbol = symbol
        self._saved = frame
        self._fresh: list[Row] = []

    @classmethod
    def open(cls, path: Path, symbol: str, step: int) -> BarFile:
        """The file as it is, or an empty one; refused if it holds anything but this symbol's bars."""
        if not path.exists():
            return cls(path, symbol, pl.DataFrame(schema=_COLUMNS))
        advice = "choose another name for this download"
        try:
            frame = pl.read_parquet(path)
        except pl.exceptions.PolarsError as error:
            raise BarsError(f"{path}: not a readable Parquet file ({error}); {advice}") from error
        if dict(frame.schema) != _COLUMNS:
            raise BarsError(f"{path}: was not written by `data fetch` (columns {', '.join(frame.columns)}); {advice}")
        if (others := frame.filter(pl.col("symbol") != symbol)).height:
            raise BarsError(f"{path}: holds {others['symbol'][0]}, not {symbol}; {advice}")
        spacing = np.diff(frame["open_time"].dt.epoch("ms").to_numpy())
        if len(spacing) and (spacing.min() != step or (spacing % step).any()):
            nearest = timedelta(milliseconds=int(spacing.min()))
            raise BarsError(f"{path}: its bars are {nearest} apart, not {timedelta(milliseconds=step)}; {advice}")
        return cls(path, symbol, frame)

    @property
    def bars(self) -> int:
        return self._saved.height + len(self._fresh)

    @property
    def times(self) -> NDArray[np.int64]:
        """Sorted open times of the written bars, milliseconds."""
        return self._saved["open_time"].dt.epoch("ms").to_numpy()

    def row_at(self, moment: int) -> Row | None:
        """The written bar that opened at `moment`, if there is one."""
        index = int(np.searchsorted(self.times, moment))
        if index == self._saved.height or self.times[index] != moment:
            return None
        return (moment, *self._saved.select(VALUES).row(index))

    def append(self, rows: list[Row]) -> None:
        self._fresh.extend(rows)

    def save(self) -> None:
        """Write the new bars atomically."""
        if not self._fresh:
            return
        fresh = (
            pl.DataFrame(self._fresh, schema=["open_time", *VALUES], orient="row")
            .with_columns(pl.col("open_time").cast(TIME_TYPE), symbol=pl.lit(self._symbol))
            .select(*_COLUMNS)
        )
        self._saved = pl.concat([self._saved, fresh]).sort("open_time")
        self._fresh = []
        write_frame(self._saved, self._path)
