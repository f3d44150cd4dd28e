"""The arrays of a market and of its features: plain numpy, so that the numeric core needs no data-frame library."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tailguard.data.pace import Pace

Float = NDArray[np.float64]


@dataclass(frozen=True)
class Panel:
    """`R` rows of bars for `A` assets that trade side by side in one account.

    Rows with the same `segment` follow each other without a gap; an episode never crosses a segment's end. Several
    symbols traded in separate accounts are one asset wide (`A == 1`), their rows one after the other, each symbol in
    its own segments.
    """

    time: NDArray[np.int64]
    """Open time of each bar, milliseconds since 1970-01-01 UTC, [R]."""
    open: Float
    """First price of the bar, [R, A]."""
    high: Float
    low: Float
    close: Float
    volume: Float
    """Traded volume in units of the base asset, [R, A]."""
    segment: NDArray[np.int32]
    """Number of the gap-free stretch each row belongs to, [R]."""
    tradeable: NDArray[np.bool_]
    """False where a row only feeds features (the lead-in of a split), [R]."""
    symbols: tuple[str, ...]
    """Names of the assets, or of all symbols when they trade in separate accounts."""
    frequency_ms: int
    """Length of a bar in milliseconds."""
    funding: Float | None = None
    """Funding rate per eight hours in force during the bar, [R, A]; longs pay it when positive. None: not observed."""
    assumed_funding: Float | None = None
    """Funding rate per eight hours that longs and shorts pay alike, [R, A], where none is observed; None: that of
    `MarketConfig`."""

    sessions: Pace | None = None
    """Bars of a day, a week and a year where the market closes; None: it trades around the clock."""
    held_ms: NDArray[np.int64] | None = None
    """Time from each bar's open to the next one's, nights, weekends and holidays included, [R]; None: always
    `frequency_ms`. A position that is held at the close pays interest for all of it."""

    listed: NDArray[np.bool_] | None = None
    """Whether each asset is listed at each row, [R, A]; None: all are, always."""
    halted: NDArray[np.bool_] | None = None
    """Where a listed asset has no bar: it stands at its last close and cannot be traded, [R, A]; None: nowhere."""

    @property
    def rows(self) -> int:
        return int(self.open.shape[0])

    @property
    def assets(self) -> int:
        return int(self.open.shape[1])

    @property
    def pace(self) -> Pace:
        """Bars of a day, a week and a year."""
        return self.sessions or Pace.of_frequency(self.frequency_ms)

    @property
    def bars_per_year(self) -> float:
        return self.pace.per_year

    @property
    def delisted(self) -> NDArray[np.bool_]:
        """The rows on which an asset's positions are closed because its life has ended, [R, A]."""
        ended = np.zeros(self.open.shape, bool)
        if self.listed is not None:
            ended[1:] = self.listed[:-1] & ~self.listed[1:]
        return ended

    @property
    def session_ends(self) -> NDArray[np.bool_]:
        """Last bars before a closure, [R]; where there are none, as around the clock, all False."""
        if self.held_ms is None:
            return np.zeros(self.rows, bool)
        return np.asarray(self.held_ms > self.frequency_ms)

    def rows_between(self, start: int, stop: int) -> Panel:
        """The rows from `start` up to, not including, `stop`."""
        return replace(self, **{name: values[start:stop] for name, values in self._per_row().items()})

    def rows_at(self, places: NDArray[np.int64]) -> Panel:
        """The rows at these places."""
        return replace(self, **{name: values[places] for name, values in self._per_row().items()})

    def followed_by(self, other: Panel) -> Panel:
        """These rows and then those of `other`, which has the same assets."""
        after = other._per_row()
        joined: dict[str, Any] = {name: np.concatenate([rows, after[name]]) for name, rows in self._per_row().items()}
        return replace(self, **joined)

    def _per_row(self) -> dict[str, Any]:
        return {name: value for name, value in vars(self).items() if isinstance(value, np.ndarray)}


@dataclass(frozen=True, eq=False)
class FeatureTable:
    """`R` rows of `F` features, row by row those of `Bars.panel` with the same accounts."""

    values: NDArray[np.float64]
    """Unscaled values, NaN where a feature is still warming up, [R, F]."""
    names: tuple[str, ...]
    """Name of each column; `name:SYMBOL` where a portfolio holds several symbols."""
    valid: NDArray[np.bool_]
    """Rows on which every feature is defined, [R]; the others must not be traded."""
    definitions: tuple[str, ...]
    """Fingerprint of each column's feature: equal if it gives the same numbers on the same bars."""
    available: NDArray[np.bool_] | None = None
    """Assets that are listed and whose features are defined, [R, A]; None: all are on valid rows."""
    market_wide: int = 0
    """How many of the last columns are the same for all assets; the others belong to one asset each."""
