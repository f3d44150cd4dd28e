"""One run: bars, split, training, and the evaluation on the test period."""

from __future__ import annotations

import dataclasses
import io
import shlex
from collections.abc import Callable
from pathlib import Path

import torch
from rich.console import Console

from tailguard._version import __version__
from tailguard.algorithm.ensemble import Ensemble
from tailguard.algorithm.learner import Learner
from tailguard.config import RunConfig
from tailguard.console import say
from tailguard.errors import ConfigError, RunError, TailguardError
from tailguard.evaluate.baselines import AGENT
from tailguard.evaluate.budget import Budget, own_budget
from tailguard.evaluate.optimum import why_no_optimum
from tailguard.evaluate.summary import evaluate_run
from tailguard.evaluate.trials import count_trials, record_trial, trial_of
from tailguard.experiment.build import Experiment, build
from tailguard.experiment.layout import resume_command
from tailguard.experiment.trained_run import TrainedRun
from tailguard.runs.dry_run import dry_run_report, short_budget, shorten_run
from tailguard.runs.folder import RunFolder
from tailguard.runs.members import Members, train_members
from tailguard.runs.outcome import RunResult, describe_agent, print_outcome
from tailguard.runs.training import prepare_device
from tailguard.runs.validation import Validation


def _answer_no(_: str) -> bool:
    return False


def train(
    config: RunConfig,
    folder: Path,
    console: Console,
    *,
    replace: bool = False,
    resume: bool = False,
    ask: Callable[[str], bool] = _answer_no,
    verbose: bool = False,
) -> RunResult:
    """Train an agent by the config, store everything in `folder`, and show its results on the test period.

    `replace`: an earlier run in the folder is removed.
    `resume`: resume a run in the folder exactly from its newest checkpoint.
    `ask`: answers what only the user can decide: whether to resume a run that is there, and from an older
    checkpoint where the newest is damaged. By default the answer is no, and the question becomes an error.

    `verbose`: print the table of all metrics every tenth iteration.

    The first SIGINT, SIGTERM or SIGHUP ends the training after the iteration, with a checkpoint; the process exits with
    status 128 + the signal's number. Raises `RunError` if the disk is full or not writable; the last checkpoint is
    intact.
    """
    run = RunFolder(folder)
    with run.claimed():
        is_resumed = _is_resumed(run, config, replace, resume, ask)
        experiment, members = build_members(config, run, console)
        trained = TrainedRun(folder, config, _untrained_agent(members), experiment.market, experiment.split)
        dry_run(trained, console)
        if not is_resumed:  # only now: settings that cannot be used must not claim the name, nor cost an earlier run
            run.begin(config)
        agent = train_members(
            members,
            run,
            Validation(members.first, experiment.split.validation),
            console,
            resume=is_resumed,
            again=resume_command(run.path),
            ask=ask,
            verbose=verbose,
        )
        trained = dataclasses.replace(trained, agent=agent)
        with console.status("") as status:
            result = evaluate_on_test(trained, own_budget(config), lambda name: status.update(f"test     {name}"))
        note = record_run(trained, result)
    print_outcome(result, console)
    say(console, f"trials   {note}")
    say(console, f"saved    {run.agent_path}  (curves: tensorboard --logdir {shlex.quote(str(folder))})")
    return result


def evaluate_on_test(run: TrainedRun, budget: Budget | None, before_each: Callable[[str], None]) -> RunResult:
    """The agent on the test part beside the baselines, with intervals and the verdict on the budget."""
    summary = evaluate_run(run, run.part("test"), budget, before_each=before_each)
    return RunResult(run.folder, run.agent, summary, run.config.risk.limit is not None)


def dry_run(run: TrainedRun, console: Console) -> None:
    """Run the final evaluation on a few bars, so that its errors surface before training."""
    unknown = why_no_optimum(run)
    if unknown is not None:
        say(console, f"note     the planted optimum is unknown for these settings: {unknown}")
    try:
        short = shorten_run(run)
        result = evaluate_on_test(short, short_budget(own_budget(run.config)), lambda _: None)
        print_outcome(result, Console(file=io.StringIO()))
        dry_run_report(short, result.summary)
    except (TailguardError, OSError):
        raise
    except Exception as error:
        raise RunError(
            f"with these settings the run could not be judged after its training: {error!r}. Nothing was trained. "
            "This is a defect of Tailguard: please report it with the settings"
        ) from error


def resume_run(
    folder: Path,
    console: Console,
    ask: Callable[[str], bool] = _answer_no,
    verbose: bool = False,
    *,
    trust_plugins: bool = False,
) -> RunResult:
    """Resume the run in this folder with its own settings.

    Edits of data location, length, device and checkpoints since it began are accepted if `ask` agrees.
    `trust_plugins`: run the plugins that its settings name; else they are refused.
    """
    run = RunFolder(folder)
    config, edited = run.config(trust_plugins=trust_plugins), run.edited()
    if edited:
        changes = f"{run.config_path}: edited since the run began ({'; '.join(edited.values())})"
        # Bars that have moved are known by their content.
        if edited.keys() != {"data.path"} and not ask(f"{changes}. Go on with the edited settings?"):
            raise ConfigError(f"{changes}. Go on with the edited settings (--yes), or bring back those from before")
        say(console, f"note     {changes}")
    return train(config, folder, console, resume=True, ask=ask, verbose=verbose)


def _is_resumed(run: RunFolder, config: RunConfig, replace: bool, resume: bool, ask: Callable[[str], bool]) -> bool:
    """Whether the run in the folder resumes; False if a new one may start there; an error if neither is possible."""
    if run.is_run() and not replace:
        run.check_same(config)
        if not resume and not ask(f"{run.path}: this run exists already. Go on with it?"):
            raise ConfigError(
                f"{run.path}: this run exists already. Go on with it (--yes, or {resume_command(run.path)}), "
                "or choose another --name"
            )
        return True
    if not run.is_run() and not run.is_free():
        raise ConfigError(f"{run.path}: the folder exists already and holds no run; choose another --name")
    return False


def _untrained_agent(members: Members) -> Learner | Ensemble:
    """A fresh agent of the kind that the run will end with."""
    return members.first if members.config.risk.limit is None and members.count == 1 else Ensemble([members.first])


def build_members(config: RunConfig, run: RunFolder, console: Console) -> tuple[Experiment, Members]:
    """The experiment that the settings describe and its learners, with a line on each part."""
    prepare_device(config)
    threads = torch.get_num_threads()
    device = f"{config.training.device}, {threads} thread{'s' if threads > 1 else ''}"
    say(console, f"Tailguard {__version__} · {device} · seed {config.training.seed} · {run.path}", style="bold")
    experiment = build(config, report=lambda line: say(console, line))
    members = Members(config, experiment.learner, config.training.seed)
    several = f"{members.count} members, each: " if members.count > 1 else ""
    say(console, f"agent    {several}{describe_agent(members.first)}")
    return experiment, members


def record_run(run: TrainedRun, result: RunResult) -> str:
    """Add the run to the record of trials; returns the record's summary in words."""
    trial, path = trial_of(run, result.results[AGENT].metrics["sharpe"]), run.layout.trials_path
    try:
        record_trial(path, trial)
    except OSError as error:
        return f"{path} cannot be written: {error.strerror}. This run is not counted"
    return count_trials(path, [trial]).source
