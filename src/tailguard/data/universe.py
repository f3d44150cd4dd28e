"""Universes whose members come and go: listings, halts and delistings inside one account.

The rows of a ragged panel are the times that any symbol has. A symbol is listed from its first bar to its last. Inside
its life a time without a bar is a halt: its position is held, and the move is earned when trading resumes. On the first
row after its life it is delisted: positions are closed at its last close, or at a given price. Weights of symbols that
are not listed are 0.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np
import polars as pl
from numpy.typing import NDArray

from tailguard.data.calendars import Timetable
from tailguard.errors import BarsError
from tailguard.validate import check_range

if TYPE_CHECKING:
    from tailguard.data.bars import Bars

Float = NDArray[np.float64]
Mask = NDArray[np.bool_]


@dataclass(frozen=True)
class Life:
    """Open times of a symbol's first and last bar in the whole record, ms."""

    symbol: str
    first: int
    last: int
    delisting_price: float | None = None
    """What a share is worth after the last bar; None: the last close."""


@dataclass(frozen=True)
class Universe:
    """The members of a ragged universe, in the order of the panel's assets; parts of a split have the same."""

    lives: tuple[Life, ...]
    end: int
    """Open time of the last bar of any of them, ms."""

    @property
    def symbols(self) -> tuple[str, ...]:
        return tuple(life.symbol for life in self.lives)

    def select(self, symbols: tuple[str, ...]) -> Universe:
        """These members only."""
        return Universe(tuple(life for life in self.lives if life.symbol in symbols), self.end)


def universe_of(frame: pl.DataFrame, delistings: Mapping[str, float], source: str) -> Universe:
    """The lives of the symbols in a frame of bars, sorted by symbol and time."""
    times = frame.group_by("symbol", maintain_order=True).agg(
        first=pl.col("time").min().dt.epoch("ms"), last=pl.col("time").max().dt.epoch("ms")
    )
    end = int(times["last"].max())  # type: ignore[arg-type]  # times are there
    lives = tuple(Life(symbol, first, last, delistings.get(symbol)) for symbol, first, last in times.iter_rows())
    for symbol, price in delistings.items():
        check_range(f"delistings.{symbol}", price, low=0)
        life = next((life for life in lives if life.symbol == symbol), None)
        if life is None:
            raise BarsError(f"{source}: delistings: no symbol {symbol!r}; there are {', '.join(times['symbol'])}")
        if life.last == end:
            raise BarsError(f"{source}: delistings: {symbol} has bars until the end of the record")
    return Universe(lives, end)


def ragged_segments(frame: pl.DataFrame, timetable: Timetable) -> pl.Series:
    """Segments that start where no symbol has a bar although the calendar has one, and with each symbol."""
    times = frame["time"].dt.epoch("ms").to_numpy()
    union = np.unique(times)
    marks = np.cumsum(timetable.breaks(union))[np.searchsorted(union, times)]
    starts = (np.diff(marks, prepend=marks[:1]) != 0) | (
        (frame["symbol"] != frame["symbol"].shift()).fill_null(False).to_numpy()
    )
    return pl.Series("segment", np.cumsum(starts), dtype=pl.Int32)


def shared_gaps(times: list[NDArray[np.int64]], timetable: Timetable) -> Timetable:
    """A timetable of the bars that no symbol has: the others of a symbol are halts."""
    union = np.unique(np.concatenate(times))
    if timetable.grid is not None:
        missing = timetable.grid[~np.isin(timetable.grid, timetable.keys(union))]
    else:
        holes = np.flatnonzero(np.diff(union) > timetable.step)
        found = [np.arange(union[at] + timetable.step, union[at + 1], timetable.step) for at in holes]
        missing = np.concatenate([np.zeros(0, np.int64), *found])
    return replace(timetable, grid=missing, holidays=0)


