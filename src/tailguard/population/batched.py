"""The executor for one device: all members are one computation, which lives from round to round."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path

from tailguard.algorithm.learner import Learner
from tailguard.algorithm.member_learners import OWN_SETTINGS, MemberLearners, check_members
from tailguard.errors import ConfigError
from tailguard.experiment.build import trading_env
from tailguard.monitor.writers import STEP, numbers
from tailguard.population.executor import Job, JobOutcome
from tailguard.population.hyper import apply, put_in_force
from tailguard.population.workshop import Workshop, failed_outcome


class BatchedExecutor:
    """Trains all members as one computation (`MemberLearners`), in this process.

    `members`: the folder of their checkpoints. From one round to the next the members stay where they are, and an
    exploit is a copy by index; they are built anew from their checkpoints only where a population is resumed, or where
    fewer members go on.
    """

    def __init__(self, workshop: Workshop, members: Path) -> None:
        check_batchable(workshop.searched)
        self.workshop, self.members = workshop, members
        self._batch: _Batch | None = None

    def run(self, jobs: Sequence[Job]) -> list[JobOutcome]:
        """Do all jobs of a round, side by side."""
        self.members.mkdir(parents=True, exist_ok=True)
        if self._batch is None or not self._batch.can_do(jobs):
            self._batch = None  # its memory is free before the next one needs it
            self._batch = _Batch.restored(self.workshop, self.members, jobs)
        else:
            self._batch.take_over(self.workshop, jobs)
        return self._batch.train(self.workshop, self.members, jobs)

    def collect(self, member: int, step: int) -> None:
        """Checkpoints are in the run's folder from the start."""

    def close(self) -> None:
        """Let go of the device's memory."""
        self._batch = None


class _Batch:
    """Members side by side, by their numbers in the population."""

    def __init__(self, members: Sequence[int], learners: Sequence[Learner]) -> None:
        self.places = {member: place for place, member in enumerate(members)}
        self.together = MemberLearners(learners)
        self.step = learners[0].num_timesteps

    @classmethod
    def restored(cls, workshop: Workshop, members: Path, jobs: Sequence[Job]) -> _Batch:
        """Learners as the jobs begin."""
        learners: list[Learner] = []
        for job in jobs:
            env = trading_env(learners[0]) if learners else None
            learner = workshop.build(job.member, job.hyper, env)
            if job.start:
                workshop.restore(learner, job, members)
            learners.append(learner)
        return cls([job.member for job in jobs], learners)

    def can_do(self, jobs: Sequence[Job]) -> bool:
        """Whether the jobs go on from where these members are."""
        same = [job.member for job in jobs] == list(self.places)
        return same and all(job.start == self.step and job.parent in self.places for job in jobs)

    def take_over(self, workshop: Workshop, jobs: Sequence[Job]) -> None:
        """Copy states between members, with the jobs' values in force."""
        moves = {self.places[job.member]: self.places[job.parent] for job in jobs if job.parent != job.member}
        self.together.exploit(moves)
        for job in jobs:
            place = self.places[job.member]
            learner = self.together.learners[place]
            put_in_force(learner, apply(workshop.config, job.hyper))
            if job.optimizer == "reset" and job.parent != job.member:
                self.together.reset_optimizer(place)
            if job.streams is not None:
                learner.reseed(job.streams)
        check_members(self.together.learners)

    def train(self, workshop: Workshop, members: Path, jobs: Sequence[Job]) -> list[JobOutcome]:
        """Iterate to the end of the round; then judge and store each member."""
        together, learners = self.together, self.together.learners
        lines: list[list[dict[str, float]]] = [[] for _ in learners]
        begun, clock = self.step, time.perf_counter()
        while self.step < jobs[0].until and not all(together.failures):
            for learner in learners:
                learner.state.progress = learner.num_timesteps / workshop.config.training.total_timesteps
            reports = together.iterate()
            self.step = learners[0].num_timesteps
            speed = (self.step - begun) / (time.perf_counter() - clock)
            for place, report in enumerate(reports):
                if together.failures[place] is None:
                    lines[place].append(numbers(report | {"time/fps": speed, STEP: self.step}))
        return [
            workshop.finish(learner, job.member, metrics, members)
            if why is None
            else failed_outcome(job.member, self.step, metrics, why)
            for job, learner, metrics, why in zip(jobs, learners, lines, together.failures, strict=True)
        ]


def can_batch(name: str) -> bool:
    """Whether members side by side may differ in this setting."""
    section, _, rest = name.partition(".")
    return (name if section == "risk" else rest) in OWN_SETTINGS


def check_batchable(searched: Sequence[str]) -> None:
    """Refuse a search space in which members could not be one computation."""
    others = [name for name in searched if not can_batch(name)]
    if others:
        raise ConfigError(
            f"--executor batched: {', '.join(others)}: members that train as one computation may differ in "
            f"{', '.join(sorted(OWN_SETTINGS))} only. Choose --executor local or ray, or leave it out of the space"
        )
