"""Decisions bar by bar on bars that are still coming: `evaluate.decision`, on a history that grows.

Features, volatility factors and the market's table are computed from the whole history at every bar, by the code of a
backtest. Averages that a shorter history would round differently are therefore the same, bit for bit.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch

from tailguard.data.panel import Panel
from tailguard.envs.episodes import TradingTask
from tailguard.envs.spec import task_for
from tailguard.errors import ConfigError, TailguardError
from tailguard.evaluate.backtest import BacktestAgent, Throttled, step_policy
from tailguard.evaluate.deciders import AgentDecider, EpisodeWindow
from tailguard.evaluate.decision import Decision, DecisionMemory, decide
from tailguard.live.bar_history import BarHistory, LiveBar
from tailguard.live.explain import Explainer


class WarmUpError(TailguardError):
    """Replaying the journal did not lead to the decisions in it."""


@dataclass(frozen=True)
class AccountAtClose:
    """The account that a decision reads, at the close of the last bar; see `AccountView`."""

    row: int
    equity: float
    weights: Sequence[float]
    unfilled: Sequence[float]


class BarDecider(Protocol):
    """What a session asks at each bar: `LiveDecider`, or a rule that needs no features."""

    @property
    def row(self) -> int: ...

    def read(self, *bars: LiveBar) -> None: ...

    def can_decide(self, row: int) -> bool: ...

    def prepare(self, account: AccountAtClose) -> dict[str, Any]: ...

    def decide(self, account: AccountAtClose) -> Decision: ...

    def explain(self, account: AccountAtClose) -> dict[str, Any] | None: ...

    def restore(self, decisions: Sequence[Mapping[str, Any]]) -> None: ...


class LiveDecider:
    """A trained agent, the bars so far, and the memory of its decisions."""

    def __init__(self, agent: BacktestAgent, history: BarHistory) -> None:
        if agent.spec is None:
            raise ConfigError("this agent was not trained on a TradingEnv, so it cannot trade bars")
        self.agent, self.history, self.spec = agent, history, agent.spec
        self.memory: DecisionMemory | None = None
        """None before the first decision."""
        self._policy = step_policy(agent)
        self._decider: AgentDecider | None = None
        self._decided_row = -1
        self._explainer: Explainer | None = None

    task: TradingTask
    panel: Panel
    usable: np.ndarray

    def read(self, *bars: LiveBar) -> None:
        """Take in closed bars."""
        self.task, usable, self.panel = task_for(self.spec, self.history.extend(*bars), None, torch.float64)
        self.usable = usable & self.panel.tradeable
        if self._decider is None:
            self._decider = AgentDecider(self._policy, self.task, self.panel)
            if Explainer.can_explain(self.agent):
                self._explainer = Explainer(self.agent, self.task.observation_size)
        else:
            self._decider.read(self.task, self.panel)

    @property
    def row(self) -> int:
        """Row of the last bar."""
        return self.panel.rows - 1

    def row_of(self, time_ms: int) -> int:
        return int(np.searchsorted(self.panel.time, time_ms))

    def can_decide(self, row: int) -> bool:
        """Whether all features are defined; after a gap they warm up again."""
        return bool(self.usable[row])

    def follows(self, row: int) -> bool:
        """Whether the bar continues the stretch of the bar before it."""
        same = row > 0 and self.panel.segment[row] == self.panel.segment[row - 1]
        return bool(same and self.usable[row - 1])

    def prepare(self, account: AccountAtClose) -> dict[str, Any]:
        """Move the memory to this close and return it as it is before the decision."""
        if self.memory is None:
            throttle = self.agent.make_throttle() if isinstance(self.agent, Throttled) else None
            self.memory = DecisionMemory.start(account.equity, throttle)
            self.memory.begin_stretch(account.equity, self.panel.assets)
        elif not self.follows(account.row):
            self.memory.begin_stretch(account.equity, self.panel.assets)
        elif self._decided_row == account.row - 1:
            self.memory.end_bar(account.equity)
        return memory_to_dict(self.memory)

    def decide(self, account: AccountAtClose) -> Decision:
        """Target weights for the next open; call `prepare` first."""
        assert self.memory is not None
        assert self._decider is not None
        self._decided_row = account.row
        with torch.inference_mode():
            decision = decide(self._decider, self.task, self.panel, account, self.memory, flat=False)
        if self._explainer is not None:
            self._explainer.follow(self._decider.observation, self.memory.window.age == 0)
        return decision

    def explain(self, account: AccountAtClose) -> dict[str, Any] | None:
        """What moved the last decision, by symbol; see `Explainer.explain`."""
        if self._explainer is None:
            return None
        return self._explainer.explain(self.task, account.row, account.weights)

    def restore(self, decisions: Sequence[Mapping[str, Any]]) -> None:
        """Replay journalled decisions, the first of which began a window, until the memory is that of the last one.

        Raises `WarmUpError` unless memory and targets are those of the journal, bit for bit.
        """
        for index, record in enumerate(decisions):
            row = self.row_of(record["bar"])
            account = AccountAtClose(row, record["equity"], record["weights"], record["unfilled"])
            if index == 0:
                self.memory = self._memory_from(record["memory"])
            elif (memory := self.prepare(account)) != record["memory"]:
                raise WarmUpError(
                    f"the memory at the bar {record['bar']} is {memory} in a replay and {record['memory']} in the "
                    "journal. The history or the code has changed since; start a new session"
                )
            target = self.decide(account).target
            if not np.array_equal(target, record["target"], equal_nan=True):
                raise WarmUpError(
                    f"the decision at the bar {record['bar']} is {target} in a replay and {record['target']} in the "
                    "journal. The agent, its bars or the code has changed since; start a new session"
                )

    def _memory_from(self, state: Mapping[str, Any]) -> DecisionMemory:
        throttle = self.agent.make_throttle() if isinstance(self.agent, Throttled) else None
        if throttle is not None:
            throttle.standing = state["standing"]
        window, realised = (EpisodeWindow(*state[name]) for name in ("window", "realised"))
        return DecisionMemory(window, realised, throttle, count=state["count"])


def memory_to_dict(memory: DecisionMemory) -> dict[str, Any]:
    """JSON-serialisable: all but the policy's recurrent state, which a replay from a window's start restores."""
    window, realised = ([each.start_equity, each.peak_equity, each.age] for each in (memory.window, memory.realised))
    standing = None if memory.throttle is None else memory.throttle.standing
    return {"window": window, "realised": realised, "standing": standing, "count": memory.count}
