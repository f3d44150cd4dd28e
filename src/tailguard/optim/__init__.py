"""Optimisers and gradient scaling that work on any torch model."""

from tailguard.optim.upgd import UPGD, UPGDW, AdaptiveUPGD
from tailguard.optim.variance_scaler import VarianceGradientScaler

__all__ = ["UPGD", "UPGDW", "AdaptiveUPGD", "VarianceGradientScaler"]
