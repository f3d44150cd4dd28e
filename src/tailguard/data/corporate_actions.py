"""Dividends and splits: bars as an owner of the shares experiences them.

Earlier prices are multiplied so that the return from a close to the next open is that of an owner who reinvests the
dividend at this open: (open · split + dividend) / close − 1. Volumes are multiplied by the splits. Later bars stay, so
returns and features up to a time do not depend on what is paid after it, beyond the unit of the price.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from typing import Any, Literal, get_args

import numpy as np
import polars as pl
from numpy.typing import NDArray

from tailguard.data.columns import read_numbers, read_times, symbol_column
from tailguard.data.findings import time_label
from tailguard.data.frames import Frame, is_frame, read_frame
from tailguard.data.readers import Paths, files_of, read_file
from tailguard.errors import BarsError
from tailguard.validate import check_choice

Adjust = Literal["none", "splits", "dividends", "all"]
"""What the prices are adjusted for; `dividends`: prices that are adjusted for splits already."""
Float = NDArray[np.float64]

NAMES = {
    "dividend": ("dividend", "dividends", "div", "cashdividend", "dividendamount", "divcash"),
    "split": ("split", "splits", "stocksplits", "splitratio", "splitfactor", "splitcoefficient"),
}
"""Accepted names of the columns, without case, spaces and punctuation: the dividend paid per share, and the new shares
for an old one (4 for 4:1; 0, 1 or nothing where there is none), on the first bar without them."""


def action_columns(columns: Sequence[str]) -> dict[str, str]:
    """The columns that hold dividends and splits, by kind."""
    keys = {re.sub(r"[^a-z0-9]", "", column.lower()): column for column in columns}
    found = {kind: next((keys[name] for name in names if name in keys), None) for kind, names in NAMES.items()}
    return {kind: column for kind, column in found.items() if column is not None}


def adjusted(frame: pl.DataFrame, source: str, adjust: Adjust, events: Frame | Paths | None = None) -> pl.DataFrame:
    """Bars laid out as `tailguard.data.checks` says, adjusted; `events`: dividends and splits from a table of them.

    Without `events` they are columns of the bars. Each symbol's rows must be in the order of their times, which the
    checks then require.
    """
    check_choice("adjust", adjust, get_args(Adjust))
    if adjust == "none":
        if events is not None:
            raise BarsError(f"{source}: events are given and adjust='none'; choose splits, dividends or all")
        return frame
    table = None if events is None else _read_events(events)
    columns = action_columns(frame.columns)
    if table is None and not columns:
        raise BarsError(
            f"{source}: adjust={adjust!r} needs columns named dividend and split, or a table of events; columns found: "
            f"{', '.join(name for name in frame.columns if name not in ('file', 'row', 'unreadable'))}"
        )
    parts = []
    for part in frame.partition_by("symbol", maintain_order=True):
        dividend, split = (
            _from_columns(part, columns) if table is None else _from_events(part, table, str(part["symbol"][0]))
        )
        if adjust == "splits":
            dividend = np.zeros_like(dividend)
        if adjust == "dividends":
            split = np.ones_like(split)
        _check_visible(part, split)
        parts.append(_adjusted(part, dividend, split))
    return pl.concat(parts)


def _adjusted(part: pl.DataFrame, dividend: Float, split: Float) -> pl.DataFrame:
    opened = part["open"].to_numpy()
    with np.errstate(invalid="ignore", divide="ignore"):
        factor = np.where((dividend > 0) | (split != 1), opened / (opened * split + dividend), 1.0)
    prices, shares = _later(factor), _later(split)
    columns = [pl.Series(name, part[name].to_numpy() * prices) for name in ("open", "high", "low", "close")]
    missing = part["volume"].is_null()
    volume = pl.Series("volume", part["volume"].to_numpy() * shares).set(missing, None)
    return part.with_columns(*(column.set(part[column.name].is_null(), None) for column in columns), volume)


def _later(factor: Float) -> Float:
    """The product of all later factors, for each row."""
    product = np.cumprod(factor[::-1])[::-1]
    return np.append(product[1:], 1.0)


def _from_columns(part: pl.DataFrame, columns: dict[str, str]) -> tuple[Float, Float]:
    def values(kind: str, none: float) -> Float:
        if kind not in columns:
            return np.full(part.height, none)
        found = part[columns[kind]].fill_null(none).to_numpy()
        return np.where(found == 0, none, found)

    return values("dividend", 0.0), values("split", 1.0)


def _from_events(part: pl.DataFrame, events: pl.DataFrame, symbol: str) -> tuple[Float, Float]:
    """Each event belongs to the first bar that opens at its time or later."""
    times = part["time"].dt.epoch("ms").fill_null(0).to_numpy()
    dividend, split = np.zeros(part.height), np.ones(part.height)
    own = events.filter(pl.col("symbol").is_null() | (pl.col("symbol") == symbol))
    for row in own.iter_rows(named=True):
        place = int(np.searchsorted(times, row["ms"]))
        if 0 < place < part.height:
            # A dividend and a split of one day: the dividend is paid on the old shares.
            dividend[place] += row["dividend"] or 0.0
            split[place] *= row["split"] or 1.0
    return dividend, split


def _check_visible(part: pl.DataFrame, split: Float) -> None:
    """Refuse prices that are adjusted for a split already: they would be adjusted twice."""
    close, opened = part["close"].to_numpy(), part["open"].to_numpy()
    for place in np.flatnonzero(split != 1):
        if place == 0 or not split[place] > 0:
            continue
        jump = math.log(close[place - 1] / opened[place])
        if abs(jump - math.log(split[place])) > abs(jump):
            row = part.row(int(place), named=True)
            raise BarsError(
                f"{row['file']}: row {row['row']} ({time_label(row['time'])}): a split of {split[place]:g}:1 that is "
                f"not in the prices (close {close[place - 1]:g}, next open {opened[place]:g}): they are adjusted for "
                "it already. Use adjust='dividends', or 'none'"
            )


def _read_events(events: Frame | Paths) -> pl.DataFrame:
    """The columns ms, symbol (null: every symbol), dividend and split."""
    raw = read_frame(events) if is_frame(events) else pl.concat([read_file(file) for file in files_of(events)])
    columns = action_columns(raw.columns)
    time = next((name for name in raw.columns if name.lower() in ("date", "time", "ex_date", "exdate", "index")), None)
    if time is None or not columns:
        raise BarsError(
            f"events: a table of events has a column date or ex_date, and dividend or split; found: "
            f"{', '.join(raw.columns)}"
        )
    times = read_times(raw[time])
    if times.null_count():
        raise BarsError(f"events: {raw[time].filter(times.is_null())[0]!r} in column {time!r} is not a date")
    symbols = symbol_column(raw.columns)
    numbers: dict[str, Any] = {
        kind: read_numbers(raw[columns[kind]]) if kind in columns else pl.lit(None, pl.Float64) for kind in NAMES
    }
    named = pl.lit(None, pl.String) if symbols is None else raw[symbols].cast(pl.String)
    return raw.select(ms=times.dt.epoch("ms"), symbol=named, **numbers).sort("ms")
