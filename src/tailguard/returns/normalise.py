"""Running statistics of observations and returns, advantage normalisation, and PopArt.

Statistics are kept and computed in float64: their cost is small, and rounding in float32 divided by a small standard
deviation turns into signal. Nothing here waits for the device.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from tailguard.errors import ConfigError

AdvantageMode = Literal["global", "per_env", "off"]

# Observations and returns are float32: variation below this share of the mean is rounding, not signal.
_FLOAT32_RESOLUTION = 2.0**-23


def _moments(samples: Tensor, valid: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Count, mean and sum of squared deviations along the first dimension, over the valid entries, in float64.

    samples: [M, ...]; valid: bool, broadcastable to samples. Invalid entries are selected away, so they may hold NaN.
    """
    invalid = ~valid
    deviations = samples.to(torch.float64, copy=True).masked_fill_(invalid, 0.0)
    count = valid.sum(0).double()
    mean = deviations.sum(0) / count.clamp_min(1.0)
    squares = deviations.sub_(mean).masked_fill_(invalid, 0.0).square_().sum(0)
    return count, mean, squares


@dataclass(frozen=True)
class MomentPowers:
    """What an entry of an optimiser's state is an average of: gradient^gradient · weight^weight."""

    gradient: int
    weight: int = 0


GRADIENT, SQUARED_GRADIENT = MomentPowers(1), MomentPowers(2)
UTILITY = MomentPowers(1, 1)
COMMON_MOMENTS: Mapping[str, MomentPowers] = {
    "momentum_buffer": GRADIENT,
    "exp_avg": GRADIENT,
    "exp_avg_sq": SQUARED_GRADIENT,
    "max_exp_avg_sq": SQUARED_GRADIENT,
    "utility": UTILITY,
}
"""State of SGD with momentum, of Adam and its relatives, and of UPGD."""


@dataclass(frozen=True)
class MomentsChange:
    """Change of the statistics in one update; every field is float64 of the statistics' shape."""

    old_mean: Tensor
    old_std: Tensor
    new_mean: Tensor
    new_std: Tensor
    mean_shift: Tensor
    """How far the mean moved, in old standard deviations; 0 at the first update."""
    std_ratio: Tensor
    """New standard deviation over the old; 1 at the first update."""


