"""Training that can be interrupted at any moment: from the newest checkpoint to the final agent."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator

import torch
from rich.console import Console

from tailguard.algorithm.ensemble import Ensemble
from tailguard.algorithm.learner import Learner
from tailguard.config import RunConfig
from tailguard.console import say
from tailguard.errors import CheckpointError, ConfigError, RunError
from tailguard.monitor.writers import ConsoleTable, JsonlWriter, MetricsWriter, TensorBoardWriter
from tailguard.runs.checkpoint import CheckpointStore, DamagedCheckpointError, data_hashes
from tailguard.runs.checkpoint_callback import CheckpointCallback
from tailguard.runs.folder import RunFolder
from tailguard.runs.signals import StopSignals
from tailguard.runs.validation import BestScore, Validation, signed


def prepare_device(config: RunConfig) -> None:
    """Set the number of threads; raise unless the device can be used."""
    name = config.training.device
    try:
        torch.zeros(1, device=name)
    except (RuntimeError, AssertionError) as error:  # PyTorch without CUDA asserts
        reason = str(error).splitlines()[0]
        raise ConfigError(f"training.device: {name!r} cannot be used: {reason}. Choose cpu, or cuda") from error
    if config.training.threads:
        torch.set_num_threads(config.training.threads)


def train_learner(
    agent: Learner,
    config: RunConfig,
    run: RunFolder,
    validation: Validation | None,
    console: Console,
    *,
    resume: bool,
    again: str,
    ask: Callable[[str], bool],
    verbose: bool = False,
) -> CheckpointStore:
    """Train a fresh agent with checkpoints in the run's folder, and bring it to the state that is chosen.

    `validation`: chooses the agent; none: the last one is taken.
    `resume`: start from the newest checkpoint, if there is one.
    `again`: the command that resumes after a stop, for messages.
    `ask`: answers whether to resume from an older checkpoint where the newest is damaged.

    The first SIGINT, SIGTERM or SIGHUP ends the training after the iteration, with a checkpoint; the process exits with
    status 128 + the signal's number. Raises `RunError` if the disk is full or not writable; the last checkpoint is
    intact.
    """
    store = CheckpointStore(run.path, data_hashes(agent.env), config.training.keep_checkpoints)
    try:
        store.clean()
        if resume:
            _resume_from_checkpoint(agent, store, run, console, ask, again)
        with _report_once():
            _learn(agent, config, run, store, validation, console, again, verbose)
        print_tail_in_training(agent, console)
        _choose(agent, config, run, store, validation, console, again)
    except OSError as error:
        raise disk_error(error, run, store, again) from error
    return store


def save_result(agent: Learner | Ensemble, run: RunFolder, again: str) -> None:
    """Save the agent of a finished training. Raises `RunError` if the disk is full or not writable."""
    try:
        agent.save(run.agent_path)
    except OSError as error:
        raise disk_error(error, run, None, again) from error


def disk_error(error: OSError, run: RunFolder, store: CheckpointStore | None, again: str) -> RunError:
    """What a full or read-only disk means for a run: what is intact, and how to resume.

    `store`: checkpoints of the agent that was being trained; None where all of them have been trained.
    """
    intact = None if store is None else store.newest_intact()
    rest = "nothing was saved yet" if intact is None else f"the checkpoint of step {intact:,} is intact"
    rest = "its checkpoints are intact" if store is None else rest
    return RunError(
        f"{error.filename or run.path}: {error.strerror}. The run has stopped; {rest}. Free disk space, or make "
        f"the folder writable, and resume with: {again}"
    )


@contextlib.contextmanager
def _report_once() -> Iterator[None]:
    """Report a full disk only once: the thread that writes the curves would also print a traceback."""
    usual = threading.excepthook

    def ignore_disk_error(failure: threading.ExceptHookArgs) -> None:
        if not issubclass(failure.exc_type, OSError):
            usual(failure)

    threading.excepthook = ignore_disk_error
    try:
        yield
    finally:
        threading.excepthook = usual


def _resume_from_checkpoint(
    agent: Learner,
    store: CheckpointStore,
    run: RunFolder,
    console: Console,
    ask: Callable[[str], bool],
    again: str,
) -> None:
    """Restore the agent and truncate the run's metrics to the newest checkpoint."""
    try:
        step = store.newest() or 0
        changed = store.restore(agent, step) if step else {}
    except DamagedCheckpointError as error:
        if error.intact is None or not ask(f"{error}. Resume from there?"):
            way = f"{again} --yes resumes from there"
            raise CheckpointError(f"{error}" + ("" if error.intact is None else f"; {way}")) from None
        step = error.intact
        changed = store.restore(agent, step)
    removed = store.forget_after(step)
    kept, dropped = run.cut_metrics(step)
    say(console, f"resume   from step {step:,}" + (f", without {len(removed)} damaged" if removed else ""))
    if kept != agent.state.iteration:
        say(
            console,
            f"note     {run.metrics_path.name} has {kept} lines for {agent.state.iteration} iterations: some are lost",
        )
    if dropped:
        say(console, f"note     {dropped} iterations after the checkpoint are repeated")
    for name, (then, now) in changed.items():
        say(console, f"note     {name} was {then}, is {now}: the run continues, but not bit for bit as before")


