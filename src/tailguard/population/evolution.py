"""The loop of a population: rounds of jobs for an executor, judged and decided, with a record from which it resumes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from tailguard.errors import ConfigError
from tailguard.population.ask_tell import PBT, MemberTrial
from tailguard.population.executor import Executor, Job, JobOutcome
from tailguard.population.lineage import Lineage, read_lineage
from tailguard.population.options import PopulationSettings
from tailguard.population.space import SearchSpace

STREAMS = 2**31 - 1
"""Number of the random stream of seeds, which no decision uses."""


@dataclass(frozen=True)
class RoundReport:
    """A finished round, for those who watch."""

    number: int
    outcomes: Sequence[JobOutcome]
    lineage: Lineage


def evolve(
    executor: Executor,
    space: SearchSpace,
    settings: PopulationSettings,
    total_timesteps: int,
    lineage_path: Path,
    on_round: Callable[[RoundReport], None] = lambda _: None,
    on_outcomes: Callable[[Sequence[Job], Sequence[JobOutcome]], None] = lambda _, __: None,
) -> PBT:
    """Run all rounds, or those that are left after the record in `lineage_path`.

    `total_timesteps`: environment steps of every member; a round takes a share of them, in whole rollouts.
    `on_outcomes`: called before a round is recorded, `on_round`: after it.
    """
    lineage = resumed(lineage_path, space, settings) or Lineage(settings, space)
    pbt = PBT(space, settings, lineage=lineage, log=lineage_path)
    while not pbt.finished:
        jobs = [job_of(trial, pbt.lineage, total_timesteps) for trial in pbt.trials]
        trials, number = list(pbt.trials), pbt.round
        outcomes = executor.run(jobs)
        on_outcomes(jobs, outcomes)
        for trial, outcome in zip(trials, outcomes, strict=True):
            pbt.tell(trial, None if outcome.failure else outcome.score, step=outcome.step)
        on_round(RoundReport(number, outcomes, pbt.lineage))
    return pbt


def job_of(trial: MemberTrial, lineage: Lineage, total_timesteps: int) -> Job:
    """What a trial means for a learner."""
    settings = lineage.settings
    streams = None
    if trial.takes_over:
        drawn = np.random.default_rng([settings.seed, STREAMS, trial.round, trial.member])
        streams = int(drawn.integers(2**62))
    return Job(
        member=trial.member,
        hyper=trial.hyper,
        parent=trial.parent,
        start=lineage.rounds[-1].step if lineage.rounds else 0,
        until=-(-total_timesteps * trial.round // settings.rounds),
        streams=streams,
        optimizer=settings.optimizer,
    )


def resumed(path: Path, space: SearchSpace, settings: PopulationSettings) -> Lineage | None:
    """The rounds that are recorded already; raises for a record of other settings."""
    if not path.exists():
        return None
    lineage = read_lineage(path)
    if lineage.settings != settings or lineage.space.to_dict() != space.to_dict():
        raise ConfigError(
            f"{path}: this population was started with another search space or other settings. Choose another --name, "
            "or resume it with its own"
        )
    lineage.replay()
    return lineage
