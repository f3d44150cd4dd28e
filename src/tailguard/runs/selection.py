"""Which of the agents that a run went through is its result: by its score on the validation part."""

from __future__ import annotations

import math
from dataclasses import dataclass
from statistics import NormalDist

from torch import Tensor

from tailguard.risk.exposure import MOST_EXPOSURE

BREACH_PENALTY = 5.0
"""Yearly log-growth that a tail of twice the limit costs: more than agents earn, so that the limit comes first."""


@dataclass(frozen=True)
class Evaluation:
    """An agent on the validation part."""

    growth: float
    """Yearly log-growth, net of costs."""
    cvar: float | None
    """CVaR of the budget's measure; None without a budget."""
    score: float
    """What checkpoints are compared by; higher is better."""

    def describe(self) -> str:
        """As `+3.1 a year, CVaR −3.4 %`."""
        tail = "" if self.cvar is None else f", CVaR {signed(100 * self.cvar)} %"
        return f"{signed(self.growth)} a year{tail}"


def budget_score(growth: float, cvar: float | None, limit: float | None) -> float:
    """growth − 5·max(0, ES/|limit| − 1), ES = −CVaR: growth alone where there is no limit or it is kept.

    Not growth subject to the limit: a tail of a few independent weeks is measured with an error, and while no agent
    keeps the limit yet, the one that is nearer to it must count for more.
    """
    if cvar is None or limit is None:
        return growth
    return growth - BREACH_PENALTY * max(0.0, cvar / limit - 1.0)


def calibrated_score(growth: float, outcomes: Tensor, alpha: float, limit: float) -> float:
    """Growth at the exposure that brings the tail to the limit: growth · |limit| / ES, with ES = σ·φ(z_α)/α − μ.

    Where the exposure is calibrated later, only the proportion of growth to tail counts. The tail is that of a normal
    distribution with the outcomes' mean and deviation: a validation part holds one or two episodes of the tail itself,
    and their mean would choose by luck. Losses count at the exposure as it is.

    outcomes: of the budget's measure, [...]
    """
    z = NormalDist().inv_cdf(alpha)
    shortfall = float(outcomes.std(correction=0)) * NormalDist().pdf(z) / alpha - float(outcomes.mean())
    if growth <= 0:
        return growth
    return growth * min(-limit / max(shortfall, 1e-12), MOST_EXPOSURE)


@dataclass(frozen=True)
class Best:
    """The best score so far."""

    score: float = -math.inf
    since: int = 0
    """Evaluations after it, none of them better."""

    def after(self, score: float) -> Best:
        """With another evaluation; the earlier of two equal ones stays."""
        return Best(score) if score > self.score else Best(self.score, self.since + 1)


def signed(value: float) -> str:
    """One decimal with its sign, as −3.4."""
    return f"{value:+.1f}".replace("-", "−")
