"""Bars from data frames in memory, pandas or Polars: the same table of columns that a file gives."""

from __future__ import annotations

from typing import Any

import polars as pl

from tailguard.data.columns import is_time_name
from tailguard.data.layouts import rows_of_levels
from tailguard.errors import BarsError

Frame = Any
"""A pandas DataFrame, or a Polars DataFrame or LazyFrame. pandas is optional, so its type is not imported here."""


def is_frame(data: object) -> bool:
    return isinstance(data, pl.DataFrame | pl.LazyFrame) or _is_pandas(data)


def frame_name(data: Frame) -> str:
    """Name for messages."""
    return "pandas frame" if _is_pandas(data) else "Polars frame"


def read_frame(data: Frame) -> pl.DataFrame:
    """The frame's columns; the index of a pandas frame is a column like the others."""
    if isinstance(data, pl.LazyFrame):
        return data.collect()
    if isinstance(data, pl.DataFrame):
        return data
    columns = data.columns
    if columns.nlevels > 1:
        levels = {tuple(map(str, name)): _series(str(name), data[name]) for name in columns}
        rows = rows_of_levels(levels, _index(data))
        if rows is not None:
            return rows
        raise BarsError(
            f"pandas frame: its columns have {columns.nlevels} levels, like {columns[0]!r}. Choose one symbol, as in "
            "frame.xs('BTC-USD', axis=1, level=1), or bring the symbols into a column `symbol`"
        )
    if not columns.is_unique:
        raise BarsError(f"pandas frame: two columns are named {columns[columns.duplicated()][0]!r}; rename or drop one")
    series = {name: _series(name, data[column]) for name, column in zip(map(str, columns), columns, strict=True)}
    for name, level in _index(data).items():
        if name in series:
            raise BarsError(f"pandas frame: its index and a column are both named {name!r}; rename or drop one")
        series[name] = level
    return pl.DataFrame(series)


def _is_pandas(data: object) -> bool:
    kind = type(data)
    return kind.__module__.partition(".")[0] == "pandas" and hasattr(data, "columns") and hasattr(data, "index")


def _index(data: Frame) -> dict[str, pl.Series]:
    """The index as a named column, unless it only numbers the rows; a DatetimeIndex of any name holds the times."""
    index, series = data.index, {}
    if type(index).__name__ == "RangeIndex" and index.name is None:
        return {}
    for place in range(index.nlevels):
        level = index.get_level_values(place)
        name = "index" if level.name is None else str(level.name)
        if level.dtype.kind == "M" and not is_time_name(name):
            name = "index"
        series[name] = _series(name, level.to_series())
    return series


def _series(name: str, values: Any) -> pl.Series:
    """A pandas Series as Polars has it; missing values are null, and text stays text."""
    dtype = values.dtype
    if dtype.kind == "M":
        zone = getattr(dtype, "tz", None)
        utc = values.dt.tz_convert("UTC").dt.tz_localize(None) if zone is not None else values
        return pl.Series(name, utc.to_numpy().astype("datetime64[ns]"))
    if dtype.kind in "biuf":
        missing = values.isna()
        if not missing.any():
            return pl.Series(name, values.to_numpy(dtype=f"{dtype.kind}{getattr(dtype, 'itemsize', 8)}"))
        return pl.Series(name, values.astype("float64").to_numpy(), nan_to_null=True)
    return pl.Series(
        name, [None if missing else str(value) for value, missing in zip(values, values.isna(), strict=True)]
    )
