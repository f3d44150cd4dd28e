"""Episodes on bars that an agent did not train on, all of them traded side by side.

They are of the agent's own length, overlap, and each starts from a flat account: more windows than a backtest has, in a
fraction of its time.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from tailguard.data.panel import Panel
from tailguard.envs.episodes import GROWTH_FLOOR, TradingTask, episode_starts
from tailguard.envs.spec import TradingSpec, task_for
from tailguard.evaluate.accounts import separate
from tailguard.evaluate.backtest import BacktestAgent
from tailguard.experiment.faulty_feed import task_under
from tailguard.market import open_accounts
from tailguard.risk.config import RiskMeasure
from tailguard.robust.feed import Feed

if TYPE_CHECKING:
    from tailguard.data.bars import Bars

OVERLAP = 8
"""Episodes begin every eighth of their length: a tail is then the mean of several windows, not of one or two."""
MOST_EPISODES = 2048
"""Beyond so many, episodes begin less often, down to one after the other."""


@dataclass(frozen=True)
class Outcomes:
    """An agent's results over episodes, in the order of their starts."""

    growth: Tensor
    """Log-growth net of costs, [n] float64."""
    measured: Tensor
    """The budget's measure: P&L or maximum drawdown [n, 1], or the net return of each bar [n, bars]."""


class HeldOutEpisodes:
    """Episodes of one account: a task, the rows at which they start, and the bars between two starts.

    `time`: when each starts, in bars; None: their rows, as in a single market.
    """

    def __init__(self, task: TradingTask, starts: Tensor, stride: int, time: Tensor | None = None) -> None:
        self.task, self.starts, self.stride = task, starts, stride
        self.time = starts if time is None else time

    def __len__(self) -> int:
        return len(self.starts)

    @property
    def overlap(self) -> int:
        """How many consecutive episodes share a bar."""
        return max(1, math.ceil(self.task.episode_length / self.stride))

    @torch.no_grad()
    def trade(self, agent: BacktestAgent, measure: RiskMeasure = "episode") -> Outcomes:
        """Trade every episode with the agent's deterministic policy."""
        task, count = self.task, len(self.starts)
        device = task.features.device
        state = task.begin(open_accounts(self.starts.to(device), task.market.assets, task.market.dtype))
        memory = None
        growth, drawdown = (torch.zeros(count, dtype=torch.float64, device=device) for _ in range(2))
        ruined = torch.zeros(count, dtype=torch.bool, device=device)
        nets = []
        for _ in range(task.episode_length):
            action, memory = agent.predict(task.observe(state).cpu().numpy(), state=memory, deterministic=True)
            chosen = torch.as_tensor(np.asarray(action), dtype=task.market.dtype, device=device)
            weights = task.decide(chosen, state)[0]
            state, transition = task.advance(state, torch.where(ruined[:, None], 0.0, weights))
            growth += torch.log((1 + transition.net.double()).clamp(min=GROWTH_FLOOR))
            drawdown = torch.minimum(drawdown, (state.market.equity / state.peak_equity - 1).double())
            ruined |= transition.liquidated
            if measure == "bar":
                nets.append(transition.net.double())
        if measure == "bar":
            measured = torch.stack(nets, dim=1)
        elif measure == "drawdown":
            measured = drawdown[:, None]
        else:
            measured = (state.market.equity / state.start_equity - 1).double()[:, None]
        return Outcomes(growth.cpu(), measured.cpu())


def episodes_on(spec: TradingSpec, bars: Bars, feed: Feed | None = None) -> list[HeldOutEpisodes]:
    """Overlapping episodes on these bars, for each account; empty ones are left out. `feed`: the faults they have."""
    accounts = []
    for part in separate(bars, spec.accounts):
        if feed is None:
            task, usable, panel = task_for(spec, part, None, torch.float32)
        else:
            task, prepared = task_under(feed, spec, part, None, torch.float32)
            usable, panel = prepared.usable, prepared.panel
        possible = episode_starts(
            torch.as_tensor(panel.tradeable),
            torch.as_tensor(usable),
            torch.as_tensor(panel.segment),
            spec.episode_length,
        )
        stride = stride_of(len(possible), spec.episode_length)
        starts = spaced_starts(possible, stride)
        accounts += [HeldOutEpisodes(task, starts, stride, opening_times(panel, starts))] if len(starts) else []
    return accounts


def opening_times(panel: Panel, rows: Tensor) -> Tensor:
    """Open times of these rows, in lengths of a bar since 1970: the same for all symbols."""
    return torch.as_tensor(np.asarray(panel.time)[rows.cpu().numpy()] // panel.frequency_ms)


def stride_of(possible: int, length: int) -> int:
    """Bars between the starts of two episodes."""
    return min(max(length // OVERLAP, math.ceil(possible / MOST_EPISODES), 1), length)


def spaced_starts(possible: Tensor, stride: int) -> Tensor:
    """The earliest of the possible starts, ascending, that are at least `stride` bars apart."""
    starts: list[int] = []
    for row in possible.tolist():
        if not starts or row >= starts[-1] + stride:
            starts.append(row)
    return torch.tensor(starts, dtype=torch.int64)
