"""Data-dependent branches: free on a CPU, a synchronisation on a GPU."""

from __future__ import annotations

import torch
from torch import Tensor


def may_hold_any(flags: Tensor) -> bool:
    """Whether any flag may be set, so rare work can be skipped where the check is free.

    A CPU reads the flags. A GPU would have to synchronise, and a compiler to break its graph: there the answer is True.
    """
    return flags.device.type != "cpu" or torch.compiler.is_compiling() or bool(flags.any())
