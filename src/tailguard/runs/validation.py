"""Validation: choose the run's result among its checkpoints by a quick, deterministic evaluation."""

from __future__ import annotations

import math
from dataclasses import dataclass
from statistics import NormalDist
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from tailguard.algorithm.learner import Learner
from tailguard.envs.feed_copies import MixedStarts
from tailguard.errors import ConfigError
from tailguard.evaluate.held_out import HeldOutEpisodes, episodes_on
from tailguard.experiment.build import trading_env
from tailguard.risk.config import RiskConfig, RiskMeasure
from tailguard.risk.cvar import cvar_from_samples
from tailguard.risk.exposure import MOST_EXPOSURE
from tailguard.robust.feed import Feed

if TYPE_CHECKING:
    from tailguard.data.bars import Bars

TRAINING_EPISODES = 256
"""Training episodes that show what a policy earns there without its exploration."""
BREACH_PENALTY = 5.0
"""Yearly log-growth that a tail of twice the limit costs: more than agents earn, so that the limit comes first."""


@dataclass(frozen=True)
class ValidationResult:
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
class BestScore:
    """The best score so far."""

    score: float = -math.inf
    since: int = 0
    """Evaluations after it, none of them better."""

    def after(self, score: float) -> BestScore:
        """With another evaluation; the earlier of two equal ones stays."""
        return BestScore(score) if score > self.score else BestScore(self.score, self.since + 1)


def signed(value: float) -> str:
    """One decimal with its sign, as −3.4."""
    return f"{value:+.1f}".replace("-", "−")


def training_episodes(agent: Learner) -> HeldOutEpisodes:
    """Episodes at places all over the bars that the agent trains on, without randomisation."""
    env = trading_env(agent)
    starts = env.starts.rows if isinstance(env.starts, MixedStarts) else env.starts
    count = starts.shape[0]
    places = torch.linspace(0, count - 1, min(TRAINING_EPISODES, count), dtype=torch.float64).long()
    rows = starts.index_select(0, places.to(env.device)).cpu()
    return HeldOutEpisodes(env.whole_task, rows[rows < env.prepared.own_rows], env.episode_length)


class Validation:
    """Yearly log-growth and tail over the validation part, net of costs and without exploration."""

    def __init__(self, agent: Learner, bars: Bars, risk: RiskConfig | None = None) -> None:
        """`risk`: the budget to judge by; None: each agent's own."""
        if agent.spec is None:
            raise ConfigError("this agent was not trained on a TradingEnv, so it has no validation bars")
        self.spec, self.bars, self.risk = agent.spec, bars, risk
        self.parts = episodes_on(agent.spec, bars)
        self.length = agent.spec.episode_length
        self.bars_per_year = agent.spec.pace.per_year

    def parts_under(self, feed: Feed) -> list[HeldOutEpisodes]:
        """The same episodes, seen through a feed with faults."""
        return episodes_on(self.spec, self.bars, feed)

    @property
    def episodes(self) -> int:
        """Number of episodes in an evaluation."""
        return sum(map(len, self.parts))

    def evaluate(self, agent: Learner) -> ValidationResult | None:
        """Growth, tail and score of the agent as it is now; None where the part is shorter than an episode."""
        if not self.episodes:
            return None
        risk = None if agent.risk is None else (self.risk or agent.risk.config)
        measure: RiskMeasure = "episode" if risk is None else risk.measure
        traded = [part.trade(agent, measure) for part in self.parts]
        growth = float(torch.cat([each.growth for each in traded]).mean()) / self.length * self.bars_per_year
        if risk is None:
            return ValidationResult(growth, None, growth)
        outcomes = torch.cat([each.measured.flatten() for each in traded])
        cvar = float(cvar_from_samples(outcomes, risk.alpha))
        if risk.limit is None:
            return ValidationResult(growth, cvar, growth)
        if risk.confidence > 0:
            return ValidationResult(growth, cvar, calibrated_score(growth, outcomes, risk.alpha, risk.limit))
        return ValidationResult(growth, cvar, budget_score(growth, cvar, risk.limit))

    def training_growth(self, agent: Learner) -> float:
        """Yearly log-growth of training episodes; NaN where the rewards of a policy without exploration hide it.

        Of a policy that explores, episodes are traded again without it: it pays for it, and validation does not.
        """
        metrics, explores = agent.metrics, getattr(agent.config, "stochastic", True)
        if explores:
            traded = training_episodes(agent).trade(agent)
            return float(traded.growth.mean()) / self.length * self.bars_per_year
        if agent.spec is None or agent.spec.reward != "log":
            return math.nan
        earned, length = (metrics.get(f"rollout/ep_{name}_mean", math.nan) for name in ("rew", "len"))
        return earned / length * self.bars_per_year if length else math.nan
