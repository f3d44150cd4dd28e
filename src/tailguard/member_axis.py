"""The member axis: tensors that hold the values of all members of a population, [P, ...].

Code of one learner runs for P members under `torch.vmap`. There a tensor that differs between members is *logical*: it
looks like that of one member, and its axis [P] is hidden. *Stacked* is the same tensor with the axis. Most operations
have rules in PyTorch; `on_stacked` is for functions that treat the axis themselves.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch._C import _functorch as functorch
from torch._functorch.pyfunctorch import temporarily_clear_interpreter_stack as outside_members

__all__ = ["expanded", "hidden", "is_logical", "logical", "on_stacked", "outside_members", "stacked"]


def is_logical(value: object) -> bool:
    """Whether the value differs between members; never inside a compiler, which sees stacked tensors."""
    return isinstance(value, Tensor) and not torch.compiler.is_compiling() and bool(functorch.is_batchedtensor(value))


def stacked(value: Tensor) -> Tensor:
    """The members' values of a logical tensor, [P, ...]; a view, so that it can be written to."""
    inner: Tensor = functorch.get_unwrapped(value)
    axis = functorch.maybe_get_bdim(value)
    return inner if axis == 0 else inner.movedim(axis, 0)


def logical(value: Tensor) -> Tensor:
    """What each member sees of [P, ...]."""
    return hidden(value, 0)


def hidden(value: Tensor, axis: int) -> Tensor:
    """What each member sees of a tensor whose members are along this axis."""
    level = functorch.maybe_current_level()
    if level is None:
        raise RuntimeError("members: there is no member axis outside torch.vmap")
    seen: Tensor = functorch._add_batch_dim(value, axis, level)
    return seen


def expanded(value: Tensor, count: int) -> Tensor:
    """[P, ...] of a tensor, repeated where it is the same for all members."""
    return stacked(value) if is_logical(value) else value.expand(count, *value.shape)


def on_stacked(function: Callable[..., Any], *values: Tensor) -> tuple[Tensor, ...]:
    """The logical results of a function that takes stacked tensors and returns a tuple of them."""
    count = next(stacked(value).shape[0] for value in values if is_logical(value))
    given = [expanded(value, count) for value in values]
    with outside_members():
        made = function(*given)
    return tuple(logical(value) for value in made)
