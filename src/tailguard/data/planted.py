"""The optimal log-growth of a trader who sees the planted state: a dynamic programme with costs.

The trader's state is (market state s, current weight w). A trade to the weight u costs `cost·|u − w|`, the next bar
returns R with a law that depends on s, and the weight drifts to `u·(1 + R) / (1 + u·R)`. The optimal policy is a
no-trade band for each s (Constantinides 1979; Davis & Norman 1990). It is found here by Howard's policy iteration on
a grid of weights, with a discount so close to one that the discounted optimum is the long-run one (Blackwell 1962).
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from tailguard.data.panel import Float
from tailguard.errors import TailguardError
from tailguard.validate import check_range

DISCOUNT = 1 - 1e-8
"""Discount per bar: the cost of the first trade is spread over 1e8 bars; the linear systems keep 8 digits."""
STEPS_PER_LEVERAGE = 80
"""Grid points between flat and full leverage."""
DRIFT_ROOM = 1.5
"""The grid reaches this multiple of the leverage: a short that loses drifts beyond it, until the next trade."""
IMPROVEMENT = 1e-10
"""Log-growth an action must add before it replaces another: above rounding, far below a basis point."""

MOST_ROUNDS = 1_000
"""Policy iteration converges in 5 to 60 rounds."""


@dataclass(frozen=True)
class ReturnLaw:
    """Law of the next bar's simple return in each of `S` market states, as `K` points, and how the states change."""

    returns: Float
    """[S, K]"""
    probability: Float
    """[K], the same for every state."""
    transition: Float
    """[S, S]; row: from, column: to."""


@dataclass(frozen=True)
class Optimum:
    """The growth-optimal policy and its performance, net of costs."""

    log_growth: float
    """Expected log-growth of equity, per bar."""
    mean: float
    """Expected simple return, per bar."""
    deviation: float
    """Standard deviation of the simple return, per bar."""
    turnover: float
    """Expected absolute change of weight, per bar."""
    low: Float
    """Lower end of the no-trade band in each market state, [S]."""
    high: Float
    """Upper end of the no-trade band in each market state, [S]."""
    bars_per_year: float

    @property
    def log_growth_per_year(self) -> float:
        """Expected log-growth per year; shares of the optimum refer to it, because log-growth is additive over time."""
        return self.log_growth * self.bars_per_year

    @property
    def growth_per_year(self) -> float:
        """The same compounded: growth of equity in the typical year, as a fraction."""
        return math.expm1(self.log_growth_per_year)

    @property
    def sharpe(self) -> float:
        """Annualised Sharpe ratio of the net simple return."""
        return self.mean / self.deviation * self.bars_per_year**0.5 if self.deviation > 0 else 0.0


@dataclass(frozen=True)
class _Programme:
    """Tables of the dynamic programme; `G` grid weights."""

    weights: Float
    """[G]"""
    trade: Float
    """Log-growth paid for trading from one weight to another, −inf where it is not allowed, [G, G]."""
    growth: Float
    """Expected log-growth of holding a weight over the next bar, [S, G]."""
    mean: Float
    """Expected simple return of the same, [S, G]."""
    square: Float
    """Expected squared simple return of the same, [S, G]."""
    drift: Float
    """Where a held weight ends after the bar, interpolated on the grid, [S, G, G]."""


