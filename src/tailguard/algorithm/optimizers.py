"""The optimiser and, if enabled, the scaler that reduces noisy steps."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from tailguard.errors import ConfigError
from tailguard.optim import OPTIMIZERS, OptimizerSettings, Parameters, VarianceGradientScaler, kind_of

if TYPE_CHECKING:
    from tailguard.algorithm.config import LearnerConfig


def make_optimizer(
    parameters: Parameters, config: LearnerConfig, learning_rate: Tensor, seed: int
) -> torch.optim.Optimizer:
    """The optimiser that the config names; it holds the `learning_rate` tensor itself."""
    settings = OptimizerSettings(learning_rate, config.weight_decay, config.upgd, seed)
    return OPTIMIZERS[config.optimizer].make(parameters, settings)


def make_scaler(optimizer: torch.optim.Optimizer, config: LearnerConfig) -> VarianceGradientScaler | None:
    """The scaler, if the config asks for one.

    It always acts on the learning rate. A factor on the gradient would cancel out in Adam, and for every optimiser in
    the gradient clip that follows: a gradient beyond the limit comes out of it with the same length, scaled or not.
    """
    vgs = config.vgs
    if not vgs.enabled:
        return None
    return VarianceGradientScaler(
        optimizer,
        alpha=vgs.alpha,
        beta=vgs.beta,
        min_scale=vgs.min_scale,
        max_nsr=vgs.max_nsr,
        warmup_steps=vgs.warmup_steps,
        granularity=vgs.granularity,
        moments=vgs.moments,
        apply="learning_rate",
    )


def optimizer_metrics(optimizer: torch.optim.Optimizer, scaler: VarianceGradientScaler | None) -> dict[str, Tensor]:
    """Metrics that the optimiser declares, as `upgd/*`, and `vgs/*`, as far as they are there."""
    kind = kind_of(optimizer)
    own = {} if kind is None or kind.metrics is None else kind.metrics(optimizer)
    return own | ({} if scaler is None else scaler.metrics())


def unless(stopped: Tensor, change: Callable[[], None], values: list[Tensor]) -> None:
    """Change `values` in place, and leave them as they were where `stopped`, a bool on the device, holds.

    The change is made in any case, and taken back where it must not be, so that nobody has to look.
    """
    kinds: dict[torch.dtype, list[Tensor]] = {}
    for value in values:
        kinds.setdefault(value.dtype, []).append(value)
    before = {dtype: torch.cat([value.flatten() for value in group]) for dtype, group in kinds.items()}
    change()
    for dtype, group in kinds.items():
        after = torch.cat([value.flatten() for value in group])
        parts = torch.split(torch.where(stopped, before[dtype], after), [value.numel() for value in group])
        torch._foreach_copy_(group, [part.view_as(value) for part, value in zip(parts, group, strict=True)])


class OptimizerState:
    """An optimiser's moments by the names of the parameters, to save and to load."""

    def __init__(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        self.names = dict(model.named_parameters())
        self.optimizer = optimizer

    def state_dict(self) -> dict[str, Any]:
        """Copies of the moments, and of the generators of those that draw noise."""
        moments = {
            name: {key: value.clone() for key, value in self.optimizer.state[parameter].items()}
            for name, parameter in self.names.items()
            if self.optimizer.state.get(parameter)
        }
        generators = getattr(self.optimizer, "generators", {})
        return {
            "moments": moments,
            "generators": {device.type: generator.get_state() for device, generator in generators.items()},
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from a saved state; tensors are copied, so its giver and this one stay independent."""
        self.optimizer.state.clear()
        for name, moments in state["moments"].items():
            if name not in self.names:
                raise ConfigError(f"optimizer: saved moments of {name}, which this network does not have")
            parameter = self.names[name]
            self.optimizer.state[parameter] = {
                key: _placed(name, key, value, parameter) for key, value in moments.items()
            }
        for device, generator in getattr(self.optimizer, "generators", {}).items():
            if device.type in state["generators"]:
                generator.set_state(state["generators"][device.type].cpu())


def _placed(name: str, key: str, value: Tensor, parameter: Tensor) -> Tensor:
    if value.dim() and value.shape != parameter.shape:
        raise ConfigError(
            f"optimizer: {key} of {name} has shape {tuple(value.shape)} where {tuple(parameter.shape)} is needed"
        )
    return value.to(parameter.device, copy=True)
