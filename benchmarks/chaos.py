"""Kill a run again and again, at random moments, and see whether its end is that of a run nobody disturbed.

    python benchmarks/chaos.py --kills 50

Each life of the run is a process of its own that is killed with SIGKILL: one in five at a random moment from its birth
on, two in five within a few iterations of training, two in five while a checkpoint is being written. After every death
the run folder is inspected: every checkpoint in it must be intact, and the newest never an earlier one than before. At
the end all weights, the whole state and every line of figures must be those of the undisturbed run, bit by bit.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch.utils.tensorboard  # noqa: F401 (loaded once, before the lives begin)
from rich.console import Console

from tailguard.config import RunConfig, load_config
from tailguard.errors import TailguardError
from tailguard.runs.checkpoint import CheckpointStore
from tailguard.runs.folder import RunFolder
from tailguard.runs.runner import resume_run, train

SETTINGS = (
    "data.synthetic_bars=1500",
    "data.synthetic_signal=30",
    "data.features=[return_24, taker_imbalance_6]",
    "data.embargo=1d",
    "env.num_envs=8",
    "env.episode_length=32",
    "ppo.n_steps=16",
    "ppo.minibatch_size=64",
    "ppo.epochs=2",
    "ppo.learning_rate=linear:1e-2:0",
    "ppo.optimizer=upgdw",
    "ppo.vgs.enabled=true",
    "ppo.network.hidden=[8]",
    "ppo.network.lstm_size=8",
    "ppo.network.twin_critics=true",
    "training.threads=1",
    "training.checkpoint_steps=256",
    "training.checkpoint_minutes=0.001",
    "training.keep_checkpoints=2",
)
"""A checkpoint almost every iteration, so that many kills fall into the writing of one."""


@dataclass(frozen=True)
class Death:
    """When a life ends: so many seconds after it was born, began to train, or began to write a checkpoint."""

    seconds: float
    after: Literal["birth", "training", "writing"]

    def has_begun(self, folder: Path, known: int) -> bool:
        """Whether the event has come; `known` is the size that the figures had before this life."""
        if self.after == "birth":
            return True
        if self.after == "training":
            figures = folder / "metrics.jsonl"
            # A life that goes on first cuts the figures, then adds to them.
            return figures.exists() and figures.stat().st_size > known
        return any((folder / "checkpoints").glob(".*.partial"))


def live(config: RunConfig, folder: Path, death: Death | None = None) -> bool:
    """One life of the run, begun or taken up in a process of its own; returns whether it finished."""
    figures = folder / "metrics.jsonl"
    known = figures.stat().st_size if figures.exists() else 0
    child = os.fork()
    if child == 0:
        os._exit(_live(config, folder))
    if death is not None:
        begun = None
        while begun is None or time.monotonic() - begun < death.seconds:
            if os.waitpid(child, os.WNOHANG)[0]:
                return True
            if begun is None and death.has_begun(folder, known):
                begun = time.monotonic()
            time.sleep(0.0002)
        os.kill(child, signal.SIGKILL)
    _, status = os.waitpid(child, 0)
    if os.WIFEXITED(status) and os.WEXITSTATUS(status):
        raise SystemExit("chaos: FAILED: a run could not go on")
    return os.WIFEXITED(status)


def _live(config: RunConfig, folder: Path) -> int:
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
    try:
        if RunFolder(folder).is_run():
            resume_run(folder, Console(quiet=True))
        else:
            train(config, folder, Console(quiet=True))
    except BaseException as error:
        print(f"a life ended in an error: {error!r}", file=sys.stderr, flush=True)
        return 1
    return 0


def inspect(folder: Path, before: int) -> int:
    """The newest step after a death; ends the program if a checkpoint is lost or damaged."""
    store = CheckpointStore(folder, {})
    newest = store.newest() or 0
    try:
        for step in store.steps():
            store.verify(step)
        if newest:
            store.verify(newest)
    except TailguardError as error:
        raise SystemExit(f"chaos: FAILED: {error}") from error
    if newest < before:
        raise SystemExit(f"chaos: FAILED: the newest checkpoint was step {before} and is step {newest}")
    return newest


def outcome(folder: Path, step: int) -> dict[str, Any]:
    """Hashes of weights and state, and the figures without those of the clock."""
    manifest = json.loads((folder / "checkpoints" / f"step_{step}" / "manifest.json").read_text())
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return {"files": manifest["files"], "lines": [{k: v for k, v in line.items() if k != "time/fps"} for line in lines]}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])  # type: ignore[union-attr]
    parser.add_argument("--kills", type=int, default=50, help="kills before the run may finish")
    parser.add_argument("--iterations", type=int, default=200, help="iterations of the whole run")
    parser.add_argument("--seed", type=int, default=0, help="of the moments of the kills")
    parser.add_argument("--folder", type=Path, help="where to run; a temporary folder by default")
    arguments = parser.parse_args()
    draw = random.Random(arguments.seed)
    total = 128 * arguments.iterations
    config = load_config(overrides=[*SETTINGS, f"training.total_timesteps={total}"])
    with tempfile.TemporaryDirectory() as temporary:
        place = arguments.folder or Path(temporary)
        live(config, place / "whole")
        seconds = total / json.loads((place / "whole" / "metrics.jsonl").read_text().splitlines()[-1])["time/fps"]
        print(f"undisturbed: {arguments.iterations} iterations, {seconds:.1f} s of training", flush=True)
        folder, newest, kills, writing = place / "killed", 0, 0, 0
        while kills < arguments.kills:
            longest = {"birth": 3.0, "training": seconds / (2 + arguments.kills), "writing": 0.006}
            after = draw.choice(("birth", "training", "training", "writing", "writing"))
            if live(config, folder, Death(draw.uniform(0.0, longest[after]), after)):
                break
            kills += 1
            writing += any((folder / "checkpoints").glob(".*"))
            newest = inspect(folder, newest)
        live(config, folder)
        same = outcome(place / "whole", total) == outcome(folder, total)
    print(f"killed {kills} times, {writing} of them while a checkpoint was being written or removed")
    print(f"lost or damaged checkpoints: 0 · end bit-identical: {'yes' if same else 'NO'}")
    sys.exit(0 if same else 1)


if __name__ == "__main__":
    main()
