"""Workers in a Ray cluster that share a list of work: what one leaves when it dies, another one does."""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from tailguard.errors import MissingExtraError, RunError, TailguardError
from tailguard.population.executor import Job, JobOutcome

ATTEMPTS = 3
"""Times that a piece of work is tried when workers die."""
PATIENCE = 60.0
"""Seconds without any news after which the user is told what is waited for."""


@dataclass(eq=False)
class _Hand:
    """A worker."""

    actor: Any
    ready: bool = False
    """Whether it has begun: it may wait for a node with room for it."""
    last: int | None = None
    """Number of the work that it did last, whose members it may still hold."""


class WorkerPool:
    """Workers, each with a share of a node, as many as the cluster has room for.

    `hire`: makes an actor. `most`: workers at once; 0: what there is room for.
    """

    def __init__(self, hire: Callable[[], Any], cpus: float, gpus: float, most: int) -> None:
        self.hire, self.cpus, self.gpus, self.most = hire, cpus, gpus, most
        self._hands: list[_Hand] = []
        self._pending: dict[Any, tuple[_Hand, int | None]] = {}
        """What is waited for, with whom and with which work; None: for the worker to begin."""

    def do(self, work: Sequence[Sequence[Job]]) -> list[list[JobOutcome]]:
        """Outcomes of every piece of work. A worker or a node that dies costs what it had under way."""
        ray = import_ray()
        waiting = list(range(len(work)))
        done: dict[int, list[JobOutcome]] = {}
        lost: Counter[int] = Counter()
        while len(done) < len(work):
            self._fill(len(work) - len(done))
            self._hand_out(waiting, work)
            ready, _ = ray.wait(list(self._pending), num_returns=1, timeout=PATIENCE)
            if not ready and not any(hand.ready for hand in self._hands):
                warnings.warn(self._why_nothing_happens(), RuntimeWarning, stacklevel=2)
            for reference in ready:
                hand, number = self._pending.pop(reference)
                outcomes = self._taken(reference, hand)
                if outcomes is None:  # the worker is gone
                    if number is not None:
                        waiting.insert(0, number)
                    lost[-1 if number is None else number] += 1
                    self._check_attempts(lost, work)
                elif number is not None:
                    done[number] = outcomes
        return [done[number] for number in range(len(work))]

    def _fill(self, left: int) -> None:
        """Hire while there is more work than workers, and room for more."""
        wanted = min(left, self.most or max(1, self._room()))
        while len(self._hands) < wanted:
            hand = _Hand(self.hire())
            self._hands.append(hand)
            self._pending[hand.actor.begin.remote()] = (hand, None)

    def _room(self) -> int:
        """Workers that the living nodes hold."""
        ray = import_ray()
        room = 0.0
        for node in ray.nodes():
            if node["Alive"]:
                has = node["Resources"]
                shares = [has.get("CPU", 0.0) / self.cpus] if self.cpus else []
                shares += [has.get("GPU", 0.0) / self.gpus] if self.gpus else []
                room += int(min(shares) + 1e-9)
        return int(room)

    def _hand_out(self, waiting: list[int], work: Sequence[Sequence[Job]]) -> None:
        """Give work to those who have none: first what they did last, whose members may still be in their memory."""
        busy = {id(hand) for hand, _ in self._pending.values()}
        idle = [hand for hand in self._hands if hand.ready and id(hand) not in busy]
        for hand in sorted(idle, key=lambda each: each.last not in waiting):
            if not waiting:
                return
            number = hand.last if hand.last in waiting else waiting[0]
            assert number is not None
            waiting.remove(number)
            hand.last = number
            self._pending[hand.actor.perform.remote(work[number])] = (hand, number)

    def _taken(self, reference: Any, hand: _Hand) -> list[JobOutcome] | None:
        """What a worker returned; None if it died before it could."""
        ray = import_ray()
        exceptions = ray.exceptions
        try:
            outcomes: list[JobOutcome] | None = ray.get(reference)
        except exceptions.RayTaskError as error:  # raised by the worker's code: it would be raised again
            if isinstance(error.cause, TailguardError):
                raise error.cause from None
            raise
        except (
            exceptions.RayActorError,
            exceptions.ObjectLostError,
            exceptions.NodeDiedError,
            exceptions.WorkerCrashedError,
            exceptions.OutOfMemoryError,
        ):
            self._hands.remove(hand)
            ray.kill(hand.actor)  # one that only cannot be reached must not work on beside its successor
            return None
        hand.ready = True
        return [] if outcomes is None else outcomes

    def _check_attempts(self, lost: Counter[int], work: Sequence[Sequence[Job]]) -> None:
        number, times = lost.most_common(1)[0]
        if number < 0 and times >= ATTEMPTS * max(1, len(work)):
            raise RunError(
                f"population: {times} workers of the Ray cluster died before they began; see the nodes' logs"
            )
        if number >= 0 and times >= ATTEMPTS:
            members = ", ".join(str(job.member) for job in work[number])
            raise RunError(
                f"population: the worker of member {members} died {ATTEMPTS} times before its round was done, most "
                "often because a node's memory ran out. What is finished is kept; give each worker more of a node "
                "with --worker-cpus or --worker-gpus, and resume"
            )

    def _why_nothing_happens(self) -> str:
        ray = import_ray()
        has = ray.cluster_resources()
        return (
            f"population: no worker has begun yet; each needs {self.cpus:g} CPU and {self.gpus:g} GPU of one node, "
            f"and the cluster has {has.get('CPU', 0):g} CPU and {has.get('GPU', 0):g} GPU in all. Waiting"
        )

    def close(self) -> None:
        """End the workers."""
        ray = import_ray()
        for hand in self._hands:
            ray.kill(hand.actor)
        self._hands, self._pending = [], {}


def import_ray() -> Any:
    """Ray, or a message on how to install it."""
    try:
        import ray
    except ModuleNotFoundError as error:
        raise MissingExtraError("Ray", "ray", "--executor ray") from error
    return ray
