"""Operations that a CPU and a GPU do differently: branching on data, and shuffling."""

from __future__ import annotations

import torch
from torch import Tensor


def may_hold_any(flags: Tensor) -> bool:
    """Whether any flag may be set, so rare work can be skipped where the check is free.

    A CPU reads the flags. A GPU would have to synchronise, and a compiler to break its graph: there the answer is True.
    """
    return flags.device.type != "cpu" or torch.compiler.is_compiling() or bool(flags.any())


def shuffled(count: int, generator: torch.Generator) -> Tensor:
    """The numbers 0 … count − 1 in random order, on the generator's device.

    On a GPU by sorting random numbers: unlike `randperm`, that can be captured in a CUDA graph.
    """
    if generator.device.type == "cpu":
        return torch.randperm(count, generator=generator)
    return torch.rand(count, generator=generator, device=generator.device, dtype=torch.float64).argsort()
