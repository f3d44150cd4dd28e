"""The table of features a model reads: plain numpy, so that the numeric core needs no data-frame library."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray


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
