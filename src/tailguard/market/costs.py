"""The table of costs. The simulator's step and books, metrics, backtests, stress tests and reports all follow it.

A cost of one's own is one entry, from inside the package or from outside:

    def stamp_duty(rate: Tensor, fill: Fill) -> Tensor:
        return rate * fill.order.clamp(min=0)

    register_cost(Cost("stamp_duty", stamp_duty, charged="order", rate=0.005))

Amounts are shares of the equity before the bar, which equity then no longer has. A market reads the table when it is
built, so a cost must be registered before.
"""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import reduce
from typing import TYPE_CHECKING, Any, Generic, Literal, NamedTuple, TypeVar, get_args

import torch
from torch import Tensor

from tailguard.errors import ConfigError
from tailguard.validate import check_choice, check_range

if TYPE_CHECKING:
    from tailguard.market.config import MarketConfig
    from tailguard.market.tables import Bar, Market

ChargedAt = Literal["order", "close", "liquidation"]
"""With the order at the open, on the position at the bar's close, or when an account is liquidated."""

Number = TypeVar("Number", float, Tensor)
"""A number for each account: [N, 1], or a float for the one account of a backtest."""
Numbers = TypeVar("Numbers")
"""A number for each account and asset: [N, A], or A floats for the one account of a backtest."""


class Fill(NamedTuple, Generic[Number, Numbers]):
    """Orders as they fill at the open: what a cost charged with the `order` is computed from."""

    market: Market
    bar: Bar[Numbers]
    """Prices, volume and rates of the bar, by column."""
    equity: Number
    """Equity before the bar, as a multiple of the starting capital."""
    order: Numbers
    """Value bought (above 0) or sold (below 0), as a share of that equity, as are the amounts below."""
    traded: Numbers
    """Its absolute value."""
    turnover: Number
    """Its absolute value, all assets together."""


class Holding(NamedTuple, Generic[Number, Numbers]):
    """Positions held from the fill to the close: what a cost charged at the `close` is computed from."""

    market: Market
    bar: Bar[Numbers]
    equity: Number
    """Equity before the bar, as a multiple of the starting capital."""
    filled_equity: Number
    """Equity after the fill and its costs, as a share of that equity, as are the amounts below."""
    positions: Numbers
    """Signed values after the fill."""
    values: Numbers
    """Signed values at the close."""


class ForcedClose(NamedTuple):
    """Positions closed by force: what a cost charged in a `liquidation` is computed from."""

    market: Market
    positions: Tensor
    """Signed values at the prices of the close, [N, A]."""


@dataclass(frozen=True)
class Cost:
    """A kind of cost: its amount, when it is charged, and where its rate stands."""

    kind: str
    """Its name in the books, in metrics, in backtests and in reports."""
    amount: Callable[[Tensor, Any], Tensor]
    """Amount by rate and `Fill`, `Holding` or `ForcedClose`: [N, A], or [N, 1] for all assets together.

    A pure function of fixed shapes, differentiable where it is smooth. Only a cost charged at the close may be below
    zero: an income."""
    charged: ChargedAt
    rate: float = 0.0
    """Default of `MarketConfig.extra_costs[kind]`, for a cost without a setting of its own."""
    setting: str | None = None
    """Field of `MarketConfig` with its rate. Stress tests multiply that field, or the entry of `extra_costs`."""
    yearly: bool = False
    """Whether the rate is per year; `amount` is then given the rate per bar, or [N, 1] for the calendar time until the
    next bar where the market closes."""
    in_reach: bool = False
    """Whether the bound `Bar.reach` includes it, for a cost charged at the close."""
    plain: Callable[[Any, Any], float] | None = None
    """The same amount, of all assets together, for one account in plain floats, where backtests are to be fast.

    Without it a backtest steps the simulator itself, at a few times the cost per bar."""

    def __post_init__(self) -> None:
        if not re.fullmatch(r"[a-z][a-z0-9_]*", self.kind) or self.kind in RESERVED:
            raise ConfigError(
                f"cost {self.kind!r}: use lower case letters, digits and underscores, and none of the names that the "
                f"books hold already: {', '.join(sorted(RESERVED))}"
            )
        check_choice(f"cost {self.kind!r}: charged", self.charged, get_args(ChargedAt))
        check_range(f"cost {self.kind!r}: rate", self.rate, low=0, high=math.inf, high_open=True)

    def rate_in(self, config: MarketConfig) -> float:
        """Its rate under these settings."""
        if self.setting is None:
            return config.extra_costs.get(self.kind, self.rate)
        return float(getattr(config, self.setting))

    def rate_per_bar(self, config: MarketConfig, bars_per_year: float) -> float:
        """The rate that `amount` is given."""
        rate = self.rate_in(config)
        return rate / bars_per_year if self.yearly else rate


