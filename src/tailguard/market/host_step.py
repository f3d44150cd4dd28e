"""A bar of few accounts on a CPU, in NumPy, with its slopes written out by hand.

At a few hundred accounts an operation of PyTorch takes about twice as long as NumPy's, and automatic differentiation
gives each of the fifty operations of a step a node, which takes as long again. The numbers are those of
`simulator.step`, bit by bit. What it does not do is left to the simulator: orders beyond their caps, liquidations,
lots, interest on shorts and borrowed cash, and costs of one's own.

In the names of the simulator's page, for a loss with slopes of_net, of_equity and of_weights in the results:

    weights = values / e            of_values = of_weights / e,  of_net −= Σ of_values·weights
    equity  = equity·(1 + net)      of_net   += of_equity·equity
    net     = Σ w·gap + Σ v·move − Σ costs
    values  = v·(1 + move)
    v       = w·(1 + gap) + Δ       Δ = target·e₀ − w·(1 + gap)
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import reduce
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from tailguard.device_ops import readable
from tailguard.market.costs import borrow_cost, funding_cost, impact_cost, spread_cost, turnover_cost
from tailguard.market.state import MarketState
from tailguard.market.tables import Bar, Market, bar_of

Array = NDArray[Any]

MOST_NUMBERS = 8_192
"""Accounts times assets up to which NumPy is faster; beyond, PyTorch's operations are as fast and use more threads."""

KNOWN: tuple[Callable[..., Tensor], ...] = (turnover_cost, spread_cost, impact_cost, funding_cost, borrow_cost)
"""Amounts of costs that are computed here; that of interest only where none is due."""


class HostStep(NamedTuple):
    """A step's results and what its slopes need; [N, A], or [N, 1] where all assets are together."""

    target: Array
    gap: Array
    move: Array
    impact: Array
    funding: Array
    tick: Array | None
    hold: Array | None
    cost_factor: Array | None
    equity: Array
    """Before the bar."""
    opened: Array
    """Equity at the open."""
    order: Array
    traded: Array
    turnover: Array
    values: Array
    """Of the positions at the close."""
    pnl: Array
    costs: dict[str, Array]
    """Costs by kind, without those of liquidations."""
    net: Array
    closed: Array
    """Equity at the close, as a share of that before the bar."""
    weights: Array


class StepSlopes(NamedTuple):
    """Slopes of a loss in what a step returns, [N, 1], in the weights [N, A]; None: 0."""

    equity: Array | None = None
    weights: Array | None = None
    net: Array | None = None
    turnover: Array | None = None
    costs: Mapping[str, Array] = {}


def can_step(market: Market, target: Tensor) -> bool:
    """Whether `host_step` may be tried."""
    charged = (*market.costs["order"], *market.costs["close"])
    return (
        target.numel() <= MOST_NUMBERS
        and readable(target)
        and not market.charges_borrow
        and "lot" not in market.columns
        and all(cost.amount in KNOWN for cost in charged)
    )


