"""What every critic head is: how it learns, what it predicts, and how it follows the scale of the return.

A head reads critic features ``[..., H]`` and outputs *normalised* return units; the learner owns the scale
(``raw = mean + std * output``). When the scale changes, raw predictions must not: `Critic.rescale`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, ClassVar, Literal, Self, get_args

import torch
from torch import Tensor, nn

from tailguard.errors import ConfigError
from tailguard.models.precision import full_precision
from tailguard.returns import MomentsChange, RunningMoments, popart_rescale

if TYPE_CHECKING:
    from tailguard.models.policy import NetworkConfig

ClipMode = Literal["off", "mean_only", "mean_and_variance", "per_quantile"]

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


@dataclass(frozen=True)
class ValueClip:
    """How far a prediction may move from the old one before its loss stops improving."""

    mode: ClipMode = "off"
    """off, mean_only (the shape stays free), mean_and_variance, or per_quantile; a scalar knows on and off only."""
    limit: float | Tensor = 0.2
    """Largest change of the mean (or of each quantile), in standard deviations of the return."""
    sd_ratio: float | Tensor = 1.5
    """mean_and_variance: largest factor, up or down, between the old and the new standard deviation."""

    def __post_init__(self) -> None:
        if self.mode not in get_args(ClipMode):
            raise ConfigError(f"value clip {self.mode!r}; choose one of {', '.join(get_args(ClipMode))}")


@dataclass(frozen=True)
class LossSettings:
    """Settings of the learner that a critic's loss may read."""

    clip: ValueClip = field(default_factory=ValueClip)
    huber_kappa: float = 0.0
    """κ of the quantile Huber loss, in normalised return units; 0: pinball loss."""


@dataclass(frozen=True)
class CriticLoss:
    """One critic's loss on a batch."""

    loss: Tensor
    """Per sample, [...]."""
    clipped: Tensor
    """1 where the clip moved the prediction, else 0, [...]; its mean is the clip fraction."""
    unclipped_loss: Tensor
    """Of the prediction as it is, without gradient, [...]."""
    clipped_loss: Tensor
    """Of the clipped prediction, without gradient, [...]; the same where there is no clip."""


class Critic(nn.Module, ABC):
    """A linear head on critic features. The network evaluates `layer`; everything else is what its output means."""

    kind: ClassVar[str]
    """Its name in `network.critic`, set when it is registered."""
    loss_degree: ClassVar[int] = 1
    """p, if residuals in units c times smaller multiply the loss by c^p: 2 for a squared error, 1 for pinball. It
    tells how gradients of `return_layers` scale, and with them what an optimiser remembers."""
    clip_modes: ClassVar[tuple[ClipMode, ...]] = ("off",)
    """Values of `value_clip` that it knows."""
    loss_settings: ClassVar[tuple[str, ...]] = ()
    """Fields of `LossSettings`, beside the clip, that its loss reads. Others must be left at their defaults."""
    size_setting: ClassVar[str | None] = None
    """Field of `NetworkConfig` with its number of outputs, if there is one."""
    predicts_distribution: ClassVar[bool] = False

    layer: nn.Linear

    def __init__(self, feature_size: int, output_size: int, gain: float = INITIAL_GAIN) -> None:
        super().__init__()
        self.layer = nn.Linear(feature_size, output_size)
        nn.init.orthogonal_(self.layer.weight, gain)
        nn.init.zeros_(self.layer.bias)

    @classmethod
    @abstractmethod
    def from_config(cls, feature_size: int, network: NetworkConfig) -> Self:
        """The head that the settings of the network ask for."""

    @classmethod
    def outputs(cls, network: NetworkConfig) -> int:
        """Number of outputs, or a lower bound of it."""
        return 1 if cls.size_setting is None else int(getattr(network, cls.size_setting))

    @classmethod
    def describe(cls, network: NetworkConfig) -> str:
        """The head in a few words, as `32 quantiles`."""
        return cls.kind if cls.size_setting is None else f"{cls.outputs(network)} {cls.size_setting}"

    def forward(self, features: Tensor) -> Tensor:
        """Features [..., H] to the head's output [..., K]."""
        return full_precision([self.layer], features)[0]

    @abstractmethod
    def mean(self, output: Tensor) -> Tensor:
        """Expected normalised return [...] of an output [..., K]."""

    # --- learning ---------------------------------------------------------------------------------------------------

    @abstractmethod
    def encode(self, samples: Tensor) -> Tensor:
        """Samples of the target return [..., M] in the form this head's loss uses; once per rollout, not per epoch."""

    @abstractmethod
    def loss(self, output: Tensor, targets: Tensor, settings: LossSettings) -> Tensor:
        """Loss per sample [...] of an output [..., K] on ``targets = encode(samples)``."""

    def clip(self, output: Tensor, old_output: Tensor, clip: ValueClip) -> Tensor:  # noqa: ARG002
        """The output [..., K] with its change from the old one bounded; q = q_old is left as it is."""
        raise ConfigError(f"value clip {clip.mode}: a {type(self).__name__} has none; choose off")

    def clipped_loss(
        self, output: Tensor, targets: Tensor, old_output: Tensor | None, settings: LossSettings
    ) -> CriticLoss:
        """The loss with value clipping around ``old_output``, where the settings ask for it: the larger of the two.

        ``output`` and ``old_output`` [..., K] come from the same critic, never from a twin or from the minimum of both:
        that minimum may lie outside this critic's clip range and would silence its gradient.
        """
        loss = self.loss(output, targets, settings)
        if settings.clip.mode == "off":
            return CriticLoss(loss, torch.zeros_like(loss), loss.detach(), loss.detach())
        clipped = self.clip(output, self._require(old_output, settings.clip), settings.clip)
        return larger_loss(loss, self.loss(clipped, targets, settings), output, clipped)

    def _require(self, old_output: Tensor | None, clip: ValueClip) -> Tensor:
        if old_output is None:
            raise ConfigError(f"value clip {clip.mode}: the critic's old output is missing; store it with the rollout")
        return old_output

    # --- a new scale of the return ----------------------------------------------------------------------------------

    def return_layers(self) -> list[nn.Linear]:
        """The layers whose outputs are in return units: PopArt rescales them, and what optimisers remember of them."""
        return [self.layer]

    def rescale(self, change: MomentsChange) -> None:
        """Keep raw predictions when the return scale changes."""
        for layer in self.return_layers():
            popart_rescale(layer.weight, layer.bias, change.old_mean, change.old_std, change.new_mean, change.new_std)

    def support_drift(self, unit: Tensor | float = 1.0) -> Tensor | None:  # noqa: ARG002
        """Misfit of a fixed support to the returns, [], above 1 where it must be reset; None: the head has none.

        `unit`: standard deviation of the return, in normalised return units
        """
        return None

    def reset_support(self, unit: float) -> list[Tensor]:  # noqa: ARG002
        """Lay the support over the returns anew, between two rollouts.

        Returns the parameters that this rewrote: what an optimiser remembers of them no longer holds.
        """
        return []


