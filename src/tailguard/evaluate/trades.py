"""Round trips: P&L of each position, net of costs, from its first fill until it is closed or reversed.

A trade is the time in which the position in one symbol keeps its side; resizing it does not end it. It begins at the
open of the bar that filled it and ends at the open that closed or reversed it, or inside the bar that liquidated it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from tailguard.errors import ConfigError
from tailguard.market.costs import cost_kinds

if TYPE_CHECKING:
    from tailguard.data.panel import Panel
    from tailguard.evaluate.backtest import BacktestResult

Float = NDArray[np.float64]

FLAT = 1e-9
"""Share of equity below which a position counts as closed: rounding."""


@dataclass(frozen=True)
class Trade:
    """One round trip. Money is in multiples of the starting capital."""

    symbol: str
    side: str
    """long or short."""
    entry_time: int
    """Open of the bar in which it was first filled, milliseconds UTC."""
    exit_time: int | None
    """Open of the bar that closed or reversed it; None while it is open at the end of the record."""
    bars: int
    """Bars held."""
    entry_price: float
    exit_price: float
    """Open prices of these bars; for an open trade, and a liquidated one, the last close."""
    size: float
    """Largest position, as a share of equity at the fill."""
    pnl: float
    """Net of all costs."""
    costs: float
    """Its share of all costs."""
    return_: float
    """`pnl` over the equity before the entry."""


def round_trips(result: BacktestResult, panel: Panel) -> list[Trade]:
    """Every trade of a backtest in the order of entry. Together they earned `equity[-1] − 1`, the whole record.

    `panel`: the bars that the result was computed on.

    A position's gain is known from weights and prices. Costs of orders go to the symbols by what each traded, costs at
    the close by the value held, and the cost of a liquidation by the value held before it. With one symbol that is
    exact; with several, it is exact for costs proportional to size, and impact and observed funding are approximate.
    """
    books = _Books.of(result, panel)
    trades = [trade for asset in range(len(result.symbols)) for trade in _trades_of(books, result, asset)]
    return sorted(trades, key=lambda trade: (trade.entry_time, trade.symbol))


@dataclass(frozen=True)
class _Books:
    """Every bar's money by symbol, [T, A] each, in multiples of the starting capital."""

    open: Float
    close: Float
    filled: Float
    """Position after the fill, as a share of the equity before the bar."""
    before_open: Float
    """P&L of the position before the open: the gap, and the costs of closing it."""
    before_costs: Float
    """The costs in it."""
    after_open: Float
    """P&L of the position after the fill until the close."""
    after_costs: Float

    @classmethod
    def of(cls, result: BacktestResult, panel: Panel) -> _Books:
        rows = np.searchsorted(panel.time, result.time)
        fits = panel.symbols == result.symbols and rows.max() < panel.rows
        if not fits or (panel.time[rows] != result.time).any() or rows.min() < 1:
            raise ConfigError("trades: the result was not computed on these bars; pass the bars it was backtested on")
        opened, close = panel.open[rows], panel.close[rows]
        gap, move = opened / panel.close[rows - 1] - 1, close / opened - 1
        held = np.vstack([np.zeros((1, len(result.symbols))), result.weights[:-1]])
        at_open = held * (1 + gap)
        filled = result.weights * (1 + result.net)[:, None] / (1 + move)
        gap_gain, move_gain = held * gap, filled * move
        # A liquidation leaves no weight: the position is the target, or the one before.
        unexplained = result.pnl - (gap_gain + move_gain).sum(1)
        forced = (np.abs(result.weights).sum(1) <= FLAT) & (np.abs(unexplained) > FLAT)
        wanted = np.where(np.isnan(result.targets), at_open, result.targets * (1 + gap_gain.sum(1))[:, None])
        filled = np.where(forced[:, None], wanted, filled)
        move_gain = np.where(forced[:, None], _share(wanted) * unexplained[:, None], move_gain)
        # Net return beyond gains and costs: the debt of a forced close, which the exchange bears.
        paid = sum(result.costs.values(), np.zeros(len(result.net)))
        move_gain += _share(filled) * (result.net - result.pnl + paid)[:, None]

        reduced = np.where(at_open * filled > 0, np.maximum(np.abs(at_open) - np.abs(filled), 0), np.abs(at_open))
        traded = np.where(at_open * filled > 0, np.abs(filled - at_open), np.abs(filled) + np.abs(at_open))
        of_orders = [result.costs[kind] for kind in cost_kinds("order") if kind in result.costs]
        trading = sum(of_orders, np.zeros(len(paid)))
        per_symbol = _share(traded) * trading[:, None]
        of_closing = np.divide(reduced, traded, out=np.zeros_like(traded), where=traded > 0) * per_symbol
        of_holding = per_symbol - of_closing + _share(filled) * (paid - trading)[:, None]
        money = result.equity[:-1, None]
        return cls(
            opened,
            close,
            filled,
            money * (gap_gain - of_closing),
            money * of_closing,
            money * (move_gain - of_holding),
            money * of_holding,
        )


def _share(values: Float) -> Float:
    """Of each row's sum of sizes, [T, A]; in equal parts where there is none."""
    size = np.abs(values)
    total = size.sum(1, keepdims=True)
    equal = np.full_like(size, 1 / size.shape[1])
    return np.asarray(np.divide(size, total, out=equal, where=total > 0))


def _trades_of(books: _Books, result: BacktestResult, asset: int) -> list[Trade]:
    filled = books.filled[:, asset]
    side = np.where(np.abs(filled) > FLAT, np.sign(filled), 0).astype(int)
    begins = np.flatnonzero(np.diff(side, prepend=0))
    ends = np.append(begins[1:], len(side))[: len(begins)]  # an account that never held anything has no end either
    trades = []
    for begin, end in zip(begins, ends, strict=True):
        if side[begin] == 0:
            continue
        is_open = end == len(side) and abs(result.weights[-1, asset]) > FLAT
        # P&L before the open of the bar after the last one still belongs to the trade.
        until = min(end + 1, len(side))
        own, other = slice(begin, end), slice(begin + 1, until)
        closed_inside = abs(result.weights[end - 1, asset]) <= FLAT
        by_order = end < len(side) and not closed_inside
        last = end if by_order else end - 1
        pnl = books.after_open[own, asset].sum() + books.before_open[other, asset].sum()
        costs = books.after_costs[own, asset].sum() + books.before_costs[other, asset].sum()
        trades.append(
            Trade(
                symbol=result.symbols[asset],
                side="long" if side[begin] > 0 else "short",
                entry_time=int(result.time[begin]),
                exit_time=None if is_open else int(result.time[last]),
                bars=int(end - begin),
                entry_price=float(books.open[begin, asset]),
                exit_price=float(books.open[end, asset] if by_order else books.close[end - 1, asset]),
                size=float(np.abs(filled[own]).max()),
                pnl=float(pnl),
                costs=float(costs),
                return_=float(pnl / result.equity[begin]) if result.equity[begin] > 0 else 0.0,
            )
        )
    return trades
