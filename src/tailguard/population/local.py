"""The executor for one machine: a few processes that share the bars in memory, or this process alone."""

from __future__ import annotations

import multiprocessing
import signal
from collections.abc import Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from multiprocessing.connection import Connection
from pathlib import Path

import torch

from tailguard.data.disk.workers import cores, end_with_parent
from tailguard.errors import RunError
from tailguard.plugins import load_plugins
from tailguard.population.executor import Job, JobOutcome
from tailguard.population.shared import SharedObject, share
from tailguard.population.workshop import Workshop

ATTEMPTS = 3
"""Times that a round is tried when processes die."""
SHARED = ".bars"
"""File in the run's folder that the processes' bars are mapped from."""


class LocalExecutor:
    """Trains members in processes of this machine.

    `members`: the folder of their checkpoints. `processes`: 1 trains in this process; 0: one for each core.
    """

    def __init__(self, workshop: Workshop, members: Path, processes: int = 0) -> None:
        self.workshop, self.members = workshop, members
        self.processes = processes or cores()
        self._shared: SharedObject | None = None
        self._pool: ProcessPoolExecutor | None = None
        self._leash: Connection | None = None

    def run(self, jobs: Sequence[Job]) -> list[JobOutcome]:
        """Do all jobs; what a dead process leaves is done again by others."""
        self.members.mkdir(parents=True, exist_ok=True)
        if self.processes == 1:
            return [self.workshop.perform(job, self.members) for job in jobs]
        done: dict[int, JobOutcome] = {}
        for _ in range(ATTEMPTS):
            waiting = [job for job in jobs if job.member not in done]
            if not waiting:
                break
            done |= self._attempt(waiting)
        lost = [str(job.member) for job in jobs if job.member not in done]
        if lost:
            raise RunError(
                f"population: the process of member {', '.join(lost)} ended {ATTEMPTS} times before its round was done,"
                " most often because memory ran out. What is finished is kept; use fewer --processes, and resume"
            )
        return [done[job.member] for job in jobs]

    def _attempt(self, jobs: Sequence[Job]) -> dict[int, JobOutcome]:
        """Outcomes of the jobs whose process lived to their end, by member."""
        pool = self._started()
        try:
            tasks: dict[int, Future[JobOutcome]] = {
                job.member: pool.submit(_perform, job, self.members) for job in jobs
            }
        except BrokenProcessPool:
            self._stop()
            return {}
        done, broken = {}, False
        for member, task in tasks.items():
            try:
                done[member] = task.result()
            except BrokenProcessPool:
                broken = True
        if broken:
            self._stop()
        return done

    def _started(self) -> ProcessPoolExecutor:
        if self._shared is None:
            self._shared = share(self.workshop, self.members / SHARED)
        if self._pool is None:
            threads = self.workshop.config.training.threads or max(1, cores() // self.processes)
            # A forked process may inherit locks that a thread of Polars or PyTorch holds.
            spawn = multiprocessing.get_context("spawn")
            theirs, self._leash = spawn.Pipe(duplex=False)
            self._pool = ProcessPoolExecutor(
                self.processes,
                spawn,
                initializer=_begin,
                initargs=(self._shared, threads, self.workshop.config.plugins, theirs),
            )
        return self._pool

    def _stop(self) -> None:
        """End the processes, in the middle of a job too: what they have not stored is done again."""
        if self._leash is not None:
            self._leash.close()
        if self._pool is not None:
            self._pool.shutdown(wait=True, cancel_futures=True)
        self._leash = self._pool = None

    def collect(self, member: int, step: int) -> None:
        """Checkpoints are in the run's folder from the start."""

    def close(self) -> None:
        """End the processes."""
        self._stop()
        (self.members / SHARED).unlink(missing_ok=True)  # perhaps that of a process that was killed
        self._shared = None


_workshop: Workshop | None = None
"""Of a worker process."""


def _begin(shared: SharedObject, threads: int, plugins: Sequence[str], leash: Connection) -> None:
    global _workshop
    end_with_parent(leash)
    for number in (signal.SIGINT, signal.SIGHUP):  # a terminal sends them to all; the parent decides what they mean
        signal.signal(number, signal.SIG_IGN)
    torch.set_num_threads(threads)
    load_plugins(plugins)  # before anything that they register is unpacked
    _workshop = shared.open()


def _perform(job: Job, members: Path) -> JobOutcome:
    assert _workshop is not None
    return _workshop.perform(job, members)
