"""The tensors that make up a learner: found by walking its parts, so that none is forgotten.

Members of a population are learners of one shape. `places` finds in each of them the same tensors under the same names,
in the same order; `replace` puts others in their places.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from tailguard.envs.protocol import FunctionalEnv

SKIPPED = frozenset(
    {"config", "runtime", "inputs", "snapshot", "metrics", "recorded", "alarms", "prediction_generator", "robust"}
)
"""Attributes of a learner without tensors that an iteration works on."""

Exchange = Callable[[str, Tensor], Tensor]
"""The tensor to put in the place of another, of this name."""


def replace(learner: Any, exchange: Exchange) -> None:
    """Exchange every tensor of the learner; one that stands in several places is asked for once."""
    _Walk(exchange).visit("", learner)


def exchange(parts: tuple[Any, ...], function: Exchange) -> tuple[Any, ...]:
    """The same parts with every tensor in them exchanged."""
    walked: tuple[Any, ...] = _Walk(function).visit("", parts)
    return walked


def places(learner: Any) -> dict[str, Tensor]:
    """Every tensor of the learner by the name of its first place."""
    found: dict[str, Tensor] = {}

    def note(name: str, value: Tensor) -> Tensor:
        found[name] = value
        return value

    replace(learner, note)
    return found


def optimizers(learner: Any) -> list[torch.optim.Optimizer]:
    """The optimisers of a learner, in the order in which its parts are walked."""
    walk = _Walk(lambda _, value: value)
    walk.visit("", learner)
    return walk.optimizers


class _Walk:
    """One walk through a learner."""

    def __init__(self, exchange: Exchange) -> None:
        self.exchange = exchange
        self.made: dict[int, Tensor] = {}
        self.seen: dict[int, Any] = {}
        self.kept: list[Any] = []
        """What was replaced: alive until the end, so that no other object gets its `id`."""
        self.optimizers: list[torch.optim.Optimizer] = []

    def visit(self, name: str, value: Any) -> Any:
        """The value with its tensors exchanged; containers that can be changed are changed in place."""
        if isinstance(value, Tensor):
            return self._tensor(name, value)
        if isinstance(value, tuple):
            return self._tuple(name, value)
        if not _has_parts(value) or id(value) in self.seen:
            return value
        self.seen[id(value)] = value
        if isinstance(value, dict):
            for key in list(value):
                value[key] = self.visit(f"{name}.{key}", value[key])
        elif isinstance(value, list):
            value[:] = [self.visit(f"{name}.{index}", part) for index, part in enumerate(value)]
        elif isinstance(value, FunctionalEnv):
            value.state = self.visit(f"{name}.state", value.state)  # the market itself is the same for all
        elif isinstance(value, torch.optim.Optimizer):
            self._optimizer(name, value)
        elif isinstance(value, nn.Module):
            self._module(name, value)
        else:
            self._attributes(name, value)
        return value

    def _tensor(self, name: str, value: Tensor) -> Tensor:
        if id(value) not in self.made:
            self.kept.append(value)
            self.made[id(value)] = self.exchange(name, value)
            self.made.setdefault(id(self.made[id(value)]), self.made[id(value)])
        return self.made[id(value)]

    def _tuple(self, name: str, value: tuple[Any, ...]) -> tuple[Any, ...]:
        parts = [self.visit(f"{name}.{index}", part) for index, part in enumerate(value)]
        if all(new is old for new, old in zip(parts, value, strict=True)):
            return value
        return type(value)(*parts) if hasattr(value, "_fields") else tuple(parts)

    def _attributes(self, name: str, value: Any) -> None:
        for key, part in list(_attributes(value)):
            changed = self.visit(f"{name}.{key}", part)
            if changed is not part:
                object.__setattr__(value, key, changed)  # frozen dataclasses hold hyper-parameters, shared by identity

    def _module(self, name: str, value: nn.Module) -> None:
        for table in (value._parameters, value._buffers):
            for key, part in table.items():
                if part is not None:
                    # A logical tensor is no `Parameter`: the table takes it, an assignment to the module would not.
                    table[key] = self.visit(f"{name}.{key}", part)
        for key, child in value._modules.items():
            self.visit(f"{name}.{key}", child)
        for key, part in list(vars(value).items()):
            if not key.startswith("_"):
                self.visit(f"{name}.{key}", part)

    def _optimizer(self, name: str, value: torch.optim.Optimizer) -> None:
        self.optimizers.append(value)
        order = [parameter for group in value.param_groups for parameter in group["params"]]
        states = {id(parameter): index for index, parameter in enumerate(order)}
        known = {states[id(parameter)]: state for parameter, state in value.state.items()}
        for index, group in enumerate(value.param_groups):
            for key in list(group):
                group[key] = self.visit(f"{name}.{index}.{key}", group[key])
        value.state.clear()
        order = [parameter for group in value.param_groups for parameter in group["params"]]
        for index, parameter in enumerate(order):
            if index in known:
                value.state[parameter] = self.visit(f"{name}.state.{index}", known[index])


def _has_parts(value: Any) -> bool:
    if isinstance(value, dict | list | nn.Module | torch.optim.Optimizer | FunctionalEnv):
        return True
    ours = type(value).__module__.startswith("tailguard.")
    return ours and not isinstance(value, type) and (hasattr(value, "__dict__") or dataclasses.is_dataclass(value))


def _attributes(value: Any) -> Iterator[tuple[str, Any]]:
    for key, part in vars(value).items():
        if key not in SKIPPED:
            yield key, part
