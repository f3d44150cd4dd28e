"""A hard cap on exposure, applied to each decision by arithmetic, not by learning."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from tailguard.validate import check_range


@dataclass(frozen=True)
class Shield:
    """Positions so small that a stated shock cannot take the episode's loss beyond a budget.

    With equity E, the episode's first equity S and gross exposure g (a multiple of E), a shock leaves E·(1 − g·shock).
    That is at least S·(1 − budget) as long as g ≤ (1 − (1 − budget)·S/E) / shock. A move larger than the shock, costs
    and liquidation can still exceed the budget.
    """

    shock: float
    """Move against all positions at once, as a fraction of their price, above 0 to 1."""
    budget: float
    """Largest loss of an episode, as a fraction of its first equity, above 0 to 1."""

    def __post_init__(self) -> None:
        check_range("shield.shock", self.shock, low=0, low_open=True, high=1)
        check_range("shield.budget", self.budget, low=0, low_open=True, high=1)

    def cap(self, equity: Tensor, start_equity: Tensor) -> Tensor:
        """Largest gross exposure, [N], a multiple of equity; 0 once the budget is spent."""
        return ((1 - (1 - self.budget) * start_equity / equity) / self.shock).clamp(min=0.0)

    def apply(self, weights: Tensor, equity: Tensor, start_equity: Tensor) -> tuple[Tensor, Tensor]:
        """Weights [N, A] scaled down together to the cap where they exceed it, and where they did, [N] bool."""
        gross = weights.abs().sum(-1)
        cap = self.cap(equity, start_equity).to(weights.dtype)
        held_back = gross > cap
        # Divide only where the cap binds: near an exposure of 0 the slope is not finite.
        factor = torch.where(held_back, cap / torch.where(held_back, gross, 1.0), 1.0)
        return weights * factor.unsqueeze(-1), held_back
