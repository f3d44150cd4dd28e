"""The training as a report shows it: metrics of every iteration, and the alarms that were raised."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from tailguard.errors import ConfigError
from tailguard.monitor.health import advice_on
from tailguard.monitor.writers import STEP


@dataclass(frozen=True)
class AlarmRaised:
    """An alarm of the training, from its metrics."""

    name: str
    step: int
    """Environment steps at which it was raised for the first time."""
    count: int
    """Iterations that were bad."""
    usually: str


def read_metrics(path: Path) -> tuple[dict[str, float], ...]:
    """The lines of `metrics.jsonl`; a last line truncated by a kill is left out, all others must be valid."""
    lines = path.read_bytes().splitlines() if path.is_file() else []
    iterations = []
    for number, line in enumerate(lines, start=1):
        try:
            metrics = json.loads(line)
            iterations.append({name: math.nan if value is None else float(value) for name, value in metrics.items()})
        except (ValueError, AttributeError, TypeError) as error:
            if number < len(lines):
                raise ConfigError(f"{path}: line {number} is not a line of metrics: {error}") from error
    return tuple(iterations)


def alarms_in(*trained: tuple[Mapping[str, float], ...]) -> tuple[AlarmRaised, ...]:
    """Every alarm counted in the metrics of one or several agents, in the order in which they were raised."""
    raised = []
    names = {name for metrics in trained for line in metrics for name in line if name.startswith("warn/")}
    for name in sorted(names):
        counts = [[(line.get(name, 0.0), line.get(STEP, math.nan)) for line in metrics] for metrics in trained]
        steps = [step for each in counts for count, step in each if count > 0]
        if steps:
            short = name.removeprefix("warn/")
            total = sum(int(each[-1][0]) for each in counts if each)
            raised.append(AlarmRaised(short, int(min(steps)), total, advice_on(short)))
    return tuple(sorted(raised, key=lambda alarm: alarm.step))
