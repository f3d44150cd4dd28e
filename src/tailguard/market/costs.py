"""Costs of trading and holding. Amounts are shares of the equity before the step, [N, A] or, summed, [N, 1]."""

from __future__ import annotations

from typing import Literal, NamedTuple

import torch
from torch import Tensor

from tailguard.market.tables import Market


class Cost(NamedTuple):
    """A kind of cost. The simulator's books, metrics, backtests and stress tests all follow the table below."""

    kind: str
    """Its name in the books, in metrics and in backtests."""
    setting: str
    """Field of `MarketConfig` that it is proportional to, which stress tests multiply."""
    charged: Literal["order", "close", "liquidation"]
    """With the order at the open, on the position at the bar's close, or when an account is liquidated."""


COSTS = (
    Cost("fee", "fee", "order"),
    Cost("spread", "half_spread", "order"),
    Cost("impact", "impact", "order"),
    Cost("funding", "funding_rate", "close"),
    Cost("borrow", "borrow_rate", "close"),
    Cost("liquidation", "liquidation_fee", "liquidation"),
)
COST_KINDS = tuple(cost.kind for cost in COSTS)
ORDER_COSTS = tuple(cost.kind for cost in COSTS if cost.charged == "order")
CLOSE_COSTS = tuple(cost.kind for cost in COSTS if cost.charged == "close")


def over_assets(values: Tensor) -> Tensor:
    """Sum over the assets, [N, A] -> [N, 1]."""
    return values if values.shape[1] == 1 else values.sum(-1, keepdim=True)


def impact_cost(traded: Tensor, equity: Tensor, coefficient: Tensor) -> Tensor:
    """Square-root impact of all orders, [N, 1]: Σ |Δ|·Y·σ_day·√(order / daily volume) (Almgren 2005, Tóth 2011).

    `traded` is the absolute order as a share of equity, `coefficient` the impact of an order worth the starting
    capital, so an order of `traded · equity` capitals moves its price by `coefficient · √(traded · equity)`.
    """
    return over_assets(traded * coefficient * _root(traded * equity))


def _root(values: Tensor) -> Tensor:
    """√, with gradient 0 at 0: its slope is infinite there, and an order of size 0 would give 0·∞.

    The impact is proportional to x·√x, which is 0 with slope 0 at 0, whatever small number stands for √0.
    """
    if values.requires_grad:
        values = values.clamp(min=torch.finfo(values.dtype).tiny)
    return values.sqrt()


def funding_cost(value: Tensor, rate: Tensor, market: Market) -> Tensor:
    """Funding due at the bar's close on the position values there, [N, A] -> [N, 1]; below zero: received.

    Observed rates are paid by longs to shorts, an assumed rate is a cost to both.
    """
    return over_assets(rate * (value if market.signed_funding else value.abs()))


def borrow_cost(positions: Tensor, equity: Tensor, market: Market) -> Tensor:
    """Interest for one bar on short notional and on the cash that longs borrow, [N, 1].

    Short proceeds are collateral: they do not pay for longs.
    """
    if not market.charges_borrow:
        return torch.zeros_like(equity)
    short = over_assets(positions.clamp(max=0)).neg()
    long = over_assets(positions.clamp(min=0))
    return market.rates.borrow_per_bar * (short + (long - equity).clamp(min=0))
