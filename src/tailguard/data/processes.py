"""Random processes in time, vectorised: the building blocks of the synthetic market.

All take their randomness as arguments and depend on the past only, so a longer draw starts with the shorter one, bit
for bit. Times are in hours, `hours` is the length of a bar.
"""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray

from tailguard.data.panel import Float


def autoregression(normal: Float, *, size: float, relaxation: float, hours: float) -> Float:
    """Stationary Gaussian AR(1), [T]: standard deviation `size`, correlation exp(−t / relaxation).

    Summed by doubling, x ← x + φ^(2^k)·shift(x, 2^k): log₂ T vector operations instead of a loop over bars.
    """
    decay = math.exp(-hours / relaxation)
    path = size * math.sqrt(1 - decay**2) * normal
    path[0] = size * normal[0]
    step = 1
    while step < len(path) and decay > 1e-18:
        path[step:] = path[step:] + decay * path[:-step]
        step, decay = 2 * step, decay**2
    return path


def two_state(uniform: Float, *, off: float, on: float, hours: float) -> NDArray[np.bool_]:
    """Stationary two-state Markov process seen at each bar, [T]: True for `on` hours on average, then False for `off`.

    One uniform draw per bar either sets the state or keeps it, so only the last draw that sets it counts.
    """
    share = on / (off + on)
    forget = -math.expm1(-hours * (1 / off + 1 / on))
    sets_on = uniform < share * forget
    sets_off = uniform >= 1 - (1 - share) * forget
    sets_on[0] = uniform[0] < share
    sets = sets_on | sets_off
    sets[0] = True
    last = np.maximum.accumulate(np.where(sets, np.arange(len(uniform)), 0))
    return sets_on[last]


def flip_probability(duration: float, hours: float) -> float:
    """Probability that a `two_state` process with equal mean durations differs one bar later."""
    return -math.expm1(-2 * hours / duration) / 2


def heavy_tailed(
    student: Float,
    uniform: Float,
    normal: Float,
    *,
    tail_index: float,
    jump_wait: float,
    jump_size: float,
    hours: float,
) -> Float:
    """Shocks of unit variance: a Student t with `tail_index` degrees of freedom, and rare Gaussian jumps.

    A jump comes every `jump_wait` hours and measures `jump_size` hourly standard deviations, whatever the bar's length.
    """
    jumps = uniform < -math.expm1(-hours / jump_wait)
    scale = jump_size / math.sqrt(hours)
    rate = -math.expm1(-hours / jump_wait)
    shock = student * math.sqrt((tail_index - 2) / tail_index) + jumps * scale * normal
    return shock / math.sqrt(1 + rate * scale**2)


def bridge_extremes(move: Float, deviation: Float, uniform_high: Float, uniform_low: Float) -> tuple[Float, Float]:
    """Highest and lowest point of a path that starts at 0 and ends at `move`, any shape.

    Each has the exact law of a Brownian bridge's maximum, P(max > h) = exp(−2h(h − move) / deviation²); the two are
    drawn independently.
    """
    high = (move + np.sqrt(move**2 - 2 * deviation**2 * np.log1p(-uniform_high))) / 2
    low = (move - np.sqrt(move**2 - 2 * deviation**2 * np.log1p(-uniform_low))) / 2
    return high, low


def price_extremes(
    opened: Float, closed: Float, deviation: Float, uniform_high: Float, uniform_low: Float
) -> tuple[Float, Float]:
    """High and low of bars with these opens and closes and this standard deviation of the log-price."""
    rise, fall = bridge_extremes(np.log(closed / opened), deviation, uniform_high, uniform_low)
    # log and exp round: an extreme at the open or the close must not fall inside the body.
    high = np.maximum(opened * np.exp(rise), np.maximum(opened, closed))
    low = np.minimum(opened * np.exp(fall), np.minimum(opened, closed))
    return high, low
