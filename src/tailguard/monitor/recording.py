"""The base of all writers: which metrics and alarms are new, and when to write them."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from tailguard.algorithm.callbacks import Callback
from tailguard.errors import TailguardError

if TYPE_CHECKING:
    from tailguard.monitor.health import Alarm

STEP = "time/total_timesteps"
"""Figure that says at which environment step an iteration ended."""


class FigureWriter(Callback, ABC):
    """Hands over every iteration's figures, and every alarm when it is raised for the first time.

    Other callbacks record figures of their own, evaluations above all, some of them after this one. Those join the
    iteration's figures as soon as they can be known to be complete: before the next rollout, or at the end.
    """

    known: frozenset[str] | None = None
    """Names that have been written of the iteration under way; none before the first one."""
    alarms: int = 0
    """Alarms of the agent that have been written."""

    @abstractmethod
    def write(self, figures: Mapping[str, float], step: int) -> None:
        """Record an iteration's metrics; they may not be finite."""

    def add(self, figures: Mapping[str, float], step: int) -> None:
        """Take figures that joined after `write`, of the same step."""
        self.write(figures, step)

    def warn(self, alarm: Alarm) -> None:
        """Take an alarm."""

    def close(self) -> None:
        """Bring everything to its place."""

    def on_training_start(self, locals_: dict[str, Any], globals_: dict[str, Any]) -> None:  # noqa: ARG002 (SB3's)
        self.known, self.alarms = None, len(self.model.alarms)

    def on_rollout_start(self) -> None:
        self._complete()

    def on_iteration_end(self) -> None:
        figures = numbers(self.model.metrics)
        self.known = frozenset(figures)
        self.write(figures, self.model.num_timesteps)
        self._warn()

    def on_training_end(self) -> None:
        self._complete()
        self.close()

    def _complete(self) -> None:
        if self.known is None:
            return
        figures = numbers({name: value for name, value in self.model.metrics.items() if name not in self.known})
        if figures:
            self.known |= frozenset(figures)
            self.add(figures, self.model.num_timesteps)
        self._warn()

    def _warn(self) -> None:
        for alarm in self.model.alarms[self.alarms :]:
            self.warn(alarm)
        self.alarms = len(self.model.alarms)


def numbers(metrics: Mapping[str, Any]) -> dict[str, float]:
    """Figures as plain numbers; whole numbers stay whole."""
    return {name: value if isinstance(value, int) else _number(name, value) for name, value in metrics.items()}


def _number(name: str, value: Any) -> float:
    try:
        return float(value)
    except (TypeError, ValueError):
        raise TailguardError(
            f"{name}: {value!r} was recorded as a metric and is not a number; record numbers only"
        ) from None
