"""The interface of executors: they train members for a round, and know nothing of how members are chosen.

A job says which state a member goes on from, with which settings, and to which step; its outcome is the member's state
at that step, stored as a checkpoint, and its judgement on validation. Nothing else passes between the two sides, and a
job repeated from the same checkpoint gives the same outcome. That is why every executor makes the same lineage, and why
work that is lost with a process, a node or the driver is simply done again.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, Protocol

Value = float | int | str | bool
Hyper = Mapping[str, Value]
"""Values of the searched settings, by their full names as `ppo.clip_range`."""

OptimizerState = Literal["copy", "reset"]
"""What becomes of the optimiser when a member takes over another's state."""


@dataclass(frozen=True)
class Job:
    """What a member does in a round."""

    member: int
    hyper: Hyper
    """In force from the job's first update on, whatever the checkpoint says."""
    parent: int
    """The member whose state it goes on from: its own, or that of the member it exploits."""
    start: int
    """Environment step of that state; 0: a fresh learner."""
    until: int
    """Environment step to train to, in whole rollouts."""
    streams: int | None = None
    """Seed for every random stream, where the state is another member's; None: the streams go on."""
    optimizer: OptimizerState = "copy"
    """With another member's state: `reset` begins with fresh moments."""


@dataclass(frozen=True)
class JobOutcome:
    """What came of a job."""

    member: int
    step: int
    """Environment step of its checkpoint."""
    score: float
    """The metric that members are judged by, on validation; higher is better. −inf where training failed."""
    metrics: tuple[Mapping[str, float], ...] = field(default=(), repr=False)
    """Of every iteration; the last one has the evaluation's too."""
    failure: str | None = None
    """Why training stopped: numbers that are not finite. There is no checkpoint then."""


class Executor(Protocol):
    """Trains the members of a population. `local`, `batched` and `ray` are the three kinds."""

    def run(self, jobs: Sequence[Job]) -> list[JobOutcome]:
        """Do all jobs of a round, at most one for each member; outcomes in the order of the jobs.

        When it returns, the checkpoint of every outcome without a failure is stored.
        """
        ...

    def collect(self, member: int, step: int) -> None:
        """Bring a stored checkpoint to the run's folder, where it is not there already."""
        ...

    def close(self) -> None:
        """Release processes and devices. What is stored stays."""
        ...
