"""One bar of trading for N accounts: a pure function from state and target weights to the next state.

The agent observes the close of bar t and chooses target weights. They fill at the open of bar t+1, sized on the equity
there before fees, and the account is carried to the close of bar t+1:

    equity at the open     e₀ = 1 + Σ w·gap
    order                  Δ  = target·e₀ − w·(1 + gap), at most the bar's capacity
    position               v  = w·(1 + gap) + Δ
    equity at the close    e  = e₀ − fee − spread − impact + Σ v·move − funding − borrow

All of these are shares of the equity before the step. Where equity falls to the maintenance margin, the account is
liquidated: at the open before it trades, inside the bar on the way to its worst prices, or at the close, when funding
and borrow are due.

The step is differentiable in the target weights, the held weights and the equity. It is piecewise smooth: |Δ| has
slope 0 at 0, and an order beyond the capacity has no slope in the target, only in what limits it. A liquidation is a
discontinuity; the books of a liquidated account are constants for the gradient.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import reduce

import torch
from torch import Tensor

from tailguard.flags import may_hold_any
from tailguard.market.account import Account, liquidate, margin_excess, margin_floor, revalue
from tailguard.market.costs import (
    CLOSE_COSTS,
    COST_KINDS,
    ORDER_COSTS,
    borrow_cost,
    funding_cost,
    impact_cost,
    over_assets,
)
from tailguard.market.state import MarketState
from tailguard.market.tables import Market, Rates

NO_LIMIT = 1e12
"""Capacity, in starting capitals, that no order reaches. An infinite one would have an infinite slope in the equity."""


@dataclass(frozen=True)
class Transition:
    """Result of one bar for each account, as shares of the equity before it, [N] each.

    net = pnl − fee − spread − impact − funding − borrow − liquidation + shortfall
    """

    net: Tensor
    """Growth of equity net of everything: next equity / equity − 1."""
    pnl: Tensor
    """Gain from prices alone."""
    fee: Tensor
    spread: Tensor
    impact: Tensor
    funding: Tensor
    """Negative where a short receives funding at an observed rate; every other cost is never below zero."""
    borrow: Tensor
    liquidation: Tensor
    """Liquidation fee."""
    shortfall: Tensor
    """Loss beyond the account's equity, which the exchange bears."""
    turnover: Tensor
    """Absolute value traded by orders, without liquidations."""
    unfilled: Tensor
    """Absolute value ordered beyond the bar's capacity."""
    liquidated: Tensor
    """bool: the account was liquidated."""

    def costs(self) -> dict[str, Tensor]:
        """The costs by kind."""
        return {kind: getattr(self, kind) for kind in COST_KINDS}


def total(amounts: Iterable[Tensor]) -> Tensor:
    """Their sum, from left to right."""
    return reduce(torch.add, amounts)


