"""A population as a run: from settings and a search space to an agent in a folder, with its out-of-sample results."""

from __future__ import annotations

import math
import shlex
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path

from rich.console import Console

from tailguard.algorithm.ensemble import Ensemble
from tailguard.algorithm.learner import Learner
from tailguard.config import RunConfig, to_yaml
from tailguard.console import say
from tailguard.errors import ConfigError
from tailguard.evaluate.backtest import BacktestResult, backtest
from tailguard.evaluate.baselines import AGENT
from tailguard.evaluate.budget import own_budget
from tailguard.evaluate.report import write_page
from tailguard.evaluate.trials import count_trials, record_trial, trial_of
from tailguard.experiment.trained_run import TrainedRun
from tailguard.population.ask_tell import PBT
from tailguard.population.evolution import evolve, resumed
from tailguard.population.executor import Executor
from tailguard.population.executors import ExecutorOptions, make_executor
from tailguard.population.lineage import Lineage, read_lineage
from tailguard.population.member_records import MemberRecords
from tailguard.population.options import PopulationSettings
from tailguard.population.pbt import Standing
from tailguard.population.population_page import PopulationData, population_page, sentences, trades_as
from tailguard.population.population_screen import in_words, shown_population
from tailguard.population.space import SearchSpace
from tailguard.population.workshop import Workshop
from tailguard.runs.folder import RunFolder
from tailguard.runs.members import Member, combine
from tailguard.runs.outcome import RunResult, budget_outcome_in_words, print_outcome
from tailguard.runs.runner import build_members, dry_run, evaluate_on_test
from tailguard.runs.training import save_result


@dataclass(frozen=True)
class PopulationPlan:
    """Everything that a population is, besides the settings of its members' run."""

    space: SearchSpace
    settings: PopulationSettings = field(default_factory=PopulationSettings)
    keep: int = 1
    """Best members that become the agent, as one."""
    executor: str = "auto"
    options: ExecutorOptions = field(default_factory=ExecutorOptions)

    def __post_init__(self) -> None:
        if not 1 <= self.keep <= self.settings.members:
            raise ConfigError(f"--keep {self.keep}: give 1 to {self.settings.members}, the number of members")


def train_population(
    config: RunConfig,
    plan: PopulationPlan,
    folder: Path,
    console: Console,
    *,
    ask: Callable[[str], bool] = lambda _: False,
) -> RunResult:
    """Train a population, save its best members as the run's agent, and show its results on the test period.

    A population that is in the folder goes on after its last finished round, if `ask` agrees.
    """
    _check(config)
    run = RunFolder(folder)
    with run.claimed():
        goes_on = _goes_on(run, config, plan, ask)
        experiment, built = build_members(_alone(config), run, console)
        workshop = Workshop.of(experiment, plan.settings, plan.space)
        trained = TrainedRun(folder, config, _untrained(built.first, config, plan), experiment.market, experiment.split)
        dry_run(trained, console)
        executor = make_executor(plan.executor, workshop, run.members_path, plan.options)
        try:
            check_rounds(built.first, config.training.total_timesteps, plan.settings.rounds)
            if not goes_on:  # only now, as for a single run: what cannot be used must not claim the name
                run.begin(config)
            pbt = _evolve(run, config, plan, executor, console)
            trained_to = _trained_to(pbt.lineage)
            for member, (step, _) in trained_to.items():
                executor.collect(member, step)
        finally:
            executor.close()
        kept = pbt.best[: plan.keep]
        learners = {member: _restored(workshop, run, standing, step) for member, (step, standing) in trained_to.items()}
        members = [Member(learners[each.member], None) for each in kept]
        agent = combine(members, workshop.judge.validation, config, console)
        save_result(agent, run, again_command(run.path))
        words = in_words(sorted(kept[0].hyper.items()))
        say(
            console,
            f"kept     member {', '.join(str(each.member) for each in kept)} of {plan.settings.members}: {words}",
        )
        trained = TrainedRun(folder, config, agent, experiment.market, experiment.split)
        result = _finish(trained, pbt.lineage, learners, [each.member for each in kept], console)
    say(console, f"saved    {run.agent_path}  (curves: tensorboard --logdir {shlex.quote(str(run.members_path))})")
    return result


def _check(config: RunConfig) -> None:
    if config.training.members > 1:
        raise ConfigError(
            f"training.members: {config.training.members} are agents of a single run; a population has --members and "
            "--keep. Set training.members to 0"
        )
    if config.training.patience:
        raise ConfigError("training.patience: a population ends after its rounds; set it to 0")


def check_rounds(learner: Learner, total_timesteps: int, rounds: int) -> None:
    """Refuse rounds shorter than a rollout: members would be judged again without having learned anything."""
    rollout = learner.config.n_steps * learner.env.num_envs
    if total_timesteps < rounds * rollout:
        raise ConfigError(
            f"--rounds {rounds}: a round of {total_timesteps:,} / {rounds} steps is shorter than a rollout, which "
            f"takes {rollout:,} steps here. Choose at most {max(1, total_timesteps // rollout)} rounds, or raise "
            f"training.total_timesteps to {rounds * rollout:,}"
        )


