"""A run's folder: its lock, its settings, and metrics that end where its checkpoint does."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
from collections.abc import Iterator

from tailguard.config import RunConfig, differing_settings, to_dict, to_yaml
from tailguard.errors import ConfigError
from tailguard.experiment.layout import LOCK, SEAL, WRITTEN, RunLayout, is_leftover, resume_command
from tailguard.experiment.settings import changed_since, edited_settings, load_run_config, seal_settings
from tailguard.monitor.writers import STEP
from tailguard.places import lock, read_plain, recover, replace_synced


class RunFolder(RunLayout):
    """`runs/<name>/`: settings, metrics, curves, checkpoints and the agent of one run, to read and to write."""

    def is_free(self) -> bool:
        """Whether a new run may start here."""
        if not self.path.is_dir():
            return not self.path.exists()
        names = {item.name for item in self.path.iterdir() if not is_leftover(item.name)}
        # A run that was killed at its start has sealed settings but no config file yet.
        return names <= {LOCK, SEAL}

    def config(self, *, trust_plugins: bool = False) -> RunConfig:
        """The settings that the run was started with; raises if they, or the code of its plugins, have changed.

        `trust_plugins`: run the plugins that they name; else they are refused, unless this process has run them.
        """
        if self.is_walk_forward():
            raise ConfigError(f"{self.path}: a walk forward; to resume it, repeat the command that started it")
        if not self.is_run():
            raise ConfigError(f"{self.path}: no run here: {self.config_path.name} is missing")
        config = load_run_config(self.config_path, trust_plugins=trust_plugins)
        changed = changed_since(self.config_path, config)
        if changed:
            raise ConfigError(
                f"{self.path}: {'; '.join(changed)}: an agent must not be trained by two versions of the code. Restore "
                "the file, or start a new run with another --name"
            )
        return config

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
                f"with its own settings: {resume_command(self.path)}"
            )

    @contextlib.contextmanager
    def claimed(self) -> Iterator[None]:
        """Create the folder and hold its lock, which the system releases however the process ends."""
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            descriptor = os.open(self.lock_path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o644)
        except OSError as error:
            raise ConfigError(f"{self.path}: cannot write there: {error.strerror}") from error
        try:
            self._refuse_links()
            if not lock(descriptor):
                raise ConfigError(f"{self.path}: another process is training this run; wait for it or stop it")
            for path in self.path.iterdir():
                if is_leftover(path.name) and not path.is_dir():
                    path.unlink()
            recover(self.agent_path)
            yield
        finally:
            os.close(descriptor)

    def _refuse_links(self) -> None:
        """Refuse links: an untrusted folder must not make this process write elsewhere."""
        for name in WRITTEN:
            if (self.path / name).is_symlink():
                raise ConfigError(f"{self.path / name}: a symbolic link; links are not followed")

    def begin(self, config: RunConfig) -> None:
        """Remove an earlier run, write the settings, which mark the folder as a run, and then an empty metrics file."""
        try:
            self._clear()
            replace_synced(self.seal_path, seal_settings(config))
            replace_synced(self.config_path, to_yaml(config).encode())
            replace_synced(self.metrics_path, b"")
        except OSError as error:
            raise ConfigError(f"{self.path}: cannot write there: {error.strerror}") from error

    def _clear(self) -> None:
        self.latest_path.unlink(missing_ok=True)
        for path in (self.checkpoints_path, self.members_path, self.tensorboard_path, self.agent_path):
            if path.is_dir():
                shutil.rmtree(path)
        # The settings are removed last: a kill in between must leave a folder that still counts as a run.
        for path in (self.metrics_path, self.lineage_path, self.seal_path, self.config_path):
            path.unlink(missing_ok=True)

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
        return float(json.loads(line)[STEP])
    except (ValueError, KeyError, TypeError, RecursionError):
        return float("inf")
