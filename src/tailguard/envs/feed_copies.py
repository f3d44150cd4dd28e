"""Training bars under several feeds: the same market several times, each time with other features.

The copies follow each other in one table, in segments of their own, as symbols with separate accounts do. An episode
draws its feed when it draws its first row and keeps it, since no episode leaves its segment; the environment and its
saved state need nothing else.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from fractions import Fraction

import numpy as np
import torch
from torch import Tensor

from tailguard.data.prepare import PreparedBars, join_available
from tailguard.errors import ConfigError
from tailguard.validate import check_range

FINEST = 1_000
"""Probabilities are kept to a thousandth."""


@dataclass(frozen=True)
class RandomisedBars(PreparedBars):
    """Bars as they are, and then as each of several feeds shows them."""

    feeds: int
    """Number of feeds with faults."""
    probability: float
    """Share of episodes with one of them, all equally likely, 0 to 1."""

    @property
    def rows(self) -> int:
        """Rows of one copy; those of feed k, counted from 1, begin at k · rows."""
        return self.panel.rows // (self.feeds + 1)


def randomise(clean: PreparedBars, faulty: Sequence[PreparedBars], probability: float) -> RandomisedBars:
    """Put the bars of several feeds behind the clean ones; all have the same rows, features and scaling."""
    check_range("robust.feed_probability", probability, low=0, high=1)
    panel, copies = clean.panel, [clean, *faulty]
    if any(copy.panel.rows != panel.rows or copy.names != clean.names for copy in faulty):
        raise ConfigError("feeds: bars under another feed must have the rows and features of the clean ones")
    first, joined = copies[0], copies[0].panel
    for copy in copies[1:]:
        moved = copy.panel.segment + (joined.segment[-1] + 1 - copy.panel.segment[0])
        joined = joined.followed_by(replace(copy.panel, segment=moved.astype(np.int32)))
    # A row that some feed leaves undefined is used by none, so that all feeds have the same episodes.
    usable = np.logical_and.reduce([copy.usable for copy in copies])
    return RandomisedBars(
        panel=joined,
        features=np.concatenate([copy.features for copy in copies]),
        names=first.names,
        usable=np.tile(usable, len(copies)),
        scaler=first.scaler,
        available=join_available([copy.available for copy in copies]),
        seen_close=np.concatenate([copy.seen_panel.close for copy in copies]),
        feeds=len(faulty),
        probability=probability,
    )


class MixedStarts:
    """First rows of episodes in the clean bars and in those of every feed, as a tensor of rows without storage."""

    def __init__(self, rows: Tensor, offsets: Tensor) -> None:
        self.rows = rows
        """Rows in the clean bars, [S]."""
        self.offsets = offsets
        """What is added to them, each equally likely, [M]."""

    @classmethod
    def of(cls, rows: Tensor, bars: RandomisedBars) -> MixedStarts:
        """Of these rows of the clean bars."""
        share = Fraction(bars.probability).limit_denominator(FINEST)
        if not bars.feeds:
            share = Fraction(0)
        # Of `denominator · feeds` equal parts, each feed gets `numerator` and the clean bars all others.
        clean = (share.denominator - share.numerator) * max(bars.feeds, 1)
        slots = [0] * clean + [feed for feed in range(1, bars.feeds + 1) for _ in range(share.numerator)]
        return cls(rows, torch.tensor(slots, dtype=torch.int64, device=rows.device) * bars.rows)

    @property
    def shape(self) -> tuple[int]:
        return (len(self.rows) * len(self.offsets),)

    def numel(self) -> int:
        return self.shape[0]

    def to(self, device: torch.device) -> MixedStarts:
        return MixedStarts(self.rows.to(device), self.offsets.to(device))

    def only(self, rows: Tensor) -> MixedStarts:
        """With these rows of the clean bars in place of all."""
        return MixedStarts(rows.to(self.offsets.device), self.offsets)

    def index_select(self, dim: int, index: Tensor) -> Tensor:  # noqa: ARG002 (a tensor's signature; there is one dim)
        """The rows at these positions, [N]."""
        return self.rows[index % len(self.rows)] + self.offsets[index // len(self.rows)]
