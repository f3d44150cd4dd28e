"""Checkpoints of a run: each one complete, verified and tied to its data; `latest` names the newest.

`checkpoints/step_<n>/` is renamed into place after its files are flushed to disk and read back, so a kill or a
power failure at any moment leaves the earlier checkpoints intact. `latest` is a line of text, replaced by a rename as
well: unlike a symbolic link it survives copies and archives, and it can be checked before it is followed.
"""

from __future__ import annotations

import hashlib
import math
import os
import platform
import shutil
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import torch

from tailguard._version import __version__
from tailguard.algorithm.learner import Learner
from tailguard.algorithm.saving import PARTS, capture, describe, restore
from tailguard.data.prepare import PreparedBars
from tailguard.envs.prepared_market import MappedBars
from tailguard.envs.trading import TradingEnv
from tailguard.errors import CheckpointError
from tailguard.experiment.layout import (
    RunLayout,
    checkpoint_name,
    checkpoint_step,
    is_checkpoint_leftover,
    removed_name,
)
from tailguard.places import replace_synced, sync_folder
from tailguard.runs.validation import BestScore, ValidationResult
from tailguard.sealed import read_about, read_regular, read_sealed, verify_sealed, write_sealed


class DamagedCheckpointError(CheckpointError):
    """The newest checkpoint cannot be read; `intact` is the newest step that can, None if there is none."""

    def __init__(self, message: str, intact: int | None) -> None:
        offer = (
            "no other checkpoint is intact"
            if intact is None
            else f"the newest intact checkpoint is {checkpoint_name(intact)}"
        )
        super().__init__(f"{message}; {offer}")
        self.intact = intact


class CheckpointStore:
    """The checkpoints of one run folder.

    `data`: `data_hashes` of the training data; a checkpoint saved with other data is refused.
    `keep`: number of newest checkpoints to keep; the best by score is kept too.
    """

    def __init__(self, run: Path, data: Mapping[str, str], keep: int = 3) -> None:
        self.run, self.layout, self.data, self.keep = run, RunLayout(run), dict(data), keep
        self.folder = self.layout.checkpoints_path
        if self.folder.is_symlink():
            raise CheckpointError(f"{self.folder}: a symbolic link; links are not followed")

    def steps(self) -> list[int]:
        """Steps that have a checkpoint, ascending."""
        if not self.folder.is_dir():
            return []
        steps = (checkpoint_step(path.name) for path in self.folder.iterdir())
        return sorted(step for step in steps if step is not None)

    def newest(self) -> int | None:
        """The step to resume from; None if nothing has been saved yet."""
        steps = self.steps()
        pointer = self.layout.latest_path
        if pointer.is_symlink() or pointer.exists():
            text = read_regular(pointer, 100).decode(errors="replace").strip()
            named = checkpoint_step(text)
            if named is None:
                raise DamagedCheckpointError(
                    f"{pointer}: {text!r} is not the name of a checkpoint", self.newest_intact()
                )
            steps.append(named)
        # A kill between the two renames leaves `latest` one step behind; the newer checkpoint is complete all the same.
        return max(steps, default=None)

    def newest_intact(self) -> int | None:
        """The newest step whose files are all intact."""
        for step in reversed(self.steps()):
            try:
                self.verify(step)
            except CheckpointError:
                continue
            return step
        return None

    def verify(self, step: int) -> None:
        """Raise `CheckpointError` unless the checkpoint exists and every byte is as written."""
        verify_sealed(self._existing(step), PARTS)

    def save(self, agent: Learner, evaluation: ValidationResult | None = None, since_best: int = 0) -> Path:
        """Write a checkpoint, make it the latest, and remove those that are no longer kept.

        `evaluation`: on the validation part; the checkpoint with the best score is kept.
        `since_best`: evaluations after the best one so far, for a run that resumes from here.
        Raises OSError if it cannot be written; the earlier checkpoints stay intact.
        """
        step = agent.num_timesteps
        about = describe(agent) | {
            "data": self.data,
            "versions": versions(),
            "evaluation": None if evaluation is None or not math.isfinite(evaluation.score) else asdict(evaluation),
            "since_best": since_best,
        }
        write_sealed(self._path(step), capture(agent), about)
        self._point_to(step)
        for other in self._dispensable():
            self._remove(other)
        return self._path(step)

    def restore(self, agent: Learner, step: int) -> dict[str, tuple[Any, Any]]:
        """Restore an agent, built with the run's settings, to its exact state at this step.

        Returns library versions and thread counts that have changed, as {name: (then, now)}: the run then continues,
        but not bit for bit as before.
        """
        folder = self._path(step)
        try:
            about, parts = read_sealed(self._existing(step), PARTS)
        except CheckpointError as error:
            raise DamagedCheckpointError(str(error), self.newest_intact()) from error
        if about.get("step") != step:
            raise CheckpointError(f"{folder}: holds the state of step {about.get('step')!r}")
        _check_data(folder, about.get("data"), self.data)
        restore(agent, parts, str(folder), episodes=True)
        if agent.num_timesteps != step:
            raise CheckpointError(f"{folder}: its learner is at step {agent.num_timesteps}")
        then = about.get("versions")
        now = versions()
        return {
            name: (then.get(name) if isinstance(then, dict) else None, value)
            for name, value in now.items()
            if not isinstance(then, dict) or then.get(name) != value
        }

    def best(self) -> int | None:
        """The step with the highest score, the first of equal ones; None if no checkpoint has one."""
        scores = {step: result.score for step in self.steps() if (result := self.evaluation(step)) is not None}
        return max(scores, key=lambda step: (scores[step], -step), default=None)

    def evaluation(self, step: int) -> ValidationResult | None:
        """Validation result of the checkpoint; None if it was not evaluated or cannot be read."""
        try:
            saved = read_about(self._existing(step), PARTS).get("evaluation")
        except CheckpointError:
            return None
        growth, cvar, score = (_number(saved, name) for name in ("growth", "cvar", "score"))
        return None if growth is None or score is None else ValidationResult(growth, cvar, score)

    def best_before(self, step: int) -> BestScore:
        """The best score so far, for a run that resumes from this checkpoint."""
        best = self.best()
        result = None if best is None else self.evaluation(best)
        since = read_about(self._existing(step), PARTS).get("since_best")
        return BestScore() if result is None else BestScore(result.score, since if isinstance(since, int) else 0)

    def forget_after(self, step: int) -> list[int]:
        """Remove the checkpoints after this step, from which the run resumes; returns their steps."""
        later = [other for other in self.steps() if other > step]
        for other in later:
            self._remove(other)
        if self.steps():
            self._point_to(self.steps()[-1])
        return later

    def clean(self) -> None:
        """Remove partial files of killed processes. The caller must hold the run's lock."""
        if self.folder.is_dir():
            for path in self.folder.iterdir():
                if is_checkpoint_leftover(path.name) and not path.is_symlink():
                    shutil.rmtree(path)

    def _point_to(self, step: int) -> None:
        replace_synced(self.layout.latest_path, f"{checkpoint_name(step)}\n".encode())

    def _path(self, step: int) -> Path:
        return self.layout.checkpoint_path(step)

    def _existing(self, step: int) -> Path:
        path = self._path(step)
        if path.is_symlink():
            raise CheckpointError(f"{path}: a symbolic link; links are not followed")
        if not path.is_dir():
            raise CheckpointError(f"{self.layout.latest_path} names {checkpoint_name(step)}, which does not exist")
        return path

    def _dispensable(self) -> list[int]:
        best = self.best()
        return [step for step in self.steps()[: -self.keep] if step != best]

    def _remove(self, step: int) -> None:
        # Renamed first: a kill while files are being deleted must not leave a checkpoint that looks damaged.
        path, gone = self._path(step), self.folder / removed_name(step)
        if path.is_symlink():
            path.unlink()
            return
        shutil.rmtree(gone, ignore_errors=True)
        os.rename(path, gone)
        sync_folder(self.folder)
        shutil.rmtree(gone)


