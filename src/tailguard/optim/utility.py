"""Utilities of weights, the gates made of them, and the step that every gated optimiser takes.

A weight's utility is how much the loss would rise if the weight were set to zero, to first order: −gradient · weight.
Its bias-corrected running average û, divided by the largest one in the whole optimiser, becomes a gate

    gate = 1 − sigmoid(û / max û)

that multiplies the weight's step and a Gaussian perturbation: 0.27 for the most useful weight, 0.5 for one of no use,
towards 1 for a harmful one (Elsayed & Mahmood, "Addressing Loss of Plasticity and Catastrophic Forgetting in Continual
Learning", ICLR 2024).
"""

from __future__ import annotations

import math
import warnings
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal, overload

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.optim.optimizer import ParamsT

from tailguard.deprecated import renamed_method
from tailguard.errors import ConfigError
from tailguard.validate import check_choice, check_count, check_range

Normalisation = Literal["max", "minmax"]

NO_UTILITY = 1e-12
"""A largest utility (or half the range of all) up to this carries no information: every gate is 0.5."""
SATURATION = 0.05
"""A gate this close to 0 or 1 is saturated."""


def bias_correction(beta: float, steps: Tensor) -> Tensor:
    """1 − β^t: bias correction of an average that started at zero. `expm1` keeps precision when β is near 1.

    steps: [n] → [n]
    """
    return -torch.expm1(steps * (math.log(beta) if beta > 0 else -math.inf))


def gate_line(normalisation: Normalisation, lowest: Tensor, highest: Tensor) -> tuple[Tensor, Tensor]:
    """Slope and offset with which gate = sigmoid(slope · û + offset), from the extremes of all û.

    `max`: −û / highest, the published rule; if the highest is not positive it would reverse the order of the weights,
    so every gate is then 0.5. `minmax`: 1 − 2 (û − lowest) / (highest − lowest), from 1 at the lowest to −1 at the
    highest, whatever their signs.

    lowest, highest: 0-dim; returns two 0-dim tensors
    """
    span = highest if normalisation == "max" else (highest - lowest) / 2
    slope = torch.where(span > NO_UTILITY, -1 / span, 0.0)
    return slope, torch.zeros_like(slope) if normalisation == "max" else -slope * (highest + lowest) / 2


@dataclass(frozen=True)
class Bucket:
    """Parameters of one group that share device and dtype, so one call handles them all.

    Elementwise quantities are computed on one row of all P weights, at least in float32.
    """

    group: dict[str, Any]
    parameters: list[Tensor]
    states: list[dict[str, Tensor]]

    def each(self, name: str) -> list[Tensor]:
        """One entry of the state, parameter by parameter."""
        return [state[name] for state in self.states]

    @cached_property
    def gradients(self) -> list[Tensor]:
        """The dense gradient: a sparse one is converted, since decay and perturbation affect every weight anyway."""
        return [parameter.grad.to_dense() for parameter in self.parameters if parameter.grad is not None]

    @cached_property
    def sizes(self) -> list[int]:
        return [parameter.numel() for parameter in self.parameters]

    @cached_property
    def device(self) -> torch.device:
        return self.parameters[0].device

    @cached_property
    def dtype(self) -> torch.dtype:
        return torch.promote_types(self.parameters[0].dtype, torch.float32)

    def row(self, tensors: Sequence[Tensor]) -> Tensor:
        """One tensor for each parameter, end to end, [P]."""
        return torch.cat([tensor.flatten() for tensor in tensors]).to(self.dtype)

    def cut(self, row: Tensor) -> list[Tensor]:
        """A row's parts in the parameters' shapes."""
        parts = torch.split_with_sizes(row, self.sizes)
        return [part.view(parameter.shape) for part, parameter in zip(parts, self.parameters, strict=True)]

    def spread(self, numbers: Tensor) -> Tensor:
        """One number for each parameter, repeated for each of its weights, [parameters] → [P]."""
        return torch.cat([number.expand(size) for number, size in zip(numbers.unbind(), self.sizes, strict=True)])

    def bias_correction(self, beta: float) -> Tensor:
        """For every parameter's own count of steps, [parameters]."""
        return bias_correction(beta, torch.stack(self.each("step")).to(self.dtype))

    def learning_rate(self) -> float | Tensor:
        rate = self.group["lr"]
        return rate.to(self.device, non_blocking=True) if isinstance(rate, Tensor) else rate


