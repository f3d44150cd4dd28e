"""One decision at the close of each bar: the same code in backtests and in shadow, paper and live trading.

A decision is what the policy asks for (0 for assets that may not be held, and before a close that must be met flat),
times the factor of the agent's throttle, within the agent's limits on portfolios and its shield. It depends on the bars
so far, on the account, and on a memory that is carried from bar to bar: the agent's episode window, the window of
realised losses, the throttle, and the policy's own recurrent state.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

import numpy as np
import torch

from tailguard.data.panel import Panel
from tailguard.envs.episodes import TradingTask
from tailguard.evaluate.baselines import HOLD
from tailguard.evaluate.deciders import AccountView, Decider, EpisodeWindow, check_target
from tailguard.risk.throttle import Throttle


@dataclass(frozen=True)
class Decision:
    """Target weights for the next open, and what shaped them."""

    target: list[float]
    """[A], after throttle, limits and shield; NaN holds a position."""
    throttle: float = 1.0
    """Factor of the throttle on the exposure."""
    shielded: bool = False
    """Whether the shield reduced the positions."""


@dataclass
class DecisionMemory:
    """What decisions remember from bar to bar, besides the policy's recurrent state."""

    window: EpisodeWindow
    """The agent's episode. It restarts, with the policy's memory reset, when it ends and after a gap."""
    realised: EpisodeWindow
    """The window of the throttle. It counts traded bars: a gap must not hide the losses before it."""
    throttle: Throttle | None = None
    waiting: deque[list[float]] = field(default_factory=deque)
    """Decisions that have not filled yet, where each waits longer than to the next open."""
    count: int = 0
    """Bars traded."""

    @classmethod
    def start(cls, equity: float, throttle: Throttle | None = None) -> DecisionMemory:
        """The memory of an account that has not traded."""
        return cls(EpisodeWindow(equity, equity), EpisodeWindow(equity, equity), throttle)

    def begin_stretch(self, equity: float, assets: int, delay: int = 0) -> None:
        """Bars begin anew here, at the start or after a gap."""
        self.window = EpisodeWindow(equity, equity)
        self.waiting = deque([[HOLD] * assets] * delay)

    def end_bar(self, equity: float) -> None:
        """The bar after a decision has closed with this equity."""
        self.window.age += 1
        self.realised.age += 1
        self.window.peak_equity = max(self.window.peak_equity, equity)
        self.count += 1


def decide(
    decider: Decider, task: TradingTask, panel: Panel, account: AccountView, memory: DecisionMemory, *, flat: bool
) -> Decision:
    """Target weights at the close of the account's bar; the memory moves on, see `DecisionMemory.end_bar`.

    `flat`: close all positions without asking the policy, as before a gap and after a liquidation.
    """
    throttle = memory.throttle
    if memory.window.age >= task.episode_length:
        memory.window = EpisodeWindow(account.equity, account.equity)
    if throttle is not None and memory.realised.age >= task.episode_length:
        if memory.realised.start_equity > 0:  # a ruined account has nothing left to lose
            throttle.observe(account.equity / memory.realised.start_equity - 1)
        memory.realised = EpisodeWindow(account.equity, account.equity)
    closing = flat or (task.flat_rows is not None and bool(task.flat_rows[account.row]))
    if flat:
        target = [0.0] * panel.assets
    else:
        asked = decider(account, memory.window, first=memory.count == 0)
        check_target(asked, panel, account.row, task.market.config)
        memory.waiting.append(asked)
        target = memory.waiting.popleft()
        if closing:
            target = [0.0] * panel.assets
        if task.holdable is not None:
            there = task.holdable[account.row].tolist()
            target = [weight if held else 0.0 for weight, held in zip(target, there, strict=True)]
    if throttle is not None:
        target = [weight * throttle.factor for weight in target]
    if task.limits is not None and not closing:
        target = task.limit_one(target, account.weights, account.row)
    shielded = False
    if task.shield is not None and any(target) and not np.isnan(target).any():
        equity, start = (
            torch.tensor([value], dtype=torch.float64) for value in (account.equity, memory.window.start_equity)
        )
        weights, held_back = task.shield.apply(torch.tensor([target], dtype=torch.float64), equity, start)
        target, shielded = weights[0].tolist(), bool(held_back)
    return Decision(target, 1.0 if throttle is None else throttle.factor, shielded)
