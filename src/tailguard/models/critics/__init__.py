"""Critic heads: a scalar value, quantiles of the return, a categorical distribution, and those of one's own.

A critic owns what makes it one: the form of its targets, its loss and value clipping, what happens to it when the
scale of the return changes, its metrics, its description and the settings it reads. `register_critic` adds one.
"""

from tailguard.models.critics.base import (
    ClipMode,
    Critic,
    CriticLoss,
    DistributionalCritic,
    LossSettings,
    ValueClip,
    ascending,
    midpoints,
)
from tailguard.models.critics.categorical import HL_GAUSS_WIDTH, CategoricalCritic, Projection, hl_gauss, two_hot
from tailguard.models.critics.quantile import QuantileCritic
from tailguard.models.critics.registry import CRITICS, register_critic
from tailguard.models.critics.scalar import ScalarCritic
from tailguard.models.critics.twins import TwinMode, combine_quantiles, combine_values, twin_pessimism

__all__ = [
    "CRITICS",
    "HL_GAUSS_WIDTH",
    "CategoricalCritic",
    "ClipMode",
    "Critic",
    "CriticLoss",
    "DistributionalCritic",
    "LossSettings",
    "Projection",
    "QuantileCritic",
    "ScalarCritic",
    "TwinMode",
    "ValueClip",
    "ascending",
    "combine_quantiles",
    "combine_values",
    "hl_gauss",
    "midpoints",
    "register_critic",
    "twin_pessimism",
    "two_hot",
]
