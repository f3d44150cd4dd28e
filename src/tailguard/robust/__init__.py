"""Robustness: attacks on observations, training against them, bounds on their effect, and faults of the feed."""

from tailguard.robust.attacks import Attack, attackable, perturb
from tailguard.robust.config import RobustConfig
from tailguard.robust.smoothness import Smoothness

__all__ = ["Attack", "RobustConfig", "Smoothness", "attackable", "perturb"]
