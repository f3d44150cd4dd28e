"""Fair timing: candidates alternate, so that other load on the machine affects all of them."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch

if TYPE_CHECKING:
    from rich.table import Table

WARM_UP = 2
"""Turns that are not counted: compilers, caches and allocators settle in them."""


@dataclass(frozen=True)
class Workload:
    """Something to time."""

    turn: Callable[[], object]
    """Runs the work once, synchronously."""
    steps: int
    """Environment steps in a turn."""


@dataclass(frozen=True)
class Speed:
    """Measured speed of a candidate."""

    per_second: float
    """Median of the turns, in steps per second."""
    spread: float
    """Distance of the quartiles, as a share of the median."""


Group = Mapping[str, Callable[[], Workload]]
"""Candidates to compare by name, each made when its time comes; ratios are taken to the first."""


def nothing(name: str) -> None:
    """A report function that prints nothing."""


def take_turns(
    group: Group, turns: int, before_each: Callable[[str], None] = nothing, warm_up: int = WARM_UP
) -> dict[str, Speed]:
    """Speeds of all candidates, one turn of each after the other, `turns` rounds after `warm_up` uncounted ones.

    `before_each` is called with a candidate's name before each of its turns.
    """
    made = {name: make() for name, make in group.items()}
    rates: dict[str, list[float]] = {name: [] for name in group}
    for round_number in range(warm_up + turns):
        for name, workload in made.items():
            before_each(name)
            begun = time.perf_counter()
            workload.turn()
            if round_number >= warm_up:
                rates[name].append(workload.steps / (time.perf_counter() - begun))
    return {name: speed_of(each) for name, each in rates.items()}


def speed_of(rates: list[float]) -> Speed:
    """Median and spread of steps per second."""
    low, middle, high = np.quantile(rates, (0.25, 0.5, 0.75))
    return Speed(float(middle), float((high - low) / middle))


def speed_table(title: str) -> Table:
    """An empty table of speeds."""
    from rich.table import Column, Table

    table = Table(Column(title, no_wrap=True), box=None, pad_edge=False)
    for heading in ("steps/s", "spread", "ratio"):
        table.add_column(heading, justify="right")
    return table


def add_speeds(table: Table, speeds: Mapping[str, Speed]) -> None:
    """Add the candidates of a group, set off from those above."""
    if table.row_count:
        table.add_row()
    reference = next(iter(speeds.values())).per_second
    for name, speed in speeds.items():
        ratio = speed.per_second / reference
        table.add_row(
            name, f"{speed.per_second:,.0f}", f"{100 * speed.spread:.0f} %", f"{ratio:.{2 if ratio < 2 else 1}f}×"
        )


@contextmanager
def torch_threads(count: int) -> Iterator[None]:
    """Let torch use so many CPU threads inside."""
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)
