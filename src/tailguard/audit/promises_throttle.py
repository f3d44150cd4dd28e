"""A check of the throttle: its bound on the realised tail on every path, and the windows that a backtest counts."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping

import numpy as np
from numpy.typing import NDArray

from tailguard.audit.promises_trading import EPISODE, losing_agent
from tailguard.audit.registry import Measurement, at_most, none_of, register_check, within, worst
from tailguard.audit.subject import Subject
from tailguard.risk.throttle import Throttle

LIMIT, ALPHA, WINDOWS, WORST = 0.04, 0.05, 400, 0.6
"""Of the paths: the limit, its level, their length, and the largest loss of a window at full exposure."""
LIMITS = (-0.001, -0.02, -0.05)
"""Of the agents: one that stops trading, and two whose exposure is reduced by parts."""


class ByHand:
    """The throttle of risk/throttle.py once more, from its formulas."""

    def __init__(self, limit: float, alpha: float) -> None:
        self.alpha, self.aim = alpha, 0.95 * limit
        self.step = 0.1 / (self.cost(self.aim) - self.aim)
        self.standing = 1.3

    def cost(self, loss: float) -> float:
        """c = ν + (L − ν)₊/α with ν = d/2."""
        return self.aim / 2 + max(0.0, loss - self.aim / 2) / self.alpha

    def observe(self, loss: float) -> float:
        """The factor after a window with this loss."""
        self.standing = min(1.3, self.standing - self.step * (self.cost(loss) - self.aim))
        return min(1.0, max(0.0, self.standing))

    def bound(self, losses: NDArray[np.float64]) -> float:
        """d + (S/η + c_max)/T"""
        return self.aim + (1.3 / self.step + self.cost(float(losses.max()))) / len(losses)


def shortfall(losses: NDArray[np.float64], alpha: float) -> float:
    """Mean of the largest share α of the losses, of which there is a whole number."""
    return float(np.sort(losses)[-round(alpha * len(losses)) :].mean())


def paths(seed: int) -> Mapping[str, Callable[[float], float]]:
    """What a window loses at full exposure, given the factor that is in force."""
    draw = np.random.default_rng(seed)
    calm = iter(range(WINDOWS))
    return {
        "a loss beyond the limit in every window": lambda _: 2 * LIMIT,
        "heavy tails": lambda _: float(np.clip(0.03 * draw.standard_t(2), -WORST, WORST)),
        "a crash after every calm": lambda _: WORST if next(calm) % 23 == 22 else -0.001,
        "a crash whenever exposure is whole": lambda factor: WORST if factor >= 1 else -0.001,
    }


def wrong_paths(seed: int) -> Iterator[str]:
    """Paths on which the throttle's factors are not those by hand, or the realised tail exceeds the bound."""
    for name, loss_at in paths(seed).items():
        throttle, by_hand, losses = Throttle(-LIMIT, ALPHA), ByHand(LIMIT, ALPHA), np.zeros(WINDOWS)
        for window in range(WINDOWS):
            losses[window] = throttle.factor * loss_at(throttle.factor)
            throttle.observe(-losses[window])
            wanted = by_hand.observe(losses[window])
            if not math.isclose(throttle.factor, wanted, abs_tol=1e-12):
                yield f"{name}, window {window + 1}: factor {throttle.factor:.6f}, by hand {wanted:.6f}"
                break
        tail, bound = shortfall(losses, ALPHA), by_hand.bound(losses)
        if tail > bound:
            yield f"{name}: the worst windows lost {tail:.2%}, the bound is {bound:.2%}"


@register_check(
    "P11",
    "Does the throttle bound the realised tail on every path, and follow each window of a backtest once?",
    why="Calibration alone keeps a limit in half to two thirds of all cases: the throttle does the rest, and it is the "
    "one part of the promise that needs no assumption about the market.",
    remedy="See risk/throttle.py for the formulas, and decide in evaluate/decision.py for the windows.",
    fast=True,
)
def throttle_bounds_the_tail(subject: Subject) -> Measurement:
    gaps, acted = [0.0], [0.0]
    for limit in LIMITS:
        gap, share = _beside_by_hand(subject.seed, limit)
        gaps.append(gap)
        acted.append(share)
    return worst([
        none_of("paths on which the throttle is not that by hand, or breaks its bound", wrong_paths(subject.seed)),
        at_most("gap of a backtest's throttle to the one by hand, window by window", max(gaps), 1e-9),
        within("share of a backtest's bars in which it acts", max(acted), 0.1, 1.0),
    ])  # fmt: skip


def _beside_by_hand(seed: int, limit: float) -> tuple[float, float]:
    """Largest gap of a backtest's throttle to the one by hand, and the share of bars in which it acts."""
    agent, _, traded = losing_agent(seed, limit, length=200)
    assert agent.calibration is not None
    assert traded.throttle is not None  # the agent has one
    by_hand, factor, gap = ByHand(-limit, agent.calibration.alpha), 1.0, 0.0
    for first in range(0, len(traded.throttle), EPISODE):
        if first:
            factor = by_hand.observe(1 - traded.equity[first] / traded.equity[first - EPISODE])
        gap = max(gap, float(np.abs(traded.throttle[first : first + EPISODE] - factor).max()))
    return gap, float((traded.throttle < 1).mean())
