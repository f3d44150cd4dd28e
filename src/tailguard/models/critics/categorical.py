"""Probabilities of evenly spaced atoms.

The head is linear in its logits, not in its value, so no change of weights can follow a new return scale. Its atoms
move instead: `rescale` expresses the same raw atoms in the new units, which is exact. The atoms keep their raw values,
and the support no longer fits once the scale has changed a lot; `support_drift` measures that, and `set_support` moves
the atoms back over the returns. Only that last call may alter predictions.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Literal, Self

import torch
from torch import Tensor, nn

from tailguard.errors import ConfigError
from tailguard.models.critics.base import (
    INITIAL_GAIN,
    CriticLoss,
    DistributionalCritic,
    LossSettings,
    ValueClip,
    clip_value,
    larger_loss,
    midpoints,
    sd_factor,
)
from tailguard.models.critics.registry import register_critic
from tailguard.returns import MomentsChange

if TYPE_CHECKING:
    from tailguard.models.policy import NetworkConfig

Projection = Literal["two_hot", "hl_gauss"]

# Farebrother et al. 2024, "Stop Regressing": the width of the Gaussian in units of the atom spacing.
HL_GAUSS_WIDTH = 0.75

# A clipped prediction has atoms without any mass; the floor keeps the cross-entropy there finite.
PROBABILITY_FLOOR = 1e-6


@register_critic("categorical")
class CategoricalCritic(DistributionalCritic):
    """Probabilities of evenly spaced atoms (Bellemare et al. 2017). Output: logits [..., K].

    ``two_hot`` targets keep the mean; ``hl_gauss`` targets (Farebrother et al. 2024) also spread over neighbours, which
    regresses better. Both add a known variance to the learned distribution; :meth:`quantiles` removes it.
    """

    clip_modes = ("off", "mean_only", "mean_and_variance")
    size_setting = "atoms"
    support: Tensor
    grid: Tensor

    def __init__(
        self,
        feature_size: int,
        atoms: int = 51,
        v_min: float = -10.0,
        v_max: float = 10.0,
        projection: Projection = "hl_gauss",
        gain: float = INITIAL_GAIN,
    ) -> None:
        if atoms < 2 or not v_min < v_max:
            raise ConfigError(
                f"categorical critic: {atoms} atoms on [{v_min}, {v_max}]; give 2 or more and v_min < v_max"
            )
        if projection not in ("two_hot", "hl_gauss"):
            raise ConfigError(f"categorical critic: projection {projection!r}; choose two_hot or hl_gauss")
        super().__init__(feature_size, atoms, gain)
        self.projection: Projection = projection
        self.v_min, self.v_max = v_min, v_max
        # float64, because a long run rescales the support thousands of times.
        self.register_buffer("support", torch.tensor([v_min, v_max], dtype=torch.float64))
        self.register_buffer("grid", torch.linspace(0.0, 1.0, atoms, dtype=torch.float64), persistent=False)

    @classmethod
    def from_config(cls, feature_size: int, network: NetworkConfig) -> Self:
        low, high = network.support
        return cls(feature_size, network.atoms, low, high, network.projection)

    @property
    def atoms(self) -> Tensor:
        """Atom positions [K] in normalised return units."""
        low, high = self.support[0], self.support[1]
        return (low + (high - low) * self.grid).to(self.layer.weight.dtype)

    def mean(self, output: Tensor) -> Tensor:
        mean: Tensor = output.softmax(-1) @ self.atoms
        return mean

    def encode(self, samples: Tensor) -> Tensor:
        """Samples [..., M] to the probabilities [..., K] of their projection on the atoms."""
        project = two_hot if self.projection == "two_hot" else hl_gauss
        return project(samples, self.atoms)

    def quantiles(self, output: Tensor, count: int) -> Tensor:
        """Inverse CDF of bins of even density, shrunk about the mean to the variance before projection; no gradient.

        The projection adds a variance of Δ²/6 (two-hot) or (¾Δ)² + Δ²/12 (HL-Gauss) and the bins another Δ²/12: without
        the correction, the tail would be overstated, increasingly so with every bootstrap.
        """
        atoms = self.atoms
        probabilities = output.detach().softmax(-1)
        spacing = atoms[1] - atoms[0]
        mean = probabilities @ atoms
        variance = (probabilities * (atoms - mean.unsqueeze(-1)).square()).sum(-1)
        added = 1 / 6 if self.projection == "two_hot" else HL_GAUSS_WIDTH**2 + 1 / 12
        shrink = ((variance - added * spacing**2).clamp(min=0) / (variance + spacing**2 / 12)).sqrt()
        raw = _inverse_cdf(probabilities, atoms, midpoints(count, dtype=atoms.dtype, device=atoms.device))
        return mean.unsqueeze(-1) + (raw - mean.unsqueeze(-1)) * shrink.unsqueeze(-1)

    def loss(self, output: Tensor, targets: Tensor, settings: LossSettings) -> Tensor:  # noqa: ARG002
        return cross_entropy(output.log_softmax(-1), targets)

    def clipped_loss(
        self, output: Tensor, targets: Tensor, old_output: Tensor | None, settings: LossSettings
    ) -> CriticLoss:
        """As of any critic; what is clipped are probabilities, which have no logits where an atom lost all its mass."""
        clip = settings.clip
        if clip.mode == "off":
            return super().clipped_loss(output, targets, old_output, settings)
        probabilities = output.softmax(-1)
        clipped = clip_categorical(probabilities, self._require(old_output, clip).softmax(-1), self.atoms, clip)
        clipped_loss = cross_entropy(clipped.clamp(min=PROBABILITY_FLOOR).log(), targets)
        return larger_loss(self.loss(output, targets, settings), clipped_loss, probabilities, clipped)

    def return_layers(self) -> list[nn.Linear]:
        """None: logits carry no return unit, so an old output needs no translation either."""
        return []

    @torch.no_grad()
    def rescale(self, change: MomentsChange) -> None:
        """Express the same raw atoms in the units of the new scale: raw predictions are unchanged, exactly."""
        raw = change.old_std.double() * self.support + change.old_mean.double()
        self.support.copy_((raw - change.new_mean.double()) / change.new_std.double())

    def support_drift(self, unit: Tensor | float = 1.0) -> Tensor:
        """Misfit of the atoms to the configured range, a scalar: 0 fits, 1 is a factor 2 or a shift by half of it.

        `unit`: the unit of the configured range, in normalised return units
        """
        wanted = unit * (self.v_max - self.v_min)
        low, high = self.support[0], self.support[1]
        stretch = ((high - low) / wanted).log2().abs()
        shift = (low + high - unit * (self.v_min + self.v_max)).abs() / wanted
        return torch.maximum(stretch, shift)

    def reset_support(self, unit: float) -> list[Tensor]:
        self.set_support(unit * self.v_min, unit * self.v_max)
        return [self.layer.weight, self.layer.bias]

    @torch.no_grad()
    def set_support(self, v_min: float, v_max: float) -> None:
        """Move the atoms to [v_min, v_max] and resample the log-density the logits describe at the new atoms.

        Resampling is linear in the logits, so it is folded into the layer. Cubic interpolation (Keys 1981) is exact for
        the quadratic log-density of a Gaussian; atoms outside the old support get a tail that falls by e per atom. Call
        it between rollouts only; this layer's optimiser state and encoded targets are stale after it.
        """
        if not v_min < v_max:
            raise ConfigError(f"categorical critic: support [{v_min}, {v_max}] is empty; v_min must be below v_max")
        count = self.grid.numel()
        low, high = self.support.clone().unbind()
        self.support.copy_(torch.tensor([v_min, v_max], dtype=torch.float64))
        position = (v_min + (v_max - v_min) * self.grid - low) * (count - 1) / (high - low)
        inside = position.clamp(0, count - 1)
        outside = (position - inside).abs() * (high - low) / (v_max - v_min)
        distance = (inside.unsqueeze(-1) - torch.arange(count, device=inside.device)).abs()
        near = 1.5 * distance**3 - 2.5 * distance**2 + 1
        far = -0.5 * distance**3 + 2.5 * distance**2 - 4 * distance + 2
        weights = torch.where(distance < 1, near, torch.where(distance < 2, far, torch.zeros_like(far)))
        weights = weights / weights.sum(-1, keepdim=True)
        dtype = self.layer.weight.dtype
        self.layer.weight.copy_((weights @ self.layer.weight.double()).to(dtype))
        self.layer.bias.copy_((weights @ self.layer.bias.double() - outside).to(dtype))


def _positions(samples: Tensor, atoms: Tensor) -> Tensor:
    """Samples [...] clamped to the support, in units of the atom spacing from the first atom."""
    spacing = (atoms[-1] - atoms[0]) / (atoms.numel() - 1)
    return ((samples - atoms[0]) / spacing).clamp(0, atoms.numel() - 1)


def two_hot(samples: Tensor, atoms: Tensor, mass: Tensor | None = None) -> Tensor:
    """Each sample's mass (1/M unless given), split between its two neighbouring atoms, [..., M] to [..., K].

    Total mass and, inside the support, the mean are kept (Bellemare et al. 2017, equation 7), also where a sample meets
    an atom. CUDA adds in no fixed order; ``torch.use_deterministic_algorithms`` makes it repeatable.
    """
    positions = _positions(samples, atoms)
    mass = torch.full_like(positions, 1 / positions.shape[-1]) if mass is None else mass
    lower = positions.detach().long().clamp(max=atoms.numel() - 2)
    upper_mass = mass * (positions - lower)
    empty = positions.new_zeros(*positions.shape[:-1], atoms.numel())
    return empty.scatter_add(-1, lower, mass - upper_mass).scatter_add(-1, lower + 1, upper_mass)


def hl_gauss(samples: Tensor, atoms: Tensor, width: float = HL_GAUSS_WIDTH) -> Tensor:
    """Mean over M of N(y, (width·Δ)²) integrated over each atom's bin and renormalised, [..., M] to [..., K].

    Farebrother et al. 2024. The mean is kept, except within about Δ of the ends of the support, where it is pulled in.
    Bins more than seven standard deviations from the sample are left out.
    """
    positions = _positions(samples, atoms).unsqueeze(-1)
    reach = math.ceil(7 * width)
    offsets = torch.arange(-reach, reach + 2, dtype=atoms.dtype, device=atoms.device)
    nearest = positions.round()
    bins = nearest + offsets[:-1]
    cdf = ((nearest - positions + (offsets - 0.5)) * (math.sqrt(0.5) / width)).erf_()
    mass = cdf.diff(dim=-1) * ((bins >= 0) & (bins < atoms.numel()))
    mass = mass / (mass.sum(-1, keepdim=True) * samples.shape[-1])
    index = bins.clamp_(0, atoms.numel() - 1).long().flatten(-2)
    return mass.new_zeros(*samples.shape[:-1], atoms.numel()).scatter_add(-1, index, mass.flatten(-2))


def _inverse_cdf(probabilities: Tensor, atoms: Tensor, levels: Tensor) -> Tensor:
    """Quantiles [..., n] at ``levels`` [n] of bins centred on the atoms with mass ``probabilities`` [..., K]."""
    spacing = atoms[1] - atoms[0]
    upper = probabilities.cumsum(-1)
    wanted = levels.expand(*probabilities.shape[:-1], levels.numel()).contiguous()
    index = torch.searchsorted(upper, wanted).clamp(max=atoms.numel() - 1)
    mass = probabilities.gather(-1, index)
    share = (wanted - upper.gather(-1, index)) / mass.clamp(min=torch.finfo(mass.dtype).tiny) + 1
    return atoms[index] + (share.clamp(0, 1) - 0.5) * spacing


def cross_entropy(log_probabilities: Tensor, targets: Tensor) -> Tensor:
    """−Σ_k target_k log p_k, [..., K] twice to [...]. Unbounded: log K is the loss of a uniform p, not a ceiling."""
    return -(targets * log_probabilities).sum(-1)


def clip_categorical(probabilities: Tensor, old: Tensor, atoms: Tensor, clip: ValueClip) -> Tensor:
    """Probabilities [..., K] whose mean (and spread) is bounded around the old ones.

    The atoms move as :func:`clip_quantiles` moves quantiles, and their mass is projected back on the fixed grid: mass
    one, and the clipped mean exactly as long as no atom with mass leaves the support.
    """
    if clip.mode == "off":
        return probabilities
    if clip.mode == "per_quantile":
        raise ConfigError("value clip per_quantile needs a quantile critic; choose mean_only or mean_and_variance")
    mean, old_mean = probabilities @ atoms, old @ atoms
    clipped_mean = clip_value(mean, old_mean, clip.limit)
    deviation = atoms - mean.unsqueeze(-1)
    if clip.mode == "mean_and_variance":
        variance = (probabilities * deviation.square()).sum(-1, keepdim=True)
        old_variance = (old * (atoms - old_mean.unsqueeze(-1)).square()).sum(-1, keepdim=True)
        deviation = deviation * sd_factor(variance, old_variance, clip.sd_ratio)
    moved = clipped_mean.unsqueeze(-1) + deviation
    return two_hot(moved, atoms, probabilities)
