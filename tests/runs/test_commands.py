"""Stopping and going on from a shell, and on a disk that is really full."""

from __future__ import annotations

import contextlib
import io
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import polars as pl
import pytest
import yaml

from tailguard.cli import main
from tailguard.config import to_dict
from tailguard.data.synthetic import make_market
from tailguard.runs.checkpoint import CheckpointStore

MAIN = [sys.executable, "-c", "from tailguard.cli import main; main()"]


@pytest.fixture
def place(tmp_path: Path, small_config) -> Path:
    (tmp_path / "run.yaml").write_text(yaml.safe_dump(to_dict(small_config("training.total_timesteps=1280000"))))
    return tmp_path


def in_this_process(folder: Path, *arguments: str) -> tuple[int, str]:
    """Exit status and output of the command; a process of its own would spend most of its time on imports."""
    said = io.StringIO()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", ["tailguard", *arguments])
        patch.chdir(folder)
        with contextlib.redirect_stdout(said), contextlib.redirect_stderr(said):
            try:
                main()
            except SystemExit as stop:
                return int(stop.code or 0), said.getvalue()
    return 0, said.getvalue()


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
    status, message = in_this_process(place, "train", "--resume", "runs/btc", "--set", "ppo.gamma=0.9")
    assert status == 2
    assert "the run resumes with its own settings; remove the other settings" in message


def begin(place: Path, *arguments: str, **options: Any) -> tuple[subprocess.Popen[str], Path]:
    """A training that has written its first figures, and its folder."""
    process = subprocess.Popen(
        [*MAIN, "train", "run.yaml", "--name", "btc", *arguments],
        cwd=place,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        **options,
    )
    folder = place / "runs" / "btc"
    while not (folder / "metrics.jsonl").exists() or not (folder / "metrics.jsonl").stat().st_size:
        assert process.poll() is None, process.communicate()
        time.sleep(0.01)
    return process, folder


def test_a_closed_terminal_saves_and_the_run_can_go_on(place: Path) -> None:
    """SIGHUP, twice as shell and system send it, with nobody left to read."""
    process, folder = begin(place)
    assert process.stdout is not None
    assert process.stderr is not None
    process.stdout.close()
    process.stderr.close()
    process.send_signal(signal.SIGHUP)
    process.send_signal(signal.SIGHUP)
    assert process.wait(timeout=60) == 129
    step = int((folder / "latest").read_text().removeprefix("step_"))
    assert CheckpointStore(folder, {}).newest_intact() == step
    shorter = (folder / "config.yaml").read_text().replace("total_timesteps: 1280000", f"total_timesteps: {step}")
    (folder / "config.yaml").write_text(shorter)
    resume = ("train", "--resume", "runs/btc")
    status, message = in_this_process(place, *resume)
    assert status == 2
    assert f"training.total_timesteps was 1280000 and is {step}" in message
    status, message = in_this_process(place, *resume, "--yes")
    assert status == 0, message
    assert f"resume   from step {step:,}" in message
    (folder / "config.yaml").write_text(shorter.replace("gamma: 0.99", "gamma: 0.5", 1))
    status, message = in_this_process(place, *resume, "--yes")
    assert status == 2
    assert "changed since the run started (ppo.gamma was 0.99 and is 0.5)" in message


def test_training_goes_on_when_nobody_reads_its_output(tmp_path: Path, small_config) -> None:
    config = small_config("training.total_timesteps=6400", "training.checkpoint_steps=640")
    (tmp_path / "run.yaml").write_text(yaml.safe_dump(to_dict(config)))
    process, folder = begin(tmp_path)
    assert process.stdout is not None
    process.stdout.close()
    assert process.stderr is not None
    messages = process.stderr.read()
    assert process.wait(timeout=60) == 0, messages
    assert "Traceback" not in messages
    assert (folder / "latest").read_text() == "step_6400\n"
    assert len((folder / "metrics.jsonl").read_text().splitlines()) == 50


def test_names_with_markup_are_names(tmp_path: Path, small_config) -> None:
    """A name, a symbol and a file that Rich would take for markup, through training and a backtest."""
    bars = make_market(2_500, seed=4).bars.frame.drop("segment").with_columns(symbol=pl.lit("BTC[/x]"))
    bars.rename({"time": "open_time"}).write_csv(tmp_path / "x[/b].csv".replace("/", "_"))
    (tmp_path / "x[").mkdir()
    (tmp_path / "x[" / "b].csv").write_bytes((tmp_path / "x[_b].csv").read_bytes())
    config = small_config("training.total_timesteps=128")
    (tmp_path / "run.yaml").write_text(yaml.safe_dump(to_dict(config)))
    arguments = ("train", "run.yaml", "--data", "x[/b].csv", "--name", "[red]a[/b]")
    status, message = in_this_process(tmp_path, *arguments)
    assert status == 0, message
    assert "market   x[/b].csv · BTC[/x]" in message
    assert "saved    runs/[red]a[/b]/agent" in message
    assert (tmp_path / "runs" / "trials.jsonl").is_file()
    status, message = in_this_process(tmp_path, "backtest", "runs/[red]a[/b]", "--data", "x[/b].csv")
    assert status == 0, message
    assert "b].csv, net" in message


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
    assert "No space left on device. The run has stopped; the checkpoint of step" in result.stderr
    assert "Traceback" not in result.stderr
    store = CheckpointStore(place / "kept" / "full", {})
    assert store.newest() == store.newest_intact()
    assert store.newest()