RESERVED = frozenset(
    {"net", "pnl", "shortfall", "turnover", "unfilled", "liquidated", "time", "equity", "drawdown"}
    | {"finite", "weights", "shielded", "exposure", "flips", "nonfinite_costs"}
)
"""Other names of the books, of a step's outcome and of the metrics `data/*`, which a cost would overwrite."""


def over_assets(values: Tensor) -> Tensor:
    """Sum over the assets, [N, A] -> [N, 1]; what is summed already stays."""
    return values if values.shape[1] == 1 else values.sum(-1, keepdim=True)


def total(amounts: Iterable[Tensor]) -> Tensor:
    """Their sum, from left to right."""
    return reduce(torch.add, amounts)


def charge(
    market: Market, moment: ChargedAt, basis: Fill[Tensor, Tensor] | Holding[Tensor, Tensor] | ForcedClose
) -> dict[str, Tensor]:
    """The market's costs of a moment by kind, [N, 1] each."""
    rates = market.rates.costs
    if isinstance(basis, Holding) and basis.bar.held is not None:
        held = basis.bar.held[:, :1]  # the same for all assets
        rates = rates | {cost.kind: rates[cost.kind] * held for cost in market.costs[moment] if cost.yearly}
    return {cost.kind: over_assets(cost.amount(rates[cost.kind], basis)) for cost in market.costs[moment]}


def turnover_cost(rate: Tensor, fill: Fill[Tensor, Tensor]) -> Tensor:
    """A rate on the traded notional, [N, 1]; the rate is [], or [A] where assets differ."""
    return over_assets(rate * fill.traded) if rate.dim() else rate * fill.turnover


def plain_turnover_cost(rate: float | list[float], fill: Fill[float, list[float]]) -> float:
    """`turnover_cost` of one account in floats."""
    if isinstance(rate, list):
        return sum([own * traded for own, traded in zip(rate, fill.traded, strict=True)])
    return rate * fill.turnover


def spread_cost(rate: Tensor, fill: Fill[Tensor, Tensor]) -> Tensor:
    """Half the spread on the traded notional, [N, 1]: the rate, or half a tick of the price where that is more."""
    cost = turnover_cost(rate, fill)
    return cost if fill.bar.tick is None else cost + over_assets(fill.bar.tick * fill.traded)


def plain_spread_cost(rate: float | list[float], fill: Fill[float, list[float]]) -> float:
    """`spread_cost` of one account in floats."""
    cost = plain_turnover_cost(rate, fill)
    if fill.bar.tick is None:
        return cost
    return cost + sum([tick * traded for tick, traded in zip(fill.bar.tick, fill.traded, strict=True)])


def impact_cost(_: Tensor, fill: Fill[Tensor, Tensor]) -> Tensor:
    """Square-root impact of all orders, [N, 1]: Σ |Δ|·Y·σ_day·√(order / daily volume) (Almgren 2005, Tóth 2011).

    The bar's coefficient, which holds the rate Y, is the impact of an order worth the starting capital, so an order of
    `traded · equity` capitals moves its price by `coefficient · √(traded · equity)`.
    """
    return over_assets(fill.traded * fill.bar.impact * _root(fill.traded * fill.equity))


def _root(values: Tensor) -> Tensor:
    """√, with gradient 0 at 0: its slope is infinite there, and an order of size 0 would give 0·∞.

    The impact is proportional to x·√x, which is 0 with slope 0 at 0, whatever small number stands for √0.
    """
    if values.requires_grad:
        values = values.clamp(min=torch.finfo(values.dtype).tiny)
    return values.sqrt()


def plain_impact_cost(_: float, fill: Fill[float, list[float]]) -> float:
    """`impact_cost` of one account in floats."""
    cost = 0.0
    for traded, coefficient in zip(fill.traded, fill.bar.impact, strict=True):
        cost += traded * coefficient * math.sqrt(traded * fill.equity)
    return cost


def funding_cost(_: Tensor, holding: Holding[Tensor, Tensor]) -> Tensor:
    """Funding due at the bar's close on the position values there, [N, 1]; below zero: received.

    The bar holds the rate. Observed rates are paid by longs to shorts, an assumed rate is a cost to both.
    """
    values = holding.values
    return over_assets(holding.bar.funding * (values if holding.market.signed_funding else values.abs()))


def plain_funding_cost(_: float, holding: Holding[float, list[float]]) -> float:
    """`funding_cost` of one account in floats."""
    signed, cost = holding.market.signed_funding, 0.0
    for value, rate in zip(holding.values, holding.bar.funding, strict=True):
        cost += rate * (value if signed else abs(value))
    return cost


