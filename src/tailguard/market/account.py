"""Margin: when an account is closed by force, and what is left of it."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from tailguard.market.costs import over_assets
from tailguard.market.tables import Rates


@dataclass(frozen=True)
class Liquidation:
    """What a forced close leaves, as shares of the equity before the step, [N, 1] each."""

    equity: Tensor
    """What is left after the fee, never below zero."""
    fee: Tensor
    shortfall: Tensor
    """What the account could not pay: a price that jumped past the liquidation price, borne by the exchange."""

    @property
    def before_fee(self) -> Tensor:
        """Equity at the prices of the forced close, below zero where they left a debt."""
        return self.equity - self.shortfall + self.fee


def margin_excess(equity: Tensor, positions: Tensor, rates: Rates) -> Tensor:
    """Equity above the maintenance margin of these position values [N, A], as [N, 1]; at zero or below: liquidation."""
    return equity - rates.maintenance_margin * over_assets(positions.abs())


def liquidate(equity: Tensor, positions: Tensor, worst: Tensor, rates: Rates) -> Liquidation:
    """Close the account where its margin runs out on the way from the fill to the bar's worst prices.

    Equity, notional and with them the excess over the maintenance margin move in a straight line from the fill
    (`equity`, `positions`) to the worst prices, which change the positions' values by `worst` [N, A]. The close is
    where the excess is zero, which for one asset is its liquidation price. An account that is below its margin from
    the start, as after a gap, is closed right there.
    """
    excess = margin_excess(equity, positions, rates)
    worst_excess = margin_excess(equity + over_assets(worst), positions + worst, rates)
    share = (excess / torch.maximum(excess - worst_excess, rates.tiny)).clamp(0, 1)
    fee = rates.liquidation_fee * over_assets((positions + share * worst).abs())
    left = equity + share * over_assets(worst) - fee
    return Liquidation(left.clamp(min=0), fee, left.clamp(max=0).neg())
