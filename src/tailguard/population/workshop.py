"""Where members are made, trained and judged, whatever process that happens in."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

from tailguard.algorithm.learner import Learner
from tailguard.algorithm.nonfinite import NonFiniteError
from tailguard.config import RunConfig
from tailguard.envs.prepared_market import MappedBars
from tailguard.envs.trading import TradingEnv
from tailguard.errors import CheckpointError
from tailguard.experiment.build import Experiment, build_learner, trading_env
from tailguard.experiment.layout import RunLayout
from tailguard.monitor.callbacks import Callback
from tailguard.monitor.writers import numbers
from tailguard.population.executor import Job, JobOutcome
from tailguard.population.hyper import apply, check_same_parts, check_space, put_in_force
from tailguard.population.judge import Judge
from tailguard.population.options import PopulationSettings
from tailguard.population.space import SearchSpace
from tailguard.runs.checkpoint import CheckpointStore, data_hashes
from tailguard.runs.validation import Validation

if TYPE_CHECKING:
    from tailguard.data.prepare import PreparedBars

KEPT = 2
"""Checkpoints of a member: of the round under way, and of the one before, which others may go on from."""


@dataclass(frozen=True)
class Workshop:
    """The settings that all members share, their bars and their judge. It can be sent to another process."""

    config: RunConfig
    bars: PreparedBars | MappedBars
    """Training bars with their features, once for all members of a process."""
    judge: Judge
    hashes: Mapping[str, str]
    """SHA-256 of the bars, which checkpoints are tied to."""
    searched: tuple[str, ...]
    """Names of the searched settings."""

    @classmethod
    def of(cls, experiment: Experiment, settings: PopulationSettings, space: SearchSpace) -> Self:
        """For the experiment of a config; raises for a search space that cannot be used with it."""
        config, learner = experiment.config, experiment.learner
        check_space(config, space)
        validation = Validation(learner, experiment.split.validation, config.risk)
        judge, hashes = Judge(validation, settings.metric), data_hashes(learner.env)
        made = cls(config, trading_env(learner).prepared, judge, hashes, space.names)
        for each in space.dimensions:
            for value in each.values:
                check_same_parts(each.name, value, learner, made.build(0, {each.name: value}))
        return made

    def build(self, member: int, hyper: Mapping[str, Any], env: TradingEnv | None = None) -> Learner:
        """A fresh member with these values. `env`: one on the same market, whose tensors it shares."""
        return build_learner(apply(self.config, hyper), self.bars, self.config.training.seed + member, env)

    def perform(self, job: Job, members: Path) -> JobOutcome:
        """Do a job: restore, train, judge, store. `members`: the folder of all members' checkpoints."""
        learner = self.build(job.member, job.hyper)
        if job.start:
            self.restore(learner, job, members)
        lines = _Lines(job.until)
        try:
            left = self.config.training.total_timesteps - learner.num_timesteps
            with named_warnings(job.member):
                # The whole run is the goal, or schedules would start anew in every round.
                learner.learn(left, callback=[lines], reset_num_timesteps=False)
        except NonFiniteError as error:
            return failed_outcome(job.member, learner.num_timesteps, lines.metrics, str(error))
        return self.finish(learner, job.member, lines.metrics, members)

    def restore(self, learner: Learner, job: Job, members: Path) -> None:
        """The state that a job goes on from, with the job's values in force."""
        self.load(learner, members, job.parent, job.start)
        self.take_over(learner, job)

    def load(self, learner: Learner, members: Path, member: int, step: int) -> None:
        """The state that a member had at this step."""
        store = self.store(members, member)
        if step not in store.steps():
            raise CheckpointError(
                f"{members / str(member)}: there is no checkpoint of step {step:,}. If that round was trained with "
                "--executor ray and --storage, it is in the storage: go on with the same two options"
            )
        store.restore(learner, step)

    def finish(
        self, learner: Learner, member: int, metrics: Sequence[Mapping[str, float]], members: Path
    ) -> JobOutcome:
        """Judge and store a member that has trained to the end of its round. `metrics`: of every iteration."""
        judged = self.judge.judge(learner)
        own = self.store(members, member)
        own.folder.mkdir(parents=True, exist_ok=True)
        own.clean()
        own.save(learner)
        lines = (*metrics[:-1], {**metrics[-1], **judged.metrics})
        return JobOutcome(member, learner.num_timesteps, judged.score, lines)

    def take_over(self, learner: Learner, job: Job) -> None:
        """Put the job's values in force on a restored state, with streams and optimiser as the job says."""
        put_in_force(learner, apply(self.config, job.hyper))
        if job.optimizer == "reset" and job.parent != job.member:
            learner.reset_optimizer()
        if job.streams is not None:
            learner.reseed(job.streams)

    def store(self, members: Path, member: int) -> CheckpointStore:
        """The checkpoints of a member."""
        return CheckpointStore(RunLayout(members / str(member)).path, self.hashes, KEPT)


@contextlib.contextmanager
def named_warnings(member: int) -> Iterator[None]:
    """Context in which alarms name the member: several train at once, and their messages reach one terminal."""

    def named(record: logging.LogRecord) -> bool:
        record.msg = f"member {member}: {record.msg}"
        return True

    logger = logging.getLogger("tailguard")
    logger.addFilter(named)
    try:
        yield
    finally:
        logger.removeFilter(named)


def failed_outcome(member: int, step: int, metrics: Sequence[Mapping[str, float]], why: str) -> JobOutcome:
    """Of a member whose numbers are not finite."""
    return JobOutcome(member, step, float("-inf"), tuple(metrics), why)


class _Lines(Callback):
    """Keeps the metrics of every iteration, and ends training at a step."""

    def __init__(self, until: int) -> None:
        self.until = until
        self.metrics: list[dict[str, float]] = []

    def on_iteration_logged(self) -> bool:
        self.metrics.append(numbers(self.model.metrics))
        return bool(self.model.num_timesteps < self.until)