def data_hashes(env: Any) -> dict[str, str]:
    """SHA-256 of the bars and of the scaled features that an environment trades; empty where there are none."""
    if not isinstance(env, TradingEnv):
        return {}
    prepared: PreparedBars = env.prepared
    # A market on disk stores its hashes; computing them now would load all of it.
    return dict(prepared.hashes) if isinstance(prepared, MappedBars) else prepared_hashes(prepared)


def prepared_hashes(prepared: PreparedBars) -> dict[str, str]:
    """SHA-256 of prepared bars and of their scaled features."""
    panel = prepared.panel
    columns = (panel.open, panel.high, panel.low, panel.close, panel.volume, panel.funding)
    bars: tuple[Any, ...] = (panel.symbols, panel.frequency_ms, panel.time, *columns, panel.segment, panel.tradeable)
    features: tuple[Any, ...] = (prepared.names, prepared.scaler.definitions, prepared.features, prepared.usable)
    if panel.assumed_funding is not None:
        bars = (*bars, panel.assumed_funding)
    if prepared.seen_close is not None:
        features = (*features, prepared.seen_close)
    return {"bars": _digest(*bars), "features": _digest(*features)}


def versions() -> dict[str, Any]:
    """What bit-identical arithmetic depends on besides the code of this package."""
    return {
        "tailguard": __version__,
        "torch": str(torch.__version__),
        "numpy": np.__version__,
        "python": platform.python_version(),
        "cpu": torch.backends.cpu.get_cpu_capability(),
        "threads": torch.get_num_threads(),
    }


def _number(values: Any, name: str) -> float | None:
    value = values.get(name) if isinstance(values, dict) else None
    return float(value) if isinstance(value, int | float) and math.isfinite(value) else None


def _check_data(folder: Path, then: Any, now: Mapping[str, str]) -> None:
    for name in ("bars", "features"):
        saved = then.get(name) if isinstance(then, dict) else None
        if saved != now.get(name):
            raise CheckpointError(
                f"{folder}: saved with different {name}: their SHA-256 was {str(saved)[:12]}… and is "
                f"{str(now.get(name))[:12]}… now. Restore the data of this run, or start a new run"
            )


def _digest(*values: Any) -> str:
    digest = hashlib.sha256()
    for value in values:
        plain = np.ascontiguousarray(value) if isinstance(value, np.ndarray) else None
        head = repr(value) if plain is None else f"{plain.dtype.str}{plain.shape}"
        digest.update(head.encode() + b"\n")
        if plain is not None:
            digest.update(plain.data if plain.size else b"")
    return digest.hexdigest()
