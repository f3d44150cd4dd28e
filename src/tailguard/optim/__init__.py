"""Optimisers and gradient scaling that work on any torch model."""

from tailguard.optim.registry import (
    OPTIMIZERS,
    OptimizerKind,
    OptimizerSettings,
    Parameters,
    kind_of,
    moments_of,
    register_optimizer,
)
from tailguard.optim.upgd import UPGD, UPGDW, AdaptiveUPGD
from tailguard.optim.variance_scaler import VarianceGradientScaler

__all__ = [
    "OPTIMIZERS",
    "UPGD",
    "UPGDW",
    "AdaptiveUPGD",
    "OptimizerKind",
    "OptimizerSettings",
    "Parameters",
    "VarianceGradientScaler",
    "kind_of",
    "moments_of",
    "register_optimizer",
]
