"""Optimisers and gradient scaling that work on any torch model."""

from tailguard.optim.upgd import UPGD, UPGDW, AdaptiveUPGD

__all__ = ["UPGD", "UPGDW", "AdaptiveUPGD"]
