"""Histograms of many tensors, counted where the tensors are and read in one transfer."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

BINS = 64


@dataclass(frozen=True)
class Histogram:
    """Counts in bins of equal width."""

    low: float
    high: float
    number: float
    total: float
    squares: float
    edges: list[float]
    """Right edges."""
    counts: list[float]


def histograms(tensors: Mapping[str, Tensor], bins: int = BINS) -> dict[str, Histogram]:
    """One for each tensor with a finite number in it, by name, over its finite numbers."""
    if not tensors:
        return {}
    rows = torch.stack([count(values, bins) for values in tensors.values()]).cpu()
    result = {}
    for name, row in zip(tensors, rows, strict=True):
        low, high, first, width, number, total, squares = row[:7].tolist()
        if number:
            edges = (first + width * torch.arange(1, bins + 1, dtype=torch.float64)).tolist()
            result[name] = Histogram(low, high, number, total, squares, edges, row[7:].tolist())
    return result


@torch.no_grad()
def count(values: Tensor, bins: int = BINS) -> Tensor:
    """[7 + bins]: minimum, maximum, left edge, width of a bin, number, sum, sum of squares, and the counts.

    The bins span the values; if all are the same, one unit around them, as in NumPy. No host sync: numbers that are not
    finite are counted in a bin of their own, which is dropped, rather than filtered out.
    """
    rows = values.flatten().double()
    finite = rows.isfinite()
    low = torch.where(finite, rows, torch.inf).min()
    high = torch.where(finite, rows, -torch.inf).max()
    constant = low == high
    first = torch.where(constant, low - 0.5, low)
    width = torch.where(constant, 1.0, high - low) / bins
    kept = torch.where(finite, rows, 0.0)
    place = torch.where(finite, ((kept - first) / width).floor().clamp(0, bins - 1), bins).long()
    counts = rows.new_zeros(bins + 1).scatter_add_(0, place, torch.ones_like(rows))
    summary = [low, high, first, width, finite.sum().double(), kept.sum(), kept.square().sum()]
    return torch.cat([torch.stack(summary), counts[:-1]])
