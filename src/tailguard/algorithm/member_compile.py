"""A compiled function for all members at once.

A compiler cannot look into `torch.vmap` from inside it. So the function is traced to a graph of tensor operations on
the stacked tensors, with the member axis in each of them, and the graph is compiled: elementwise work is then one
kernel for all members, as it is for one learner.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor
from torch.overrides import _pop_mode_temporarily

from tailguard.algorithm.member_ops import MemberOps
from tailguard.algorithm.member_state import exchange
from tailguard.algorithm.runtime import mapped, tensors_of
from tailguard.member_axis import is_logical, logical, outside_members, stacked

Result = TypeVar("Result")


@dataclasses.dataclass
class _Traced:
    """One trace of the function."""

    call: Callable[..., Any]
    structure: Any
    """What the function returned while it was traced; its tensors are replaced at every call."""


class MemberFunction(Generic[Result]):
    """A function of tensors, parts and settings, compiled once for each set of shapes."""

    def __init__(self, function: Callable[..., Result], count: int) -> None:
        self.function, self.count = function, count
        self._traced: dict[Any, _Traced] = {}

    def __call__(self, *args: Any) -> Result:
        seen = _logical_tensors(args)
        values = [stacked(value) for value in seen]
        key = tuple((tuple(value.shape), value.dtype, value.requires_grad) for value in values), torch.is_grad_enabled()
        with outside_members(), _pop_mode_temporarily():
            if key not in self._traced:
                self._traced[key] = self._trace(args, seen, values)
            found = self._traced[key]
            made = found.call(*values)
        parts: Iterator[Tensor] = iter(made)
        result: Result = mapped(lambda _: logical(next(parts)), found.structure)
        return result

    def _trace(self, args: tuple[Any, ...], seen: list[Tensor], values: list[Tensor]) -> _Traced:
        from torch.fx.experimental.proxy_tensor import make_fx  # half a second that a learner alone does not need

        structure: list[Any] = []

        def one_member(*given: Tensor) -> tuple[Tensor, ...]:
            places = {id(mine): other for mine, other in zip(seen, given, strict=True)}
            back = {id(other): mine for mine, other in zip(seen, given, strict=True)}
            with MemberOps(self.count, {}, traced=True):
                changed = exchange(args, lambda _, value: places.get(id(value), value))
                try:
                    result = self.function(*changed)
                finally:
                    exchange(changed, lambda _, value: back.get(id(value), value))
                structure.append(result)
                # What came without gradient must not get one from the graph's.
                return tuple(value if value.requires_grad else value.detach() for value in tensors_of(result))

        def all_members(*given: Tensor) -> tuple[Tensor, ...]:
            made: tuple[Tensor, ...] = torch.vmap(one_member)(*given)
            return made

        graph = make_fx(all_members)(*values)
        return _Traced(torch.compile(graph, dynamic=False), mapped(lambda _: torch.empty(0), structure[-1]))


def _logical_tensors(args: tuple[Any, ...]) -> list[Tensor]:
    """Every tensor among the arguments that differs between members, once."""
    found: dict[int, Tensor] = {}

    def note(_: str, value: Tensor) -> Tensor:
        if is_logical(value):
            found[id(value)] = value
        return value

    exchange(args, note)
    return list(found.values())
