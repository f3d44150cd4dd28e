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
"""Metric with the environment step at which an iteration ended."""


class FigureWriter(Callback, ABC):
    """Base class of writers: receives every iteration's metrics, and every alarm when it is first raised.

    Other callbacks, evaluations above all, may record metrics after this one has written. Those are added to the
    iteration's metrics once they are known to be complete: before the next rollout, or at the end of training.
    """

    known: frozenset[str] | None = None
    """Metrics of the current iteration already written; None before the first iteration."""
    alarms: int = 0
    """Number of the agent's alarms already written."""

    @abstractmethod
    def write(self, figures: Mapping[str, float], step: int) -> None:
        """Record an iteration's metrics; they may not be finite."""

    def add(self, figures: Mapping[str, float], step: int) -> None:
        """Record metrics of the same step that arrived after `write`."""
        self.write(figures, step)

    def warn(self, alarm: Alarm) -> None:
        """Record an alarm."""

    def close(self) -> None:
        """Finish writing and release resources."""

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
    """Metrics as plain numbers; integers stay integers."""
    return {name: value if isinstance(value, int) else _number(name, value) for name, value in metrics.items()}


def _number(name: str, value: Any) -> float:
    try:
        return float(value)
    except (TypeError, ValueError):
        raise TailguardError(
            f"{name}: {value!r} was recorded as a metric and is not a number; record numbers only"
        ) from None
