"""Settings of UPGD and variance gradient scaling."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

from tailguard.optim.utility import Normalisation
from tailguard.optim.variance_scaler import Granularity, Moments
from tailguard.validate import check_choice, check_count, check_range


@dataclass(frozen=True)
class UPGDConfig:
    """Gates and perturbations of upgd, adaptive_upgd and upgdw; the other optimisers have none."""

    beta_utility: float = 0.999
    """Share of the utility's running average kept at each step, 0 to below 1; 0.999 averages about 1,000 steps."""
    sigma: float = 0.001
    """Standard deviation of the perturbation, in units of the gradient (upgd) or of Adam's direction (the others)."""
    step_factor: Literal[1, 2] = 2
    """2 lets a weight without utility move as without a gate; 1 is the formula of the paper's experiments."""
    normalisation: Normalisation = "max"
    """max divides utilities by the largest one (the paper); minmax spreads the gates regardless of signs."""

    def __post_init__(self) -> None:
        check_range("upgd.beta_utility", self.beta_utility, low=0, high=1, high_open=True)
        check_range("upgd.sigma", self.sigma, low=0)
        check_choice("upgd.step_factor", self.step_factor, (1, 2))
        check_choice("upgd.normalisation", self.normalisation, get_args(Normalisation))


@dataclass(frozen=True)
class VGSConfig:
    """Variance gradient scaling: shorter steps where gradients are mostly noise."""

    enabled: bool = False
    """Whether steps are scaled."""
    alpha: float = 1.0
    """Weight of the noise in the factor 1 / (1 + α·NSR); 1 is optimal for plain descent, 0 to 10."""
    beta: float = 0.99
    """Share of the gradients' running averages kept at each step; 0.99 averages about 100 steps."""
    min_scale: float = 0.1
    """Lowest factor, above 0 to 1."""
    max_nsr: float = 1e4
    """Highest noise-to-signal ratio."""
    warmup_steps: int = 100
    """Optimiser steps before the first scaling."""
    granularity: Granularity = "global"
    """global keeps the direction of the step; per_tensor gives each tensor its own factor."""
    moments: Moments = "own"
    """own averages raw gradients; optimizer reads Adam's, which costs no memory but sees clipped gradients."""

    def __post_init__(self) -> None:
        check_range("vgs.alpha", self.alpha, low=0)
        check_range("vgs.beta", self.beta, low=0, high=1, low_open=True, high_open=True)
        check_range("vgs.min_scale", self.min_scale, low=0, high=1, low_open=True)
        check_range("vgs.max_nsr", self.max_nsr, low=0, low_open=True)
        check_count("vgs.warmup_steps", self.warmup_steps)
        check_choice("vgs.granularity", self.granularity, get_args(Granularity))
        check_choice("vgs.moments", self.moments, get_args(Moments))
