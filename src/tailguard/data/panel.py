"""The arrays of a market and of its features: plain numpy, so that the numeric core needs no data-frame library."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

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

    @property
    def rows(self) -> int:
        return int(self.open.shape[0])

    @property
    def assets(self) -> int:
        return int(self.open.shape[1])

    @property
    def bars_per_year(self) -> float:
        return 365.25 * 86_400_000 / self.frequency_ms

    def rows_between(self, start: int, stop: int) -> Panel:
        """The rows from `start` up to, not including, `stop`."""
        return replace(self, **{name: values[start:stop] for name, values in self._per_row().items()})

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
