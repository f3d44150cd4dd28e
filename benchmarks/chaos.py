"""Kill a run again and again, at random moments, and see whether its end is that of a run nobody disturbed.

    python benchmarks/chaos.py --kills 50

Each life of the run is a process of its own. One in five is killed with SIGKILL at a random moment from its birth on,
the others within a few iterations of training, where every iteration writes a checkpoint. After every death the run
folder is inspected: every checkpoint in it must be intact, and the newest never an earlier one than before. At the end
all weights, the whole state and every line of figures must be those of the undisturbed run, bit by bit.
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
from pathlib import Path
from typing import Any

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


def live(config: RunConfig, folder: Path, patience: tuple[float, bool] | None = None) -> tuple[bool, float]:
    """One life of the run: begun or taken up in a process of its own; returns whether it finished, and its length.

    `patience`: seconds after which it is killed, counted from its birth, or if true from its first line of figures.
    """
    begun = time.monotonic()
    figures = folder / "metrics.jsonl"
    written = figures.stat().st_mtime_ns if figures.exists() else 0
    child = os.fork()
    if child == 0:
        os._exit(_live(config, folder))
    if patience is not None:
        seconds, trained = patience
        start = None if trained else begun
        while start is None or time.monotonic() - start < seconds:
            if os.waitpid(child, os.WNOHANG)[0]:
                return True, time.monotonic() - begun
            if start is None and figures.exists() and figures.stat().st_size and figures.stat().st_mtime_ns > written:
                start = time.monotonic()
            time.sleep(0.0005)
        os.kill(child, signal.SIGKILL)
    _, status = os.waitpid(child, 0)
    if os.WIFEXITED(status) and os.WEXITSTATUS(status):
        raise SystemExit("chaos: FAILED: a run could not go on")
    return os.WIFEXITED(status), time.monotonic() - begun


def _live(config: RunConfig, folder: Path) -> int:
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
    try:
        if RunFolder(folder).holds_a_run():
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
        _, length = live(config, place / "whole")
        print(f"undisturbed: {arguments.iterations} iterations in {length:.1f} s", flush=True)
        folder, newest, kills, writing, early = place / "killed", 0, 0, 0, 0
        share = length / (2 + arguments.kills)
        while kills < arguments.kills:
            trained = draw.random() > 0.2
            finished, _ = live(config, folder, (draw.uniform(0.0, share if trained else length / 4), trained))
            if finished:
                break
            kills += 1
            writing += any(path.name.startswith(".step_") for path in (folder / "checkpoints").glob(".*"))
            early += newest == 0
            newest = inspect(folder, newest)
        live(config, folder)
        same = outcome(place / "whole", total) == outcome(folder, total)
    print(
        f"killed {kills} times ({early} before the first checkpoint, {writing} inside the writing or removing of one)"
    )
    print(f"lost or damaged checkpoints: 0 · end bit-identical: {'yes' if same else 'NO'}")
    sys.exit(0 if same else 1)


if __name__ == "__main__":
    main()
