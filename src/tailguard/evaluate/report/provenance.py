"""What identifies a run in its report: hashes, versions and steps, and the command that repeats it."""

from __future__ import annotations

import json
import platform
import shlex
from collections.abc import Mapping
from typing import Any

from tailguard._version import __version__
from tailguard.algorithm.ensemble import Ensemble
from tailguard.errors import CheckpointError
from tailguard.evaluate.formatting import describe_exposure
from tailguard.experiment.trained_run import TrainedRun
from tailguard.sealed import MANIFEST, read_about


def repeat_command(run: TrainedRun) -> str:
    """The command that trains the run again, under another name."""
    return f"tailguard train {shlex.quote(str(run.layout.config_path))} --name {shlex.quote(run.name)}-again"


def provenance(run: TrainedRun) -> dict[str, str]:
    """What identifies the run: SHA-256 of its weights, bars and features, and the versions it was made with."""
    manifest = run.layout.agent_path / MANIFEST
    # An agent that is not saved yet has no hashes.
    files = json.loads(manifest.read_text(encoding="utf-8"))["files"] if manifest.is_file() else {}
    facts = {f"SHA-256 of {run.layout.agent_path.name}/{name}": entry["sha256"] for name, entry in files.items()}
    checkpoint = run.layout.training_folders()[0].checkpoint_path(run.agent.num_timesteps)
    made: Mapping[str, Any] = {}
    if checkpoint.is_dir():
        try:
            made = read_about(checkpoint, ("weights", "state"))
        except CheckpointError as error:
            facts["checkpoint"] = str(error)
    facts |= {f"SHA-256 of the training {name}": str(value) for name, value in dict(made.get("data") or {}).items()}
    then = ", ".join(f"{name} {value}" for name, value in dict(made.get("versions") or {}).items())
    facts |= {"trained with": then} if then else {}
    steps, total = run.agent.num_timesteps, run.config.training.total_timesteps
    chosen = f" of {total:,}; the best on validation" if run.config.select == "best" and steps < total else ""
    facts["steps"] = f"{steps:,}{chosen}"
    if isinstance(run.agent, Ensemble):
        facts["members"] = f"{len(run.agent.members)}; the training curves are of the first"
        calibrated = run.agent.calibration
        facts["exposure"] = f"×{run.agent.exposure:.2f}" if calibrated is None else describe_exposure(calibrated)
    facts["report made with"] = f"tailguard {__version__}, python {platform.python_version()}"
    return facts
