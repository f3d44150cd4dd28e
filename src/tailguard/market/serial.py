"""One account, bar by bar, in plain numbers: the simulator's step without the overhead of tensors of one element.

A policy that observes its own account must be evaluated bar by bar, so a backtest cannot be one batch. `SerialAccount`
carries equity and weights from bar to bar; `simulator.step` over all bars at once then computes the books, and
`check_agreement` compares the two. Formulas of costs in floats stand beside those in tensors, in `market.costs`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch

from tailguard.errors import TailguardError
from tailguard.market import simulator
from tailguard.market.costs import Cost, Fill, Holding
from tailguard.market.simulator import LOT_ROUNDING, NO_LIMIT
from tailguard.market.state import MarketState
from tailguard.market.tables import Bar, Market, bar_of


class SerialAccount:
    """Equity and weights of one account after the close of bar `row`, in float64. It starts flat with equity 1."""

    def __init__(self, market: Market, row: int) -> None:
        self.row = row
        self.equity = 1.0
        self.weights: list[float] = [0.0] * market.assets
        self.unfilled: list[float] = [0.0] * market.assets
        """Unfilled part of each order in the last bar, as a share of the equity before it."""
        self.read(market)

    def read(self, market: Market) -> None:
        """Trade these bars from now on: those so far and new ones after them."""
        self._market = market
        # Rows first, so that a bar is one contiguous block.
        self._bars = market.table.permute(1, 0, 2).double().contiguous().numpy()
        rates = market.rates
        self._maintenance_margin, self._slack, self._tiny = (
            float(rate.amax()) for rate in (rates.maintenance_margin, rates.slack, rates.tiny)
        )
        due = (*market.costs["order"], *market.costs["close"])

        def rate_of(cost: Cost) -> Any:
            """A float, or a list of A of them where assets differ."""
            return rates.costs[cost.kind].tolist()

        # One cost without a formula in floats, and every bar is left to the simulator.
        self._is_plain = all(cost.plain is not None for cost in due)
        self._order_costs, self._unbounded_costs, self._close_costs = (
            tuple((cost.plain, rate_of(cost), cost.yearly) for cost in costs if cost.plain is not None)
            for costs in (
                market.costs["order"],
                [cost for cost in market.costs["close"] if not cost.in_reach],
                market.costs["close"],
            )
        )

    def step(self, target: Sequence[float]) -> bool:
        """Trade to the target weights [A] at the next open, NaN to hold, and advance to the next close.

        The formulas, and their order, are those of `simulator.step`. Returns whether the account was liquidated.
        """
        bar: Bar[list[float]] = bar_of(self._market.columns, self._bars[self.row + 1].tolist())
        equity, weights = self.equity, self.weights
        gap_pnl = sum([weight * jump for weight, jump in zip(weights, bar.gap, strict=True)])
        opened = gap_pnl + 1.0
        room = max(equity, self._tiny)
        turnover = gain_sum = at_risk = 0.0
        orders, trades, positions, values = [], [], [], []
        unfilled = [0.0] * len(weights)
        for asset, weight in enumerate(weights):
            position = weight + weight * bar.gap[asset]
            order = traded = 0.0
            if target[asset] == target[asset]:  # NaN, which is not equal to itself, holds the position
                wanted = target[asset] * opened - position
                traded = min(abs(wanted), bar.capacity[asset] / room)
                order = math.copysign(traded, wanted)
                unfilled[asset] = wanted - order
                if bar.lot is not None and bar.lot[asset] > 0:
                    size = min(bar.lot[asset] / room, NO_LIMIT)
                    traded = math.floor(traded / max(size, self._tiny) + LOT_ROUNDING) * size
                    order = math.copysign(traded, wanted)
                turnover += traded
                position += order
            gain = position * bar.move[asset]
            gain_sum += gain
            at_risk += abs(position) * bar.reach[asset]
            orders.append(order)
            trades.append(traded)
            positions.append(position)
            values.append(position + gain)
        self.unfilled = unfilled
        if not self._is_plain:
            return self._exact_step(target)
        fill = Fill(self._market, bar, equity, orders, trades, turnover)
        trading_cost = 0.0
        for amount, rate, _ in self._order_costs:
            trading_cost += amount(rate, fill)
        filled = opened - trading_cost
        holding = Holding(self._market, bar, equity, filled, positions, values)
        floor = filled - at_risk - self._maintenance_margin * turnover
        # Yearly rates are due for the calendar time until the next bar, where the market closes.
        held = 1.0 if bar.held is None else bar.held[0]
        for amount, rate, yearly in self._unbounded_costs:
            floor -= max(amount(rate * held if yearly else rate, holding), 0.0)
        if floor <= self._slack:
            return self._exact_step(target)
        paid = trading_cost
        for amount, rate, yearly in self._close_costs:
            paid += amount(rate * held if yearly else rate, holding)
        net = gap_pnl + gain_sum - paid
        closed = net + 1.0
        self.row += 1
        self.equity = equity + equity * net
        self.weights = [value / closed for value in values]
        return False

    def _exact_step(self, target: Sequence[float]) -> bool:
        """The bar by the simulator itself: the margin may run out (rare), or a cost has no formula in floats."""
        dtype = self._market.dtype
        wanted = torch.tensor([list(target)], dtype=dtype)
        state = MarketState(
            torch.tensor([self.row]),
            torch.tensor([self.equity], dtype=dtype),
            torch.tensor([self.weights], dtype=dtype),
        )
        state, transition = simulator.step(self._market, state, wanted.nan_to_num(), wanted.isnan())
        self.row += 1
        self.equity = float(state.equity)
        self.weights = state.weights[0].tolist()
        return bool(transition.liquidated)


def check_agreement(serial: MarketState, batch: MarketState) -> None:
    """Raise unless the accounts carried bar by bar are those of the simulator, to rounding."""
    tolerance = 1e-9 if batch.equity.dtype == torch.float64 else 1e-4
    equal = torch.isclose(serial.equity, batch.equity, rtol=tolerance, atol=tolerance, equal_nan=True)
    equal &= torch.isclose(serial.weights, batch.weights, rtol=tolerance, atol=tolerance, equal_nan=True).all(-1)
    if not equal.all():
        first = int((~equal).nonzero()[0])
        raise TailguardError(
            f"bar {int(batch.row[first]) + 1}: the account carried bar by bar has equity {float(serial.equity[first])} "
            f"and weights {serial.weights[first].tolist()}, the simulator {float(batch.equity[first])} and "
            f"{batch.weights[first].tolist()}. market/serial.py must follow market/simulator.py"
        )
