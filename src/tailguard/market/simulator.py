"""One bar of trading for N accounts: a pure function from state and target weights to the next state.

The agent has seen bar t close and names target weights. They fill at the open of bar t+1, sized on the equity there
before fees, and the account is carried to the close of bar t+1:

    equity at the open     e₀ = 1 + Σ w·gap
    order                  Δ  = target·e₀ − w·(1 + gap), at most the bar's capacity
    position               v  = w·(1 + gap) + Δ
    equity at the close    e  = e₀ − fee − spread − impact + Σ v·move − funding − borrow

All of these are shares of the equity before the step. If equity falls to the maintenance margin, at the open or at
the bar's worst price, the account is liquidated.
"""

from __future__ import annotations

from dataclasses import dataclass, fields, replace

import torch
from torch import Tensor

from tailguard.flags import may_hold_any
from tailguard.market.account import liquidate, margin_excess
from tailguard.market.costs import borrow_cost, funding_cost, impact_cost, over_assets
from tailguard.market.state import MarketState
from tailguard.market.tables import Market

COST_KINDS = ("fee", "spread", "impact", "funding", "borrow", "liquidation")


@dataclass(frozen=True)
class Transition:
    """What one bar did to each account, as shares of the equity before it, [N] each.

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
    """Fee of a forced close."""
    shortfall: Tensor
    """Loss beyond the account's equity, which the exchange bears."""
    turnover: Tensor
    """Absolute value traded."""
    unfilled: Tensor
    """Absolute value wanted but beyond the bar's capacity."""
    liquidated: Tensor
    """bool: the account was closed by force."""

    def costs(self) -> dict[str, Tensor]:
        """The costs by kind."""
        return {kind: getattr(self, kind) for kind in COST_KINDS}


def step(
    market: Market, state: MarketState, target: Tensor, hold: Tensor | None = None
) -> tuple[MarketState, Transition]:
    """Trade to the target weights [N, A] at the next open and go on to the next close.

    `hold` [N, A] bool marks positions to leave alone, whatever their target. The caller keeps `row + 1` inside the
    row's segment and the target's gross weight inside the allowed leverage.
    """
    rates = market.rates
    row = state.row + 1
    gap, move, low, high, coefficient, capacity, funding_rate = market.table.index_select(0, row).unbind(1)
    equity = state.equity.unsqueeze(1)

    gap_gain = state.weights * gap
    carried = state.weights + gap_gain
    gap_pnl = over_assets(gap_gain)
    at_open = gap_pnl + rates.one

    wanted = target * at_open - carried
    if hold is not None:
        wanted = wanted.masked_fill(hold, 0)
    limit = capacity / torch.maximum(equity, rates.tiny)
    order = torch.clamp(wanted, -limit, limit)
    traded = order.abs()
    turnover = over_assets(traded)
    fee = rates.fee * turnover
    spread = rates.half_spread * turnover
    impact = impact_cost(traded, equity, coefficient)
    trading_cost = fee + spread + impact
    filled = carried + order
    after_trade = at_open - trading_cost

    gain = filled * move
    value = filled + gain
    funding = funding_cost(value, value.abs(), funding_rate, market)
    borrow = borrow_cost(filled, after_trade, market)
    pnl = gap_pnl + over_assets(gain)
    net = pnl - (trading_cost + funding + borrow)
    grown = net + rates.one

    worst = torch.minimum(filled * low, filled * high)
    excess = torch.minimum(
        margin_excess(at_open, carried, rates),
        torch.minimum(
            margin_excess(after_trade + over_assets(worst), filled + worst, rates), margin_excess(grown, value, rates)
        ),
    )
    nothing = torch.zeros_like(net)
    transition = Transition(
        net=net,
        pnl=pnl,
        fee=fee,
        spread=spread,
        impact=impact,
        funding=funding,
        borrow=borrow,
        liquidation=nothing,
        shortfall=nothing,
        turnover=turnover,
        unfilled=over_assets(wanted.abs()) - turnover,
        liquidated=excess <= 0,
    )
    weights = value / grown
    if may_hold_any(transition.liquidated):
        weights = weights.masked_fill(transition.liquidated, 0)
        transition = _with_liquidations(transition, market, at_open, carried, after_trade, filled, worst)
    transition = Transition(*(getattr(transition, field.name).squeeze(1) for field in fields(Transition)))
    return MarketState(row, torch.addcmul(state.equity, state.equity, transition.net), weights), transition


def _with_liquidations(
    usual: Transition,
    market: Market,
    at_open: Tensor,
    carried: Tensor,
    after_trade: Tensor,
    filled: Tensor,
    worst: Tensor,
) -> Transition:
    """The transition with the forced closes booked, [N, 1] fields: at the open, before any trade, or inside the bar."""
    rates = market.rates
    at_gap = margin_excess(at_open, carried, rates) <= 0
    forced = liquidate(
        torch.where(at_gap, at_open, after_trade),
        torch.where(at_gap, carried, filled),
        worst,
        rates,
    )
    nothing = torch.zeros_like(usual.net)
    fee, spread, impact = (torch.where(at_gap, nothing, cost) for cost in (usual.fee, usual.spread, usual.impact))
    chosen = usual.liquidated

    def where(otherwise: Tensor, usually: Tensor) -> Tensor:
        return torch.where(chosen, otherwise, usually)

    return replace(
        usual,
        net=where(forced.equity - 1, usual.net),
        pnl=where(forced.before_fee - 1 + (fee + spread + impact), usual.pnl),
        fee=fee,
        spread=spread,
        impact=impact,
        funding=where(nothing, usual.funding),
        borrow=where(nothing, usual.borrow),
        liquidation=where(forced.fee, nothing),
        shortfall=where(forced.shortfall, nothing),
        turnover=torch.where(at_gap, nothing, usual.turnover),
        unfilled=torch.where(at_gap, nothing, usual.unfilled),
    )
