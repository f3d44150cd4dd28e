"""What an actor of a Ray cluster does: it trains members with the workshop that lies in the object store."""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from tailguard.errors import ConfigError
from tailguard.plugins import load_plugins
from tailguard.population.batched import BatchedExecutor
from tailguard.population.checkpoint_storage import CheckpointStorage
from tailguard.population.executor import Job, JobOutcome
from tailguard.population.ray_pool import import_ray
from tailguard.population.shared import put_arrays_back
from tailguard.population.workshop import Workshop


@dataclass(frozen=True)
class WorkPlace:
    """Where a worker finds what it needs."""

    members: Path
    """Folder of the members' checkpoints, which every node sees, unless there is a storage."""
    token: str
    """Content of `TOKEN` in that folder: a node that has another folder of this name must not write to it."""
    storage: str | None
    threads: int
    plugins: tuple[str, ...]
    batched: bool
    """Train the jobs of a call as one computation."""


TOKEN = ".population"


class MemberWorker:
    """An actor. It is made without work, so that what goes wrong in `begin` reaches the user as an error."""

    def __init__(self, place: WorkPlace, bars: Sequence[Any]) -> None:
        self.place, self.bars = place, bars
        self.workshop: Workshop | None = None
        self.batch: BatchedExecutor | None = None

    def begin(self) -> None:
        """Check the node, and open the workshop: its arrays are those of the node's object store, and no copies."""
        torch.set_num_threads(self.place.threads)
        load_plugins(self.place.plugins)  # before anything that they register is unpacked
        if self.place.storage is None:
            self._check_folder()
        outline, arrays = import_ray().get(self.bars[0])
        self.workshop = put_arrays_back(outline, arrays)
        if self.place.batched:
            assert self.workshop is not None
            self.batch = BatchedExecutor(self.workshop, self.place.members)

    def _check_folder(self) -> None:
        path = self.place.members / TOKEN
        if not path.is_file() or path.read_text(encoding="utf-8") != self.place.token:
            node = import_ray().util.get_node_ip_address()
            raise ConfigError(
                f"--executor ray: node {node} does not see {self.place.members}, where checkpoints are kept. Give a "
                "folder that all nodes share, or object storage, with --storage"
            )

    def perform(self, jobs: Sequence[Job]) -> list[JobOutcome]:
        """Do jobs; when it returns, the checkpoints of their outcomes are stored."""
        if self.place.storage is None:
            return self._train(jobs, self.place.members)
        storage = CheckpointStorage(self.place.storage)
        with tempfile.TemporaryDirectory(prefix="tailguard-") as name:
            folder = Path(name)
            for parent, start in sorted({(job.parent, job.start) for job in jobs if job.start}):
                storage.fetch(folder, parent, start)
            outcomes = self._train(jobs, folder)
            for job, outcome in zip(jobs, outcomes, strict=True):
                if outcome.failure is None:
                    storage.publish(folder, outcome.member, outcome.step)
                    storage.keep(outcome.member, {job.start, outcome.step})
        return outcomes

    def _train(self, jobs: Sequence[Job], folder: Path) -> list[JobOutcome]:
        assert self.workshop is not None
        if self.batch is None:
            return [self.workshop.perform(job, folder) for job in jobs]
        self.batch.members = folder
        return self.batch.run(jobs)
