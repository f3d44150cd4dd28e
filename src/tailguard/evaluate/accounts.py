"""Combine separate accounts: an agent that trades each symbol in its own account, shown as one capital."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from tailguard.evaluate.backtest import BacktestResult

if TYPE_CHECKING:
    from tailguard.data.bars import Accounts, Bars

Float = NDArray[np.float64]


def separate(bars: Bars, accounts: Accounts) -> list[Bars]:
    """The bars of each account: all symbols together, or one account per symbol."""
    if accounts == "portfolio" or len(bars.symbols) == 1:
        return [bars]
    return [bars.select(symbol) for symbol in bars.symbols]


def pooled(results: Sequence[BacktestResult]) -> BacktestResult:
    """One capital, split equally among the accounts at the start and never rebalanced.

    All fractions are of the whole. At a time for which only some accounts have bars, the others do not change.
    """
    if len(results) == 1:
        return results[0]
    time = np.unique(np.concatenate([result.time for result in results]))
    rows = [np.searchsorted(time, result.time) for result in results]

    def spread(account: int, values: Float, fill: float = 0.0) -> Float:
        whole = np.full((len(time), *values.shape[1:]), fill)
        whole[rows[account]] = values
        return whole

    growth = [spread(account, 1 + result.net, 1.0) for account, result in enumerate(results)]
    own = np.vstack([np.ones((1, len(results))), np.cumprod(np.stack(growth, axis=1), axis=0)])
    total = own.sum(1)
    share = own / np.where(total > 0, total, 1.0)[:, None]

    def summed(values: Sequence[Float]) -> Float:
        """Fractions of each account's equity before the bar as one fraction of the whole's."""
        columns = np.stack([spread(account, each) for account, each in enumerate(values)], axis=1)
        return np.asarray((share[:-1] * columns).sum(1))

    def side_by_side(values: Sequence[Float], weight: Float, fill: float) -> Float:
        return np.hstack([weight[:, [account]] * spread(account, each, fill) for account, each in enumerate(values)])

    throttles = [
        spread(account, result.throttle, 1.0) for account, result in enumerate(results) if result.throttle is not None
    ]
    free = [
        float(result.equity[-1] - 1) if result.unthrottled_return is None else result.unthrottled_return
        for result in results
    ]
    shielded = [spread(account, result.shielded.astype(np.float64)) for account, result in enumerate(results)]
    return BacktestResult(
        time=time,
        equity=total / len(results),
        targets=side_by_side([result.targets for result in results], share[:-1], np.nan),
        weights=side_by_side([result.weights for result in results], share[1:], 0.0),
        net=summed([result.net for result in results]),
        pnl=summed([result.pnl for result in results]),
        costs={kind: summed([result.costs[kind] for result in results]) for kind in results[0].costs},
        turnover=summed([result.turnover for result in results]),
        unfilled=summed([result.unfilled for result in results]),
        shielded=np.asarray(np.stack(shielded).any(0)),
        liquidated=any(result.liquidated for result in results),
        bars_per_year=results[0].bars_per_year,
        sessions=results[0].sessions,
        symbols=tuple(symbol for result in results for symbol in result.symbols),
        throttle=np.mean(throttles, axis=0) if throttles else None,
        unthrottled_return=float(np.mean(free))
        if any(each.unthrottled_return is not None for each in results)
        else None,
    )
