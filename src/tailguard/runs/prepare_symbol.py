"""The work on a prepared market that one process does: a symbol's features, statistics of columns, a whole array."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from tailguard.data.disk.arrays import ArrayWriter, map_array, read_rows
from tailguard.data.disk.bar_store import BarStore
from tailguard.data.disk.feature_stream import Part, stream_features
from tailguard.data.disk.order_statistics import Statistics, streamed_statistics
from tailguard.data.scaling import QUARTILES, Scaler
from tailguard.data.stored_features import FeaturePrecision, stored
from tailguard.market import MarketConfig
from tailguard.market.tables import TableStream, check_table, table_columns

ROWS = ("time", "segment", "tradeable", "held_ms")
"""Arrays of the training part that have one number a row and follow from the times alone."""
PRECISIONS: dict[FeaturePrecision, str] = {"float32": "<f4", "bfloat16": "<u2"}


@dataclass(frozen=True)
class Lane:
    """The rows of the training part that a symbol's bars are in: all of them in a portfolio."""

    index: int
    """Number of the symbol."""
    first: int
    count: int
    columns: Path
    """Beginning of the names of its temporary files."""

    def file(self, name: str) -> Path:
        return self.columns.with_name(f"{self.columns.name}-{name}")


@dataclass(frozen=True)
class SymbolTask:
    """A symbol whose features and table one process computes."""

    lane: Lane
    store: BarStore
    """Of this symbol alone."""
    symbols: tuple[str, ...]
    """Of the panel that its rows become a part of."""
    part: Part
    features: tuple[str, ...] | None
    market: MarketConfig
    folder: Path
    """Of the arrays that have one number a row."""
    entries: dict[str, Any]
    prices: tuple[str, ...]
    rows: int


@dataclass(frozen=True)
class SymbolColumns:
    """What became of a symbol's bars."""

    names: tuple[str, ...]
    definitions: tuple[str, ...]
    market_wide: int
    traded: bool
    """Whether it has volume in any bar."""


def write_symbol(task: SymbolTask) -> SymbolColumns:
    """Write a symbol's prices, table, features (feature by feature) and which rows have all of them."""
    lane = task.lane
    mapped = {name: map_array(task.folder / name, entry) for name, entry in task.entries.items()}
    given = {name: mapped[name][lane.first : lane.first + lane.count] for name in ROWS if name in mapped}
    planes = len(table_columns(task.market, "held_ms" in given))
    writers = {name: ArrayWriter(lane.file(name), "<f8", kept=False) for name in task.prices}
    writers["valid"] = ArrayWriter(lane.file("valid"), "|b1", kept=False)
    writers["table"] = ArrayWriter(lane.file("table"), "<f4", planes=planes, rows=lane.count, kept=False)
    stream, made = TableStream(task.market), None
    for window in stream_features(task.store, given["time"], task.part, task.features, task.rows):
        table, rows = window.table, slice(window.start, window.start + window.panel.rows)
        own: dict[str, Any] = {name: np.array(values[rows]) for name, values in given.items()}
        panel = replace(window.panel, symbols=task.symbols, **own)
        columns = stream.extend(panel).astype(np.float32)
        check_table(torch.from_numpy(columns), panel, lane.first + window.start)
        if made is None:
            made = SymbolColumns(table.names, table.definitions, table.market_wide, traded=False)
            features = len(table.names)
            writers["raw"] = ArrayWriter(lane.file("raw"), "<f8", planes=features, rows=lane.count, kept=False)
        values = {"valid": table.valid, "table": columns[:, :, 0], "raw": _by_plane(table.values)}
        for name, writer in writers.items():
            writer.append(values[name] if name in values else getattr(panel, name)[:, 0])
    assert made is not None  # a lane has rows
    for writer in writers.values():
        writer.close()
    return replace(made, traded=bool(stream.traded.any()))


def _by_plane(values: NDArray[np.float64]) -> NDArray[np.float64]:
    """[r, F] -> [F, r], or [r] where there is one feature."""
    return values.T if values.shape[1] > 1 else values[:, 0]


