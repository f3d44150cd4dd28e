"""Calibrated exposure: the largest factor on an agent's weights that keeps a budget on held-out bars, with confidence.

An agent trained on a few years overfits them, and its tail on other bars is several times its tail in training. The
loss of an episode is nearly proportional to the exposure, so a factor m on the weights brings the tail to any limit d.
Held-out episodes, which had no part in training, tell which:

    m = sup { m : U(m) ≤ d },    U(m): upper confidence bound of ES_α of the held-out episodes traded at exposure m

U comes from ES_α over resampled records: circular blocks of whole episodes (Politis & Romano 1992), two episodes long,
so that neighbouring and overlapping episodes stay together. `percentile`: U is their quantile. The tail of a resampled
record is too mild for the same reason as that of the record itself, so that this bound covers less often than it says
while the tail holds few episodes. `pivotal`: the ratio of resampled to estimated ES stands for that of the estimate to
the truth (the basic bootstrap of Davison & Hinkley 1997, in logarithms), which turns that error round.

The idea is that of conformal risk control (Angelopoulos et al. 2024): tune one monotone parameter on data that the
model has not seen. It rests on the assumption that the bars to come are like the held-out ones; where the market
changes, no factor can promise anything.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields, replace
from typing import Any, get_args

import torch
from torch import Tensor

from tailguard.errors import ConfigError
from tailguard.risk.config import BoundKind
from tailguard.risk.cvar import cvar_from_samples
from tailguard.validate import check_choice, check_count, check_range

RESAMPLES = 400
LARGEST_RATIO = 2.0
"""Of a pivotal bound to the estimate: resamples whose tail gains tell nothing about how much deeper it can be."""
MOST_EXPOSURE = 3.0
"""Largest factor: an agent whose tail stays far inside the limit is not scaled up without end."""
TOLERANCE = 0.01
"""The bound ends within this share of the limit, on the inner side."""
ROUNDS = 8
"""Most evaluations of the bound; three or four are enough where losses are nearly proportional to exposure."""


@dataclass(frozen=True)
class Exposure:
    """A factor on an agent's weights, and how it was calibrated. CVaRs are returns: −0.04 is a loss of 4 %."""

    factor: float
    limit: float
    alpha: float
    level: float
    """Confidence of the bound."""
    uncalibrated: float
    """CVaR of the held-out episodes at exposure 1."""
    cvar: float
    """CVaR of the held-out episodes at the factor."""
    bound: float
    """Its lower confidence bound at the factor; at or above the limit."""
    tail_episodes: float
    """Independent held-out episodes in the tail: the evidence behind the bound."""

    def __post_init__(self) -> None:
        for item in fields(self):
            check_range(f"exposure.{item.name}", getattr(self, item.name))
        check_range("exposure.factor", self.factor, low=0)

    @classmethod
    def from_dict(cls, state: Mapping[str, Any]) -> Exposure:
        """The exposure from the output of `dataclasses.asdict`."""
        return cls(**{item.name: float(state[item.name]) for item in fields(cls)})


