"""The slopes of a bar in which nothing is capped and nobody is liquidated, written out by hand.

Automatic differentiation gives each of the fifty operations of a step a node of its own. At a few hundred accounts the
nodes take longer than the arithmetic, forward and backward. `slopes_before` is the whole step's backward pass; bars
with an order beyond its cap or a liquidation, and costs that are not in `KNOWN`, are left to automatic differentiation.

In the names of the simulator's page, for a loss with slopes of_net, of_equity and of_weights in the results:

    weights = values / e            of_values = of_weights / e,  of_net −= Σ of_values·weights
    equity  = equity·(1 + net)      of_net   += of_equity·equity
    net     = Σ w·gap + Σ v·move − Σ costs
    values  = v·(1 + move)
    v       = w·(1 + gap) + Δ       Δ = target·e₀ − w·(1 + gap)
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor

from tailguard.market.account import Account
from tailguard.market.costs import borrow_cost, funding_cost, impact_cost, over_assets, spread_cost, turnover_cost
from tailguard.market.tables import Bar, Market

KNOWN: frozenset[Callable[..., Tensor]] = frozenset(
    {turnover_cost, spread_cost, impact_cost, funding_cost, borrow_cost}
)
"""Amounts of costs whose slopes are below; that of interest only where none is due."""


class Course(NamedTuple):
    """What a step computes on the way to its results."""

    bar: Bar[Tensor]
    target: Tensor
    equity: Tensor
    """Before the bar, [N, 1]."""
    opened: Account
    order: Tensor
    traded: Tensor
    closed: Account
    rough: bool
    """Some order may have been larger than its bar's capacity, or some account liquidated."""


def has_known_slopes(market: Market) -> bool:
    """Whether every cost of a bar without liquidations is one of `KNOWN`."""
    charged = (*market.costs["order"], *market.costs["close"])
    return not market.charges_borrow and all(cost.amount in KNOWN for cost in charged)


@dataclass(frozen=True)
class Slopes:
    """Of a loss in what a step returns, [N, 1] each, in the weights [N, A]; None: 0."""

    equity: Tensor | None = None
    weights: Tensor | None = None
    net: Tensor | None = None
    turnover: Tensor | None = None
    costs: Mapping[str, Tensor] = field(default_factory=dict)


def slopes_before(
    market: Market, course: Course, weights: Tensor, hold: Tensor | None, cost_factor: Tensor | None, of: Slopes
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Slopes in the target [N, A], in the weights [N, A] and in the equity [N, 1] that a step began with.

    `weights`: those after the step, [N, A]. `of`: at least one slope.
    """
    bar, equity, closed = course.bar, course.equity, course.closed
    of_net, of_equity, of_values = of.net, None, None
    if of.equity is not None:
        of_net, of_equity = plus(of_net, of.equity * equity), of.equity * closed.equity
    if of.weights is not None:
        of_values = of.weights / closed.equity
        of_net = plus(of_net, over_assets(of_values * weights).neg())

    # What costs take, they take from the net growth.
    of_costs = None if of_net is None else of_net.neg()
    of_values = plus(of_values, _of_close(market, course, of_costs, of.costs))
    of_filled = None if of_values is None else torch.addcmul(of_values, of_values, bar.move)
    of_filled = plus(of_filled, None if of_net is None else of_net * bar.move)
    of_traded, of_size = _of_order_costs(market, course, cost_factor, of_costs, of.costs)
    of_traded, of_equity = plus(of.turnover, of_traded), plus(of_equity, of_size)

    of_order = plus(of_filled, None if of_traded is None else of_traded * course.order.sign())
    assert of_order is not None  # every result depends on the order
    if hold is not None:
        of_order = of_order.masked_fill(hold, 0.0)
    # The order is the target's value without the position's, and adds up with it to what is held.
    of_position = of_order.neg() if of_filled is None else of_filled - of_order
    of_gap = of_position + _sum(of_net, over_assets(of_order * course.target))
    return of_order * course.opened.equity, torch.addcmul(of_position, of_gap, bar.gap), of_equity


def _of_close(
    market: Market, course: Course, of_costs: Tensor | None, own: Mapping[str, Tensor]
) -> Tensor | None:
    """Slopes of the costs at the close in the positions' values there, [N, A]."""
    slope: Tensor | None = None
    for cost in market.costs["close"]:
        of_cost = plus(of_costs, own.get(cost.kind))
        if cost.amount is funding_cost and of_cost is not None:
            due = of_cost * course.bar.funding
            slope = plus(slope, due if market.signed_funding else due * course.closed.positions.sign())
    return slope


def _of_order_costs(
    market: Market, course: Course, factor: Tensor | None, of_costs: Tensor | None, own: Mapping[str, Tensor]
) -> tuple[Tensor | None, Tensor | None]:
    """Slopes of the costs of an order in its size, [N, A], and in the account's equity, [N, 1]."""
    of_traded: Tensor | None = None
    of_equity: Tensor | None = None
    for cost in market.costs["order"]:
        of_cost = plus(of_costs, own.get(cost.kind))
        if of_cost is None:
            continue
        if factor is not None:
            of_cost = of_cost * factor.unsqueeze(1)
        if cost.amount is impact_cost:
            # x·√(x·e) has the slopes 1.5·√(x·e) and x·√(x·e)/2e.
            price = of_cost * course.bar.impact * (course.traded * course.equity).sqrt()
            of_traded = plus(of_traded, 1.5 * price)
            of_equity = 0.5 * over_assets(course.traded * price) / course.equity
            continue
        of_traded = plus(of_traded, of_cost * market.rates.costs[cost.kind])
        if cost.amount is spread_cost and course.bar.tick is not None:
            of_traded = plus(of_traded, of_cost * course.bar.tick)
    return of_traded, of_equity


def plus(one: Tensor | None, other: Tensor | None) -> Tensor | None:
    """Their sum; None is 0."""
    if one is None or other is None:
        return other if one is None else one
    return one + other


def _sum(one: Tensor | None, other: Tensor) -> Tensor:
    return other if one is None else one + other