def best_growth(
    law: ReturnLaw,
    *,
    cost: float,
    leverage: float = 1.0,
    holding: float = 0.0,
    allow_short: bool = True,
    bars_per_year: float,
) -> Optimum:
    """The largest long-run log-growth of a trader who sees the market state, and the policy that reaches it.

    `cost` is paid on every unit of weight traded (fee + half spread), `holding` per bar on every unit of weight held,
    long or short. A weight that has drifted beyond ±`leverage` is traded back at the next open.
    """
    check_range("leverage", leverage, low=0, low_open=True)
    # The worst return ruins a larger weight, and its log-growth is −inf: the optimum stays below it.
    leverage = min(leverage, 1 / (float(np.abs(law.returns).max()) + holding))
    check_range("cost", cost, low=0, high=0.5 / max(leverage, 1))
    check_range("holding", holding, low=0, high=0.01)
    programme = _tabulate(law, cost, leverage, holding, allow_short)
    hold = np.broadcast_to(np.arange(len(programme.weights)), programme.growth.shape)
    action = _improve(programme, np.zeros_like(programme.growth), law, hold)
    for _ in range(MOST_ROUNDS):
        value = _evaluate(programme, law, action)[0]
        better = _improve(programme, value - value[0, value.shape[1] // 2], law, action)
        if np.array_equal(better, action):
            return _summarise(programme, law, action, bars_per_year)
        action = better
    raise TailguardError(
        f"the planted optimum did not settle in {MOST_ROUNDS} rounds (cost {cost:g}, leverage {leverage:g})"
    )


def _tabulate(law: ReturnLaw, cost: float, leverage: float, holding: float, allow_short: bool) -> _Programme:
    points = round(DRIFT_ROOM * STEPS_PER_LEVERAGE)
    weights = np.arange(-points, points + 1, dtype=np.float64) * (leverage / STEPS_PER_LEVERAGE)
    size = len(weights)

    distance = np.abs(weights[None, :] - weights[:, None])
    reachable = (np.abs(weights) <= leverage * (1 + 1e-12)) & ((weights >= 0) | allow_short)
    allowed = np.broadcast_to(reachable, distance.shape)
    left = np.maximum(1 - cost * distance, 0)
    trade = np.log(left, out=np.full_like(left, -np.inf), where=allowed & (left > 0))

    net = weights[None, :, None] * law.returns[:, None, :] - holding * np.abs(weights)[None, :, None]  # [S, G, K]
    log_growth = np.log1p(net, out=np.full_like(net, -np.inf), where=net > -1)
    ended = weights[None, :, None] * (1 + law.returns[:, None, :]) / np.maximum(1 + net, 1e-12)
    position = np.clip((ended - weights[0]) / (weights[1] - weights[0]), 0, size - 1)
    cell = np.minimum(position.astype(np.int64), size - 2)
    share = position - cell
    drift = np.zeros((len(law.returns), size, size))
    state, weight = np.ogrid[: len(law.returns), :size]
    for point, probability in enumerate(law.probability):  # a node at a time: fancy += would drop repeated cells
        drift[state, weight, cell[..., point]] += probability * (1 - share[..., point])
        drift[state, weight, cell[..., point] + 1] += probability * share[..., point]
    return _Programme(
        weights, trade, log_growth @ law.probability, net @ law.probability, net**2 @ law.probability, drift
    )


def _improve(programme: _Programme, value: Float, law: ReturnLaw, action: NDArray[np.int64]) -> NDArray[np.int64]:
    """The action (index of the weight to trade to) with the largest value in each state, [S, G].

    The present action stays unless another is better by more than rounding.
    """
    ahead = np.einsum("sug,sg->su", programme.drift, law.transition @ value)
    worth = programme.trade[None] + (programme.growth + DISCOUNT * ahead)[:, None, :]  # [S, G, G]
    gain = worth.max(-1) - np.take_along_axis(worth, action[..., None], -1)[..., 0]
    return np.where(gain > IMPROVEMENT, worth.argmax(-1), action)


def _evaluate(programme: _Programme, law: ReturnLaw, action: NDArray[np.int64]) -> Float:
    """Discounted sums under a fixed policy of log-growth, net return, its square and turnover, [4, S, G]."""
    states, size = action.shape
    state = np.arange(states)[:, None]
    here = np.arange(size)[None, :]
    paid = programme.trade[here, action]
    fee = -np.expm1(paid)
    mean = programme.mean[state, action]
    gains = np.stack(
        [
            paid + programme.growth[state, action],
            mean - fee,
            programme.square[state, action] - 2 * fee * mean + fee**2,
            np.abs(programme.weights[action] - programme.weights[here]),
        ]
    )
    flow = programme.drift[state, action][:, :, None, :] * law.transition[:, None, :, None]  # [S, G, S, G]
    system = np.eye(states * size) - DISCOUNT * flow.reshape(states * size, states * size)
    return np.linalg.solve(system, gains.reshape(4, -1).T).T.reshape(4, states, size)


def _summarise(programme: _Programme, law: ReturnLaw, action: NDArray[np.int64], bars_per_year: float) -> Optimum:
    totals = _evaluate(programme, law, action)
    growth, mean, square, turnover = (1 - DISCOUNT) * totals[:, 0, totals.shape[2] // 2]  # a trader who starts flat
    held = [programme.weights[row == np.arange(len(row))] for row in action]
    return Optimum(
        log_growth=float(growth),
        mean=float(mean),
        deviation=float(np.sqrt(max(square - mean**2, 0.0))),
        turnover=float(turnover),
        low=np.array([band[0] for band in held]),
        high=np.array([band[-1] for band in held]),
        bars_per_year=bars_per_year,
    )


def follow(
    optimum: Optimum, state: NDArray[np.integer], gap: Float, move: Float, *, cost: float, holding: float
) -> Float:
    """The policy's orders along a path, one account over all assets: target weights [T, A], NaN where it holds.

    Row t is decided at the close of bar t from `state[t]` [T, A]; it fills at the open of bar t+1, after the return
    `gap[t + 1]` from the close before, and earns `move[t + 1]` from there to the close, [T, A] each. An account that
    the path ruins gives no further orders.
    """
    orders = np.full(gap.shape, np.nan)
    # Plain floats: the steps are sequential, and for a few assets array operations are slower.
    columns = (optimum.low[state][:-1], optimum.high[state][:-1], gap[1:], move[1:])
    weights = [0.0] * gap.shape[1]
    for row, bar in enumerate(zip(*(column.tolist() for column in columns), strict=True)):
        at_open = 1 + sum(weight * opened for weight, opened in zip(weights, bar[2], strict=True))
        equity, values = at_open, []
        for asset, (weight, low, high, opened, moved) in enumerate(zip(weights, *bar, strict=True)):
            target = min(max(weight, low), high)
            carried = filled = weight * (1 + opened)
            if target != weight:
                orders[row, asset] = target
                filled = target * at_open
            value = filled * (1 + moved)
            equity += value - filled - cost * abs(filled - carried) - holding * abs(value)
            values.append(value)
        if equity <= 0:
            break
        weights = [value / equity for value in values]
    return orders
