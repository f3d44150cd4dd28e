"""A quick, deterministic evaluation on the validation part: what a run's checkpoints are chosen by."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from tailguard.algorithm.learner import Learner
from tailguard.envs.episodes import GROWTH_FLOOR, episode_starts
from tailguard.envs.spec import TradingSpec, task_for
from tailguard.errors import ConfigError
from tailguard.evaluate.accounts import separate
from tailguard.market import open_accounts
from tailguard.risk.config import RiskMeasure
from tailguard.risk.cvar import cvar_from_samples
from tailguard.runs.selection import Evaluation, budget_score

if TYPE_CHECKING:
    from tailguard.data.bars import Bars

OVERLAP = 8
"""Episodes begin every eighth of their length: a tail is then the mean of several windows, not of one or two."""
MOST_EPISODES = 2048
"""Beyond so many, episodes begin less often, down to one after the other."""


class Validation:
    """Yearly log-growth and tail over the validation part, net of costs and without exploration.

    The part is traded as overlapping episodes of the agent's own length, each from a flat account and all of them side
    by side: more windows than a backtest has, in a fraction of its time.
    """

    def __init__(self, agent: Learner, bars: Bars) -> None:
        if agent.spec is None:
            raise ConfigError("this agent was not trained on a TradingEnv, so it has no validation bars")
        self.parts = [_Part(agent.spec, part) for part in separate(bars, agent.spec.accounts)]
        self.length = agent.spec.episode_length
        self.bars_per_year = 365.25 * 86_400_000 / agent.spec.frequency_ms

    @property
    def episodes(self) -> int:
        """Episodes that an evaluation is made of."""
        return sum(len(part.starts) for part in self.parts)

    def evaluate(self, agent: Learner) -> Evaluation | None:
        """Growth, tail and score of the agent as it is now; None where the part is shorter than an episode."""
        if not self.episodes:
            return None
        risk = None if agent.risk is None else agent.risk.config
        measure: RiskMeasure = "episode" if risk is None else risk.measure
        traded = [part.trade(agent, measure) for part in self.parts if part.starts]
        growth = float(torch.cat([each for each, _ in traded]).mean()) / self.length * self.bars_per_year
        cvar = limit = None
        if risk is not None:
            cvar = float(cvar_from_samples(torch.cat([outcomes for _, outcomes in traded]), risk.alpha))
            limit = risk.limit
        return Evaluation(growth, cvar, budget_score(growth, cvar, limit))

    def training_growth(self, agent: Learner) -> float:
        """Yearly log-growth of the last finished training episodes; NaN where their rewards do not tell it.

        A policy that explores pays for it in training: its growth there cannot be compared.
        """
        figures, explores = agent.metrics, getattr(agent.config, "stochastic", True)
        if agent.spec is None or agent.spec.reward != "log" or explores:
            return math.nan
        earned, length = (figures.get(f"rollout/ep_{name}_mean", math.nan) for name in ("rew", "len"))
        return earned / length * self.bars_per_year if length else math.nan


class _Part:
    """The bars of one account, and where its episodes start."""

    def __init__(self, spec: TradingSpec, bars: Bars) -> None:
        self.task, usable, panel = task_for(spec, bars, None, torch.float32)
        possible = episode_starts(
            torch.as_tensor(panel.tradeable),
            torch.as_tensor(usable),
            torch.as_tensor(panel.segment),
            spec.episode_length,
        ).tolist()
        self.starts = spaced_starts(possible, stride_of(len(possible), spec.episode_length))

    def trade(self, agent: Learner, measure: RiskMeasure) -> tuple[Tensor, Tensor]:
        """Log-growth of each episode, [episodes], and the outcomes that a budget of this measure is on."""
        task = self.task
        state = task.begin(open_accounts(torch.tensor(self.starts), task.market.assets, task.market.dtype))
        memory = None
        growth = torch.zeros(len(self.starts), dtype=torch.float64)
        drawdown = torch.zeros_like(growth)
        ruined = torch.zeros(len(self.starts), dtype=torch.bool)
        nets = []
        for _ in range(task.episode_length):
            action, memory = agent.predict(task.observe(state).numpy(), state=memory, deterministic=True)
            weights = task.decide(torch.as_tensor(np.asarray(action), dtype=task.market.dtype), state)[0]
            state, transition = task.advance(state, torch.where(ruined[:, None], 0.0, weights))
            growth += torch.log((1 + transition.net.double()).clamp(min=GROWTH_FLOOR))
            drawdown = torch.minimum(drawdown, (state.market.equity / state.peak_equity - 1).double())
            ruined |= transition.liquidated
            if measure == "bar":
                nets.append(transition.net.double())
        if measure == "bar":
            return growth, torch.cat(nets)
        pnl = (state.market.equity / state.start_equity - 1).double()
        return growth, drawdown if measure == "drawdown" else pnl


def stride_of(possible: int, length: int) -> int:
    """Bars between the starts of two episodes."""
    return min(max(length // OVERLAP, math.ceil(possible / MOST_EPISODES), 1), length)


def spaced_starts(possible: list[int], stride: int) -> list[int]:
    """The earliest of the possible starts that are at least `stride` bars apart."""
    starts: list[int] = []
    for row in possible:
        if not starts or row >= starts[-1] + stride:
            starts.append(row)
    return starts
