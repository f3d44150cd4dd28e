"""The executors by name. Each is one entry of a table, imported when it is used."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from tailguard.population.executor import Executor
from tailguard.population.workshop import Workshop
from tailguard.validate import check_count, check_registered


@dataclass(frozen=True)
class ExecutorOptions:
    """What the user says about where members train."""

    processes: int = 0
    """Of local; 0: one for each core."""

    def __post_init__(self) -> None:
        check_count("--processes", self.processes, low=0)


Maker = Callable[[Workshop, Path, ExecutorOptions], Executor]


def _local(workshop: Workshop, members: Path, options: ExecutorOptions) -> Executor:
    from tailguard.population.local import LocalExecutor

    return LocalExecutor(workshop, members, options.processes)


def _batched(workshop: Workshop, members: Path, options: ExecutorOptions) -> Executor:
    from tailguard.population.batched import BatchedExecutor

    del options  # one process, one device
    return BatchedExecutor(workshop, members)


EXECUTORS: dict[str, Maker] = {"local": _local, "batched": _batched}
"""Makers by name: of the workshop, the folder of the members' checkpoints, and the options."""


def make_executor(name: str, workshop: Workshop, members: Path, options: ExecutorOptions) -> Executor:
    """The executor of this name; `auto` is the default of the device."""
    if name == "auto":
        name = default_executor(workshop.config.training.device, workshop.searched)
    check_registered("--executor", name, EXECUTORS, "tailguard.population.executors.EXECUTORS")
    return EXECUTORS[name](workshop, members, options)


def default_executor(device: str, searched: Sequence[str]) -> str:
    """batched on a GPU where the search space allows it, else local."""
    from tailguard.population.batched import can_batch

    return "batched" if device != "cpu" and all(map(can_batch, searched)) else "local"
