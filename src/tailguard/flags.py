"""Data-dependent branches: free on a CPU, a synchronisation on a GPU."""

from __future__ import annotations

import torch
from torch import Tensor


def may_hold_any(flags: Tensor) -> bool:
    """Whether any flag may be set, so that rare work can be left out where looking is free.

    A CPU looks. A GPU would have to wait for its queue, and a compiler to break its graph: there the answer is yes.
    """
    return flags.device.type != "cpu" or torch.compiler.is_compiling() or bool(flags.any())
