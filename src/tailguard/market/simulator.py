"""One bar of trading for N accounts: a pure function from state and target weights to the next state.

The agent observes the close of bar t and chooses target weights. They fill at the open of bar t+1, sized on the equity
there before fees, and the account is carried to the close of bar t+1:

    equity at the open     e₀ = 1 + Σ w·gap
    order                  Δ  = target·e₀ − w·(1 + gap), at most the bar's capacity
    position               v  = w·(1 + gap) + Δ
    equity at the close    e  = e₀ − costs of the order + Σ v·move − costs at the close

The table in `market.costs` names the costs: fee, spread and impact of the order, funding and borrow at the close. All
amounts are shares of the equity before the step. Where equity falls to the maintenance margin, the account is
liquidated: at the open before it trades, inside the bar on the way to its worst prices, or at the close, when funding
and borrow are due.

The step is differentiable in the target weights, the held weights and the equity. It is piecewise smooth: |Δ| has
slope 0 at 0, and an order beyond the capacity has no slope in the target, only in what limits it. Lots are rounded
straight through. A liquidation is a discontinuity; the books of a liquidated account are constants for the gradient.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from tailguard.device_ops import may_hold_any
from tailguard.market.account import Account, liquidate, margin_excess, margin_floor, revalue
from tailguard.market.costs import ChargedAt, Fill, Holding, charge, over_assets, total
from tailguard.market.state import MarketState
from tailguard.market.tables import Market, Rates, bar_of

NO_LIMIT = 1e12
"""Capacity, in starting capitals, that no order reaches. An infinite one would have an infinite slope in the equity."""


LOT_ROUNDING = 1e-3
"""Share of a lot by which an order may miss a whole number of them and still be filled whole."""


@dataclass(frozen=True)
class Transition:
    """Result of one bar for each account, as shares of the equity before it, [N] each.

    net = pnl − Σ costs + shortfall
    """

    net: Tensor
    """Growth of equity net of everything: next equity / equity − 1."""
    pnl: Tensor
    """Gain from prices alone."""
    costs: dict[str, Tensor]
    """Costs by kind, in the order of the table. Observed funding is below zero where a short receives it."""
    shortfall: Tensor
    """Loss beyond the account's equity, which the exchange bears."""
    turnover: Tensor
    """Absolute value traded by orders, without liquidations."""
    unfilled: Tensor
    """Absolute value ordered beyond the bar's capacity."""
    liquidated: Tensor
    """bool: the account was liquidated."""


def step(
    market: Market,
    state: MarketState,
    target: Tensor,
    hold: Tensor | None = None,
    cost_factor: Tensor | None = None,
) -> tuple[MarketState, Transition]:
    """Trade to the target weights [N, A] at the next open and advance to the next close.

    `hold` [N, A] bool marks positions to hold, whatever their target. The caller keeps `row + 1` inside the
    row's segment and the target's gross weight inside the allowed leverage.
    `cost_factor`: on each account's costs of orders, [N]; None: 1.
    """
    rates = market.rates
    # Decided at the close of `row`, filled at the open of the next row: no bar is both seen and traded.
    row = state.row + 1
    bar = bar_of(market.columns, market.table.index_select(1, row).unbind(0))
    equity = state.equity.unsqueeze(1)

    # The gap belongs to the old position: the target was chosen at the last close and cannot fill before the open.
    gap_gain = state.weights * bar.gap
    gap_pnl = over_assets(gap_gain)
    opened = Account(gap_pnl + rates.one, state.weights + gap_gain)

    # Sized on the equity before the order's own costs, as brokers and the usual backtesters do. Sizing net of costs
    # would be an implicit equation, because the costs depend on the size.
    wanted = target * opened.equity - opened.positions
    if hold is not None:
        wanted = wanted.masked_fill(hold, 0)
    ordered = wanted.abs()
    # The participation cap: what exceeds it is not filled, and not carried over to the next bar.
    if not target.requires_grad or may_hold_any(ordered > _fill_limit(bar.capacity, equity.detach(), rates)):
        limit = _fill_limit(bar.capacity, equity, rates)
        # A clamp, not sign times size: an order of exactly 0 still has slope 1 in the target.
        order = filled_order = torch.clamp(wanted, -limit, limit)
    else:  # the same numbers and slopes, without the limit's part of the graph
        order = filled_order = wanted
    if bar.lot is not None:
        order = _whole_lots(order, bar.lot, equity, rates)
    traded = ordered if order is wanted else order.abs()
    turnover = over_assets(traded)
    order_costs = charge(market, "order", Fill(market, bar, equity, order, traded, turnover))
    if cost_factor is not None:
        order_costs = {kind: cost * cost_factor.unsqueeze(1) for kind, cost in order_costs.items()}
    trading_cost = total(order_costs.values())
    filled = Account(opened.equity - trading_cost, opened.positions + order)

    # The move belongs to the new position. What is due at the close is computed last, on the values there.
    gain = filled.positions * bar.move
    values = filled.positions + gain
    close_costs = charge(market, "close", Holding(market, bar, equity, filled.equity, filled.positions, values))
    pnl = gap_pnl + over_assets(gain)
    # From the parts, not as closed equity − 1: the return of a quiet bar would lose digits in that difference.
    net = pnl - total([trading_cost, *close_costs.values()])
    closed = Account(net + rates.one, values)

    # If this bound holds for all, no account is liquidated; where it fails, the exact check decides.
    with torch.no_grad():
        floor = margin_floor(filled, turnover, bar.reach, rates)
        # An income does not raise the bound: until the close it is not there.
        for cost in market.costs["close"]:
            if not cost.in_reach:
                floor = floor - close_costs[cost.kind].clamp(min=0)
    nothing = torch.zeros_like(net)
    booked = Transition(
        net=net,
        pnl=pnl,
        costs=order_costs | close_costs | {cost.kind: nothing for cost in market.costs["liquidation"]},
        shortfall=nothing,
        turnover=turnover,
        # What whole lots leave of an order is not wanted any more, so it does not wait for the next bar.
        unfilled=over_assets(ordered) - (turnover if bar.lot is None else over_assets(filled_order.abs())),
        liquidated=floor <= rates.slack,
    )
    if may_hold_any(booked.liquidated):
        worst = torch.minimum(filled.positions * bar.low, filled.positions * bar.high)
        booked = _with_forced_closes(booked, market, opened, filled, closed, worst)
        # Set to zero before the division: a slope of 1/equity at equity 0 would enter the gradient as 0·∞.
        liquidated = booked.liquidated
        closed = Account(closed.equity.masked_fill(liquidated, 1), values.masked_fill(liquidated, 0))
    weights = closed.positions / closed.equity
    transition = _per_account(booked)
    return MarketState(row, torch.addcmul(state.equity, state.equity, transition.net), weights), transition


