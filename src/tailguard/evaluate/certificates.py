"""Certificates of an agent on bars: how far an error of the feed can move its decisions, proven by intervals."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from tailguard.evaluate.formatting import percent
from tailguard.evaluate.held_out import HeldOutEpisodes, episodes_on, spaced_starts
from tailguard.robust.attacks import Attack
from tailguard.robust.bounds import CertifiedPolicy

if TYPE_CHECKING:
    from tailguard.data.bars import Bars
    from tailguard.robust.attacked_policy import AttackableAgent

CERTIFIED = (0.01, 0.05)
"""Errors of the features that a report gives certificates for, in standard deviations of each."""


@dataclass(frozen=True)
class Certificate:
    """Bounds on the change of a single decision by an error of the features, over many decisions.

    Changes are of the action: shares of the allowed leverage, before volatility scaling, limits and throttle.
    """

    epsilon: float
    """Largest error of every feature, in standard deviations of each."""
    mean: float
    """Mean over the decisions of the largest possible change."""
    p95: float
    """Its 95th percentile."""
    largest: float
    sign_fixed: float
    """Share of decisions that no such error can bring to the other side of the market."""
    decisions: int

    def __str__(self) -> str:
        return (
            f"If every feature is wrong by up to {self.epsilon:g} standard deviations at a bar, the position cannot "
            f"move by more than {percent(self.mean, sign=False)} of the allowed leverage on average over "
            f"{self.decisions:,} decisions, {percent(self.p95, sign=False)} in 95 % of them and "
            f"{percent(self.largest, sign=False)} in any; in {percent(self.sign_fixed, sign=False)} of them it cannot "
            "change sides."
        )


def certify(agent: AttackableAgent, bars: Bars, epsilons: Sequence[float] = CERTIFIED) -> list[Certificate]:
    """Bounds for every decision of episodes that follow each other on these bars, at each error.

    Empty where bars are shorter than an episode. A policy that has no bounds is an error that says why.
    """
    if agent.spec is None:
        return []
    length = agent.spec.episode_length
    parts = [
        HeldOutEpisodes(part.task, spaced_starts(part.starts, length), length) for part in episodes_on(agent.spec, bars)
    ]
    if not parts:
        return []
    found = []
    for epsilon in epsilons:
        policy = CertifiedPolicy(agent, Attack("random", epsilon))
        for part in parts:
            part.trade(policy)
        reached = policy.summary()
        found.append(
            Certificate(
                epsilon, reached["mean"], reached["p95"], reached["max"], reached["sign_fixed"], policy.decisions
            )
        )
    return found
