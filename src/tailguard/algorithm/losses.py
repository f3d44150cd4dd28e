"""Policy losses: pure, per-sample functions of log-probabilities and advantages.

``log_ratio`` is log π_new(a|s) − log π_old(a|s) with actions drawn from π_old. A loss is something to minimise; the
caller takes the weighted mean with :func:`masked_mean`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class GuardedLogRatio:
    """A log-ratio that is safe to exponentiate, and what had to be done to it."""

    log_ratio: Tensor
    """Clamped to ±limit, [...]."""
    clamped_share: Tensor
    """Share of samples beyond the limit, a scalar."""
    finite: Tensor
    """False if any log-ratio was NaN or infinite, a scalar bool: the batch must not be used."""


@dataclass(frozen=True)
class SurrogateLoss:
    """PPO's clipped objective on a batch."""

    loss: Tensor
    """Per sample, [...]."""
    ratio: Tensor
    """π_new / π_old, [...], without gradient."""
    clipped: Tensor
    """1 where the ratio is outside the clip range, else 0, [...]; its mean is the clip fraction."""


def masked_mean(values: Tensor, weights: Tensor | None = None, total: Tensor | float | None = None) -> Tensor:
    """Weighted mean Σ w x / Σ w, a scalar. Weights [...] are 1 for samples that count and 0 for padding and dead rows.

    ``total`` is the sum of the weights of the whole group when ``values`` is one microbatch of it: the microbatches'
    means then add up to the group's, and so do their gradients, however the group is split. A sample of weight 0 adds
    nothing even if it is not finite. A group without weight has mean 0.
    """
    if weights is None:
        return values.sum() / (values.numel() if total is None else total)
    if total is None:
        total = weights.sum().clamp(min=torch.finfo(values.dtype).tiny)
    return (torch.where(weights != 0, values, torch.zeros_like(values)) * weights).sum() / total


def guard_log_ratio(log_ratio: Tensor, limit: float = 20.0, weights: Tensor | None = None) -> GuardedLogRatio:
    """Clamp the log-ratio [...] before it is exponentiated, and say whether it was finite *before* the clamp.

    The clamp's backward pass gives a zero gradient where its input is NaN, so a NaN log-probability yields finite
    gradients: a check of the gradient norm cannot find it, this flag does. Samples of weight 0 are ignored.
    """
    with torch.no_grad():
        finite = log_ratio.isfinite()
        if weights is not None:
            finite = finite | (weights == 0)
        clamped_share = masked_mean((log_ratio.abs() > limit).to(log_ratio.dtype), weights)
    return GuardedLogRatio(log_ratio.clamp(-limit, limit), clamped_share, finite.all())


def clipped_surrogate(log_ratio: Tensor, advantages: Tensor, clip_range: float | Tensor) -> SurrogateLoss:
    """−min(r A, clip(r, 1 ± ε) A) per sample, all [...] (Schulman et al. 2017, equation 7)."""
    ratio = log_ratio.exp()
    clipped_ratio = ratio.clamp(1 - clip_range, 1 + clip_range)  # type: ignore[arg-type]  # stubs miss the union
    loss = torch.maximum(-advantages * ratio, -advantages * clipped_ratio)
    with torch.no_grad():
        outside = ((ratio - 1).abs() > clip_range).to(ratio.dtype)
    return SurrogateLoss(loss, ratio.detach(), outside)


def kl_k1(log_ratio: Tensor) -> Tensor:
    """−log r per sample: unbiased for KL(old‖new) under actions of the old policy; high variance (Schulman 2020)."""
    return -log_ratio


def kl_k3(log_ratio: Tensor) -> Tensor:
    """(r − 1) − log r per sample: unbiased for KL(old‖new), never negative, low variance near r = 1 (Schulman 2020)."""
    return log_ratio.expm1() - log_ratio


def entropy_loss(entropy: Tensor, log_prob: Tensor) -> Tensor:
    """−H per sample [...]; multiply by the entropy coefficient and add.

    ``log_prob`` [...] only supplies the shape: an entropy with an action dimension left in it would count once for
    every dimension.
    """
    if entropy.shape != log_prob.shape:
        raise ValueError(
            f"entropy has shape {tuple(entropy.shape)}, log-probability {tuple(log_prob.shape)}: "
            "sum the entropy over action dimensions to one value a sample"
        )
    return -entropy


def awr_weights(advantages: Tensor, beta: float | Tensor, max_weight: float = 20.0) -> Tensor:
    """min(exp(A / β), max_weight) [...], without gradient (Peng et al. 2019, advantage-weighted regression).

    The exponent is clamped, not the weight: exp overflows first otherwise.
    """
    return (advantages.detach() / beta).clamp(max=math.log(max_weight)).exp()


def bc_loss(log_prob: Tensor, weights: Tensor | None = None) -> Tensor:
    """−w log π(a|s) per sample [...] for given actions: behaviour cloning, or AWR with :func:`awr_weights`."""
    return -log_prob if weights is None else -weights * log_prob
