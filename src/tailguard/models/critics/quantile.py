"""Quantiles of the return, by quantile regression."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Self, get_args

import torch
from torch import Tensor
from torch.nn.functional import pad

from tailguard.errors import ConfigError
from tailguard.models.critics.base import (
    INITIAL_GAIN,
    ClipMode,
    DistributionalCritic,
    LossSettings,
    ValueClip,
    ascending,
    clip_value,
    midpoints,
    sd_factor,
)
from tailguard.models.critics.registry import register_critic
from tailguard.returns import RunningMoments

if TYPE_CHECKING:
    from tailguard.models.policy import NetworkConfig


@register_critic("quantile")
class QuantileCritic(DistributionalCritic):
    """Quantiles of the return at midpoint levels (Dabney et al. 2018, QR-DQN). Output [..., N], not necessarily sorted.

    A crash rarer than 1/(2N) moves no quantile, hence not the mean either: GAE's baseline is a `ScalarCritic`.
    """

    clip_modes = get_args(ClipMode)
    loss_settings = ("huber_kappa",)
    size_setting = "quantiles"
    tau: Tensor

    def __init__(self, feature_size: int, count: int = 32, gain: float = INITIAL_GAIN) -> None:
        if count < 1:
            raise ConfigError(f"quantile critic: {count} quantiles; give 1 or more (32 is usual)")
        super().__init__(feature_size, count, gain)
        self.register_buffer("tau", midpoints(count), persistent=False)

    @classmethod
    def from_config(cls, feature_size: int, network: NetworkConfig) -> Self:
        return cls(feature_size, network.quantiles)

    def mean(self, output: Tensor) -> Tensor:
        return output.mean(-1)

    def encode(self, samples: Tensor) -> Tensor:
        """Samples [..., M] in ascending order, which makes the loss O(N log M) instead of O(N M)."""
        return ascending(samples)

    def quantiles(self, output: Tensor, count: int) -> Tensor:
        """The output itself at its own levels, else linear interpolation in τ, flat beyond the outermost levels."""
        own = self.tau.numel()
        if count == own:
            return output
        position = (midpoints(count, dtype=output.dtype, device=output.device) * own - 0.5).clamp(0, own - 1)
        below = position.long()
        above = (below + 1).clamp(max=own - 1)
        ordered = output.sort(-1).values
        return torch.lerp(ordered[..., below], ordered[..., above], position - below)

    def loss(self, output: Tensor, targets: Tensor, settings: LossSettings) -> Tensor:
        return quantile_loss(output, targets, self.tau, settings.huber_kappa)

    def clip(self, output: Tensor, old_output: Tensor, clip: ValueClip) -> Tensor:
        return clip_quantiles(output, old_output, clip)

    def old_output(self, output: Tensor, quantiles: Tensor, scale: RunningMoments) -> Tensor:  # noqa: ARG002
        return scale.normalise(quantiles)

    def metrics(self, outputs: Sequence[Tensor], mean: Callable[[Tensor], Tensor]) -> dict[str, Tensor]:
        """Quantiles in the wrong order: the share of neighbouring pairs, and the total size of their crossings.

        The size is in standard deviations of the return. A nearly constant return leaves quantiles in random order
        without harm, so only the two together indicate a fault.
        """
        # As the critics say them, before they are sorted: below 0 where two stand in the wrong order, [C, T, N, Q − 1].
        gaps = torch.stack([output.diff(dim=-1) for output in outputs])
        return {
            "critic/quantile_crossing": mean((gaps < 0).float().mean((0, -1))),
            "critic/quantile_crossing_depth": mean(gaps.clamp(max=0).neg().sum(-1).mean(0)),
        }


def pinball_loss(quantiles: Tensor, sorted_targets: Tensor, tau: Tensor) -> Tensor:
    """Quantile regression (Koenker & Bassett 1978): mean over N quantiles and M targets of u (τ − 1{u < 0}), u = y − q.

    ``quantiles`` [..., N], ``sorted_targets`` [..., M] ascending along M, ``tau`` [N]; returns [...]. Mean over N, so
    that the loss does not grow with the number of quantiles; the papers sum.

    With c targets below q and S their sum, Σ_j ρ(y_j − q) = τ Σ_j (y_j − q) + c q − S, and the slope in q is c − Mτ: a
    search in the sorted targets replaces the [..., N, M] differences and their backward pass. Counts are always finite:
    a NaN shows in the loss, not in the gradient.
    """
    count = sorted_targets.shape[-1]
    with torch.no_grad():
        below = torch.searchsorted(sorted_targets, quantiles.contiguous())
        sums = pad(sorted_targets.cumsum(-1), (1, 0)).gather(-1, below)
        slope = below.to(quantiles.dtype) / count - tau
        offset = tau * sorted_targets.mean(-1, keepdim=True) - sums / count
    return (slope * quantiles + offset).mean(-1)


def quantile_huber_loss(quantiles: Tensor, sorted_targets: Tensor, tau: Tensor, kappa: float) -> Tensor:
    """Mean over N quantiles and M targets of |τ − 1{u < 0}| L_κ(u) / κ, L_κ being Huber's loss (Dabney et al. 2018).

    Shapes as in :func:`pinball_loss`. Divided by κ as in IQN, so that κ → 0 is the pinball loss at the same scale
    (QR-DQN's own is κ times this). A κ of the order of the return's standard deviation pulls the tails in: 18 % of
    CVaR₀.₀₅ at κ = 1 sd, 2.4 % at 0.1 sd.

    Within κ of q the loss is (q − y)²/2κ, beyond it |q − y| − κ/2: the count, sum and sum of squares of the targets in
    each of the four regions give it. In float64, because they cancel.
    """
    size, count = quantiles.shape[-1], sorted_targets.shape[-1]
    q, level = quantiles.double(), tau.double()
    with torch.no_grad():
        y = sorted_targets.double()
        places = torch.searchsorted(y, torch.cat((q - kappa, q, q + kappa), -1))
        places = pad(pad(places, (size, 0)), (0, size), value=count)

        def by_region(ends: Tensor) -> tuple[Tensor, ...]:
            return ends.reshape(*ends.shape[:-1], 5, size).diff(dim=-2).to(q.dtype).unbind(-2)

        number = by_region(places)
        total = by_region(pad(y.cumsum(-1), (1, 0)).gather(-1, places))
        square = by_region(pad(y.square().cumsum(-1), (1, 0)).gather(-1, places))
    quadratic = [(number[i] * q.square() - 2 * total[i] * q + square[i]) / (2 * kappa) for i in (1, 2)]
    over = number[0] * (q - kappa / 2) - total[0] + quadratic[0]
    under = total[3] - number[3] * (q + kappa / 2) + quadratic[1]
    return ((1 - level) * over + level * under).mean(-1).div(count).to(quantiles.dtype)


def quantile_loss(quantiles: Tensor, sorted_targets: Tensor, tau: Tensor, kappa: float = 0.0) -> Tensor:
    """Pinball loss for κ = 0, else quantile Huber with κ in normalised return units; [...]."""
    if kappa == 0:
        return pinball_loss(quantiles, sorted_targets, tau)
    return quantile_huber_loss(quantiles, sorted_targets, tau, kappa)


def clip_quantiles(quantiles: Tensor, old: Tensor, clip: ValueClip) -> Tensor:
    """Quantiles [..., N] bounded around the old ones; q = q_old is left as it is.

    ``mean_only`` shifts all so that the mean moves at most ``limit``; ``mean_and_variance`` also scales the deviations
    so that the standard deviation changes at most by the factor ``sd_ratio``; ``per_quantile`` bounds each by itself.
    """
    if clip.mode == "off":
        return quantiles
    if clip.mode == "per_quantile":
        return clip_value(quantiles, old, clip.limit)
    mean, old_mean = quantiles.mean(-1, keepdim=True), old.mean(-1, keepdim=True)
    clipped_mean = clip_value(mean, old_mean, clip.limit)
    deviation = quantiles - mean
    if clip.mode == "mean_and_variance":
        variance = deviation.square().mean(-1, keepdim=True)
        old_variance = (old - old_mean).square().mean(-1, keepdim=True)
        deviation = deviation * sd_factor(variance, old_variance, clip.sd_ratio)
    return clipped_mean + deviation
