"""Learning targets: advantages, λ-returns, distributional targets, and their scales."""

from tailguard.returns.distributional import bootstrap_samples, draw_continuations, sr_lambda_targets
from tailguard.returns.gae import gae, lambda_returns
from tailguard.returns.normalise import (
    COMMON_MOMENTS,
    GRADIENT,
    SQUARED_GRADIENT,
    UTILITY,
    AdvantageMode,
    MomentPowers,
    MomentsChange,
    RunningMoments,
    normalise_advantages,
    popart_rescale,
    rescale_moments,
)

__all__ = [
    "COMMON_MOMENTS",
    "GRADIENT",
    "SQUARED_GRADIENT",
    "UTILITY",
    "AdvantageMode",
    "MomentPowers",
    "MomentsChange",
    "RunningMoments",
    "bootstrap_samples",
    "draw_continuations",
    "gae",
    "lambda_returns",
    "normalise_advantages",
    "popart_rescale",
    "rescale_moments",
    "sr_lambda_targets",
]
