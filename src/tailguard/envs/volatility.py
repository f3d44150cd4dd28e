"""Volatility scaling: smaller positions while the market moves more than it did in training."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from tailguard.data.panel import Panel
from tailguard.validate import check_count, check_range

Float = NDArray[np.float64]


@dataclass(frozen=True)
class VolatilityScaling:
    """Weights times min(1, reference / volatility), for each asset.

    Volatility is the square root of an exponentially weighted mean of squared log-returns from close to close, known at
    the close at which a decision is made. Positions are never scaled up.
    """

    half_life: int
    """Bars after which a return counts half."""
    reference: tuple[float, ...]
    """Median volatility of each asset over the training bars; one number: of all assets together."""

    def __post_init__(self) -> None:
        check_count("volatility.half_life", self.half_life)
        for value in self.reference:
            check_range("volatility.reference", value, low=0, low_open=True)

    @classmethod
    def fit(cls, panel: Panel, half_life: int, *, one_for_all: bool = False) -> VolatilityScaling | None:
        """The scaling for these training bars; None where prices never move.

        `one_for_all`: one reference for all assets, the median of theirs, which also holds for others.
        """
        check_count("volatility.half_life", half_life)
        volatility = ewma_volatility(panel.close, panel.segment, half_life)
        volatility = np.where(volatility > 0, volatility, np.nan)[np.asarray(panel.tradeable)]
        if not np.isfinite(volatility).any(0).all():
            return None
        each = np.nanmedian(volatility, axis=0)
        return cls(half_life, tuple(float(value) for value in ([np.median(each)] if one_for_all else each)))

    def factors(self, panel: Panel) -> NDArray[np.float32]:
        """The factor on each asset's weight at each bar, [R, A]; 1 where there is no volatility yet."""
        volatility = ewma_volatility(panel.close, panel.segment, self.half_life)
        with np.errstate(divide="ignore", invalid="ignore"):
            ratio = np.asarray(self.reference) / volatility
        return np.fmin(ratio, 1.0).astype(np.float32)


def volatility_factors(scaling: VolatilityScaling | None, panel: Panel, device: torch.device) -> Tensor | None:
    """The factors of a scaling on these bars as a tensor; None without a scaling."""
    return None if scaling is None else torch.as_tensor(scaling.factors(panel), device=device)


def ewma_volatility(close: Float, segment: NDArray[np.integer], half_life: int) -> Float:
    """Square root of Σ wₖ r²₍ₜ₋ₖ₎ / Σ wₖ with wₖ = 2^(−k / half-life), over the bars of the segment so far, [R, A].

    NaN at the first bar of a segment, which has no return.
    """
    close = np.asarray(close, dtype=np.float64)
    edges = np.flatnonzero(np.diff(np.asarray(segment))) + 1
    decay = math.exp(-math.log(2) / half_life)
    pieces = [_of_segment(piece, decay) for piece in np.split(close, edges)]
    return np.concatenate(pieces)


def _of_segment(close: Float, decay: float) -> Float:
    squared = np.diff(np.log(close), axis=0, prepend=np.log(close[:1])) ** 2
    weight = np.ones((len(close), 1))
    weight[0] = 0.0
    with np.errstate(invalid="ignore"):
        return np.asarray(np.sqrt(_discounted_sum(squared, decay) / _discounted_sum(weight, decay)))


def _discounted_sum(values: Float, decay: float) -> Float:
    """Σₖ decayᵏ · values₍ₜ₋ₖ₎ for each row t, by doubling: log₂ T vector operations."""
    total, step, factor = values.copy(), 1, decay
    while step < len(total) and factor > 1e-18:
        total[step:] = total[step:] + factor * total[:-step]
        step, factor = 2 * step, factor**2
    return total
