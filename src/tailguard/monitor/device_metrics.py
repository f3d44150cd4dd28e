"""Metrics on the device: means over an iteration's minibatches, read all at once."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Self

import torch
from torch import Tensor

RETURN_QUANTILES = {f"critic/return_p{round(100 * level):02d}": level for level in (0.05, 0.25, 0.5, 0.75, 0.95)}
"""Levels of the return's distribution that are shown over time, by the name of their metric."""


class MeanMetrics:
    """Accumulates metrics, each a number or a row of numbers, over minibatches, which supply the names."""

    def __init__(self, device: torch.device | str = "cpu") -> None:
        self.names: tuple[str, ...] = ()
        self.sizes: tuple[int, ...] = ()
        self.sums = torch.zeros(0, dtype=torch.float64, device=device)
        self.count = torch.zeros((), dtype=torch.float64, device=device)

    def clear(self) -> None:
        """Reset the sums."""
        self.sums.zero_()
        self.count.zero_()

    @torch.no_grad()
    def add(self, metrics: Mapping[str, Tensor], counts: Tensor | None = None) -> None:
        """Add a minibatch's metrics, unless `counts`, a bool on the device, is false."""
        row = torch.cat([value.detach().reshape(-1).double() for value in metrics.values()])
        if self.names != tuple(metrics):
            self.names = tuple(metrics)
            self.sizes = tuple(value.numel() for value in metrics.values())
            self.sums = torch.zeros_like(row)
        self.sums += row if counts is None else torch.where(counts, row, 0.0)
        self.count += 1.0 if counts is None else counts

    def means(self) -> dict[str, Tensor]:
        """The metrics' means by name, NaN where no minibatch counted; nothing before the first minibatch ever."""
        if not self.names:
            return {}
        parts = torch.split(self.sums / self.count, list(self.sizes))
        return {
            name: part.squeeze(0) if size == 1 else part
            for name, part, size in zip(self.names, parts, self.sizes, strict=True)
        }


@dataclass(frozen=True)
class DeviceMetrics:
    """Numbers by name, in one row, so that reading them all waits for the device once."""

    names: tuple[str, ...]
    row: Tensor
    """[names] float64"""

    @classmethod
    def of(cls, metrics: Mapping[str, Tensor]) -> Self:
        """Put 0-dim tensors of any type together."""
        return cls(tuple(metrics), torch.stack([value.detach().double() for value in metrics.values()]))

    def read(self) -> dict[str, float]:
        """The numbers."""
        return dict(zip(self.names, self.row.tolist(), strict=True))