def calibrate_exposure(
    outcomes_at: Callable[[float], Tensor],
    limit: float,
    *,
    alpha: float,
    level: float = 0.9,
    overlap: int = 1,
    times: Tensor | None = None,
    kind: BoundKind = "percentile",
    seed: int = 0,
) -> Exposure:
    """The largest factor at which the upper confidence bound of the held-out tail keeps the limit; 0 if none was found.

    `outcomes_at`: outcomes of the held-out episodes traded at an exposure, [n] or [n, k]: a row for each episode, in
        the order of time, with k outcomes of it. It is called for each candidate.
    `overlap`: how many consecutive episodes share a bar; 1 where they do not overlap.
    `times`: when each episode begins, [n], any order: those of one time count as one; None: each has its own.
    `kind`: of the bound, see above.
    """
    check_range("limit", limit, low=-1, high=0, high_open=True)
    check_count("overlap", overlap)

    def at(factor: float) -> tuple[Exposure, float]:
        """The tail at a factor, and its bound as a multiple of the limit."""
        outcomes = _rows(outcomes_at(factor))
        cvar = float(cvar_from_samples(outcomes.flatten(), alpha))
        bound = cvar_bound(outcomes, alpha, level, block=2 * overlap, times=times, kind=kind, seed=seed)
        tail_episodes = alpha * len(_rows_of_times(len(outcomes), times)) / overlap
        return Exposure(factor, limit, alpha, level, cvar, cvar, bound, tail_episodes), bound / limit

    candidate, use = at(1.0)
    uncalibrated = candidate.cvar
    best = replace(candidate, factor=0.0, cvar=0.0, bound=0.0)
    broken = math.inf
    for _ in range(ROUNDS):
        if use <= 1 and candidate.factor >= best.factor:
            best = candidate
            if use >= 1 - TOLERANCE or candidate.factor >= MOST_EXPOSURE:
                break
        elif use > 1:
            broken = min(broken, candidate.factor)
        # Aim at the middle of the tolerance, as if losses were proportional to exposure.
        proposed = candidate.factor * (1 - TOLERANCE / 2) / use if use > 0 else MOST_EXPOSURE
        if not best.factor < proposed < broken:
            proposed = (best.factor + min(broken, MOST_EXPOSURE)) / 2
        candidate, use = at(min(proposed, MOST_EXPOSURE))
    return replace(best, uncalibrated=uncalibrated)


def cvar_bound(
    outcomes: Tensor,
    alpha: float,
    level: float,
    *,
    block: int,
    times: Tensor | None = None,
    kind: BoundKind = "percentile",
    seed: int = 0,
    resamples: int = RESAMPLES,
) -> float:
    """Lower confidence bound of CVaR_α of outcomes [n] or [n, k], from circular blocks of `block` rows.

    `times`: as of `calibrate_exposure`; blocks are then of so many times, each with all of its rows.
    """
    check_range("level", level, low=0.5, high=1, high_open=True)
    check_count("block", block)
    check_choice("kind", kind, get_args(BoundKind))
    rows = _rows(outcomes)
    at = _rows_of_times(len(rows), times)
    count = len(at)
    generator = torch.Generator().manual_seed(seed)
    steps, resampled = torch.arange(min(block, count)), []
    for _ in range(resamples):
        first = torch.randint(count, (math.ceil(count / len(steps)), 1), generator=generator)
        picked = at[((first + steps) % count).flatten()[:count]].flatten()
        resampled.append(cvar_from_samples(rows[picked[picked >= 0]].flatten(), alpha))
    tails = torch.stack(resampled)
    estimate = float(cvar_from_samples(rows.flatten(), alpha))
    if kind == "percentile" or estimate >= 0:  # a tail that gains has no logarithm
        return float(tails.quantile(1 - level))
    mildest = min(float(tails.quantile(level)), estimate / LARGEST_RATIO)
    return estimate * estimate / mildest


def _rows(outcomes: Tensor) -> Tensor:
    rows = outcomes.double().flatten(1) if outcomes.dim() > 1 else outcomes.double().unsqueeze(1)
    if not rows.numel() or not bool(rows.isfinite().all()):
        raise ConfigError("outcomes: an exposure is calibrated on at least one held-out episode, with finite outcomes")
    return rows


def _rows_of_times(rows: int, times: Tensor | None) -> Tensor:
    """The rows of each time in the order of time, −1 where one has fewer than another, [times, most rows of one]."""
    if times is None:
        return torch.arange(rows).unsqueeze(1)
    if times.shape != (rows,):
        raise ConfigError(f"times: shape {tuple(times.shape)} for {rows:,} episodes; give one time for each")
    _, number, count = torch.unique(times, return_inverse=True, return_counts=True)
    order = number.argsort(stable=True)
    own = torch.arange(rows) - (count.cumsum(0) - count)[number[order]]
    table = torch.full((len(count), int(count.max())), -1)
    table[number[order], own] = order
    return table
