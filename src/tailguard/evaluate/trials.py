"""The number of trials behind a result: a file next to the runs with one line for every evaluated training.

The best of many trials looks good by luck alone, and discarded trials are easily forgotten, so each one is recorded
when its test period is evaluated. A trial is identified by its bars and by the settings that determine the trained
agent: the same training again, a resume, or another name is not a new trial; another seed is.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import math
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from tailguard.algorithm.ensemble import Ensemble
from tailguard.config import RunConfig
from tailguard.envs.prepared_market import PreparedMarket
from tailguard.errors import ConfigError
from tailguard.experiment.settings import recorded_settings
from tailguard.places import check_plain, lock, read_plain

if TYPE_CHECKING:
    from tailguard.data.bars import Bars
    from tailguard.evaluate.backtest import BacktestResult
    from tailguard.experiment.trained_run import TrainedRun

IRRELEVANT = {
    "data": ("path",),
    "training": ("device", "threads", "checkpoint_steps", "checkpoint_minutes", "keep_checkpoints"),
}
"""Settings that do not change what is learned. The bars are identified by their content."""
_HASH_LENGTH = 64


@dataclass(frozen=True)
class Trial:
    """One training that reached its test period."""

    data: str
    """SHA-256 of all bars, training to test."""
    config: str
    """SHA-256 of the settings that determine the trained agent."""
    run: str
    """Name of its folder, for display."""
    sharpe: float | None
    """Yearly Sharpe ratio on the test period; None where it is not defined."""


@dataclass(frozen=True)
class TrialCount:
    """Trials on the same bars."""

    count: int
    sharpes: NDArray[np.float64]
    """Yearly Sharpe ratios of those that have one, [k]."""
    source: str
    """Where the number comes from, in words."""


def bars_hash(bars: Bars) -> str:
    """SHA-256 of symbols, times, prices and volumes."""
    times = bars.frame["time"].dt.epoch("ms").to_numpy()
    prices = (bars.frame[name].to_numpy() for name in ("open", "high", "low", "close", "volume"))
    return hash_of(bars.symbols, bars.frequency.total_seconds(), itertools.chain([times], prices))


def hash_of(symbols: Sequence[str], seconds: float, columns: Iterable[NDArray[Any]]) -> str:
    """SHA-256 of bars by their columns: times, opens, highs, lows, closes and volumes, in pieces as they come."""
    digest = hashlib.sha256(json.dumps([symbols, seconds]).encode())
    for column in columns:
        digest.update(np.ascontiguousarray(column).data)
    return digest.hexdigest()


def settings_hash(config: RunConfig, also: Mapping[str, Any] | None = None) -> str:
    """SHA-256 of the settings that determine the trained agent, and of other inputs that do."""
    settings = recorded_settings(config)
    if "plugins" in settings:
        settings["plugins"] = list(settings["plugins"].values())
    for section, names in IRRELEVANT.items():
        for name in names:
            del settings[section][name]
    for section, name in (("market", "extra_costs"), ("ppo", "loss_terms"), ("pathwise", "loss_terms")):
        if not settings[section][name]:  # left out, so that runs without parts of their own keep one hash
            del settings[section][name]
    text = json.dumps([settings, also or {}], sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()


def trial_of(run: TrainedRun, sharpe: float, members: Sequence[int] | None = None) -> Trial:
    """The run as the record of trials knows it, with the yearly Sharpe ratio of its test period; NaN: not tested.

    `members`: of a population, those that the trial is the mean of; None: those that are the run's agent. A population
    differs from others with the same settings of a member by its own settings and its search space.
    """
    ratio = sharpe if math.isfinite(sharpe) else None
    bars = run.bars.sha256 if isinstance(run.bars, PreparedMarket) else bars_hash(run.bars)
    also: dict[str, Any] = {}
    if run.layout.is_population():
        also = _population_settings(run.layout.lineage_path)
        also["members"] = sorted(_members_of(run) if members is None else members)
    return Trial(bars, settings_hash(run.config, also), run.name, ratio)


def _population_settings(path: Path) -> dict[str, Any]:
    """Settings and search space of a population, from the head of its lineage."""
    try:
        head = json.loads(read_plain(path).partition(b"\n")[0])
        return {name: head[name] for name in ("population", "space")}
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise ConfigError(f"{path}: not the lineage of a population: {error!r}") from error


def _members_of(run: TrainedRun) -> list[int]:
    """The members of a population that are its agent: each has the run's seed and its own number."""
    agents = run.agent.members if isinstance(run.agent, Ensemble) else [run.agent]
    return [agent.seed - run.config.training.seed for agent in agents]


