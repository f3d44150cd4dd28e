"""The command line as a person meets it: help, versions, and mistakes that end in one message and status 2."""

from __future__ import annotations

import resource
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

import tailguard as tg
from tailguard.cli import main
from tailguard.config import RunConfig, to_dict


def run(*arguments: str, folder: Path | None = None) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", "from tailguard.cli import main; main()", *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=False, cwd=folder)


def test_version_and_help() -> None:
    assert run("--version").stdout == f"tailguard {tg.__version__}\n"
    text = run("--help").stdout
    for command in ("demo", "train", "config", "data"):
        assert command in text


def test_config_prints_what_train_reads() -> None:
    assert yaml.safe_load(run("config").stdout) == to_dict(RunConfig())
    assert list(yaml.safe_load(run("config", "market").stdout)) == ["market"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("train", "--set", "ppo.gama=1"), "Did you mean ppo.gamma?"),
        (("train", "nowhere.yaml"), "nowhere.yaml: no such file"),
        (("train", "--data", "nowhere.parquet"), "nowhere.parquet"),
        (("train", "--set", "env.num_envs=-1"), "env.num_envs: -1 is out of range"),
        (("config", "pppo"), "Did you mean ppo?"),
        (("data", "check", "nowhere.csv"), "nowhere.csv"),
        (("report", "nope"), "nope: no run here"),
        (("train", "--name", "../x"), "--name '../x': the run's folder is runs/NAME"),
    ],
)
def test_a_mistake_is_one_message_and_status_2(tmp_path: Path, arguments: tuple[str, ...], message: str) -> None:
    result = run(*arguments, folder=tmp_path)
    assert result.returncode == 2
    assert message in result.stderr
    assert "Traceback" not in result.stderr


def in_this_process(*arguments: object) -> int:
    """Exit status of the command, run in this process, so that it has this process's rights and limits."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", ["tailguard", *map(str, arguments)])
        try:
            main()
        except SystemExit as stop:
            return int(stop.code or 0)
    return 0


@pytest.mark.parametrize("suffix", ["csv", "parquet", "feather"])
def test_bars_for_a_read_only_folder_end_in_one_message(
    open_folder: Path, unprivileged: Any, capsys: pytest.CaptureFixture[str], suffix: str
) -> None:
    with unprivileged(open_folder) as lock_out:
        lock_out()
        assert in_this_process("data", "make", open_folder / f"bars.{suffix}", "--bars", 100) in (1, 2)
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(str(open_folder))
    assert "Permission denied" in line or "cannot write there" in line
    assert not list(open_folder.iterdir())


@pytest.mark.parametrize("suffix", ["csv", "parquet", "feather"])
def test_bars_for_a_full_disk_end_in_one_message_and_leave_the_old_ones(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], suffix: str
) -> None:
    """The kernel refuses writes beyond a file size, as a full disk refuses them beyond its space."""
    path = tmp_path / f"bars.{suffix}"
    path.write_text("old")
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1_000, hard))
    try:
        assert in_this_process("data", "make", path, "--bars", 2_000) == 1
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    (line,) = capsys.readouterr().err.splitlines()
    assert "File too large" in line
    assert [(each.name, each.read_text()) for each in tmp_path.iterdir()] == [(path.name, "old")]


def test_bars_made_checked_and_trained_on(tmp_path: Path) -> None:
    assert in_this_process("data", "make", tmp_path / "bars.parquet", "--bars", 2_500, "--seed", 3) == 0
    assert in_this_process("data", "check", tmp_path / "bars.parquet") == 0
    small = {
        "data": {"path": "bars.parquet", "embargo": "1d"},
        "env": {"num_envs": 8, "episode_length": 32},
        "ppo": {"n_steps": 16, "minibatch_size": 64, "epochs": 1, "network": {"hidden": [8], "lstm_size": 8}},
        "training": {"total_timesteps": 256, "threads": 1},
    }
    (tmp_path / "run.yaml").write_text(yaml.safe_dump(small))
    result = run("train", "run.yaml", "--name", "first", folder=tmp_path)
    assert result.returncode == 0, result.stderr
    for words in ("buy & hold", "verdict", "agent"):
        assert words in result.stdout
    folder = tmp_path / "runs" / "first"
    assert len((folder / "metrics.jsonl").read_text().splitlines()) == 2
    assert yaml.safe_load((folder / "config.yaml").read_text())["env"]["num_envs"] == 8
    agent = tg.DistributionalPPO.load(folder / "agent")
    bars = tg.load_bars(tmp_path / "bars.parquet")
    assert tg.backtest(agent, bars).equity[-1] > 0
    again = run("train", "run.yaml", "--name", "first", folder=tmp_path)
    assert again.returncode == 2
    assert "exists already" in again.stderr