@dataclass(frozen=True)
class StatisticsTask:
    """Columns whose statistics one process finds."""

    columns: tuple[tuple[tuple[Lane, int], ...], ...]
    """Each column: the lanes whose values belong to it, and the number of the feature in each."""
    folder: Path
    rows: int


def find_statistics(task: StatisticsTask) -> list[Statistics]:
    """Statistics of each column over the rows of training that have all features."""

    def blocks(column: tuple[tuple[Lane, int], ...]) -> Iterator[NDArray[np.float64]]:
        for lane, plane in column:
            for start in range(0, lane.count, task.rows):
                count = min(task.rows, lane.count - start)
                usable, tradeable = (
                    read_rows(task.folder / name, "|b1", lane.first + start, count) for name in ("usable", "tradeable")
                )
                values = read_rows(lane.file("raw"), "<f8", plane * lane.count + start, count)
                yield values[usable & tradeable][:, None]

    return [streamed_statistics(lambda column=column: blocks(column), QUARTILES) for column in task.columns]  # type: ignore[misc]


@dataclass(frozen=True)
class ScalingTask:
    """A symbol whose features one process scales."""

    lane: Lane
    scaler: Scaler
    """Of the features that are kept: the first ones."""
    precision: FeaturePrecision
    rows: int


def scale_symbol(task: ScalingTask) -> None:
    """Write a symbol's scaled features row by row, and remove the others."""
    lane, width = task.lane, len(task.scaler.names)
    writer = ArrayWriter(lane.file("scaled"), PRECISIONS[task.precision], (width,), kept=False)
    for start in range(0, lane.count, task.rows):
        count = min(task.rows, lane.count - start)
        planes = [read_rows(lane.file("raw"), "<f8", plane * lane.count + start, count) for plane in range(width)]
        writer.append(stored(task.scaler.transform(np.stack(planes, axis=1)), task.precision))
    writer.close()
    lane.file("raw").unlink()


@dataclass(frozen=True)
class ArrayTask:
    """An array of the training part that one process puts together from those of the lanes."""

    target: Path
    dtype: str
    source: str
    """The lanes' files of it."""
    lanes: tuple[Lane, ...]
    widths: tuple[int, ...]
    """Numbers a row of each lane."""
    planes: int
    beside: bool
    """Whether lanes lie side by side, or one after the other."""
    rows: int
    ones: int = 0
    """Further columns of ones."""


def put_together(task: ArrayTask) -> dict[str, Any]:
    """Write the array; returns its entry."""
    width = (sum(task.widths) if task.beside else task.widths[0]) + task.ones
    shape = () if task.source == "valid" else (width,)
    total = task.lanes[0].count if task.beside else sum(lane.count for lane in task.lanes)
    writer = ArrayWriter(task.target, task.dtype, shape, planes=task.planes, rows=total if task.planes > 1 else 0)
    one = stored(np.ones(1, np.float32), "bfloat16" if task.dtype == "<u2" else "float32")[0]

    def block(lanes: tuple[Lane, ...], widths: tuple[int, ...], start: int, count: int) -> NDArray[Any]:
        """[P, r, W]"""
        read = [
            np.stack(
                [
                    read_rows(lane.file(task.source), task.dtype, plane * lane.count + start, count, wide)
                    for plane in range(task.planes)
                ]
            ).reshape(task.planes, count, wide)
            for lane, wide in zip(lanes, widths, strict=True)
        ]
        return np.concatenate([*read, np.full((task.planes, count, task.ones), one, task.dtype)], axis=2)

    groups = [task.lanes] if task.beside else [(lane,) for lane in task.lanes]
    for group in groups:
        step = max(1, task.rows // len(group))
        widths = task.widths if task.beside else task.widths[:1]
        for start in range(0, group[0].count, step):
            rows = block(group, widths, start, min(step, group[0].count - start))
            rows = rows if shape else rows[:, :, 0]
            writer.append(rows if task.planes > 1 else rows[0])
    return writer.close()
