"""A run's folder: its lock, its settings, and metrics that end where its checkpoint does."""

from __future__ import annotations

import contextlib
import json
import os
import re
import shlex
import shutil
from collections.abc import Iterator
from pathlib import Path

from tailguard.config import (
    BEGUN,
    RunConfig,
    differing_settings,
    edited_settings,
    load_run_config,
    seal_settings,
    to_dict,
    to_yaml,
)
from tailguard.errors import ConfigError
from tailguard.places import lock, read_plain, recover, replace_synced
from tailguard.runs.checkpoint import CHECKPOINTS, LATEST

CONFIG = "config.yaml"
METRICS = "metrics.jsonl"
TENSORBOARD = "tensorboard"
AGENT = "agent"
LOCK = ".lock"
PLAN = "walk_forward.json"
"""Settings and folds of a walk forward; it distinguishes the folder from that of a single run."""
MEMBERS = "members"
"""Where a run trains several agents: metrics, curves and checkpoints of each in a folder of its own."""
NAMES = (CONFIG, BEGUN, METRICS, TENSORBOARD, CHECKPOINTS, LATEST, MEMBERS, AGENT, LOCK)
"""Everything that a run writes; other files in the folder are never touched."""
_LEFTOVER = re.compile(r"\.(config\.yaml|settings\.json|metrics\.jsonl|latest)\.\d+\.partial")
"""Files of a run that a killed process left half written."""


def again(folder: Path) -> str:
    """The command that resumes the run in this folder."""
    return f"tailguard train --resume {shlex.quote(str(folder))}"


class RunFolder:
    """`runs/<name>/`: settings, metrics, curves, checkpoints and the agent of one run."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.config_path, self.metrics_path = path / CONFIG, path / METRICS
        self.tensorboard_path, self.agent_path = path / TENSORBOARD, path / AGENT

    def holds_a_run(self) -> bool:
        return self.config_path.is_file()

    def is_free(self) -> bool:
        """Whether a new run may start here."""
        if not self.path.is_dir():
            return not self.path.exists()
        names = {item.name for item in self.path.iterdir() if not _LEFTOVER.fullmatch(item.name)}
        # A run that was killed at its start has sealed settings but no config file yet.
        return names <= {LOCK, BEGUN}

    def config(self) -> RunConfig:
        """The settings that the run was started with."""
        if (self.path / PLAN).is_file():
            raise ConfigError(f"{self.path}: a walk forward; to resume it, repeat the command that started it")
        if not self.holds_a_run():
            raise ConfigError(f"{self.path}: no run here: {CONFIG} is missing")
        return load_run_config(self.config_path)

    def edited(self) -> dict[str, str]:
        """How the run's settings were edited since it began, by their names."""
        return edited_settings(self.config_path, self.config())

    def check_same(self, config: RunConfig) -> None:
        """Raise unless these are the run's settings; the message names those that differ."""
        differing = list(differing_settings(to_dict(self.config()), to_dict(config)).values())
        if differing:
            shown = "; ".join(differing[:8]) + ("; …" if len(differing) > 8 else "")
            raise ConfigError(
                f"{self.path}: this run was started with other settings ({shown}). Choose another --name, or resume "
                f"with its own settings: {again(self.path)}"
            )

    @contextlib.contextmanager
    def claimed(self) -> Iterator[None]:
        """Create the folder and hold its lock, which the system releases however the process ends."""
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            descriptor = os.open(self.path / LOCK, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o644)
        except OSError as error:
            raise ConfigError(f"{self.path}: cannot write there: {error.strerror}") from error
        try:
            self._refuse_links()
            if not lock(descriptor):
                raise ConfigError(f"{self.path}: another process is training this run; wait for it or stop it")
            for path in self.path.iterdir():
                if _LEFTOVER.fullmatch(path.name) and not path.is_dir():
                    path.unlink()
            recover(self.agent_path)
            yield
        finally:
            os.close(descriptor)

    def _refuse_links(self) -> None:
        """Refuse links: an untrusted folder must not make this process write elsewhere."""
        for name in NAMES:
            if (self.path / name).is_symlink():
                raise ConfigError(f"{self.path / name}: a symbolic link; links are not followed")

    def begin(self, config: RunConfig) -> None:
        """Remove an earlier run, write the settings, which mark the folder as a run, and then an empty metrics file."""
        try:
            self._clear()
            replace_synced(self.path / BEGUN, seal_settings(config))
            replace_synced(self.config_path, to_yaml(config).encode())
            replace_synced(self.metrics_path, b"")
        except OSError as error:
            raise ConfigError(f"{self.path}: cannot write there: {error.strerror}") from error

    def _clear(self) -> None:
        (self.path / LATEST).unlink(missing_ok=True)
        for name in (CHECKPOINTS, MEMBERS, TENSORBOARD, AGENT):
            if (self.path / name).is_dir():
                shutil.rmtree(self.path / name)
        # The settings are removed last: a kill in between must leave a folder that still counts as a run.
        for name in (METRICS, BEGUN, CONFIG):
            (self.path / name).unlink(missing_ok=True)

    def cut_metrics(self, step: int) -> tuple[int, int]:
        """Keep the lines up to this step; the resumed run writes the later ones again. Returns (kept, dropped)."""
        kept, dropped = [], 0
        for line in read_plain(self.metrics_path).splitlines(keepends=True) if self.metrics_path.exists() else []:
            if _step_of(line) <= step:
                kept.append(line)
            else:
                dropped += 1
        replace_synced(self.metrics_path, b"".join(kept))
        return len(kept), dropped

    def sync_metrics(self) -> None:
        """Flush the metrics to disk: a checkpoint must not outlive the lines that belong to it."""
        with self.metrics_path.open("rb") as file:
            os.fsync(file.fileno())


def _step_of(line: bytes) -> float:
    """The step of a line of metrics; infinite for a line truncated by a kill."""
    try:
        return float(json.loads(line)["time/total_timesteps"])
    except (ValueError, KeyError, TypeError, RecursionError):
        return float("inf")
