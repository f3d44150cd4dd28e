"""Tasks in several processes: what comes back is what one process gives, in the order of the tasks."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from multiprocessing.connection import Connection, wait
from types import TracebackType
from typing import Self, TypeVar

from tailguard.errors import RunError
from tailguard.plugins import load_plugins
from tailguard.validate import check_count

Task = TypeVar("Task")
Result = TypeVar("Result")

ONE_THREAD = ("POLARS_MAX_THREADS", "OMP_NUM_THREADS")
"""Variables that keep libraries from starting a thread for each core in each process."""


class Workers:
    """Processes of this machine; a single one is this process. To be used in a `with` block, which ends them.

    `plugins`: what each process loads before its first task.
    """

    def __init__(self, jobs: int = 1, plugins: Sequence[str] = ()) -> None:
        check_count("jobs", jobs)
        self.jobs, self.plugins = jobs, tuple(plugins)
        self._pool: ProcessPoolExecutor | None = None
        self._leash: Connection | None = None

    def __enter__(self) -> Self:
        if self.jobs > 1:
            # A forked process may inherit locks that a thread of Polars or PyTorch holds.
            spawn = multiprocessing.get_context("spawn")
            theirs, self._leash = spawn.Pipe(duplex=False)
            self._pool = ProcessPoolExecutor(self.jobs, spawn, initializer=_begin, initargs=(self.plugins, theirs))
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._leash is not None and kind is not None:
            # Nobody wants what is under way; and a pool that broke while a process was started forgets to end that one,
            # and would wait for it forever.
            self._leash.close()
        if self._pool is not None:
            self._pool.shutdown(wait=True, cancel_futures=True)
        if self._leash is not None:
            self._leash.close()
        self._pool = self._leash = None

    def map(self, doing: str, do: Callable[[Task], Result], tasks: Iterable[Task]) -> Iterator[Result]:
        """The results of all tasks. `doing`: what they do, for the message if a process dies."""
        if self._pool is None:
            yield from map(do, tasks)
            return
        try:
            with _single_threaded():
                waiting = [self._pool.submit(do, task) for task in tasks]
            for each in waiting:
                yield each.result()
        except BrokenProcessPool as error:
            raise RunError(
                f"a process that was {doing} ended before it was done, most often because memory ran out. Nothing is "
                f"kept; try again with fewer than {self.jobs} --jobs, or fewer --rows in each"
            ) from error


def cores() -> int:
    """Cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


@contextlib.contextmanager
def _single_threaded() -> Iterator[None]:
    """What processes that are started meanwhile find in their environment."""
    before = {name: os.environ.get(name) for name in ONE_THREAD}
    os.environ.update(dict.fromkeys(ONE_THREAD, "1"))
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


def _begin(plugins: Sequence[str], leash: Connection) -> None:
    end_with_parent(leash)
    load_plugins(plugins)


def end_with_parent(leash: Connection | None = None) -> None:
    """Let this process end when its parent has died, though it may be in the middle of a task.

    A process whose parent was killed would finish its tasks, and then wait for others forever.
    `leash`: a pipe; the process also ends when the parent closes the other end, or this end is broken.
    """
    parent = multiprocessing.parent_process()
    if parent is None:
        return
    watched: list[Connection | int] = [parent.sentinel]
    if leash is not None:
        watched.append(leash)

    def watch() -> None:
        wait(watched)
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()