def record_trial(path: Path, trial: Trial) -> bool:
    """Append the trial to the record; False if it is recorded already. Raises OSError if it cannot be written.

    Writers hold a lock that the system releases however a process ends; each line is one write. A line truncated by a
    crash stays on its own line.
    """
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW | os.O_CLOEXEC, 0o644)
    try:
        check_plain(descriptor, path)
        lock(descriptor, wait=True)
        there = _read_all(descriptor)
        known, _ = _parse(there.splitlines())
        if any((each.data, each.config) == (trial.data, trial.config) for each in known):
            return False
        start = b"" if there.endswith(b"\n") or not there else b"\n"
        os.write(descriptor, start + json.dumps(asdict(trial)).encode() + b"\n")
        os.fsync(descriptor)
        return True
    finally:
        os.close(descriptor)


def read_trials(path: Path) -> tuple[list[Trial], list[int]]:
    """The trials in the order in which they were made, and the numbers of lines that cannot be read."""
    try:
        return _parse(read_plain(path).splitlines())
    except FileNotFoundError:
        return [], []
    except OSError as error:
        raise ConfigError(f"{path}: the record of trials cannot be read: {error.strerror}") from error


def count_trials(path: Path, own: Iterable[Trial]) -> TrialCount:
    """Count the different trainings evaluated on the same bars, including `own`, recorded or not.

    A line that cannot be read counts as a trial: something was tried, and leaving it out would bias the result upwards.
    """
    mine = list(own)
    recorded, unreadable = read_trials(path)
    bars = {trial.data for trial in mine}
    distinct = {(trial.data, trial.config): trial for trial in (*mine, *recorded) if trial.data in bars}
    count = len(distinct) + len(unreadable)
    sharpes = [trial.sharpe for trial in distinct.values() if trial.sharpe is not None]
    source = f"{path} has {_several(count, 'training run')} tested on these bars"
    if unreadable:
        lines = ", ".join(str(number) for number in unreadable)
        source += f", among them {_several(len(unreadable), 'line')} that cannot be read (line {lines})"
    return TrialCount(count, np.array(sharpes), source)


def given_trials(count: int, sharpes: NDArray[np.float64] | None = None) -> TrialCount:
    """A number that the user gave."""
    return TrialCount(count, np.zeros(0) if sharpes is None else sharpes, "given with --trials")


def trials_of(run: TrainedRun, own: BacktestResult, given: int | None = None) -> TrialCount:
    """The trials that the run was chosen from: those of the record beside its folder, or as many as are `given`."""
    recorded = count_trials(run.layout.trials_path, [trial_of(run, own.metrics["sharpe"])])
    return recorded if given is None else given_trials(given, recorded.sharpes)


def _several(count: int, what: str) -> str:
    return f"{count} {what}{'s' * (count != 1)}"


def _read_all(descriptor: int) -> bytes:
    with os.fdopen(os.dup(descriptor), "rb") as file:
        return file.read()


def _parse(lines: Iterable[bytes]) -> tuple[list[Trial], list[int]]:
    trials, unreadable = [], []
    for number, line in enumerate(lines, start=1):
        try:
            trials.append(_trial(json.loads(line)))
        except (ValueError, KeyError, TypeError, RecursionError):
            unreadable.append(number)
    return trials, unreadable


def _trial(line: Any) -> Trial:
    """A line of the record; raises ValueError, KeyError or TypeError if it is invalid."""
    data, config, sharpe = line["data"], line["config"], line["sharpe"]
    if not all(isinstance(each, str) and len(each) == _HASH_LENGTH for each in (data, config)):
        raise ValueError("no hashes")
    ratio = None if sharpe is None else float(sharpe)
    return Trial(data, config, str(line["run"]), ratio if ratio is not None and math.isfinite(ratio) else None)
