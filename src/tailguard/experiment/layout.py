"""The layout of a run folder: every file and folder name is defined here, and only here.

```
runs/
  trials.jsonl                 record of every evaluated training
  <name>/                      a run
    config.yaml settings.json  its settings, and a seal of them
    metrics.jsonl tensorboard/ metrics of every iteration
    checkpoints/step_<n>/      latest names the newest
    members/<n>/               metrics and checkpoints of each of several learners
    lineage.jsonl              judgements and decisions of a population
    agent/                     the result
    report.html robustness.html population.html
    audit.html audit.json audit.sarif
    live/KILL live/KILL.<mode> the kill switch, of all modes and of one: nothing is sent while it is there
    live/exchange.sqlite       the account at a paper venue of tailguard venue
    live/<mode>/               journal, lead-in of the bars and paper account of a session
    live/<mode>/daily/<day>.*  its reports of a UTC day: .html .md .json
  <name>/                      a walk forward
    walk_forward.json settings.yaml walk_forward.html
    fold_<n>/seed_<s>/         a run's metrics, checkpoints and agent
```
"""

from __future__ import annotations

import re
import shlex
from dataclasses import dataclass
from pathlib import Path

RUNS = "runs"
"""Folder of all runs, in the working folder; names such as `btc/wide` are folders within it."""
TRIALS = "trials.jsonl"

CONFIG = "config.yaml"
"""It marks the folder of a single run."""
SEAL = "settings.json"
"""The settings that the run was started with, and their SHA-256."""
METRICS = "metrics.jsonl"
TENSORBOARD = "tensorboard"
CHECKPOINTS = "checkpoints"
LATEST = "latest"
MEMBERS = "members"
AGENT = "agent"
LOCK = ".lock"
LINEAGE = "lineage.jsonl"
"""Settings, judgements and decisions of a population; it marks a run whose members are one."""
POPULATION_PAGE = "population.html"
REPORT = "report.html"
ROBUSTNESS = "robustness.html"
AUDIT_PAGE = "audit.html"
AUDIT = "audit.json"
AUDIT_SARIF = "audit.sarif"

LIVE = "live"
KILL = "KILL"
JOURNAL = "journal.jsonl"
LEAD_IN = "lead_in.parquet"
PAPER_BOOKS = "venue.sqlite"
EXCHANGE_BOOKS = "exchange.sqlite"
DAILY = "daily"

PLAN = "walk_forward.json"
"""Settings and folds of a walk forward; it distinguishes the folder from that of a single run."""
WALK_FORWARD_SETTINGS = "settings.yaml"
"""Not config.yaml, which marks the folder of a single run."""
WALK_FORWARD_PAGE = "walk_forward.html"

WRITTEN = (CONFIG, SEAL, METRICS, TENSORBOARD, CHECKPOINTS, LATEST, MEMBERS, LINEAGE, AGENT, LOCK)
"""Everything that the training of a run writes; other files in the folder are never touched."""

_PARTIAL = r"\.\d+\.partial"
_REPLACED = "|".join(map(re.escape, (CONFIG, SEAL, METRICS, LINEAGE, LATEST)))
_LEFTOVER = re.compile(rf"\.({_REPLACED}){_PARTIAL}")
_UNPLANNED = re.compile(rf"{re.escape(LOCK)}|(\.?{re.escape(WALK_FORWARD_SETTINGS)}|\.{re.escape(PLAN)})({_PARTIAL})?")
_STEP = re.compile(r"step_(0|[1-9]\d{0,17})")
_CHECKPOINT_LEFTOVER = re.compile(r"\.step_\d+\.(\d+\.(partial|old)|removed)")


