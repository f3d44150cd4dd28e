"""Stopping and going on from a shell, and on a disk that is really full."""

from __future__ import annotations

import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import yaml

from tailguard.config import to_dict
from tailguard.runs.checkpoint import CheckpointStore

MAIN = [sys.executable, "-c", "from tailguard.cli import main; main()"]


@pytest.fixture
def place(tmp_path: Path, small_config) -> Path:
    (tmp_path / "run.yaml").write_text(yaml.safe_dump(to_dict(small_config("training.total_timesteps=1280000"))))
    return tmp_path


def test_control_c_saves_and_says_how_to_go_on(place: Path) -> None:
    command = [*MAIN, "train", "run.yaml", "--name", "btc"]
    process = subprocess.Popen(command, cwd=place, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    folder = place / "runs" / "btc"
    while not (folder / "metrics.jsonl").exists() or not (folder / "metrics.jsonl").stat().st_size:
        assert process.poll() is None
        time.sleep(0.01)
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=60)
    assert process.returncode == 130
    assert "stopping after this iteration" in err
    assert "Traceback" not in err
    step = int((folder / "latest").read_text().removeprefix("step_"))
    words = f"checkpoint step {step:,} written and verified. Resume: tailguard train --resume runs/btc"
    assert words in " ".join(out.split())
    refused = subprocess.run(
        [*MAIN, "train", "--resume", "runs/btc", "--set", "ppo.gamma=0.9"],
        cwd=place,
        capture_output=True,
        text=True,
        check=False,
    )
    assert refused.returncode == 2
    assert "the run continues with its own settings; give no others" in refused.stderr


NAMESPACE = ["unshare", "--user", "--map-root-user", "--mount"]


def may_mount() -> bool:
    """Whether this system lets us have a small file system of our own."""
    if shutil.which("unshare") is None:
        return False
    probe = [*NAMESPACE, "mount", "-t", "tmpfs", "none", "/mnt"]
    return subprocess.run(probe, capture_output=True, check=False).returncode == 0


@pytest.mark.slow
@pytest.mark.skipif(not may_mount(), reason="needs a mount namespace")
def test_a_disk_without_space_ends_the_run_with_status_1_and_an_intact_checkpoint(place: Path) -> None:
    """A file system of 600 kB: room for a few checkpoints of 60 kB, until the figures and curves have filled it."""
    (place / "runs").mkdir()
    mount = f"mount -t tmpfs -o size=600k none {place / 'runs'}"
    script = f'{mount} && cd {place} && {{ "$@"; status=$?; cp -r runs kept; exit $status; }}'
    result = subprocess.run(
        [*NAMESPACE, "sh", "-c", script, "sh", *MAIN, "train", "run.yaml", "--name", "full"],
        capture_output=True,
        text=True,
        check=False,
    )
    assert result.returncode == 1, result.stderr
    assert "No space left on device. The run has ended; the checkpoint of step" in result.stderr
    assert "Traceback" not in result.stderr
    store = CheckpointStore(place / "kept" / "full", {})
    assert store.newest() == store.newest_intact()
    assert store.newest()
