"""Accounts open flat, and are chosen one by one."""

from __future__ import annotations

import torch

from tailguard.market import MarketState, open_accounts
from tailguard.market.state import where


def test_accounts_open_flat_with_equity_one_at_their_rows() -> None:
    state = open_accounts(torch.tensor([4, 9]), assets=3, dtype=torch.float64)
    assert state.row.tolist() == [4, 9]
    assert state.equity.tolist() == [1.0, 1.0]
    assert state.weights.tolist() == [[0.0] * 3] * 2
    assert state.weights.dtype is state.equity.dtype is torch.float64


def test_where_takes_whole_accounts_from_one_state_or_the_other() -> None:
    one = MarketState(torch.tensor([1, 2]), torch.tensor([1.5, 2.5]), torch.tensor([[0.1, 0.2], [0.3, 0.4]]))
    two = MarketState(torch.tensor([7, 8]), torch.tensor([7.5, 8.5]), torch.tensor([[0.7, 0.8], [0.9, 1.0]]))
    chosen = where(torch.tensor([False, True]), one, two)
    assert torch.equal(chosen.row, torch.tensor([7, 2]))
    assert torch.equal(chosen.equity, torch.tensor([7.5, 2.5]))
    assert torch.equal(chosen.weights, torch.tensor([[0.7, 0.8], [0.3, 0.4]]))
