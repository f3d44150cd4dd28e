"""How two critics speak as one."""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from tailguard.errors import ConfigError

TwinMode = Literal["min", "mean"]


def combine_values(first: Tensor, second: Tensor, mode: TwinMode) -> Tensor:
    """The value [...] that twin critics give GAE: ``min`` is pessimistic, ``mean`` is unbiased."""
    if mode == "min":
        return torch.minimum(first, second)
    if mode == "mean":
        return (first + second) / 2
    raise ConfigError(f"twin critics: mode {mode!r}; choose min or mean")


def twin_pessimism(first: Tensor, second: Tensor) -> Tensor:
    """The mean of two values minus their minimum, [...]: s/√π on average for independent Gaussian errors of sd s."""
    return (first - second).abs() / 2


def combine_quantiles(first: Tensor, second: Tensor) -> Tensor:
    """Average of two quantile functions [..., N] at equal levels: its mean is the mean of the two means.

    The element-wise minimum would be below both ([−1, 1] with [0, 0] gives −½ where each mean is 0).
    """
    return (first + second) / 2
