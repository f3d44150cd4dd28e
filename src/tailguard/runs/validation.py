"""A quick, deterministic score on the validation part, to rank a run's checkpoints."""

from __future__ import annotations

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

if TYPE_CHECKING:
    from tailguard.data.bars import Bars


class Validation:
    """Yearly log-growth, net of costs, over the validation part, without exploration.

    The part is traded as the agent's own episodes, one after the other on the calendar and side by side in the
    computer, each from a flat account: as many bars as a backtest, in a fraction of its time.
    """

    def __init__(self, agent: Learner, bars: Bars) -> None:
        if agent.spec is None:
            raise ConfigError("this agent was not trained on a TradingEnv, so it has no validation bars")
        self.parts = [_Part(agent.spec, part) for part in separate(bars, agent.spec.accounts)]
        self.length = agent.spec.episode_length
        self.bars_per_year = 365.25 * 86_400_000 / agent.spec.frequency_ms

    @property
    def episodes(self) -> int:
        """Episodes that a score is made of."""
        return sum(len(part.starts) for part in self.parts)

    def score(self, agent: Learner) -> float | None:
        """The growth; None where the part is shorter than an episode."""
        if not self.episodes:
            return None
        total = sum(float(part.growth(agent).sum()) for part in self.parts if part.starts)
        return total / self.episodes / self.length * self.bars_per_year


class _Part:
    """The bars of one account, and where its episodes start."""

    def __init__(self, spec: TradingSpec, bars: Bars) -> None:
        self.task, usable, panel = task_for(spec, bars, None, torch.float32)
        possible = episode_starts(
            torch.as_tensor(panel.tradeable),
            torch.as_tensor(usable),
            torch.as_tensor(panel.segment),
            spec.episode_length,
        )
        self.starts = _one_after_the_other(possible.tolist(), spec.episode_length)

    def growth(self, agent: Learner) -> Tensor:
        """Log-growth of each episode, [episodes]."""
        task = self.task
        state = task.begin(open_accounts(torch.tensor(self.starts), task.market.assets, task.market.dtype))
        memory = None
        growth = torch.zeros(len(self.starts), dtype=torch.float64)
        ruined = torch.zeros(len(self.starts), dtype=torch.bool)
        for _ in range(task.episode_length):
            action, memory = agent.predict(task.observe(state).numpy(), state=memory, deterministic=True)
            weights = task.decide(torch.as_tensor(np.asarray(action), dtype=task.market.dtype), state)[0]
            state, transition = task.advance(state, torch.where(ruined[:, None], 0.0, weights))
            growth += torch.log((1 + transition.net.double()).clamp(min=GROWTH_FLOOR))
            ruined |= transition.liquidated
        return growth


def _one_after_the_other(possible: list[int], length: int) -> list[int]:
    """The earliest starts whose windows of `length` bars do not overlap."""
    starts: list[int] = []
    for row in possible:
        if not starts or row >= starts[-1] + length:
            starts.append(row)
    return starts
