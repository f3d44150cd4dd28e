"""Critic heads: a scalar value, quantiles of the return, or a categorical distribution over atoms.

Every head reads critic features ``[..., H]`` and outputs *normalised* return units; the learner owns the scale
(``raw = mean + std * output``). When the scale changes, raw predictions must not:

* scalar and quantile heads are linear in their output, so PopArt rescales the layers of ``return_layers()``;
* a categorical head is linear in its logits, not in its value, so no change of weights can rescale it. Its atoms move
  instead: ``rescale_support`` expresses the same raw atoms in the new units, which is exact. The atoms keep their
  raw values, and the support no longer fits once the scale has changed a lot; ``support_drift`` measures
  that, and ``set_support`` moves the atoms back over the returns. Only that last call may alter predictions.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from typing import Literal

import torch
from torch import Tensor, nn

from tailguard.errors import ConfigError
from tailguard.models.precision import full_precision

CriticKind = Literal["scalar", "quantile", "categorical"]
Projection = Literal["two_hot", "hl_gauss"]
TwinMode = Literal["min", "mean"]

# Farebrother et al. 2024, "Stop Regressing": the width of the Gaussian in units of the atom spacing.
HL_GAUSS_WIDTH = 0.75

# Small, so that the first predictions are the mean of normalised returns and not noise that the first return statistics
# would mistake for signal; not zero, so that twin heads differ and the trunk has a gradient from the first step.
INITIAL_GAIN = 0.01


def midpoints(count: int, *, dtype: torch.dtype | None = None, device: torch.device | None = None) -> Tensor:
    """The levels τ_i = (i + ½) / count, shape [count] (Dabney et al. 2018, QR-DQN, lemma 2)."""
    return (torch.arange(count, dtype=dtype or torch.get_default_dtype(), device=device) + 0.5) / count


@torch.no_grad()
def ascending(values: Tensor) -> Tensor:
    """Values [..., M] sorted along the last dimension, without gradient."""
    return values.sort(-1).values


class Critic(nn.Module, ABC):
    """A linear head on critic features."""

    layer: nn.Linear

    def __init__(self, feature_size: int, output_size: int, gain: float) -> None:
        super().__init__()
        self.layer = nn.Linear(feature_size, output_size)
        nn.init.orthogonal_(self.layer.weight, gain)
        nn.init.zeros_(self.layer.bias)

    def forward(self, features: Tensor) -> Tensor:
        """Features [..., H] to the head's output [..., K]."""
        return full_precision([self.layer], features)[0]

    @abstractmethod
    def mean(self, output: Tensor) -> Tensor:
        """Expected normalised return [...] of an output [..., K]."""

    @abstractmethod
    def encode(self, samples: Tensor) -> Tensor:
        """Samples of the target return [..., M] in the form this head's loss uses; once per rollout, not per epoch."""

    @abstractmethod
    def return_layers(self) -> list[nn.Linear]:
        """The layers whose outputs are in return units, for PopArt to rescale."""

    def rescale_support(self, mean: Tensor, std: Tensor, new_mean: Tensor, new_std: Tensor) -> None:
        """Keep raw predictions when the return scale changes; nothing to do where PopArt rescales the layers."""


class ScalarCritic(Critic):
    """The expected return: the baseline for GAE. Output [..., 1]."""

    def __init__(self, feature_size: int, gain: float = INITIAL_GAIN) -> None:
        super().__init__(feature_size, 1, gain)

    def mean(self, output: Tensor) -> Tensor:
        return output.squeeze(-1)

    def encode(self, samples: Tensor) -> Tensor:
        """Samples [..., M] to their mean [..., 1]."""
        return samples.mean(-1, keepdim=True)

    def return_layers(self) -> list[nn.Linear]:
        return [self.layer]


class DistributionalCritic(Critic):
    """A critic that predicts the distribution of the return."""

    @abstractmethod
    def quantiles(self, output: Tensor, count: int) -> Tensor:
        """The return's quantiles [..., count] at the levels (i + ½) / count."""


class QuantileCritic(DistributionalCritic):
    """Quantiles of the return at midpoint levels (Dabney et al. 2018, QR-DQN). Output [..., N], not necessarily sorted.

    A crash rarer than 1/(2N) moves no quantile, hence not the mean either: GAE's baseline is a :class:`ScalarCritic`.
    """

    tau: Tensor

    def __init__(self, feature_size: int, count: int = 32, gain: float = INITIAL_GAIN) -> None:
        if count < 1:
            raise ConfigError(f"quantile critic: {count} quantiles; give 1 or more (32 is usual)")
        super().__init__(feature_size, count, gain)
        self.register_buffer("tau", midpoints(count), persistent=False)

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

    def return_layers(self) -> list[nn.Linear]:
        return [self.layer]


class CategoricalCritic(DistributionalCritic):
    """Probabilities of evenly spaced atoms (Bellemare et al. 2017). Output: logits [..., K].

    ``two_hot`` targets keep the mean; ``hl_gauss`` targets (Farebrother et al. 2024) also spread over neighbours, which
    regresses better. Both add a known variance to the learned distribution; :meth:`quantiles` removes it.
    """

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

    def return_layers(self) -> list[nn.Linear]:
        """None: logits carry no return unit."""
        return []

    @torch.no_grad()
    def rescale_support(self, mean: Tensor, std: Tensor, new_mean: Tensor, new_std: Tensor) -> None:
        """Express the same raw atoms in the units of the new scale: raw predictions are unchanged, exactly."""
        self.support.copy_((std.double() * self.support + mean.double() - new_mean.double()) / new_std.double())

    def support_drift(self, unit: Tensor | float = 1.0) -> Tensor:
        """Misfit of the atoms to the configured range, a scalar: 0 fits, 1 is a factor 2 or a shift by half of it.

        `unit`: the unit of the configured range, in normalised return units
        """
        wanted = unit * (self.v_max - self.v_min)
        low, high = self.support[0], self.support[1]
        stretch = ((high - low) / wanted).log2().abs()
        shift = (low + high - unit * (self.v_min + self.v_max)).abs() / wanted
        return torch.maximum(stretch, shift)

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


def combine_values(first: Tensor, second: Tensor, mode: TwinMode) -> Tensor:
    """The value [...] that twin critics give GAE: ``min`` is pessimistic, ``mean`` is unbiased."""
    if mode == "min":
        return torch.minimum(first, second)
    if mode == "mean":
        return (first + second) / 2
    raise ConfigError(f"twin critics: mode {mode!r}; choose min or mean")


def twin_pessimism(first: Tensor, second: Tensor) -> Tensor:
    """The mean of two values minus their minimum, [...]: s/√π on average for independent Gaussian errors of sd s."""
    return (first - second).abs() / 2


def combine_quantiles(first: Tensor, second: Tensor) -> Tensor:
    """Average of two quantile functions [..., N] at equal levels: its mean is the mean of the two means.

    The element-wise minimum would be below both ([−1, 1] with [0, 0] gives −½ where each mean is 0).
    """
    return (first + second) / 2
