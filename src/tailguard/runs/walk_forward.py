"""A walk forward on disk: one agent per fold and seed, each with its own checkpoints.

A finished fold is kept and not trained again; an interrupted one resumes from its newest checkpoint.
"""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console

from tailguard.algorithm.ensemble import Ensemble, load_agent
from tailguard.algorithm.learner import Learner
from tailguard.config import RunConfig, to_yaml
from tailguard.console import say
from tailguard.data.splits import Fold
from tailguard.errors import CheckpointError, ConfigError
from tailguard.evaluate.backtest import BacktestResult
from tailguard.evaluate.trials import Trial, bars_hash, count_trials, record_trial, settings_hash
from tailguard.evaluate.walk_forward_results import (
    WalkForwardPlan,
    WalkForwardResults,
    combine_tests,
    plan_folds,
    trade_fold,
)
from tailguard.experiment.layout import RunLayout, is_unplanned
from tailguard.experiment.settings import recorded_settings
from tailguard.places import read_plain, recover, replace_synced
from tailguard.runs.folder import RunFolder
from tailguard.runs.members import Members, train_members
from tailguard.runs.training import prepare_device

if TYPE_CHECKING:
    from tailguard.data.bars import Bars


def run_walk_forward(
    config: RunConfig,
    bars: Bars,
    folder: Path,
    plan: WalkForwardPlan,
    console: Console,
    *,
    ask: Callable[[str], bool] = lambda _: False,
) -> WalkForwardResults:
    """Train every fold that is not finished in `folder`, test it, and combine the tests.

    `folder`: new, or that of an earlier call with the same settings, bars and plan, which is then resumed.
    `ask`: answers whether to resume from an older checkpoint where the newest of a fold is damaged.

    The first SIGINT, SIGTERM or SIGHUP ends the training after the iteration, with a checkpoint of the current fold.
    """
    prepare_device(config)
    folds = plan_folds(config, bars, plan)
    digest = bars_hash(bars)
    _write_or_check_plan(folder, config, digest, plan, folds)
    results: list[list[tuple[BacktestResult, ...]]] = []
    for number in range(plan.seeds):
        seed = config.training.seed + number
        results.append([])
        for fold in folds:
            agent = _trained(config, fold, len(folds), seed, folder, console, ask)
            results[-1].append(trade_fold(agent, fold))
    return _count_trials(combine_tests(config, bars, folds, results), config, digest, folder, plan, console)


def _trained(
    config: RunConfig,
    fold: Fold,
    folds: int,
    seed: int,
    folder: Path,
    console: Console,
    ask: Callable[[str], bool],
) -> Learner | Ensemble:
    """The agent of a fold: loaded if finished, else trained, from its newest checkpoint if it has one."""
    place = RunFolder(RunLayout(folder).fold_path(fold.number, seed))
    recover(place.agent_path)
    done = place.agent_path.is_dir()
    what = "is finished" if done else "trains"
    line = f"fold {fold.number} of {folds}, seed {seed}, {what}: {fold.describe().partition(': ')[2]}"
    say(console, line)
    if done:
        return _finished(place)
    place.path.mkdir(parents=True, exist_ok=True)
    resume = place.metrics_path.exists()
    agent = train_members(
        Members.on(config, fold.train, seed), place, None, console, resume=resume, again="the same command", ask=ask
    )
    _remove_checkpoints(place)
    return agent


def _finished(place: RunFolder) -> Learner | Ensemble:
    try:
        agent = load_agent(place.agent_path)
    except CheckpointError as error:
        raise CheckpointError(f"{error}. Remove {place.path} to train this fold again") from error
    _remove_checkpoints(place)
    return agent


def _remove_checkpoints(place: RunFolder) -> None:
    """Remove the checkpoints of a finished fold; its agent is kept."""
    place.latest_path.unlink(missing_ok=True)
    for path in (place.checkpoints_path, place.members_path):
        shutil.rmtree(path, ignore_errors=True)


def _count_trials(
    walked: WalkForwardResults, config: RunConfig, digest: str, folder: Path, plan: WalkForwardPlan, console: Console
) -> WalkForwardResults:
    """Write every seed into the record of trials and count them.

    All folds of a seed are one trial: they form one record, and none was selected. Each seed is a separate trial.
    """
    path, mine = RunLayout(folder).trials_path, []
    for number, account in enumerate(walked.stitched):
        also = {"walk forward": _sizes(plan), "seed": config.training.seed + number}
        ratio = account.metrics["sharpe"]
        name = f"{folder.resolve().name}, seed {config.training.seed + number}"
        mine.append(Trial(digest, settings_hash(config, also), name, ratio if math.isfinite(ratio) else None))
    try:
        for trial in mine:
            record_trial(path, trial)
    except OSError as error:
        say(console, f"note     {path} cannot be written: {error.strerror}. This walk forward is not counted")
    return replace(walked, trials=count_trials(path, mine))


def _sizes(plan: WalkForwardPlan) -> dict[str, Any]:
    return {"folds": plan.folds, "train": plan.train, "expanding": plan.expanding}


def _write_or_check_plan(
    folder: Path, config: RunConfig, digest: str, plan: WalkForwardPlan, folds: Sequence[Fold]
) -> None:
    """Write the plan, or check that an existing plan is the same."""
    wanted = {
        "settings": recorded_settings(config),
        "bars": {"sha256": digest},
        "sizes": _sizes(plan),
        "folds": [fold.describe() for fold in folds],
    }
    layout = RunLayout(folder)
    path = layout.plan_path
    if path.is_file():
        begun = _read_plan(path)
        for part, value in wanted.items():
            if begun.get(part) != value:
                how = _first_difference(begun.get(part), value)
                raise ConfigError(
                    f"{folder}: this walk forward was started with other {part}: {how}. Resume with the same ones, "
                    "or choose another --name"
                )
    elif folder.exists() and any(not is_unplanned(item.name) for item in folder.iterdir()):
        raise ConfigError(f"{folder}: the folder exists already and holds no walk forward; choose another --name")
    else:
        folder.mkdir(parents=True, exist_ok=True)
        # The plan first: it identifies the folder, so a walk forward that is killed here can be resumed.
        replace_synced(path, (json.dumps(wanted, indent=2) + "\n").encode())
    if not layout.walk_forward_settings_path.is_file():
        replace_synced(layout.walk_forward_settings_path, to_yaml(config).encode())


def _read_plan(path: Path) -> dict[str, Any]:
    try:
        begun = json.loads(read_plain(path))
    except (OSError, ValueError, RecursionError) as error:
        begun, reason = None, f": {error}"
    else:
        reason = ""
    if not isinstance(begun, dict):
        raise ConfigError(
            f"{path}: not readable as the plan of a walk forward{reason}. Without it the settings of the folds in "
            f"{path.parent} are unknown: remove that folder to start over, or choose another --name"
        )
    return begun


def _first_difference(then: Any, now: Any, where: str = "") -> str:
    """The first setting that differs, and both values."""
    if isinstance(then, dict) and isinstance(now, dict):
        for key in now:
            if then.get(key) != now[key]:
                return _first_difference(then.get(key), now[key], f"{where}.{key}".lstrip("."))
    return f"{where or 'it'} was {then!r} and is {now!r}"