class DistributionalCritic(Critic):
    """A critic that predicts the distribution of the return."""

    predicts_distribution = True

    @abstractmethod
    def quantiles(self, output: Tensor, count: int) -> Tensor:
        """The return's quantiles [..., count] at the levels (i + ½) / count."""

    def old_output(self, output: Tensor, quantiles: Tensor, scale: RunningMoments) -> Tensor:  # noqa: ARG002
        """An output from before a change of scale, in today's units: what `clip` compares with.

        `output`: [..., K], as it was; `quantiles`: of the return, [..., Q], in raw units; `scale`: today's
        """
        return output

    def metrics(
        self,
        outputs: Sequence[Tensor],  # noqa: ARG002
        mean: Callable[[Tensor], Tensor],  # noqa: ARG002
    ) -> dict[str, Tensor]:
        """Metrics of its own, `critic/*`, 0-dim, from the outputs [T, N, K] of every critic of this kind.

        `mean`: of [T, N], over the rows that count
        """
        return {}


def clip_value(value: Tensor, old: Tensor, limit: float | Tensor) -> Tensor:
    """V_old + clip(V − V_old, ±limit), element-wise."""
    return old + (value - old).clamp(-limit, limit)  # type: ignore[arg-type]  # stubs miss the union


def sd_factor(variance: Tensor, old_variance: Tensor, ratio: float | Tensor) -> Tensor:
    """clip(s, s_old / ratio, s_old · ratio) / s, with both standard deviations kept off zero."""
    tiny = torch.finfo(variance.dtype).eps
    sd, old_sd = variance.clamp(min=tiny).sqrt(), old_variance.clamp(min=tiny).sqrt()
    return torch.minimum(torch.maximum(sd, old_sd / ratio), old_sd * ratio) / sd


def larger_loss(loss: Tensor, clipped_loss: Tensor, prediction: Tensor, clipped_prediction: Tensor) -> CriticLoss:
    """Per-sample maximum of both losses, and where the clip moved the prediction by more than rounding."""
    with torch.no_grad():
        moved = (clipped_prediction - prediction).abs().amax(-1) > 1e-5 * (1 + prediction.abs().amax(-1))
    return CriticLoss(torch.maximum(loss, clipped_loss), moved.to(loss.dtype), loss.detach(), clipped_loss.detach())
