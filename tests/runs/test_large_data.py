"""Bars larger than the memory a process may have train from disk, and opening them does not read them.

The limit is RLIMIT_DATA. It counts what a process allocates and may write to, and not the pages of files that it maps
for reading, which the system takes back whenever it needs them: what is left under it is what must really be in memory.
RLIMIT_AS would count the mapped files too, which cost addresses and no memory.
"""

from __future__ import annotations

import json
import os
import resource
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import polars as pl
import pytest

import tailguard as tg
from tailguard.config import load_config, to_yaml
from tailguard.data.bars import REQUIRED
from tailguard.data.disk.arrays import ArrayWriter, map_array
from tailguard.data.synthetic import make_market
from tailguard.envs.prepared_market import seal
from tailguard.runs.prepare_market import prepare_market

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="limits and counters of Linux")

ROOM = 112 * 2**20
"""Memory that the process may take for everything once its libraries are loaded."""
BARS = 3_000
TILES = 640

LIMITED = """
import resource, sys
from pathlib import Path
import torch.utils.tensorboard
from rich.console import Console
import tailguard as tg
from tailguard.config import load_config
from tailguard.errors import TailguardError
from tailguard.memory_limits import _kilobytes
from tailguard.runs.folder import RunFolder
from tailguard.runs.members import train_members
from tailguard.runs.runner import build_members
from tailguard.runs.validation import Validation

settings, path, folder, room = sys.argv[1:]
torch.set_num_threads(1)
tg.compute_features(tg.make_market(1_000).bars)  # starts the threads that libraries keep, each with a stack
used = int(_kilobytes(Path("/proc/self/status"), "VmData"))
resource.setrlimit(resource.RLIMIT_DATA, (used + int(room), -1))
config, run, console = load_config(Path(settings), [f"data.path={path}"]), RunFolder(Path(folder)), Console()
try:
    with run.claimed():
        experiment, members = build_members(config, run, console)
        run.begin(config)
        validation = Validation(members.first, experiment.split.validation)
        train_members(members, run, validation, console, resume=False, again="", ask=lambda _: False)
except TailguardError as error:
    sys.exit(str(error))
"""
"""As `tailguard train` does it, up to the saved agent."""

TOUCHED = """
import json, resource, sys
import torch, tailguard as tg

def faults():
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return usage.ru_minflt + usage.ru_majflt

torch.set_num_threads(1)
tg.TradingEnv(sys.argv[1], num_envs=4, episode_length=32).reset(0)  # what happens once in a process
before = faults()
env = tg.TradingEnv(sys.argv[2], num_envs=4, episode_length=32)
env.reset(0)
opened = faults()
for _ in range(64):
    env.step(torch.zeros(4, 1))
print(json.dumps({"open": opened - before, "steps": faults() - opened, "rows": env.task.features.shape[0],
                  "row_bytes": env.task.features.shape[1] * env.task.features.element_size()}))
"""

SETTINGS = [
    "data.embargo=1d",
    "env.num_envs=8",
    "env.episode_length=32",
    "ppo.n_steps=16",
    "ppo.minibatch_size=64",
    "ppo.epochs=1",
    "ppo.network.hidden=[8]",
    "ppo.network.lstm_size=8",
    "training.total_timesteps=512",
    "training.threads=1",
]


def enlarge(small: Path, large: Path, times: int) -> int:
    """A prepared market with the training part of another `times` times over; returns the bytes of its arrays."""
    manifest = json.loads((small / "market.json").read_text())
    (large / "train").mkdir(parents=True)
    shutil.copytree(small / "bars", large / "bars")
    files, size = {}, 0
    for name, entry in manifest["files"]["train"].items():
        array = map_array(small / "train" / name, entry)
        planes = array.shape[0] if name == "table" else 1
        rows = array.shape[1] if name == "table" else len(array)
        writer = ArrayWriter(
            large / "train" / name, entry["dtype"], array.shape[-1:] * (array.ndim > 1), planes, rows * times
        )
        for tile in range(times):
            writer.append(_moved(name, array, tile, manifest))
        files[name] = writer.close()
        size += (large / "train" / name).stat().st_size
    (large / "market.json").write_bytes(seal(manifest["about"], manifest["files"] | {"train": files}))
    return size