def _alone(config: RunConfig) -> RunConfig:
    """The settings of one member: folds belong to the members of a single run."""
    return replace(config, training=replace(config.training, members=1, select="auto"))


def _untrained(first: Learner, config: RunConfig, plan: PopulationPlan) -> Learner | Ensemble:
    """A fresh agent of the kind that the population will end with."""
    return first if config.risk.limit is None and plan.keep == 1 else Ensemble([first])


def _goes_on(run: RunFolder, config: RunConfig, plan: PopulationPlan, ask: Callable[[str], bool]) -> bool:
    """Whether the population in the folder goes on; False if a new one may start there."""
    if not run.is_run():
        if not run.is_free():
            raise ConfigError(f"{run.path}: the folder exists already and holds no run; choose another --name")
        return False
    if not run.is_population():
        raise ConfigError(f"{run.path}: a run of another kind is here; choose another --name")
    run.check_same(config)
    resumed(run.lineage_path, plan.space, plan.settings)
    if not ask(f"{run.path}: this population exists already. Go on with it?"):
        raise ConfigError(
            f"{run.path}: this population exists already. Go on with it (--yes, or {again_command(run.path)}), or "
            "choose another --name"
        )
    return True


def again_command(folder: Path) -> str:
    """The command that goes on with the population in this folder."""
    return f"tailguard population --resume {shlex.quote(str(folder))}"


def read_plan(run: RunFolder, keep: int, executor: str, options: ExecutorOptions) -> PopulationPlan:
    """The plan of the population in a run's folder."""
    if not run.is_population():
        raise ConfigError(f"{run.path}: no population here: {run.lineage_path.name} is missing")
    lineage = read_lineage(run.lineage_path)
    return PopulationPlan(lineage.space, lineage.settings, keep, executor, options)


def _evolve(run: RunFolder, config: RunConfig, plan: PopulationPlan, executor: Executor, console: Console) -> PBT:
    """All rounds that are left, with their records and a live table."""
    lineage = resumed(run.lineage_path, plan.space, plan.settings) or Lineage(plan.settings, plan.space)
    if lineage.rounds:
        say(console, f"resumed  after round {len(lineage.rounds)} of {plan.settings.rounds}")
    lineage.write(run.lineage_path)
    step = lineage.rounds[-1].step if lineage.rounds else 0
    records = MemberRecords(run, range(plan.settings.members), step)
    with shown_population(lineage, console, config.risk.limit) as screen:
        pbt = evolve(
            executor,
            plan.space,
            plan.settings,
            config.training.total_timesteps,
            run.lineage_path,
            screen.show,
            records.write,
        )
    records.write_hyper_parameters(pbt.lineage.rounds[-1].standings, plan.settings.metric)
    return pbt


def _trained_to(lineage: Lineage) -> dict[int, tuple[int, Standing]]:
    """The last step of every member that has a state there, and its standing; some may have stopped early."""
    steps = {finished.number: finished.step for finished in lineage.rounds}
    last = lineage.last_standings()
    return {member: (steps[number], standing) for member, (number, standing) in last.items() if not standing.failed}


def _restored(workshop: Workshop, run: RunFolder, standing: Standing, step: int) -> Learner:
    """A member where its training ended."""
    learner = workshop.build(standing.member, standing.hyper)
    workshop.load(learner, run.members_path, standing.member, step)
    return learner


def _finish(
    trained: TrainedRun,
    lineage: Lineage,
    learners: dict[int, Learner],
    kept: list[int],
    console: Console,
) -> RunResult:
    """Test the agent and every member, record the trials, and write the page."""
    with console.status("") as status:
        result = evaluate_on_test(trained, own_budget(trained.config), lambda name: status.update(f"test     {name}"))
        tested: dict[int, BacktestResult] = {}
        for member, learner in learners.items():
            status.update(f"test     member {member}")
            tested[member] = backtest(learner, trained.part("test"))
    own = [trial_of(trained, result.results[AGENT].metrics["sharpe"], kept)]
    for member in lineage.last_standings():  # one without a state was tried, too
        if [member] != kept:
            sharpe = tested[member].metrics["sharpe"] if member in tested else math.nan
            trial = trial_of(trained, sharpe, [member])
            own.append(replace(trial, run=f"{trained.name}/members/{member}"))
    path = trained.layout.trials_path
    for trial in own:
        try:
            record_trial(path, trial)
        except OSError as error:
            say(console, f"trials   {path} cannot be written: {error.strerror}. This population is not counted")
            break
    trials = count_trials(path, own)
    data = PopulationData(
        trained.name,
        lineage,
        result.results,
        tested,
        kept,
        trials,
        to_yaml(trained.config),
        budget_outcome_in_words(result) if result.has_budget else "",
        trades_as(result.agent),
    )
    print_outcome(result, console)
    for sentence in sentences(data)[2:]:
        say(console, f"         {sentence}")
    write_page(population_page(data), trained.layout.population_page_path)
    say(console, f"trials   {trials.source}")
    say(console, f"page     {trained.layout.population_page_path}")
    return result