def _fill_limit(capacity: Tensor, equity: Tensor, rates: Rates) -> Tensor:
    """Largest order as a share of equity, [N, A]: the capacity is a sum of money, so it falls as the account grows."""
    if equity.requires_grad:
        capacity = capacity.clamp(max=NO_LIMIT)
    return capacity / torch.maximum(equity, rates.tiny)


def _whole_lots(order: Tensor, lot: Tensor, equity: Tensor, rates: Rates) -> Tensor:
    """The order rounded down to whole lots, [N, A]; its slope is that of the order (straight through)."""
    size = (lot / torch.maximum(equity, rates.tiny)).clamp(max=NO_LIMIT)
    # A position of whole lots, divided by its lot, is whole only to rounding.
    lots = (order.abs() / size.clamp(min=rates.tiny) + LOT_ROUNDING).floor()
    rounded = torch.where(size > 0, torch.sign(order) * lots * size, order)
    return order + (rounded - order).detach()


def _with_forced_closes(
    booked: Transition, market: Market, opened: Account, filled: Account, closed: Account, worst: Tensor
) -> Transition:
    """The books, [N, 1] each, with the accounts closed whose margin runs out; `worst` [N, A] as for `liquidate`.

    An account closes at the first moment without margin. Later events of the bar do not happen: neither the
    trade, nor the costs at the close. The worst prices count before the close, because a bar does not tell their order.
    """
    rates = market.rates
    # In the order of the bar: open, worst prices inside, close. The first one without margin decides.
    at_open = margin_excess(opened, rates) <= rates.zero
    before_close = at_open | (margin_excess(revalue(filled, worst), rates) <= rates.zero)
    liquidated = before_close | (margin_excess(closed, rates) <= rates.zero)
    nothing = torch.zeros_like(booked.net)

    def first_of(opening: Tensor, filling: Tensor, closing: Tensor) -> Tensor:
        # Constants for the gradient, see above: without a liquidation, the denominator is close to zero.
        return torch.where(at_open, opening, torch.where(before_close, filling, closing)).detach()

    forced = liquidate(
        Account(
            first_of(opened.equity, filled.equity, closed.equity),
            first_of(opened.positions, filled.positions, closed.positions),
        ),
        worst.detach(),
        market,
    )
    # A position closed at the open never trades; one closed inside the bar is gone when funding is due.
    skipped: dict[ChargedAt, Tensor] = {"order": at_open, "close": before_close}
    paid = {
        cost.kind: torch.where(skip, nothing, booked.costs[cost.kind])
        for moment, skip in skipped.items()
        for cost in market.costs[moment]
    }
    return Transition(
        net=torch.where(liquidated, forced.equity - 1, booked.net),
        # What costs do not explain is the price's: net = pnl − Σ costs + shortfall by construction.
        pnl=torch.where(liquidated, forced.before_costs - 1 + total(paid.values()), booked.pnl),
        costs=paid | {kind: torch.where(liquidated, cost, nothing) for kind, cost in forced.costs.items()},
        shortfall=torch.where(liquidated, forced.shortfall, nothing),
        turnover=torch.where(at_open, nothing, booked.turnover),
        unfilled=torch.where(at_open, nothing, booked.unfilled),
        liquidated=liquidated,
    )


def _per_account(booked: Transition) -> Transition:
    """The books [N, 1] as [N]."""
    return Transition(
        net=booked.net.squeeze(1),
        pnl=booked.pnl.squeeze(1),
        costs={kind: cost.squeeze(1) for kind, cost in booked.costs.items()},
        shortfall=booked.shortfall.squeeze(1),
        turnover=booked.turnover.squeeze(1),
        unfilled=booked.unfilled.squeeze(1),
        liquidated=booked.liquidated.squeeze(1),
    )
