"""Margin: when an account is liquidated, and the equity that remains."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from tailguard.market.costs import ForcedClose, charge, over_assets, total
from tailguard.market.tables import Market, Rates


class Account(NamedTuple):
    """Accounts at one moment of a bar, as shares of the equity before the step."""

    equity: Tensor
    """[N, 1]"""
    positions: Tensor
    """Signed values at that moment's prices, [N, A]."""


@dataclass(frozen=True)
class Liquidation:
    """Result of a liquidation, as shares of the equity before the step, [N, 1] each."""

    equity: Tensor
    """Equity after the costs, never below zero."""
    costs: dict[str, Tensor]
    """Costs of the liquidation by kind."""
    shortfall: Tensor
    """Loss beyond the account's equity, when the price jumps past the liquidation price; borne by the exchange."""

    @property
    def before_costs(self) -> Tensor:
        """Equity at the liquidation prices, below zero where the account has a debt."""
        return self.equity - self.shortfall + total(self.costs.values())


def margin_excess(account: Account, rates: Rates) -> Tensor:
    """Equity above the maintenance margin of the positions, [N, 1]; at zero or below: liquidation."""
    if rates.maintenance_margin.dim():
        return account.equity - over_assets(rates.maintenance_margin * account.positions.abs())
    return account.equity - rates.maintenance_margin * over_assets(account.positions.abs())


def margin_floor(filled: Account, turnover: Tensor, reach: Tensor, rates: Rates) -> Tensor:
    """A bound below the margin excess at every moment of the bar, [N, 1]: cheap, and nearly always sufficient.

    `reach` [N, A] bounds what a unit of position loses to prices, funding and interest and needs as margin from the
    fill on. Before the fill equity was higher by the costs of the order, and the positions were larger by at most the
    traded amount.
    """
    at_risk = over_assets(filled.positions.abs() * reach)
    margin = rates.maintenance_margin.amax() if rates.maintenance_margin.dim() else rates.maintenance_margin
    return filled.equity - at_risk - margin * turnover


def revalue(account: Account, change: Tensor) -> Account:
    """The account after its positions' values changed by this much, [N, A]."""
    return Account(account.equity + over_assets(change), account.positions + change)


def liquidate(account: Account, worst: Tensor, market: Market) -> Liquidation:
    """Liquidate the account where its margin runs out between the fill and the bar's worst prices.

    Equity, notional and with them the excess over the maintenance margin move in a straight line from here to the
    worst prices, which change the positions' values by `worst` [N, A]. The close is where the excess is zero, which
    for one asset is its liquidation price. An account that is below its margin from the start is closed right there.
    """
    rates = market.rates
    excess = margin_excess(account, rates)
    worst_excess = margin_excess(revalue(account, worst), rates)
    # A positive denominator also where nothing moves: the share is then 0 or 1, and prices stay in either case.
    share = (excess / torch.maximum(excess - worst_excess, rates.tiny)).clamp(0, 1)
    closed = revalue(account, share * worst)
    costs = charge(market, "liquidation", ForcedClose(market, closed.positions))
    left = closed.equity - total(costs.values())
    return Liquidation(left.clamp(min=0), costs, left.clamp(max=0).neg())
