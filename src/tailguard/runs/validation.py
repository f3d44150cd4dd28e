"""A quick, deterministic evaluation on the validation part: what a run's checkpoints are chosen by."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch

from tailguard.algorithm.learner import Learner
from tailguard.errors import ConfigError
from tailguard.evaluate.held_out import episodes_on
from tailguard.risk.config import RiskMeasure
from tailguard.risk.cvar import cvar_from_samples
from tailguard.runs.selection import Evaluation, budget_score, calibrated_score

if TYPE_CHECKING:
    from tailguard.data.bars import Bars


class Validation:
    """Yearly log-growth and tail over the validation part, net of costs and without exploration."""

    def __init__(self, agent: Learner, bars: Bars) -> None:
        if agent.spec is None:
            raise ConfigError("this agent was not trained on a TradingEnv, so it has no validation bars")
        self.parts = episodes_on(agent.spec, bars)
        self.length = agent.spec.episode_length
        self.bars_per_year = 365.25 * 86_400_000 / agent.spec.frequency_ms

    @property
    def episodes(self) -> int:
        """Episodes that an evaluation is made of."""
        return sum(map(len, self.parts))

    def evaluate(self, agent: Learner) -> Evaluation | None:
        """Growth, tail and score of the agent as it is now; None where the part is shorter than an episode."""
        if not self.episodes:
            return None
        risk = None if agent.risk is None else agent.risk.config
        measure: RiskMeasure = "episode" if risk is None else risk.measure
        traded = [part.trade(agent, measure) for part in self.parts]
        growth = float(torch.cat([each.growth for each in traded]).mean()) / self.length * self.bars_per_year
        if risk is None:
            return Evaluation(growth, None, growth)
        outcomes = torch.cat([each.measured.flatten() for each in traded])
        cvar = float(cvar_from_samples(outcomes, risk.alpha))
        if risk.limit is None:
            return Evaluation(growth, cvar, growth)
        if risk.confidence > 0:
            return Evaluation(growth, cvar, calibrated_score(growth, outcomes, risk.alpha, risk.limit))
        return Evaluation(growth, cvar, budget_score(growth, cvar, risk.limit))

    def training_growth(self, agent: Learner) -> float:
        """Yearly log-growth of the last finished training episodes; NaN where their rewards do not tell it.

        A policy that explores pays for it in training: its growth there cannot be compared.
        """
        figures, explores = agent.metrics, getattr(agent.config, "stochastic", True)
        if agent.spec is None or agent.spec.reward != "log" or explores:
            return math.nan
        earned, length = (figures.get(f"rollout/ep_{name}_mean", math.nan) for name in ("rew", "len"))
        return earned / length * self.bars_per_year if length else math.nan
