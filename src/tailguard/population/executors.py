"""The executors by name. Each is one entry of a table, imported when it is used."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from pathlib import Path

from tailguard.errors import ConfigError
from tailguard.population.executor import Executor
from tailguard.population.workshop import Workshop
from tailguard.validate import check_count, check_range, check_registered


@dataclass(frozen=True)
class ExecutorOptions:
    """What the user says about where members train."""

    processes: int = 0
    """Of local and ray; 0: one for each core, or as many as the cluster has room for."""
    address: str | None = None
    """Of the Ray cluster; None: that of RAY_ADDRESS, else this machine alone."""
    storage: str | None = None
    """Shared folder or address of object storage for the checkpoints of ray; None: the run's folder."""
    worker_cpus: float = 1.0
    """Of a node, for each worker of ray."""
    worker_gpus: float | None = None
    """Likewise; None: one where the members train on a GPU."""
    worker_members: int = 1
    """Members that a worker of ray trains as one computation."""

    def __post_init__(self) -> None:
        check_count("--processes", self.processes, low=0)
        check_range("--worker-cpus", self.worker_cpus, low=0, low_open=True)
        if self.worker_gpus is not None:
            check_range("--worker-gpus", self.worker_gpus, low=0)
        check_count("--worker-members", self.worker_members)

    def check_used(self, executor: str) -> None:
        """Refuse options that the executor does not have."""
        usual = ExecutorOptions(self.processes)
        given = [each.name for each in fields(self) if getattr(self, each.name) != getattr(usual, each.name)]
        if given and executor != "ray":
            raise ConfigError(
                f"--{given[0].replace('_', '-')}: only the ray executor has it, and this one is {executor}. Add "
                "--executor ray, or leave it out"
            )


Maker = Callable[[Workshop, Path, ExecutorOptions], Executor]


def _local(workshop: Workshop, members: Path, options: ExecutorOptions) -> Executor:
    from tailguard.population.local import LocalExecutor

    return LocalExecutor(workshop, members, options.processes)


def _batched(workshop: Workshop, members: Path, options: ExecutorOptions) -> Executor:
    from tailguard.population.batched import BatchedExecutor

    del options  # one process, one device
    return BatchedExecutor(workshop, members)


def _ray(workshop: Workshop, members: Path, options: ExecutorOptions) -> Executor:
    from tailguard.population.ray_executor import RayExecutor

    return RayExecutor(
        workshop,
        members,
        address=options.address,
        storage=options.storage,
        workers=options.processes,
        cpus=options.worker_cpus,
        gpus=options.worker_gpus,
        batch=options.worker_members,
    )


EXECUTORS: dict[str, Maker] = {"local": _local, "batched": _batched, "ray": _ray}
"""Makers by name: of the workshop, the folder of the members' checkpoints, and the options."""


def make_executor(name: str, workshop: Workshop, members: Path, options: ExecutorOptions) -> Executor:
    """The executor of this name; `auto` is the default of the device."""
    if name == "auto":
        name = default_executor(workshop.config.training.device, workshop.searched)
    check_registered("--executor", name, EXECUTORS, "tailguard.population.executors.EXECUTORS")
    options.check_used(name)
    return EXECUTORS[name](workshop, members, options)


def default_executor(device: str, searched: Sequence[str]) -> str:
    """batched on a GPU where the search space allows it, else local."""
    from tailguard.population.batched import can_batch

    return "batched" if device != "cpu" and all(map(can_batch, searched)) else "local"