def borrow_cost(rate: Tensor, holding: Holding[Tensor, Tensor]) -> Tensor:
    """Interest for one bar on short notional and on the cash that longs borrow, [N, 1].

    Short proceeds are collateral: they do not pay for longs.
    """
    if not holding.market.charges_borrow:
        return torch.zeros_like(holding.filled_equity)
    short = over_assets(holding.positions.clamp(max=0)).neg()
    long = over_assets(holding.positions.clamp(min=0))
    own = holding.market.rates.short_borrow
    if own is not None:
        own = own if holding.bar.held is None else own * holding.bar.held
        lent = over_assets(own * holding.positions.clamp(max=0)).neg()
        return lent + rate * (long - holding.filled_equity).clamp(min=0)
    return rate * (short + (long - holding.filled_equity).clamp(min=0))


def plain_borrow_cost(rate: float, holding: Holding[float, list[float]]) -> float:
    """`borrow_cost` of one account in floats."""
    if not holding.market.charges_borrow:
        return 0.0
    own = holding.market.rates.short_borrow
    if own is not None:
        return _plain_own_borrow(rate, own.tolist(), holding)
    long = short = 0.0
    for position in holding.positions:
        if position > 0:
            long += position
        else:
            short -= position
    return rate * (short + max(long - holding.filled_equity, 0.0))


def _plain_own_borrow(rate: float, own: list[float], holding: Holding[float, list[float]]) -> float:
    """`plain_borrow_cost` where shorts of each asset have a rate of their own."""
    held = 1.0 if holding.bar.held is None else holding.bar.held[0]
    long = sum([max(position, 0.0) for position in holding.positions])
    lent = sum([each * max(-position, 0.0) for each, position in zip(own, holding.positions, strict=True)])
    return lent * held + rate * max(long - holding.filled_equity, 0.0)


def liquidation_cost(rate: Tensor, close: ForcedClose) -> Tensor:
    """A rate on the notional closed by force, [N, 1]."""
    return rate * over_assets(close.positions.abs())


BUILT_IN = (
    Cost("fee", turnover_cost, "order", setting="fee", plain=plain_turnover_cost),
    Cost("spread", spread_cost, "order", setting="half_spread", plain=plain_spread_cost),
    Cost("impact", impact_cost, "order", setting="impact", plain=plain_impact_cost),
    Cost("funding", funding_cost, "close", setting="funding_rate", in_reach=True, plain=plain_funding_cost),
    Cost("borrow", borrow_cost, "close", setting="borrow_rate", yearly=True, in_reach=True, plain=plain_borrow_cost),
    Cost("liquidation", liquidation_cost, "liquidation", setting="liquidation_fee"),
)
COSTS: dict[str, Cost] = {cost.kind: cost for cost in BUILT_IN}
"""Every registered cost by kind. The books add them up in the order of their moments, and in this order within one."""


def register_cost(cost: Cost, *, replace: bool = False) -> Cost:
    """Add a cost to every market that is built from now on.

    `replace`: allow a kind that is already registered, as when a notebook cell runs twice.
    """
    from tailguard.market.config import MarketConfig  # which reads the table

    if cost.kind in COSTS and not replace:
        raise ConfigError(f"cost {cost.kind!r} is registered already; choose another name, or pass replace=True")
    settings = [field.name for field in dataclasses.fields(MarketConfig)]
    if cost.setting is not None and cost.setting not in settings:
        raise ConfigError(
            f"cost {cost.kind!r}: setting {cost.setting!r} is not one of MarketConfig ({', '.join(settings)}). "
            f"Leave it out and give a rate, which market.extra_costs.{cost.kind} then sets"
        )
    COSTS[cost.kind] = cost
    return cost


def unregister_cost(kind: str) -> None:
    """Remove a registered cost. Markets that are built already keep it."""
    if kind not in COSTS or COSTS[kind] in BUILT_IN:
        own = [name for name, cost in COSTS.items() if cost not in BUILT_IN]
        raise ConfigError(f"cost {kind!r}: only costs that were registered can be removed: {', '.join(own) or 'none'}")
    del COSTS[kind]


def costs_by_moment() -> Mapping[ChargedAt, tuple[Cost, ...]]:
    """The registered costs by the moment at which they are charged."""
    return {moment: tuple(cost for cost in COSTS.values() if cost.charged == moment) for moment in get_args(ChargedAt)}


def cost_kinds(moment: ChargedAt | None = None) -> tuple[str, ...]:
    """Names of the registered costs in the order of the books; those of one moment, or all."""
    table = costs_by_moment()
    return tuple(cost.kind for name, costs in table.items() if moment in (None, name) for cost in costs)


def extra_rates() -> dict[str, float]:
    """Default rates of the registered costs that have no setting of their own, by kind."""
    return {kind: cost.rate for kind, cost in COSTS.items() if cost.setting is None}
