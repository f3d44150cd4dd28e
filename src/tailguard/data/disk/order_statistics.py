"""Exact quantiles of data larger than memory, by counting in several passes over blocks.

Floating-point numbers, taken as integers with the sign bit flipped, sort like the numbers themselves. A pass counts
the next 16 bits of those that share the leading bits found so far; after four passes all 64 bits of the wanted order
statistics are known. The result equals that of `np.quantile`, bit for bit.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Float = NDArray[np.float64]
Blocks = Callable[[], Iterator[Float]]
"""Starts a new pass over the numbers: blocks of rows, [r, F], without a NaN."""

DIGIT = 16
"""Bits that one pass determines."""
SIGN = np.uint64(1 << 63)


@dataclass(frozen=True)
class Statistics:
    """Of `count` rows of `F` columns."""

    count: int
    quantiles: Float
    """[P, F]"""
    deviation: Float
    """Standard deviation, [F]."""
    smallest: Float
    largest: Float


def streamed_statistics(blocks: Blocks, probabilities: Sequence[float]) -> Statistics:
    """Quantiles (linear between neighbours), deviations and extremes of each column, in five passes."""
    count, total = 0, np.zeros(0)
    smallest = largest = np.zeros(0)
    for block in blocks():
        if not len(block):
            continue
        low, high = block.min(axis=0), block.max(axis=0)
        smallest = np.minimum(smallest, low) if count else low
        largest = np.maximum(largest, high) if count else high
        total = (total if count else 0.0) + block.sum(axis=0)
        count += len(block)
    if count == 0:
        return Statistics(0, np.zeros((len(probabilities), 0)), total, smallest, largest)
    mean = total / count
    squares = np.zeros_like(mean)
    positions = np.asarray(probabilities) * (count - 1)
    ranks = np.unique([np.floor(positions), np.ceil(positions)]).astype(np.int64)
    columns = [[_Search(int(rank)) for rank in ranks] for _ in mean]
    for digit in range(64 // DIGIT):
        for searches in columns:
            for search in searches:
                search.begin()
        for block in blocks():
            if digit == 0:
                squares += ((block - mean) ** 2).sum(axis=0)
            keys = _sortable(block)
            for column, searches in enumerate(columns):
                _count(searches, keys[:, column], digit)
        for searches in columns:
            for search in searches:
                search.settle()
    order = {
        int(rank): _number(np.array([searches[at].prefix for searches in columns], np.uint64))
        for at, rank in enumerate(ranks)
    }
    quantiles = np.stack([_between(order[int(np.floor(p))], order[int(np.ceil(p))], p % 1) for p in positions])
    return Statistics(count, quantiles, np.sqrt(squares / count), smallest, largest)


class _Search:
    """Search for the number of one rank: its leading bits so far, and the rank among those that share them."""

    def __init__(self, rank: int) -> None:
        self.rank, self.prefix = rank, 0
        self.counts = np.zeros(1 << DIGIT, np.int64)

    def begin(self) -> None:
        self.counts = np.zeros(1 << DIGIT, np.int64)

    def settle(self) -> None:
        below = np.cumsum(self.counts)
        digit = int(np.searchsorted(below, self.rank, side="right"))
        self.rank -= int(below[digit - 1]) if digit else 0
        self.prefix = (self.prefix << DIGIT) | digit


def _count(searches: Sequence[_Search], keys: NDArray[np.uint64], digit: int) -> None:
    """Count the next digit of the keys for each search; searches with the same prefix share the work."""
    shift = np.uint64(64 - DIGIT * (digit + 1))
    heads = keys >> shift
    counted: dict[int, NDArray[np.int64]] = {}
    for search in searches:
        if search.prefix not in counted:
            own = heads if digit == 0 else heads[heads >> np.uint64(DIGIT) == np.uint64(search.prefix)]
            digits = (own & np.uint64((1 << DIGIT) - 1)).astype(np.int64)
            counted[search.prefix] = np.bincount(digits, minlength=1 << DIGIT)
        search.counts += counted[search.prefix]


def _sortable(values: Float) -> NDArray[np.uint64]:
    """Integers that sort as the numbers do."""
    bits = np.ascontiguousarray(values, np.float64).view(np.uint64)
    keys: NDArray[np.uint64] = np.where(bits & SIGN != 0, ~bits, bits | SIGN)
    return keys


def _number(keys: NDArray[np.uint64]) -> Float:
    """The inverse of `_sortable`."""
    return np.where(keys & SIGN != 0, keys ^ SIGN, ~keys).view(np.float64)


def _between(low: Float, high: Float, share: float) -> Float:
    """From `low` to `high` by `share`, rounded as NumPy rounds it: from the nearer end."""
    return high - (high - low) * (1 - share) if share >= 0.5 else low + (high - low) * share