class RunningMoments:
    """Mean and standard deviation of a stream of batches; they change in `update` and nowhere else.

    With `decay` 1 every sample ever seen counts the same. With `decay` d < 1 a batch seen k updates ago counts d^k, so
    the memory is about 1/(1−d) updates; the weights are always divided by their sum, hence no start-up bias.

    The state tensors keep their storage, so a captured CUDA graph that normalises with them sees each update.
    Before the first update `normalise` is the identity.
    """

    mean: Tensor
    """[*shape] float64"""
    squares: Tensor
    """[*shape] float64: weighted sum of squared deviations from the mean"""
    count: Tensor
    """[] float64: sum of the weights of all samples seen"""
    std: Tensor
    """[*shape] float64, from the three above: population standard deviation, 1 for constant entries"""

    def __init__(self, shape: Sequence[int] = (), decay: float = 1.0, device: torch.device | str | None = None) -> None:
        if not 0.0 < decay <= 1.0:
            raise ConfigError(f"decay {decay} of running statistics is outside (0, 1]; 1 counts all batches equally")
        self.decay = decay
        self.mean = torch.zeros(tuple(shape), dtype=torch.float64, device=device)
        self.squares = torch.zeros_like(self.mean)
        self.count = torch.zeros((), dtype=torch.float64, device=device)
        self.std = torch.ones_like(self.mean)
        self.started = False
        """Whether there was an update, without device synchronisation; the owner may reset it while nothing varies."""

    @property
    def varies(self) -> Tensor:
        """Whether the samples vary by more than rounding, for each entry, [*shape] bool."""
        std = (self.squares / torch.where(self.count > 0.0, self.count, 1.0)).sqrt()
        return std > _FLOAT32_RESOLUTION * self.mean.abs()

    @torch.no_grad()
    def clear(self) -> None:
        """Reset the statistics, in the same storage."""
        for value in (self.mean, self.squares, self.count):
            value.zero_()
        self.std.fill_(1.0)

    @torch.no_grad()
    def update(self, batch: Tensor, mask: Tensor | None = None) -> MomentsChange:
        """Merge a batch [..., *shape] (Chan, Golub & LeVeque 1983).

        Rows where mask [...] is False do not count, nor do rows that hold a number that is not finite.
        """
        self.started = True
        rows = batch.reshape(-1, *self.mean.shape)
        counted = rows.isfinite().flatten(1).all(-1) if self.mean.dim() else rows.isfinite()
        if mask is not None:
            counted = counted & mask.reshape(-1)
        batch_count, batch_mean, batch_squares = _moments(rows, counted.reshape(-1, *[1] * self.mean.dim()))
        batch_count = batch_count.reshape(())

        first = self.count == 0.0
        # The past loses weight once per update, whatever the size of the batch.
        old_count = self.decay * self.count
        total = old_count + batch_count
        batch_share = batch_count / torch.where(total > 0.0, total, 1.0)
        # The pooled sum of squares is both sums plus gap²·n₁n₂/n. Unlike E[x²] − E[x]² it does not cancel at a large
        # mean.
        gap = batch_mean - self.mean
        old_mean, old_std = self.mean.clone(), self.std.clone()
        # In place: recorded graphs hold these tensors.
        self.mean.add_(gap * batch_share)
        self.squares.mul_(self.decay).add_(batch_squares).add_(gap.square() * old_count * batch_share)
        self.count.copy_(total)
        self._refresh_std()
        return MomentsChange(
            old_mean=old_mean,
            old_std=old_std,
            new_mean=self.mean.clone(),
            new_std=self.std.clone(),
            mean_shift=torch.where(first, 0.0, (self.mean - old_mean).abs() / old_std),
            std_ratio=torch.where(first, 1.0, self.std / old_std),
        )

    def normalise(self, x: Tensor, clip: float | None = None) -> Tensor:
        """(x − mean) / std for x [..., *shape], clipped to [−clip, clip] if a clip is given; dtype of x."""
        scaled = (x.double() - self.mean) / self.std
        if clip is not None:
            scaled = scaled.clamp(-clip, clip)
        return scaled.to(x.dtype)

    def denormalise(self, x: Tensor) -> Tensor:
        """The inverse of `normalise` without a clip; dtype of x."""
        return (x.double() * self.std + self.mean).to(x.dtype)

    def tensors(self) -> list[Tensor]:
        """The tensors that an update changes, themselves."""
        return [self.mean, self.squares, self.count, self.std]

    def state_dict(self) -> dict[str, Tensor]:
        """Copies of the complete state."""
        return {"mean": self.mean.clone(), "squares": self.squares.clone(), "count": self.count.clone()}

    @torch.no_grad()
    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Restore a saved state, in the same storage."""
        for name, mine in (("mean", self.mean), ("squares", self.squares), ("count", self.count)):
            if state[name].shape != mine.shape:
                raise ConfigError(
                    f"running statistics: saved {name} has shape {tuple(state[name].shape)}, this agent needs "
                    f"{tuple(mine.shape)}; use the observations (features, window) the agent was saved with"
                )
            mine.copy_(state[name])
        self.started = bool(self.varies.any())
        self._refresh_std()

    def _refresh_std(self) -> None:
        std = (self.squares / torch.where(self.count > 0.0, self.count, 1.0)).sqrt()
        # A constant entry keeps std 1: dividing by a rounding error would turn noise into a signal.
        self.std.copy_(torch.where(self.varies, std, 1.0))


@torch.no_grad()
def normalise_advantages(
    advantages: Tensor, valid: Tensor | None = None, mode: AdvantageMode = "global"
) -> tuple[Tensor, Tensor]:
    """(A − mean) / std with the sample standard deviation; to be called once for a whole optimisation group.

    There is no floor in reward units, so the result does not depend on the scale of the rewards. Where the advantages
    vary by no more than rounding they carry no signal: they become zeros, and the flag says so. A single valid entry
    is returned as it is. Invalid entries come back as zeros in every mode and influence nothing.

    advantages:  "global", "off": any shape; "per_env": [T, N], each environment by its own mean and std, which gives
                 all environments equal weight and is justified only if their reward scales are arbitrary
    valid:       bool of the same shape, or None where every entry is valid
    returns:     normalised advantages of the same shape and dtype, and the flag: bool [], or [N] for "per_env"
    """
    if valid is None:
        valid = torch.ones_like(advantages, dtype=torch.bool)
    if mode == "off":
        return advantages.masked_fill(~valid, 0.0), torch.zeros((), dtype=torch.bool, device=advantages.device)
    if mode == "global":
        count, mean, squares = _moments(advantages.reshape(-1), valid.reshape(-1))
    elif mode == "per_env":
        if advantages.dim() != 2:
            raise ConfigError(
                f"per_env advantage normalisation needs advantages [T, N], got shape {tuple(advantages.shape)}; "
                f"normalise before the rollout is flattened, or use mode 'global'"
            )
        count, mean, squares = _moments(advantages, valid)
    else:
        raise ConfigError(f"advantage normalisation {mode!r} is unknown; use 'global', 'per_env' or 'off'")

    std = (squares / (count - 1.0).clamp_min(1.0)).sqrt()
    # The threshold is relative to the advantages' own size, so that the unit of rewards does not matter.
    rms = (mean.square() + squares / count.clamp_min(1.0)).sqrt()
    enough = count >= 2.0
    degenerate = enough & (std <= 1e-6 * (mean.abs() + rms) + 1e-12)
    # n < 2: nothing to compare with, (A − 0) / 1 is A itself.
    offset, scale = mean.masked_fill(~enough, 0.0), std.masked_fill(~enough, 1.0)
    normalised = (advantages.double() - offset).div_(scale).masked_fill_(degenerate | ~valid, 0.0)
    return normalised.to(advantages.dtype), degenerate


@torch.no_grad()
def popart_rescale(
    weight: Tensor, bias: Tensor, old_mean: Tensor, old_std: Tensor, new_mean: Tensor, new_std: Tensor
) -> None:
    """Rewrite a linear head in place so that its raw predictions survive a change of statistics (van Hasselt 2016).

    The head predicts (raw − mean) / std. With W ← W·σ/σ' and b ← (σ·b + μ − μ')/σ' the raw prediction σ'(Wx + b) + μ'
    is what σ(Wx + b) + μ was before.

    weight: [Q, H]; bias: [Q]; the statistics: 0-dim tensors
    """
    # In float64, rounded once: this happens at every rollout, and errors would add up over thousands.
    weight.copy_(weight.double() * (old_std / new_std))
    bias.copy_((bias.double() * old_std + (old_mean - new_mean)) / new_std)


@torch.no_grad()
def rescale_moments(
    moments: Mapping[str, Tensor],
    old_std: Tensor,
    new_std: Tensor,
    loss_degree: int,
    powers: Mapping[str, MomentPowers] = COMMON_MOMENTS,
) -> None:
    """Carry an optimiser's gradient averages for a PopArt head over to the new units, in place.

    A loss on normalised residuals that is homogeneous of degree p (2: squared error, 1: pinball) is multiplied by
    (σ/σ')^p when the units change, and the head's weight and bias enter it multiplied by σ/σ'; so their gradient is
    multiplied by (σ/σ')^(p−1). Averages of gradients and of their squares, scaled in this way, are exactly those
    of the same history in the new units: the optimiser's next step is the one it would take had the units always been
    the new ones. For pinball the factor is 1, since its gradient has no units. A utility is a gradient times its
    weight, so it gets one more factor; the shift of a bias enters its utility through later gradients.

    moments: the optimiser's state of one parameter, `optimiser.state[parameter]`
    powers: what each tensor in it is an average of, by name; a tensor under an unknown name is refused
    """
    kept = {name: value for name, value in moments.items() if isinstance(value, Tensor)}
    unknown = [name for name, value in kept.items() if value.dim() > 0 and name not in powers]
    if unknown:
        raise ConfigError(
            f"optimiser state {', '.join(unknown)}: its scaling with the return is unknown, so it cannot be rescaled "
            f"when the return's scale changes. Declare it where the optimiser is registered, or use one whose state is "
            f"among {', '.join(powers)}, as Adam or UPGD"
        )
    ratio = old_std / new_std
    for name, power in powers.items():
        if name in kept:
            kept[name].mul_(ratio ** (power.gradient * (loss_degree - 1) + power.weight))
