"""Is a day like the days of the backtest? Probabilities under the claim that both come from one distribution."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from tailguard.evaluate.metrics import cvar

Float = NDArray[np.float64]
FEWEST = 5
"""Reference values below which nothing can be said."""
PERMUTATIONS = 4_999
_NODES, _STEPS = np.polynomial.legendre.leggauss(400)


def student_two_sided(value: float, freedom: float) -> float:
    """P(|T| ≥ |value|) for Student's T.

    With T = √f · tan θ the density of θ is proportional to cos^(f−1) θ, which a quadrature integrates exactly enough.
    """
    start = math.atan(abs(value) / math.sqrt(freedom))
    return min(1.0, _integral(start, math.pi / 2, freedom) / _integral(0.0, math.pi / 2, freedom))


def _integral(begin: float, end: float, freedom: float) -> float:
    angles = begin + (end - begin) * (_NODES + 1) / 2
    return float((_STEPS * np.cos(angles) ** (freedom - 1)).sum() * (end - begin) / 2)


def prediction_probability(value: float, reference: Float) -> float | None:
    """Two-sided probability that a further value of the reference's distribution is as far from its mean.

    Student's prediction: (value − mean) / (s · √(1 + 1/n)) has n − 1 degrees of freedom for normal values; for others
    it is a good guess where they are means of many bars. None: too few values, or all alike.
    """
    count = len(reference)
    if count < FEWEST:
        return None
    spread = float(np.std(reference, ddof=1)) * math.sqrt(1 + 1 / count)
    distance = value - float(np.mean(reference))
    if spread <= 1e-12 * max(1.0, abs(value)):
        return None
    return student_two_sided(distance / spread, count - 1)


def block_means(values: Float, length: int) -> Float:
    """Means of the blocks of `length` values that do not overlap, from the end; what is left over is dropped.

    A mean over several days is compared with these: days that follow each other are alike, blocks hardly are.
    """
    count = len(values) // length
    means: Float = values[len(values) - count * length :].reshape(count, length).mean(1)
    return means


def lower_share(value: float, reference: Float) -> float:
    """Share of the reference below the value, those equal by half."""
    return float(((reference < value) + 0.5 * (reference == value)).mean())


def cvar_probability(live: Float, reference: Float, alpha: float, seed: int = 0) -> float | None:
    """One-sided probability of a tail as bad as the live windows' if they and the reference are exchangeable.

    A permutation test: the CVaR of as many windows drawn from both together, without replacement. None: too few.
    """
    if len(live) < FEWEST or len(reference) < FEWEST:
        return None
    observed = cvar(live, alpha)
    together, draw = np.concatenate((live, reference)), np.random.default_rng(seed)
    drawn = np.array([cvar(draw.permutation(together)[: len(live)], alpha) for _ in range(PERMUTATIONS)])
    # Equal values are as bad; rounding must not separate them.
    return float((1 + (drawn <= observed + 1e-12).sum()) / (PERMUTATIONS + 1))


def holm(probabilities: Sequence[float]) -> list[float]:
    """Probabilities adjusted for their number (Holm 1979): those below a level err together at that level at most."""
    order = sorted(range(len(probabilities)), key=lambda place: probabilities[place])
    adjusted, least = [0.0] * len(probabilities), 0.0
    for rank, place in enumerate(order):
        least = max(least, min(1.0, (len(probabilities) - rank) * probabilities[place]))
        adjusted[place] = least
    return adjusted
