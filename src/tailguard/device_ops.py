"""Operations that a CPU and a GPU do differently: branching on data, and shuffling."""

from __future__ import annotations

import torch
from torch import Tensor

from tailguard.member_axis import is_logical


def may_hold_any(flags: Tensor) -> bool:
    """Whether any flag may be set, so rare work can be skipped where the check is free.

    A CPU reads the flags. A GPU would have to synchronise, a compiler to break its graph, and members of a population
    have flags of their own: there the answer is True.
    """
    return not readable(flags) or bool(flags.any())


def readable(values: Tensor) -> bool:
    """Whether Python may branch on these values at no cost: on a CPU, outside a compiler, for one learner alone."""
    return values.device.type == "cpu" and not torch.compiler.is_compiling() and not is_logical(values)


def shuffled(count: int, generator: torch.Generator) -> Tensor:
    """The numbers 0 … count − 1 in random order, on the generator's device.

    On a GPU by sorting random numbers: unlike `randperm`, that can be captured in a CUDA graph.
    """
    if generator.device.type == "cpu":
        return torch.randperm(count, generator=generator)
    return torch.rand(count, generator=generator, device=generator.device, dtype=torch.float64).argsort()
