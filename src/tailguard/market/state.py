"""The accounts of N environments, as tensors: input and output of a step."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class MarketState:
    """State of N accounts after the close of their current bar."""

    row: Tensor
    """Row of the bar that has just closed, [N] int64."""
    equity: Tensor
    """Equity net of all costs, as a multiple of the starting capital, [N]."""
    weights: Tensor
    """Signed value of each position as a share of equity, at the close, [N, A]."""


def open_accounts(row: Tensor, assets: int, dtype: torch.dtype = torch.float32) -> MarketState:
    """Flat accounts with equity 1 at these rows, [N]."""
    equity = torch.ones(row.shape[0], dtype=dtype, device=row.device)
    return MarketState(row, equity, equity.new_zeros(row.shape[0], assets))


def where(condition: Tensor, chosen: MarketState, other: MarketState) -> MarketState:
    """`chosen` where the condition [N] holds, `other` elsewhere."""
    return MarketState(
        torch.where(condition, chosen.row, other.row),
        torch.where(condition, chosen.equity, other.equity),
        torch.where(condition[:, None], chosen.weights, other.weights),
    )