@dataclass(frozen=True)
class Rows:
    """Where each symbol's bars are among the rows of a ragged panel."""

    time: NDArray[np.int64]
    """The times that any symbol has, [R]."""
    places: tuple[NDArray[np.int64], ...]
    """Rows of each symbol's bars."""
    listed: Mask
    """From a symbol's first bar to its last, [R, A]; a life that began before these rows begins with its first here."""

    @classmethod
    def of(cls, bars: Bars) -> Rows:
        assert bars.universe is not None
        times = bars.frame["time"].dt.epoch("ms").to_numpy()
        union = np.unique(times)
        symbol = bars.frame["symbol"].to_numpy()
        places, listed = [], np.zeros((len(union), len(bars.universe.lives)), bool)
        for asset, life in enumerate(bars.universe.lives):
            own = np.searchsorted(union, times[symbol == life.symbol])
            places.append(own)
            if len(own):
                # Bars that follow after these rows make the end of a symbol here a halt.
                stop = len(union) if life.last > union[-1] else own[-1] + 1
                listed[own[0] : stop, asset] = True
        return cls(union, tuple(places), listed)

    def spread(self, values: Float, counts: list[int]) -> Float:
        """A column of all symbols' bars, one after the other, as [R, A]; NaN where a symbol has no bar."""
        wide = np.full(self.listed.shape, np.nan)
        ends = np.cumsum(counts)
        for asset, (place, end, count) in enumerate(zip(self.places, ends, counts, strict=True)):
            wide[place, asset] = values[end - count : end]
        return wide

    @property
    def present(self) -> Mask:
        """Where a symbol has a bar, [R, A]."""
        there = np.zeros_like(self.listed)
        for asset, place in enumerate(self.places):
            there[place, asset] = True
        return there

    @property
    def counts(self) -> list[int]:
        return [len(place) for place in self.places]

    @property
    def delisted(self) -> Mask:
        """The row on which a symbol's positions are closed, [R, A]."""
        ended = np.zeros_like(self.listed)
        ended[1:] = self.listed[:-1] & ~self.listed[1:]
        return ended


def carried_forward(values: Float) -> Float:
    """The last known value of each column, [R, A]; NaN before the first."""
    known = np.where(np.isfinite(values), np.arange(len(values))[:, None], 0)
    return np.take_along_axis(values, np.maximum.accumulate(known, axis=0), axis=0)


def ragged_prices(bars: Bars, rows: Rows) -> dict[str, Float]:
    """Prices and volume, [R, A]: a symbol without a bar stands at its last close, or its price of delisting."""
    assert bars.universe is not None
    frame, counts = bars.frame, rows.counts
    wide = {
        name: rows.spread(frame[name].cast(pl.Float64).to_numpy(), counts)
        for name in ("open", "high", "low", "close", "volume")
    }
    present = rows.present
    last = wide["close"].copy()
    for asset, life in enumerate(bars.universe.lives):
        gone = np.flatnonzero(rows.delisted[:, asset])
        if life.delisting_price is not None and gone.size:
            # A price of 0 would make the next return infinite; nothing is held by then.
            last[gone[0], asset] = max(life.delisting_price, 1e-9 * np.nanmax(wide["close"][:, asset]))
    stands = carried_forward(last)
    # Before its first bar nothing can be held; at that bar's open the price does not jump.
    first = np.array([wide["open"][place[0], asset] if len(place) else 1.0 for asset, place in enumerate(rows.places)])
    stands = np.where(np.isfinite(stands), stands, first)
    prices = {name: np.where(present, wide[name], stands) for name in ("open", "high", "low", "close")}
    return prices | {"volume": np.where(present, wide["volume"], 0.0)}


def describe_lives(universe: Universe) -> list[str]:
    """Notes on listings, delistings and survivorship."""
    lives, start = universe.lives, min(life.first for life in universe.lives)
    listed = [f"{life.symbol} {_day(life.first)}" for life in lives if life.first > start]
    gone = [
        f"{life.symbol} {_day(life.last)}"
        + (f" at {life.delisting_price:g}" if life.delisting_price is not None else " at its last close")
        for life in lives
        if life.last < universe.end
    ]
    notes = []
    if listed:
        notes.append(f"listed later: {', '.join(listed)}")
    if gone:
        notes.append(f"delisted: {', '.join(gone)}")
    return notes


def survivorship_note(lasts: Mapping[str, int]) -> str | None:
    """Named where several symbols all live to the last bar."""
    if len(lasts) < 2 or len(set(lasts.values())) > 1:
        return None
    return (
        f"survivorship: all {len(lasts)} symbols have bars to the end. If they were chosen because they still exist, "
        "results are too good: add the ones that were delisted, with data.universe=ragged"
    )


def _day(ms: int) -> str:
    return str(np.datetime64(int(ms), "ms").astype("datetime64[D]"))