def _moved(name: str, array: np.ndarray, tile: int, manifest: dict) -> np.ndarray:
    """Segments and stretches of a tile count on from those of the one before."""
    if name == "segment":
        return array + tile
    rows = manifest["files"]["train"]["time"]["shape"][0]
    return array + tile * rows if name == "stretches" else array


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    folder = tmp_path_factory.mktemp("large")
    make_market(BARS, seed=1).save(folder / "bars.parquet")
    settings = [*SETTINGS, f"data.path={folder / 'bars.parquet'}"]
    prepare_market(load_config(overrides=settings), folder / "small")
    (folder / "run.yaml").write_text(to_yaml(load_config(overrides=SETTINGS)))
    yield folder
    for file in folder.rglob("*"):  # hundreds of megabytes; pytest keeps the folders of three sessions
        if file.is_file() and file.stat().st_size > 2**20:
            file.unlink()


def run(script: str, *arguments: object) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-W", "ignore", "-c", script, *map(str, arguments)]
    environment = {**os.environ, "POLARS_MAX_THREADS": "1", "OMP_NUM_THREADS": "1"}
    return subprocess.run(command, capture_output=True, text=True, check=False, env=environment)


def test_a_market_larger_than_the_memory_trains_from_disk_and_not_from_memory(place: Path) -> None:
    size = enlarge(place / "small", place / "large", TILES)
    assert size > 2 * ROOM
    trained = run(LIMITED, place / "run.yaml", place / "large", place / "runs-disk", ROOM)
    assert trained.returncode == 0, trained.stderr[-2_000:]
    assert (place / "runs-disk" / "agent").is_dir()
    lines = (place / "runs-disk" / "metrics.jsonl").read_text().splitlines()
    assert len(lines) == 4

    bars = tg.load_bars(place / "bars.parquet").frame.select("time", *REQUIRED)
    length = bars["time"][-1] - bars["time"][0] + (bars["time"][1] - bars["time"][0])
    tiles = [bars.with_columns(pl.col("time") + tile * length) for tile in range(TILES)]
    pl.concat(tiles).write_parquet(place / "many.parquet")
    refused = run(LIMITED, place / "run.yaml", place / "many.parquet", place / "runs-memory", ROOM)
    assert refused.returncode == 1, refused.stderr[-2_000:]
    assert "take at least" in refused.stderr
    assert "train from disk: tailguard data prepare" in refused.stderr
    assert "Traceback" not in refused.stderr


def test_opening_costs_what_is_touched_and_not_what_there_is(place: Path) -> None:
    enlarge(place / "small", place / "once", 20)
    enlarge(place / "small", place / "eightfold", 160)
    once, eightfold = (json.loads(run(TOUCHED, place / "small", place / name).stdout) for name in ("once", "eightfold"))
    assert eightfold["rows"] == 8 * once["rows"]
    # A few faults are the allocator's own. The seven additional copies are some thousands of pages.
    pages = 7 * once["rows"] * once["row_bytes"] // resource.getpagesize()
    assert pages > 1_000
    assert eightfold["open"] < 1.5 * once["open"] + pages // 50
    assert eightfold["steps"] < 1.5 * once["steps"] + 50


CHECKED = """
import resource, sys
from pathlib import Path
import tailguard as tg
from tailguard.cli import app
from tailguard.memory_limits import _kilobytes

tg.compute_features(tg.make_market(1_000).bars)  # starts the threads that libraries keep, each with a stack
used = int(_kilobytes(Path("/proc/self/status"), "VmData"))
resource.setrlimit(resource.RLIMIT_DATA, (used + int(sys.argv[1]), -1))
app(sys.argv[2:])
"""


def test_large_files_are_checked_within_the_memory_of_a_piece(tmp_path: Path) -> None:
    """A million bars of CSV: in pieces they pass under a limit under which reading them as a whole fails."""
    one = make_market(125_000, frequency="1m", seed=0).bars.frame.drop("segment", "symbol", "time")
    rows = pl.concat([one] * 8).with_columns(time=pl.int_range(0, pl.len()) * 60_000 + 1_514_764_800_000)
    rows.write_csv(tmp_path / "BTC.csv", float_precision=6)
    environment = {**os.environ, "POLARS_MAX_THREADS": "1", "OMP_NUM_THREADS": "1", "TMPDIR": str(tmp_path)}
    command = [sys.executable, "-c", CHECKED, str(720 * 2**20), "data", "check", str(tmp_path / "BTC.csv")]

    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2_000:]
    assert "1,000,000 bars" in done.stdout
    # Selecting a symbol needs all bars at once.
    whole = subprocess.run([*command, "--symbol", "BTC"], env=environment, capture_output=True, text=True, check=False)
    assert whole.returncode != 0