def host_step(
    market: Market, state: MarketState, row: Tensor, target: Tensor, hold: Tensor | None, cost_factor: Tensor | None
) -> HostStep | None:
    """A step to this row's close, arguments as of `simulator.step`; None where some order or account asks for more."""
    rates = market.rates
    bar: Bar[Array] = bar_of(market.columns, list(market.table.index_select(1, row).numpy()))
    held, wished, equity = array(state.weights), array(target), array(state.equity)[:, None]
    gap_gain = held * bar.gap
    gap_pnl = over_assets(gap_gain)
    opened, positions = gap_pnl + 1, held + gap_gain
    order = wished * opened - positions
    fixed = None if hold is None else array(hold)
    if fixed is not None:
        order[fixed] = 0
    traded = np.abs(order)
    if (traded > bar.capacity / np.maximum(equity, rates.tiny.numpy())).any():
        return None
    turnover, costs, factor = over_assets(traded), dict[str, Array](), None
    if cost_factor is not None:
        factor = array(cost_factor)[:, None]
    for cost in market.costs["order"]:
        if cost.amount is impact_cost:
            # A root of PyTorch's may differ from NumPy's in its last digit.
            amount = over_assets(traded * bar.impact * torch.from_numpy(traded * equity).sqrt().numpy())
        else:
            amount = _of_turnover(rates.costs[cost.kind].numpy(), traded, turnover)
            if cost.amount is spread_cost and bar.tick is not None:
                amount = amount + over_assets(bar.tick * traded)
        costs[cost.kind] = amount if factor is None else amount * factor
    paid: Array = reduce(np.add, costs.values())
    filled_equity, filled = opened - paid, positions + order
    gain = filled * bar.move
    values = filled + gain
    for cost in market.costs["close"]:
        if cost.amount is funding_cost:
            costs[cost.kind] = over_assets(bar.funding * (values if market.signed_funding else np.abs(values)))
            paid = paid + costs[cost.kind]
        else:  # interest, of which none is due
            costs[cost.kind] = np.zeros_like(paid)
    pnl = gap_pnl + over_assets(gain)
    net = pnl - paid
    margin = rates.maintenance_margin.numpy()
    floor = filled_equity - over_assets(np.abs(filled) * bar.reach) - margin.max() * turnover
    if (floor <= rates.slack.numpy()).any():
        return None
    closed = net + 1
    return HostStep(
        wished, bar.gap, bar.move, bar.impact, bar.funding, bar.tick, fixed, factor, equity, opened, order, traded,
        turnover, values, pnl, costs, net, closed, values / closed,
    )  # fmt: skip


def slopes_before(market: Market, step: HostStep, of: StepSlopes) -> tuple[Array, Array, Array]:
    """Slopes in the target and the weights, [N, A], and in the equity that a step began with, [N, 1]."""
    nothing = np.zeros_like(step.net)
    of_net = nothing if of.net is None else of.net
    of_equity, of_values = nothing, np.zeros_like(step.values)
    if of.equity is not None:
        of_net, of_equity = of_net + of.equity * step.equity, of.equity * step.closed
    if of.weights is not None:
        of_values = of.weights / step.closed
        of_net = of_net - over_assets(of_values * step.weights)

    # What costs take, they take from the net growth.
    for cost in market.costs["close"]:
        if cost.amount is funding_cost:
            due = _of_cost(of_net, of, cost.kind) * step.funding
            of_values = of_values + (due if market.signed_funding else due * np.sign(step.values))
    of_filled = of_values + (of_values + of_net) * step.move
    of_traded: Array = nothing if of.turnover is None else of.turnover
    for cost in market.costs["order"]:
        of_cost = _of_cost(of_net, of, cost.kind)
        if step.cost_factor is not None:
            of_cost = of_cost * step.cost_factor
        if cost.amount is impact_cost:
            # x·√(x·e) has the slopes 1.5·√(x·e) and x·√(x·e)/2e.
            price = of_cost * step.impact * np.sqrt(step.traded * step.equity)
            of_traded = of_traded + 1.5 * price
            of_equity = of_equity + 0.5 * over_assets(step.traded * price) / step.equity
            continue
        of_traded = of_traded + of_cost * market.rates.costs[cost.kind].numpy()
        if cost.amount is spread_cost and step.tick is not None:
            of_traded = of_traded + of_cost * step.tick
    of_order = of_filled + of_traded * np.sign(step.order)
    if step.hold is not None:
        of_order[step.hold] = 0
    # The order is the target's value without the position's, and adds up with it to what is held.
    of_position = of_filled - of_order
    of_gap = of_position + (of_net + over_assets(of_order * step.target))
    return of_order * step.opened, of_position + of_gap * step.gap, of_equity


def array(values: Tensor) -> Array:
    """The numbers of a tensor on a CPU, in the same memory."""
    return values.detach().numpy()


def over_assets(values: Array) -> Array:
    """Sum over the assets, [N, A] -> [N, 1]; by PyTorch, whose order of additions gives the simulator's last digit."""
    if values.shape[1] == 1:
        return values
    total: Array = torch.from_numpy(values).sum(-1, keepdim=True).numpy()
    return total


def _of_turnover(rate: Array, traded: Array, turnover: Array) -> Array:
    return over_assets(rate * traded) if rate.ndim else rate * turnover


def _of_cost(of_net: Array, of: StepSlopes, kind: str) -> Array:
    """Slope in a cost: what the net growth loses by it, and its own."""
    return of.costs[kind] - of_net if kind in of.costs else -of_net
