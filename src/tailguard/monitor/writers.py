"""Writers of metrics, callbacks to be passed to `learn`: their base, `metrics.jsonl` and a table for the terminal."""

from __future__ import annotations

import json
import math
import os
from abc import ABC, abstractmethod
from collections.abc import Mapping
from itertools import groupby
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

from tailguard.errors import TailguardError
from tailguard.monitor.callbacks import Callback
from tailguard.validate import check_count

if TYPE_CHECKING:
    from tailguard.monitor.health import Alarm
    from tailguard.monitor.tensorboard import TensorBoardWriter as TensorBoardWriter
    from tailguard.monitor.trackers import MLflowWriter as MLflowWriter
    from tailguard.monitor.trackers import WandbWriter as WandbWriter

DIGITS = 4
"""Significant digits of a value that is not a whole number."""
STEP = "time/total_timesteps"
"""Metric with the environment step at which an iteration ended."""


class MetricsWriter(Callback, ABC):
    """Base class of writers: receives every iteration's metrics, and every alarm when it is first raised.

    Other callbacks, evaluations above all, may record metrics after this one has written. Those are added to the
    iteration's metrics once they are known to be complete: before the next rollout, or at the end of training.
    """

    known: frozenset[str] | None = None
    """Metrics of the current iteration already written; None before the first iteration."""
    alarms: int = 0
    """Number of the agent's alarms already written."""

    @abstractmethod
    def write(self, metrics: Mapping[str, float], step: int) -> None:
        """Record an iteration's metrics; they may not be finite."""

    def add(self, metrics: Mapping[str, float], step: int) -> None:
        """Record metrics of the same step that arrived after `write`."""
        self.write(metrics, step)

    def warn(self, alarm: Alarm) -> None:
        """Record an alarm."""

    def close(self) -> None:
        """Finish writing and release resources."""

    def on_training_start(self, locals_: dict[str, Any], globals_: dict[str, Any]) -> None:  # noqa: ARG002 (SB3's)
        self.known, self.alarms = None, len(self.model.alarms)

    def on_rollout_start(self) -> None:
        self._complete()

    def on_iteration_end(self) -> None:
        metrics = numbers(self.model.metrics)
        self.known = frozenset(metrics)
        self.write(metrics, self.model.num_timesteps)
        self._warn()

    def on_training_end(self) -> None:
        self._complete()
        self.close()

    def _complete(self) -> None:
        if self.known is None:
            return
        metrics = numbers({name: value for name, value in self.model.metrics.items() if name not in self.known})
        if metrics:
            self.known |= frozenset(metrics)
            self.add(metrics, self.model.num_timesteps)
        self._warn()

    def _warn(self) -> None:
        for alarm in self.model.alarms[self.alarms :]:
            self.warn(alarm)
        self.alarms = len(self.model.alarms)


class JsonlWriter(MetricsWriter):
    """Appends one line of JSON per iteration; values that are not finite are written as null."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def write(self, metrics: Mapping[str, float], step: int) -> None:  # noqa: ARG002 (the metrics name it)
        with self.path.open("a", encoding="utf-8") as file:
            file.write(_object(metrics) + "\n")

    def add(self, metrics: Mapping[str, float], step: int) -> None:  # noqa: ARG002
        """Extend the last line in place, so that a crash cannot lose what it already holds."""
        with self.path.open("rb+") as file:
            file.seek(-len("}\n"), os.SEEK_END)
            file.write(f", {_object(metrics)[1:]}\n".encode())


class ConsoleTable(MetricsWriter):
    """Prints the metrics as a table every few iterations, and once more at the end.

    `every`: iterations between two tables. `file`: where to print; standard output by default.
    """

    def __init__(self, every: int = 1, file: IO[str] | None = None) -> None:
        check_count("every", every)
        self.every, self.file = every, file
        self.waiting: dict[str, float] = {}

    def write(self, metrics: Mapping[str, float], step: int) -> None:  # noqa: ARG002 (the table names it)
        if self.model.state.iteration % self.every == 0:
            self._show(metrics)
            self.waiting = {}
        else:
            self.waiting = dict(metrics)

    def add(self, metrics: Mapping[str, float], step: int) -> None:
        """Evaluations are rare and awaited: they are always shown at once."""
        self._show({**metrics, STEP: step})

    def close(self) -> None:
        if self.waiting:
            self._show(self.waiting)
            self.waiting = {}

    def _show(self, metrics: Mapping[str, float]) -> None:
        print(table(metrics), file=self.file, flush=True)


# --- text -------------------------------------------------------------------------------------------------------------


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


def _object(metrics: Mapping[str, float]) -> str:
    return json.dumps({name: value if math.isfinite(value) else None for name, value in metrics.items()})


def table(metrics: Mapping[str, float]) -> str:
    """The metrics grouped by the part of their names before the slash, names on the left, values on the right."""
    rows = []
    for group, names in groupby(sorted(metrics), key=lambda name: name.rpartition("/")[0]):
        # Of the alarms, only those that were raised: a dozen zeros would hide them.
        shown = [name for name in names if group != "warn" or metrics[name] != 0]
        rows.append((f"{group}/" if group else "", "" if shown else "none"))
        rows += [(f"    {name.removeprefix(f'{group}/')}", number(metrics[name])) for name in shown]
    left, right = (max(len(row[side]) for row in rows) for side in (0, 1))
    line = "-" * (left + right + 7)
    return "\n".join([line, *(f"| {name:<{left}} | {value:>{right}} |" for name, value in rows), line])


def number(value: float) -> str:
    """Up to four significant digits; whole numbers in full, very large and very small ones with an exponent."""
    if not math.isfinite(value):
        return str(value)
    if value == round(value) and abs(value) < 1e12:
        return f"{value:,.0f}"
    if not 1e-4 <= abs(value) < 1e6:
        return f"{value:.{DIGITS - 1}e}"
    decimals = max(0, DIGITS - 1 - math.floor(math.log10(abs(value))))
    text = f"{value:,.{decimals}f}"
    return text.rstrip("0").rstrip(".") if "." in text else text


def __getattr__(name: str) -> Any:
    """The writers that need a library of their own, imported when they are asked for."""
    if name == "TensorBoardWriter":
        from tailguard.monitor.tensorboard import TensorBoardWriter

        return TensorBoardWriter
    if name in ("MLflowWriter", "WandbWriter"):
        from tailguard.monitor import trackers

        return getattr(trackers, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
