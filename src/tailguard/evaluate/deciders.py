"""Sources of decisions in a backtest: a trained agent, a function of a `Moment`, or an array of target weights.

Each decider returns target weights [A] for the next open as a list of plain numbers, in which NaN holds a position.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray

from tailguard.data.panel import Panel
from tailguard.envs.episodes import TradingTask, account_fields
from tailguard.errors import ConfigError, TailguardError
from tailguard.evaluate.baselines import Moment, Policy
from tailguard.market.config import MarketConfig
from tailguard.models.inference import StepPolicy

Float = NDArray[np.float64]


@dataclass
class EpisodeWindow:
    """The agent's current episode."""

    start_equity: float
    peak_equity: float
    age: int = 0
    """Bars traded since it began."""


class AccountView(Protocol):
    """What a decision may know of an account: a simulated one, or one at a venue."""

    @property
    def row(self) -> int:
        """Row of the bar that has just closed."""
        ...

    @property
    def equity(self) -> float:
        """At that close, as a multiple of the starting capital."""
        ...

    @property
    def weights(self) -> Sequence[float]:
        """Position values at that close as shares of equity, [A]."""
        ...

    @property
    def unfilled(self) -> Sequence[float]:
        """Unfilled part of each order in the last bar, as a share of the equity before it, [A]."""
        ...


class Decider(Protocol):
    """Returns target weights [A] for the next open; NaN holds."""

    def __call__(self, account: AccountView, window: EpisodeWindow, first: bool) -> list[float]: ...


class AgentDecider:
    """Gives the policy the same observations as in training; its memory is reset where a window starts."""

    def __init__(self, policy: StepPolicy, task: TradingTask, panel: Panel) -> None:
        self.policy = policy
        self.read(task, panel)
        self._count = self._features.shape[1]
        self.observation = torch.zeros(1, task.observation_size)
        """The last one, [1, O]; the next decision writes over it."""
        self._row = self.observation.numpy()[0]

    def read(self, task: TradingTask, panel: Panel) -> None:
        """Decide on these bars from now on: those so far and new ones after them."""
        self.task, self.panel = task, panel
        self._features = task.features.numpy()

    def __call__(self, account: AccountView, window: EpisodeWindow, first: bool) -> list[float]:  # noqa: ARG002 (see Decider)
        self._row[: self._count] = self._features[account.row]
        self._row[self._count :] = (
            *account.weights,
            *account_fields(
                account.equity,
                window.start_equity,
                window.peak_equity,
                float(window.age),
                self.task.episode_length,
            ),
        )
        action = self.policy(self.observation, window.age == 0)
        weights = self.task.weights_of_one(action.tolist()[0], account.row)
        for weight in weights:
            if weight != weight:
                raise TailguardError(
                    f"{place(self.panel, account.row)}: the agent's action is not a number; its weights, its "
                    "observation statistics or these features are not finite"
                )
        return weights


class FunctionDecider:
    """Calls a function of a `Moment`."""

    def __init__(self, policy: Policy, panel: Panel) -> None:
        self.policy, self.panel = policy, panel

    def __call__(self, account: AccountView, window: EpisodeWindow, first: bool) -> list[float]:  # noqa: ARG002 (see Decider)
        panel, row = self.panel, account.row
        until = slice(None, row + 1)
        moment = Moment(
            row=row,
            first=first,
            time_ms=int(panel.time[row]),
            open=panel.open[until],
            high=panel.high[until],
            low=panel.low[until],
            close=panel.close[until],
            volume=panel.volume[until],
            weights=np.array(account.weights),
            equity=account.equity,
            bars_per_year=panel.bars_per_year,
            sessions=panel.sessions,
            unfilled=np.array(account.unfilled),
            listed=None if panel.listed is None else panel.listed[row],
            was_listed=None if panel.listed is None else panel.listed[until],
        )
        target = np.asarray(self.policy(moment), dtype=np.float64)
        if target.shape != (panel.assets,):
            raise ConfigError(
                f"{place(panel, row)} have shape {target.shape}; there must be {panel.assets}, one for each asset"
            )
        weights: list[float] = target.tolist()
        return weights


class ArrayDecider:
    """Reads an array of target weights, [R, A]."""

    def __init__(self, targets: Float, panel: Panel) -> None:
        self.targets = np.asarray(targets, dtype=np.float64)
        if self.targets.ndim == 1:
            self.targets = self.targets[:, None]
        if self.targets.shape != (panel.rows, panel.assets):
            raise ConfigError(
                f"target weights have shape {np.shape(targets)}; these bars need ({panel.rows}, {panel.assets}): "
                f"a row for each bar, lead-in included, and a column for each of {', '.join(panel.symbols)}"
            )

    def __call__(self, account: AccountView, window: EpisodeWindow, first: bool) -> list[float]:  # noqa: ARG002 (see Decider)
        weights: list[float] = self.targets[account.row].tolist()
        return weights


def check_target(target: list[float], panel: Panel, row: int, config: MarketConfig) -> None:
    """Refuse invalid target weights before they are traded."""
    gross, short = 0.0, False
    for weight in target:
        if weight == weight:
            gross += abs(weight)
            short |= weight < 0
    # The tolerance is the rounding of float32 weights, not a loosened limit.
    if gross <= config.leverage * (1 + 1e-6) and (config.allow_short or not short):
        return
    where = place(panel, row)
    if np.isinf(gross):
        raise TailguardError(f"{where} are {target}; they must be finite, or NaN to hold")
    if short and not config.allow_short:
        raise ConfigError(f"{where} are {target}, and market.allow_short is false")
    raise ConfigError(
        f"{where} are {target}: {gross:.4g} times equity, and market.leverage allows {config.leverage:g}. "
        "Scale them down or raise market.leverage"
    )


def place(panel: Panel, row: int) -> str:
    """Row and time of a decision, as the start of a message."""
    return f"target weights at row {row + 1} ({np.datetime64(int(panel.time[row]), 'ms')})"
