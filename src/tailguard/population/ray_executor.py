"""The executor for a Ray cluster: one actor a member, or one a batch of members on a share of a GPU."""

from __future__ import annotations

import contextlib
import math
import os
import signal
import threading
import uuid
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from tailguard.errors import ConfigError
from tailguard.population.batched import check_batchable
from tailguard.population.checkpoint_storage import CheckpointStorage
from tailguard.population.executor import Job, JobOutcome
from tailguard.population.ray_pool import WorkerPool, import_ray
from tailguard.population.ray_worker import TOKEN, MemberWorker, WorkPlace
from tailguard.population.shared import take_arrays_out
from tailguard.population.workshop import Workshop

HERE = "local"
"""Address of a cluster of this machine alone, which is started for the population and ends with it."""


OWN_CLUSTER = {"RAY_USAGE_STATS_ENABLED": "0", "RAY_worker_niceness": "0"}
"""A cluster that is started here reports nothing to anybody, and its workers have the priority of this process, unless
the user has chosen otherwise. Ray's own default for both is otherwise."""


class RayExecutor:
    """Trains members in the actors of a Ray cluster.

    `members`: the folder of their checkpoints; without a `storage` every node must see it.
    `address`: of the cluster; None: that of RAY_ADDRESS, else a cluster of this machine alone.
    `storage`: shared folder or address of object storage for the checkpoints.
    `workers`: actors at once; 0: as many as there is room for.
    `cpus`, `gpus`: what an actor takes of its node; a fraction of a GPU lets several share it.
    `batch`: members of an actor, which trains them as one computation where there are several.
    """

    def __init__(
        self,
        workshop: Workshop,
        members: Path,
        address: str | None = None,
        storage: str | None = None,
        workers: int = 0,
        cpus: float = 1.0,
        gpus: float | None = None,
        batch: int = 1,
    ) -> None:
        import_ray()
        if batch > 1:
            check_batchable(workshop.searched)
        self.workshop, self.members = workshop, members.absolute()
        self.address = address or os.environ.get("RAY_ADDRESS") or HERE
        self.workers, self.cpus, self.batch = workers, cpus, batch
        on_gpu = workshop.config.training.device != "cpu"
        self.gpus = float(on_gpu) if gpus is None else gpus
        if on_gpu and not self.gpus:
            raise ConfigError(
                f"--worker-gpus 0: training.device is {workshop.config.training.device}, and Ray hides the GPUs from a "
                "worker that asks for none. Give each a share, as 0.25"
            )
        # Each population has a place of its own in the storage.
        self.storage = storage and f"{storage.rstrip('/')}/{self.members.parent.name}"
        self._connected = False
        self._pool: WorkerPool | None = None

    def run(self, jobs: Sequence[Job]) -> list[JobOutcome]:
        """Do all jobs; what a dead worker or node leaves is done again by others."""
        pool = self._started(jobs)
        work = [jobs[begin : begin + self.batch] for begin in range(0, len(jobs), self.batch)]
        return [outcome for outcomes in pool.do(work) for outcome in outcomes]

    def _started(self, jobs: Sequence[Job]) -> WorkerPool:
        if self._pool is None:
            self.members.mkdir(parents=True, exist_ok=True)
            if self.storage is not None:
                self._hand_over(CheckpointStorage(self.storage), jobs)
            self._connect()
            self._pool = WorkerPool(self._hiring(), self.cpus, self.gpus, self.workers)
        return self._pool

    def _hand_over(self, storage: CheckpointStorage, jobs: Sequence[Job]) -> None:
        """Bring checkpoints of rounds that another executor trained to where the workers see them."""
        for parent, start in sorted({(job.parent, job.start) for job in jobs if job.start}):
            if not storage.has(parent, start) and start in self.workshop.store(self.members, parent).steps():
                storage.publish(self.members, parent, start)

    def _connect(self) -> None:
        ray = import_ray()
        if ray.is_initialized():  # by the user's own program
            return
        own: dict[str, Any] = {}
        if self.address == HERE:
            own = {"include_dashboard": False}
            own |= {"num_cpus": math.ceil(self.workers * self.cpus)} if self.workers else {}
        on_sigterm = signal.getsignal(signal.SIGTERM)
        try:
            with _environment(OWN_CLUSTER if self.address == HERE else {}):
                ray.init(address=self.address, logging_level="ERROR", log_to_driver=False, **own)
        except (ConnectionError, ValueError) as error:
            raise ConfigError(f"--address {self.address}: {error}") from error
        finally:
            if threading.current_thread() is threading.main_thread():
                signal.signal(signal.SIGTERM, on_sigterm)  # Ray puts its own there
        self._connected = True

    def _hiring(self) -> Any:
        """What makes an actor, with the bars in the object store once."""
        ray, config = import_ray(), self.workshop.config
        token = uuid.uuid4().hex
        (self.members / TOKEN).write_text(token, encoding="utf-8")
        threads = config.training.threads or max(1, int(self.cpus))
        place = WorkPlace(self.members, token, self.storage, threads, tuple(config.plugins), self.batch > 1)
        # Within a list: as an argument of its own it would be unpacked before the worker has loaded its plugins.
        bars = [ray.put(take_arrays_out(self.workshop))]
        actor = ray.remote(MemberWorker).options(
            num_cpus=self.cpus, num_gpus=self.gpus, max_restarts=0, scheduling_strategy="SPREAD"
        )
        return lambda: actor.remote(place, bars)

    def collect(self, member: int, step: int) -> None:
        """Bring a checkpoint from the storage to the run's folder."""
        if self.storage is not None:
            CheckpointStorage(self.storage).fetch(self.members, member, step)

    def close(self) -> None:
        """End the workers, and the cluster if it was started here."""
        if self._pool is not None:
            self._pool.close()
            self._pool = None
            (self.members / TOKEN).unlink(missing_ok=True)
        if self._connected:
            import_ray().shutdown()
            self._connected = False


@contextlib.contextmanager
def _environment(wanted: Mapping[str, str]) -> Iterator[None]:
    """Variables of the environment, for as long as it is entered; those that are set already stay."""
    own = {name: value for name, value in wanted.items() if name not in os.environ}
    os.environ.update(own)
    try:
        yield
    finally:
        for name in own:
            os.environ.pop(name, None)