class UtilityOptimizer(Optimizer, ABC):
    """Base class of the three optimisers: utilities, gates, noise and the order of operations in a step.

    A step reads no value on the host, so it never synchronises with the device and can be recorded in a CUDA graph
    (register every one of `generators` with the graph first). The learning rate may be a 0-dim tensor whose
    value changes between steps. A parameter without a gradient is left out: it does not move, its state stays, and its
    utility does not count for the largest one.
    """

    def __init__(self, params: ParamsT, defaults: dict[str, Any], seed: int) -> None:
        check_count("seed", seed, low=0)
        self.seed = seed
        self.generators: dict[torch.device, torch.Generator] = {}
        """Random generator of the perturbations, by device."""
        # `capturable` tells torch to keep the step counters on the parameters' device when a state is loaded.
        super().__init__(params, defaults | {"capturable": True})

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add parameters with their own settings; the defaults are those of the constructor."""
        super().add_param_group(param_group)
        group = self.param_groups[-1]
        self._check(group)
        for parameter in group["params"]:
            if not parameter.is_floating_point():
                raise ConfigError(f"params: a parameter is {parameter.dtype}; utilities need real floating-point ones")
            self._generator(parameter.device)

    def _check(self, group: dict[str, Any]) -> None:
        rate = group["lr"]
        if not isinstance(rate, Tensor):
            check_range("lr", rate, low=0)
        elif rate.ndim or not rate.is_floating_point():
            raise ConfigError(f"lr: a {rate.dtype} tensor of shape {tuple(rate.shape)}; it must be one real number")
        for name in ("weight_decay", "sigma"):
            check_range(name, group[name], low=0)
        check_range("beta_utility", group["beta_utility"], low=0, high=1, high_open=True)
        check_choice("normalisation", group["normalisation"], ("max", "minmax"))
        if group["step_factor"] not in (1, 2):
            raise ConfigError(f"step_factor: {group['step_factor']!r} is neither 1 nor 2; scale lr for other steps")

    def _generator(self, device: torch.device) -> torch.Generator:
        if device not in self.generators:
            # Devices must not share a random stream; that of the first must not depend on the kind of device.
            self.generators[device] = torch.Generator(device).manual_seed(self.seed + len(self.generators))
        return self.generators[device]

    @overload
    def step(self, closure: None = None) -> None: ...
    @overload
    def step(self, closure: Callable[[], float]) -> float: ...
    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:
        """Move every parameter that has a gradient. Returns what `closure` returns, which is called first."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        buckets = list(self._buckets(lambda parameter: parameter.grad is not None))
        for bucket in buckets:
            self._observe(bucket)
        for bucket, gates in zip(buckets, self._gates(buckets), strict=True):
            self._move(bucket, gates)
        return loss

    def _buckets(self, chosen: Callable[[Tensor], bool]) -> Iterator[Bucket]:
        for group in self.param_groups:
            kinds: dict[tuple[torch.device, torch.dtype], list[Tensor]] = {}
            for parameter in group["params"]:
                if parameter.numel() and chosen(parameter):
                    kinds.setdefault((parameter.device, parameter.dtype), []).append(parameter)
            for parameters in kinds.values():
                yield Bucket(group, parameters, [self._state(parameter) for parameter in parameters])

    def _state(self, parameter: Tensor) -> dict[str, Tensor]:
        state: dict[str, Tensor] = self.state[parameter]
        if not state:
            state["step"] = torch.zeros((), device=parameter.device)
            state["signal_norm"] = torch.zeros((), device=parameter.device, dtype=parameter.dtype)
            for name in self._averages():
                state[name] = torch.zeros_like(parameter, memory_format=torch.preserve_format)
        return state

    def _averages(self) -> tuple[str, ...]:
        """Names of the running averages that are kept for every weight."""
        return ("utility",)

    def _observe(self, bucket: Bucket) -> None:
        """Update the running averages with this step's gradients."""
        torch._foreach_add_(bucket.each("step"), 1)
        beta, utilities = bucket.group["beta_utility"], bucket.each("utility")
        torch._foreach_mul_(utilities, beta)
        torch._foreach_addcmul_(utilities, bucket.gradients, bucket.parameters, value=beta - 1)

    def _gates(self, buckets: Sequence[Bucket]) -> Iterator[Tensor]:
        """A gate for every weight, [P] per bucket; the extremes are those of all buckets together."""
        if not buckets:
            return
        corrections = [bucket.bias_correction(bucket.group["beta_utility"]) for bucket in buckets]

        def largest(traces: Iterable[list[Tensor]]) -> Tensor:
            each = [
                (torch.stack(torch._foreach_max(trace)) / correction).max().to(buckets[0].device, non_blocking=True)
                for trace, correction in zip(traces, corrections, strict=True)
            ]
            return torch.stack(each).max()

        highest = lowest = largest(bucket.each("utility") for bucket in buckets)
        if any(bucket.group["normalisation"] == "minmax" for bucket in buckets):
            lowest = -largest(list(torch._foreach_neg(bucket.each("utility"))) for bucket in buckets)
        for bucket, correction in zip(buckets, corrections, strict=True):
            slope, offset = (
                number.to(bucket.device, non_blocking=True)
                for number in gate_line(bucket.group["normalisation"], lowest, highest)
            )
            gates = bucket.row(bucket.each("utility")).mul_(bucket.spread(slope / correction))
            yield gates.add_(offset).sigmoid_()

    def _move(self, bucket: Bucket, gates: Tensor) -> None:
        group = bucket.group
        updates = self._direction(bucket) * gates
        torch._foreach_copy_(bucket.each("signal_norm"), torch._foreach_norm(bucket.cut(updates)))
        if group["sigma"] > 0:
            noise = torch.randn(
                updates.shape, generator=self._generator(bucket.device), device=bucket.device, dtype=bucket.dtype
            )
            updates.addcmul_(noise, gates, value=group["sigma"])
        if group["weight_decay"] > 0:
            self._decay(bucket, gates, updates)
        updates.mul_(bucket.learning_rate() * group["step_factor"])
        torch._foreach_sub_(bucket.parameters, bucket.cut(updates))

    @abstractmethod
    def _direction(self, bucket: Bucket) -> Tensor:
        """Step of every weight without gate, noise, decay and learning rate, [P]."""

    def _decay(self, bucket: Bucket, gates: Tensor, updates: Tensor) -> None:  # noqa: ARG002
        """Decay every weight equally, independently of gradient and gate."""
        torch._foreach_mul_(bucket.parameters, 1 - bucket.learning_rate() * bucket.group["weight_decay"])

    @torch.no_grad()
    def metrics(self) -> dict[str, Tensor]:
        """Statistics of the last step's gates, as 0-dim tensors; empty before the first step.

        `upgd/gate_p05`, `_p50`, `_p95`: quantiles of the gates (nearest rank). `upgd/saturated_share`: share of gates
        below 0.05 or above 0.95. `upgd/noise_to_step`: expected size of the perturbation as a multiple of the gated
        direction's size. Costs a sort of all weights; a step does not compute any of it but the direction's size.
        """
        buckets = list(self._buckets(lambda parameter: bool(self.state.get(parameter))))
        if not buckets:
            return {}
        home, rows, noise, signal = buckets[0].device, [], [], []
        for bucket, gates in zip(buckets, self._gates(buckets), strict=True):
            rows.append(gates.float().to(home))
            noise.append(rows[-1].square().sum() * bucket.group["sigma"] ** 2)
            signal.append(torch.stack(bucket.each("signal_norm")).float().square().sum().to(home))
        ordered = torch.cat(rows).sort().values
        saturated = (ordered < SATURATION) | (ordered > 1 - SATURATION)
        tiny = torch.finfo(torch.float32).tiny
        return {
            **{f"upgd/gate_p{rank:02d}": ordered[round(rank / 100 * (len(ordered) - 1))] for rank in (5, 50, 95)},
            "upgd/saturated_share": saturated.float().mean(),
            "upgd/noise_to_step": (torch.stack(noise).sum() / torch.stack(signal).sum().clamp(min=tiny)).sqrt(),
        }

    figures = renamed_method("figures", "metrics")

    def state_dict(self) -> dict[str, Any]:
        """The complete state, including the perturbations' generators."""
        return super().state_dict() | {
            "generators": {str(device): generator.get_state() for device, generator in self.generators.items()}
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore a saved state exactly. The state is copied, so later steps do not change `state_dict`."""
        if "generators" not in state_dict:
            raise ConfigError(f"state_dict: no generators in it; it was not saved by a {type(self).__name__}")
        super().load_state_dict(state_dict)
        for state in self.state.values():
            state.update({name: value.clone() for name, value in state.items()})
        saved = state_dict["generators"]
        for device, generator in self.generators.items():
            if str(device) in saved:
                generator.set_state(saved[str(device)].cpu())
            else:
                warnings.warn(
                    f"state_dict: its perturbations were drawn on {', '.join(saved)} and a generator's state is bound "
                    f"to its device; those on {device} restart from seed {self.seed}, so training will differ",
                    stacklevel=2,
                )
                generator.manual_seed(self.seed)

    def __getstate__(self) -> dict[str, Any]:
        return super().__getstate__() | {"seed": self.seed, "generators": self.generators}