def step(
    market: Market, state: MarketState, target: Tensor, hold: Tensor | None = None
) -> tuple[MarketState, Transition]:
    """Trade to the target weights [N, A] at the next open and advance to the next close.

    `hold` [N, A] bool marks positions to hold, whatever their target. The caller keeps `row + 1` inside the
    row's segment and the target's gross weight inside the allowed leverage.
    """
    rates = market.rates
    row = state.row + 1
    gap, move, low, high, coefficient, capacity, funding_rate, reach = market.table.index_select(1, row).unbind(0)
    equity = state.equity.unsqueeze(1)

    gap_gain = state.weights * gap
    gap_pnl = over_assets(gap_gain)
    opened = Account(gap_pnl + rates.one, state.weights + gap_gain)

    wanted = target * opened.equity - opened.positions
    if hold is not None:
        wanted = wanted.masked_fill(hold, 0)
    limit = _fill_limit(capacity, equity, rates)
    # A clamp, not sign times size: an order of exactly 0 still has slope 1 in the target.
    order = torch.clamp(wanted, -limit, limit)
    traded = order.abs()
    turnover = over_assets(traded)
    order_costs = {
        "fee": rates.fee * turnover,
        "spread": rates.half_spread * turnover,
        "impact": impact_cost(traded, equity, coefficient),
    }
    trading_cost = total(order_costs.values())
    filled = Account(opened.equity - trading_cost, opened.positions + order)

    gain = filled.positions * move
    value = filled.positions + gain
    close_costs = {
        "funding": funding_cost(value, funding_rate, market),
        "borrow": borrow_cost(filled.positions, filled.equity, market),
    }
    pnl = gap_pnl + over_assets(gain)
    net = pnl - total([trading_cost, *close_costs.values()])
    closed = Account(net + rates.one, value)

    # If this bound holds for all, no account is liquidated; where it fails, the exact check decides.
    liquidated = margin_floor(filled, turnover, reach, rates) <= rates.slack
    nothing = torch.zeros_like(net)
    booked = {
        "net": net,
        "pnl": pnl,
        **order_costs,
        **close_costs,
        "liquidation": nothing,
        "shortfall": nothing,
        "turnover": turnover,
        "unfilled": over_assets(wanted.abs()) - turnover,
    }
    if may_hold_any(liquidated):
        worst = torch.minimum(filled.positions * low, filled.positions * high)
        liquidated, changes = _forced_closes(booked, rates, opened, filled, closed, worst)
        booked |= changes
        # Set to zero before the division: a slope of 1/equity at equity 0 would enter the gradient as 0·∞.
        closed = Account(closed.equity.masked_fill(liquidated, 1), value.masked_fill(liquidated, 0))
    weights = closed.positions / closed.equity
    transition = Transition(
        **{name: amount.squeeze(1) for name, amount in booked.items()}, liquidated=liquidated.squeeze(1)
    )
    return MarketState(row, torch.addcmul(state.equity, state.equity, transition.net), weights), transition


def _fill_limit(capacity: Tensor, equity: Tensor, rates: Rates) -> Tensor:
    """Largest order as a share of equity, [N, A]."""
    if equity.requires_grad:
        capacity = capacity.clamp(max=NO_LIMIT)
    return capacity / torch.maximum(equity, rates.tiny)


def _forced_closes(
    booked: dict[str, Tensor],
    rates: Rates,
    opened: Account,
    filled: Account,
    closed: Account,
    worst: Tensor,
) -> tuple[Tensor, dict[str, Tensor]]:
    """Which accounts are liquidated, [N, 1], and the changes to the books, [N, 1] each.

    An account closes at the first moment without margin. Later events of the bar do not happen: neither the
    trade, nor funding and borrow.
    """
    at_open = margin_excess(opened, rates) <= rates.zero
    before_close = at_open | (margin_excess(revalue(filled, worst), rates) <= rates.zero)
    liquidated = before_close | (margin_excess(closed, rates) <= rates.zero)
    nothing = torch.zeros_like(booked["net"])

    def first_of(opening: Tensor, filling: Tensor, closing: Tensor) -> Tensor:
        # Constants for the gradient, see above: without a liquidation, the denominator is close to zero.
        return torch.where(at_open, opening, torch.where(before_close, filling, closing)).detach()

    forced = liquidate(
        Account(
            first_of(opened.equity, filled.equity, closed.equity),
            first_of(opened.positions, filled.positions, closed.positions),
        ),
        worst.detach(),
        rates,
    )
    trade = (*ORDER_COSTS, "turnover", "unfilled")
    traded = {name: torch.where(at_open, nothing, booked[name]) for name in trade}
    held = {name: torch.where(before_close, nothing, booked[name]) for name in CLOSE_COSTS}
    costs = total([*(traded[kind] for kind in ORDER_COSTS), *held.values()])
    return liquidated, {
        **traded,
        **held,
        "net": torch.where(liquidated, forced.equity - 1, booked["net"]),
        "pnl": torch.where(liquidated, forced.before_fee - 1 + costs, booked["pnl"]),
        "liquidation": torch.where(liquidated, forced.fee, nothing),
        "shortfall": torch.where(liquidated, forced.shortfall, nothing),
    }