def _learn(
    agent: Learner,
    config: RunConfig,
    run: RunFolder,
    store: CheckpointStore,
    validation: Validation | None,
    console: Console,
    again: str,
    verbose: bool,
) -> None:
    training = config.training
    left = training.total_timesteps - agent.num_timesteps
    best = store.best_before(agent.num_timesteps) if agent.num_timesteps else BestScore()
    if left <= 0 or 0 < training.patience <= best.since:
        say(console, f"training is complete: {agent.num_timesteps:,} steps")
        return
    if validation is not None and not validation.episodes:
        rest = "the last agent is taken, and patience has nothing to count"
        say(console, f"note     the validation part is shorter than an episode, so nothing is scored: {rest}")
    total = training.total_timesteps
    with StopSignals() as stop:
        checkpoints = CheckpointCallback(
            store,
            run,
            stop,
            validation,
            steps=training.checkpoint_steps or max(1, total // 20),
            evaluation_steps=training.evaluation_steps or max(1, total // 10),
            minutes=training.checkpoint_minutes,
            goal=total,
            patience=training.patience,
            best=best,
        )
        writers: list[MetricsWriter] = [JsonlWriter(run.metrics_path), TensorBoardWriter(run.tensorboard_path)]
        if verbose:
            writers.append(ConsoleTable(every=10))
        agent.learn(left, callback=[checkpoints, *writers], reset_num_timesteps=False, progress_bar=True)
    if stop.received is not None:
        say(console, f"saved    checkpoint step {checkpoints.saved_step:,} written and verified. Resume: {again}")
        raise SystemExit(128 + stop.received)
    if checkpoints.is_out_of_patience and agent.num_timesteps < total:
        evaluations = f"{training.patience} evaluations in a row were no better on validation (training.patience)"
        say(console, f"ended    early, after {agent.num_timesteps:,} of {total:,} steps: {evaluations}")


def print_tail_in_training(agent: Learner, console: Console) -> None:
    """Whether the limit was kept in training, by the last realised episodes."""
    if agent.risk is None or agent.risk.config.limit is None or not bool(agent.risk.constraint.ready):
        return
    cvar, limit = -float(agent.risk.constraint.shortfall), agent.risk.config.limit
    words = "kept" if cvar >= limit else f"broken, {cvar / limit:.1f} times"
    say(console, f"budget   {words} in training: CVaR {signed(100 * cvar)} %, limit {signed(100 * limit)} %")


def _choose(
    agent: Learner,
    config: RunConfig,
    run: RunFolder,
    store: CheckpointStore,
    validation: Validation | None,
    console: Console,
    again: str,
) -> None:
    """Bring the agent to the state that is the run's result, and say in a line which one it is."""
    total, last = config.training.total_timesteps, agent.num_timesteps
    if config.select == "last":
        say(console, f"chosen   step {last:,} of {total:,}: the last one (training.select: {config.training.select})")
        return
    best = store.best() if validation is not None else None
    result = None if best is None else store.evaluation(best)
    if best is None or result is None:
        what = "is shorter than an episode" if validation is not None else "does not exist here"
        say(console, f"chosen   step {last:,} of {total:,}: the last one; the validation part {what}")
        return
    if best != last:
        try:
            store.restore(agent, best)
        except CheckpointError as error:
            way = f"Remove {run.checkpoint_path(best)} to take the next best, then resume: {again}"
            raise CheckpointError(f"{error}. It is the best one on validation. {way}") from error
    limit = None if agent.risk is None else agent.risk.config.limit
    words = "the last one is the best" if best == last else "best"
    words = f"step {best:,} of {total:,}: {words} on validation ({result.describe()})"
    if result.cvar is not None and limit is not None and result.cvar < limit:
        words += f"; its tail is beyond your limit of {signed(100 * limit)} % there"
    elif best != last:
        words += "; later ones earned no more there" + ("" if limit is None else ", or broke your limit")
    say(console, f"chosen   {words}")