@dataclass(frozen=True)
class RunLayout:
    """The paths of one run folder; nothing is read or written."""

    path: Path

    @property
    def config_path(self) -> Path:
        return self.path / CONFIG

    @property
    def seal_path(self) -> Path:
        return self.path / SEAL

    @property
    def metrics_path(self) -> Path:
        return self.path / METRICS

    @property
    def tensorboard_path(self) -> Path:
        return self.path / TENSORBOARD

    @property
    def checkpoints_path(self) -> Path:
        return self.path / CHECKPOINTS

    @property
    def latest_path(self) -> Path:
        """A line of text that names the newest checkpoint."""
        return self.path / LATEST

    @property
    def members_path(self) -> Path:
        return self.path / MEMBERS

    @property
    def lineage_path(self) -> Path:
        return self.path / LINEAGE

    @property
    def population_page_path(self) -> Path:
        return self.path / POPULATION_PAGE

    @property
    def agent_path(self) -> Path:
        return self.path / AGENT

    @property
    def lock_path(self) -> Path:
        return self.path / LOCK

    @property
    def report_path(self) -> Path:
        return self.path / REPORT

    @property
    def robustness_path(self) -> Path:
        """The page of `tailguard backtest --feed` and `--attack`."""
        return self.path / ROBUSTNESS

    @property
    def audit_page_path(self) -> Path:
        return self.path / AUDIT_PAGE

    @property
    def audit_path(self) -> Path:
        """The answers of the last `tailguard audit RUN`, which the report shows."""
        return self.path / AUDIT

    @property
    def audit_sarif_path(self) -> Path:
        return self.path / AUDIT_SARIF

    @property
    def kill_path(self) -> Path:
        """The kill switch of every session of the run."""
        return self.path / LIVE / KILL

    def mode_kill_path(self, mode: str) -> Path:
        """The kill switch of the run's session in a mode; moving the session's folder away does not release it."""
        return self.path / LIVE / f"{KILL}.{mode}"

    def journal_path(self, mode: str) -> Path:
        """The journal of the run's session in a mode."""
        return self.path / LIVE / mode / JOURNAL

    def lead_in_path(self, mode: str) -> Path:
        """Bars before the first one of the session."""
        return self.path / LIVE / mode / LEAD_IN

    def daily_path(self, mode: str, day: str) -> Path:
        """The reports of a UTC day, such as 2024-01-05, without their suffix."""
        return self.path / LIVE / mode / DAILY / day

    def paper_books_path(self, mode: str) -> Path:
        """The account at the paper venue."""
        return self.path / LIVE / mode / PAPER_BOOKS

    @property
    def exchange_books_path(self) -> Path:
        """The account at the paper venue that is a process of its own."""
        return self.path / LIVE / EXCHANGE_BOOKS

    @property
    def plan_path(self) -> Path:
        return self.path / PLAN

    @property
    def walk_forward_settings_path(self) -> Path:
        return self.path / WALK_FORWARD_SETTINGS

    @property
    def walk_forward_page_path(self) -> Path:
        return self.path / WALK_FORWARD_PAGE

    @property
    def trials_path(self) -> Path:
        """The record of trials that the run belongs to: in the nearest folder `runs` above it, else beside it."""
        above = self.path.absolute().parents
        return next((each for each in above if each.name == RUNS), above[0]) / TRIALS

    def checkpoint_path(self, step: int) -> Path:
        return self.checkpoints_path / checkpoint_name(step)

    def member_path(self, number: int) -> Path:
        """The folder of one of several learners, counted from 0; it has metrics and checkpoints as a run has."""
        return self.members_path / str(number)

    def fold_path(self, fold: int, seed: int) -> Path:
        """The folder of one agent of a walk forward."""
        return self.path / f"fold_{fold}" / f"seed_{seed}"

    def is_run(self) -> bool:
        """Whether the folder is that of a single run."""
        return self.config_path.is_file()

    def is_population(self) -> bool:
        """Whether the run's members are a population."""
        return self.lineage_path.is_file()

    def is_walk_forward(self) -> bool:
        return self.plan_path.is_file()

    def training_folders(self) -> list[RunLayout]:
        """Where the metrics and checkpoints of the training are: the run's own folder, or that of each member."""
        inside = self.members_path.iterdir() if self.members_path.is_dir() else ()
        members = sorted((path for path in inside if path.name.isdigit()), key=lambda path: int(path.name))
        return [RunLayout(path) for path in members] or [RunLayout(self.path)]


def checkpoint_name(step: int) -> str:
    """Name of the checkpoint of this step."""
    return f"step_{step}"


def checkpoint_step(name: str) -> int | None:
    """The step of a checkpoint's name; None for other names."""
    match = _STEP.fullmatch(name)
    return None if match is None else int(match[1])


def removed_name(step: int) -> str:
    """Name of a checkpoint while its files are being deleted."""
    return f".{checkpoint_name(step)}.removed"


def is_leftover(name: str) -> bool:
    """Whether it is a file of a run that a killed process left half written."""
    return _LEFTOVER.fullmatch(name) is not None


def is_checkpoint_leftover(name: str) -> bool:
    """Whether it is a checkpoint that a killed process left half written or half removed."""
    return _CHECKPOINT_LEFTOVER.fullmatch(name) is not None


def is_unplanned(name: str) -> bool:
    """Whether a walk forward may leave the file if it is killed before it has a plan; nothing is trained by then."""
    return _UNPLANNED.fullmatch(name) is not None


def resume_command(folder: Path) -> str:
    """The command that resumes the run in this folder."""
    return f"tailguard train --resume {shlex.quote(str(folder))}"
