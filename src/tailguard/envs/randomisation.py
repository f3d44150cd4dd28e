"""Randomised training episodes: costs, missed orders and resampled paths that an agent cannot learn by heart.

Domain randomisation (Tobin et al. 2017): what the market will be like is not known, so training varies it. Held-out
episodes, backtests and trading are never randomised.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor

from tailguard.errors import ConfigError
from tailguard.validate import check_count, check_range


@dataclass(frozen=True)
class Randomisation:
    """Random variation of the training episodes; evaluations are without it."""

    costs: float = 0.0
    """Each episode's fees, spread and impact are multiplied by a random factor between 1 / (1 + this) and 1 + this,
    log-uniform, 0 (off) to 9."""
    delay: float = 0.0
    """Probability that the orders of a bar do not arrive in time: positions are held until the next bar, 0 to 0.9."""
    block: int = 0
    """Mean length, in bars, of the blocks from random places that paths are put together from (stationary bootstrap);
    0: paths as they were."""
    volatility: tuple[float, ...] = field(default=())
    """Factors on volatility, such as [0.7, 1.4]: for each, a copy of the training bars whose returns are multiplied by
    it, with features computed anew, is traded beside them, 0.1 to 10."""

    def __post_init__(self) -> None:
        check_range("env.randomisation.costs", self.costs, low=0, high=9)
        check_range("env.randomisation.delay", self.delay, low=0, high=0.9)
        check_count("env.randomisation.block", self.block, low=0)
        if self.block == 1:
            raise ConfigError("env.randomisation.block: blocks of 1 bar have no order in time; give 0, or 2 or more")
        for factor in self.volatility:
            check_range("env.randomisation.volatility", factor, low=0.1, high=10)

    @property
    def varies_episodes(self) -> bool:
        """Whether anything is drawn while episodes run; copies of the bars are made before."""
        return self.costs > 0 or self.delay > 0 or self.block > 0


class Variation(NamedTuple):
    """The random numbers of one step of N accounts, as rows of one float64 tensor, [4, N]."""

    rows: Tensor
    """Where an account whose episode ends starts the next one."""
    cost_factor: Tensor
    """Factor on the costs of an episode that starts now."""
    missed: Tensor
    """1 where the orders of this step do not arrive, else 0."""
    jump: Tensor
    """Row that a path goes on from after this step; −1: its own next one."""


def draw_variation(settings: Randomisation, rows: Tensor, other_rows: Tensor, generator: torch.Generator) -> Tensor:
    """Draw a `Variation`. `rows`, `other_rows`: random rows to start at and to jump to, [N] each."""
    uniform = torch.rand((3, rows.shape[0]), generator=generator, device=rows.device, dtype=torch.float64)
    cost_factor = torch.exp(math.log1p(settings.costs) * (2 * uniform[0] - 1))
    missed = uniform[1] < settings.delay
    # A block ends at each bar with the same probability: its length is geometric, and the resampled path stationary.
    ends = uniform[2] < (1 / settings.block if settings.block else 0.0)
    jump = torch.where(ends, other_rows, -1)
    return torch.stack([part.to(torch.float64) for part in (rows, cost_factor, missed, jump)])
