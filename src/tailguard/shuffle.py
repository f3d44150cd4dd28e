"""A random order."""

from __future__ import annotations

import torch
from torch import Tensor


def shuffled(count: int, generator: torch.Generator) -> Tensor:
    """The numbers 0 … count − 1 in random order, on the generator's device.

    On a GPU by sorting random numbers, which can be recorded in a CUDA graph.
    """
    if generator.device.type == "cpu":
        return torch.randperm(count, generator=generator)
    return torch.rand(count, generator=generator, device=generator.device, dtype=torch.float64).argsort()
