"""One account, bar by bar, in plain numbers: the simulator's step without the overhead of tensors of one element.

A policy that observes its own account must be evaluated bar by bar, so a backtest cannot be one batch. `SerialAccount`
carries equity and weights from bar to bar; `simulator.step` over all bars at once then computes the books, and
`check_agreement` compares the two.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from tailguard.errors import TailguardError
from tailguard.market import simulator
from tailguard.market.state import MarketState
from tailguard.market.tables import Market


class SerialAccount:
    """Equity and weights of one account after the close of bar `row`, in float64. It starts flat with equity 1."""

    def __init__(self, market: Market, row: int) -> None:
        self.row = row
        self.equity = 1.0
        self.weights: list[float] = [0.0] * market.assets
        self.unfilled: list[float] = [0.0] * market.assets
        """Unfilled part of each order in the last bar, as a share of the equity before it."""
        self._market = market
        self._bars = market.table.permute(1, 0, 2).double().contiguous().numpy()
        rates = market.rates
        self._fee, self._half_spread = float(rates.fee), float(rates.half_spread)
        self._maintenance_margin, self._slack = float(rates.maintenance_margin), float(rates.slack)
        self._borrow_per_bar, self._tiny = float(rates.borrow_per_bar), float(rates.tiny)

    def step(self, target: Sequence[float]) -> bool:
        """Trade to the target weights [A] at the next open, NaN to hold, and advance to the next close.

        The formulas, and their order, are those of `simulator.step`. Returns whether the account was liquidated.
        """
        gap, move, _, _, coefficient, capacity, funding_rate, reach = self._bars[self.row + 1].tolist()
        equity, weights = self.equity, self.weights
        gap_pnl = sum([weight * jump for weight, jump in zip(weights, gap, strict=True)])
        opened = gap_pnl + 1.0
        room = max(equity, self._tiny)
        turnover = impact = gain_sum = funding = at_risk = long = short = 0.0
        values, unfilled = [], [0.0] * len(weights)
        for asset, weight in enumerate(weights):
            position = weight + weight * gap[asset]
            if target[asset] == target[asset]:
                wanted = target[asset] * opened - position
                traded = min(abs(wanted), capacity[asset] / room)
                turnover += traded
                impact += traded * coefficient[asset] * math.sqrt(traded * equity)
                order = math.copysign(traded, wanted)
                unfilled[asset] = wanted - order
                position += order
            gain = position * move[asset]
            value = position + gain
            gain_sum += gain
            funding += funding_rate[asset] * (value if self._market.signed_funding else abs(value))
            at_risk += abs(position) * reach[asset]
            if position > 0:
                long += position
            else:
                short -= position
            values.append(value)
        trading_cost = self._fee * turnover + self._half_spread * turnover + impact
        self.unfilled = unfilled
        filled = opened - trading_cost
        if filled - at_risk - self._maintenance_margin * turnover <= self._slack:
            return self._exact_step(target)
        borrow = 0.0
        if self._market.charges_borrow:
            borrow = self._borrow_per_bar * (short + max(long - filled, 0.0))
        net = gap_pnl + gain_sum - (trading_cost + funding + borrow)
        closed = net + 1.0
        self.row += 1
        self.equity = equity + equity * net
        self.weights = [value / closed for value in values]
        return False

    def _exact_step(self, target: Sequence[float]) -> bool:
        """A bar in which the margin may run out: rare, so the simulator itself handles it."""
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
