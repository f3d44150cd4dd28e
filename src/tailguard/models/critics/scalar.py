"""The expected return as one number."""

from __future__ import annotations

from typing import TYPE_CHECKING, Self, get_args

from torch import Tensor

from tailguard.models.critics.base import INITIAL_GAIN, ClipMode, Critic, LossSettings, ValueClip, clip_value
from tailguard.models.critics.registry import register_critic

if TYPE_CHECKING:
    from tailguard.models.policy import NetworkConfig


@register_critic("scalar")
class ScalarCritic(Critic):
    """The expected return: the baseline for GAE. Output [..., 1]. `network.critic: scalar` is this head alone."""

    loss_degree = 2
    clip_modes = get_args(ClipMode)

    def __init__(self, feature_size: int, gain: float = INITIAL_GAIN) -> None:
        super().__init__(feature_size, 1, gain)

    @classmethod
    def from_config(cls, feature_size: int, network: NetworkConfig) -> Self:  # noqa: ARG003
        return cls(feature_size)

    def mean(self, output: Tensor) -> Tensor:
        return output.squeeze(-1)

    def encode(self, samples: Tensor) -> Tensor:
        """Samples [..., M] to their mean [..., 1]."""
        return samples.mean(-1, keepdim=True)

    def loss(self, output: Tensor, targets: Tensor, settings: LossSettings) -> Tensor:  # noqa: ARG002
        return squared_error(self.mean(output), targets.squeeze(-1))

    def clip(self, output: Tensor, old_output: Tensor, clip: ValueClip) -> Tensor:
        return clip_value(output, old_output, clip.limit)


def squared_error(values: Tensor, targets: Tensor) -> Tensor:
    """½ (V − target)², element-wise."""
    return 0.5 * (values - targets).square()
