"""Where the network may compute in bfloat16, and where it must not."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

Precision = Literal["auto", "float32", "bfloat16"]


def is_narrow(precision: Precision, device: torch.device) -> bool:
    """Whether trunks compute in bfloat16; with `auto` they do on a GPU."""
    return precision == "bfloat16" or (precision == "auto" and device.type == "cuda")


def autocast(precision: Precision, device: torch.device) -> AbstractContextManager[None]:
    """A context in which matrix products run in the requested precision."""
    narrow = is_narrow(precision, device)
    if not narrow and not torch.is_autocast_enabled(device.type):
        return nullcontext()  # the policy comes here at every step
    return torch.autocast(device.type, dtype=torch.bfloat16, enabled=narrow)


@contextmanager
def tensor_cores(allowed: bool) -> Iterator[None]:
    """A context in which float32 products may round their factors to TF32's 11 bits, which a GPU takes 8 times faster.

    Features computed in bfloat16 lose no precision. Acting and learning use the same rounded weights.
    """
    before = torch.get_float32_matmul_precision()
    if allowed:
        torch.set_float32_matmul_precision("high")
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)


def full_precision(layers: Sequence[nn.Linear], features: Tensor) -> list[Tensor]:
    """Last layers that read the same features, in one product and outside autocast, one output each.

    bfloat16's 8 bits would quantise values and action means, and the ratio exponentiates the error of a mean.
    """
    with autocast("float32", features.device):
        if len(layers) == 1:
            return [layers[0](features.to(layers[0].weight.dtype))]
        weight = torch.cat([layer.weight for layer in layers])
        bias = torch.cat([layer.bias for layer in layers])
        output = F.linear(features.to(weight.dtype), weight, bias)
    return list(torch.split(output, [layer.out_features for layer in layers], dim=-1))
