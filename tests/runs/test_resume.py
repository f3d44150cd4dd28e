"""A run that was stopped goes on as if nothing had happened: same weights, same figures, to the last bit."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import resource
import signal
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from tailguard.errors import CheckpointError, ConfigError, RunError
from tailguard.runs.runner import resume_run, train

yes: Callable[[str], bool] = lambda _: True  # noqa: E731


def hashes(folder: Path, step: int = 768) -> dict[str, str]:
    """SHA-256 of everything the run has come to."""
    manifest = json.loads((folder / "checkpoints" / f"step_{step}" / "manifest.json").read_text())
    return {name: entry["sha256"] for name, entry in manifest["files"].items()}


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory, small_config: Any) -> Path:
    """A run that nobody disturbed."""
    folder = tmp_path_factory.mktemp("runs") / "whole"
    train(small_config(), folder, Console(quiet=True))
    return folder


@contextlib.contextmanager
def when(condition: Callable[[], bool], act: Callable[[], Any]) -> Iterator[None]:
    """Act from another thread as soon as the condition holds."""

    def watch() -> None:
        deadline = time.monotonic() + 60
        while not condition() and time.monotonic() < deadline:
            time.sleep(0.001)
        act()

    thread = threading.Thread(target=watch)
    thread.start()
    try:
        yield
    finally:
        thread.join()


def has_lines(folder: Path, count: int) -> Callable[[], bool]:
    path = folder / "metrics.jsonl"
    return lambda: path.exists() and path.read_bytes().count(b"\n") >= count


@contextlib.contextmanager
def stopped_by(number: int, condition: Callable[[], bool]) -> Iterator[None]:
    with when(condition, lambda: os.kill(os.getpid(), number)), pytest.raises(SystemExit) as found:
        yield
    assert found.value.code == 128 + number


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_stopped_run_goes_on_bit_by_bit(
    tmp_path: Path, whole: Path, small_config: Any, lines_of: Any, number: int
) -> None:
    console = Console(record=True, width=200, file=open("/dev/null", "w"))  # noqa: SIM115
    folder = tmp_path / "stopped"
    with stopped_by(number, has_lines(folder, 3)):
        train(small_config(), folder, console)
    text = " ".join(console.export_text().split())
    assert "written and verified. Resume: tailguard train --resume" in text
    step = int((folder / "latest").read_text().removeprefix("step_"))
    assert 384 <= step < 768
    assert len(lines_of(folder)) == step // 128
    with (folder / "metrics.jsonl").open("a") as file:  # what a kill after the checkpoint would have left
        file.write(json.dumps({"time/total_timesteps": step + 128}) + "\n" + '{"time/tot')
    result = resume_run(folder, Console(quiet=True))
    assert hashes(folder) == hashes(whole)
    assert lines_of(folder) == lines_of(whole)
    assert result.agent.num_timesteps == 768
    assert (folder / "config.yaml").read_text() == (whole / "config.yaml").read_text()


def test_a_run_under_faulty_feeds_goes_on_bit_by_bit(tmp_path: Path, whole: Path, small_config: Any) -> None:
    """Which feed each running episode has is part of what is saved; another feed is another run."""
    config = small_config("robust.feed=[late:2, bad_tick:0.1@0.1]", "robust.feed_probability=0.7")
    train(config, tmp_path / "undisturbed", Console(quiet=True))
    folder = tmp_path / "stopped"
    with stopped_by(signal.SIGINT, has_lines(folder, 3)):
        train(config, folder, Console(quiet=True))
    resume_run(folder, Console(quiet=True), yes)
    assert hashes(folder) == hashes(tmp_path / "undisturbed")
    assert hashes(folder) != hashes(whole)


def test_figures_and_scores_come_with_the_steps(whole: Path, lines_of: Any) -> None:
    lines = lines_of(whole)
    assert [line["time/total_timesteps"] for line in lines] == [128, 256, 384, 512, 640, 768]
    assert ["eval/growth" in line for line in lines] == [False, True, False, True, False, True]
    assert (whole / "latest").read_text() == "step_768\n"


def test_checkpoints_by_minutes_change_nothing(tmp_path: Path, whole: Path, small_config: Any, lines_of: Any) -> None:
    config = small_config("training.checkpoint_minutes=1e-9", "training.keep_checkpoints=9")
    train(config, tmp_path / "often", Console(quiet=True))
    assert sorted(os.listdir(tmp_path / "often" / "checkpoints")) == [f"step_{128 * i}" for i in range(1, 7)]
    assert hashes(tmp_path / "often") == hashes(whole)
    assert lines_of(tmp_path / "often") == lines_of(whole)


# --- the same command again -----------------------------------------------------------------------------------------


def test_the_same_command_asks_before_it_goes_on(whole: Path, small_config: Any, quiet: Console, lines_of: Any) -> None:
    before = hashes(whole)
    lines = lines_of(whole)
    with pytest.raises(ConfigError, match=r"this run exists already\. Go on with it"):
        train(small_config(), whole, quiet)
    asked: list[str] = []
    result = train(small_config(), whole, quiet, ask=lambda question: asked.append(question) or True)
    assert len(asked) == 1
    assert "exists already" in asked[0]
    assert result.agent.num_timesteps == 768
    assert hashes(whole) == before
    assert lines_of(whole) == lines


def test_other_settings_are_named(whole: Path, small_config: Any, quiet: Console) -> None:
    config = small_config("ppo.gamma=0.5", "ppo.network.hidden=[9]")
    with pytest.raises(ConfigError) as found:
        train(config, whole, quiet, ask=yes)
    message = str(found.value)
    assert "ppo.gamma was 0.99 and is 0.5; ppo.network.hidden was [8] and is [9])" in message
    assert "tailguard train --resume" in message


def test_a_run_killed_before_its_first_checkpoint_begins_again(
    tmp_path: Path, whole: Path, small_config: Any, lines_of: Any
) -> None:
    folder = tmp_path / "early"
    with stopped_by(signal.SIGTERM, has_lines(folder, 1)):
        train(small_config(), folder, Console(quiet=True))
    for step in (folder / "checkpoints").iterdir():  # as a kill would have left it
        step.rename(folder / "checkpoints" / ".step_128.1.partial")
    (folder / "latest").unlink()
    resume_run(folder, Console(quiet=True))
    assert hashes(folder) == hashes(whole)
    assert lines_of(folder) == lines_of(whole)


def test_a_damaged_checkpoint_is_passed_over_only_with_consent(
    tmp_path: Path, whole: Path, small_config: Any, lines_of: Any
) -> None:
    folder = tmp_path / "damaged"
    with stopped_by(signal.SIGTERM, has_lines(folder, 5)):
        train(small_config(), folder, Console(quiet=True))
    newest = (folder / "latest").read_text().strip()
    os.truncate(folder / "checkpoints" / newest / "state.safetensors", 1000)
    with pytest.raises(
        CheckpointError, match=r"1,000 bytes long; .* the newest intact checkpoint is step_.* --yes resumes"
    ):
        resume_run(folder, Console(quiet=True))
    assert (folder / "checkpoints" / newest).is_dir()
    resume_run(folder, Console(quiet=True), yes)
    assert hashes(folder) == hashes(whole)
    assert lines_of(folder) == lines_of(whole)


def test_other_bars_in_the_file_are_noticed(tmp_path: Path, small_config: Any, quiet: Console) -> None:
    from tailguard.data.synthetic import make_market

    make_market(2_500, seed=1).save(tmp_path / "bars.parquet")
    config = small_config(f"data.path={tmp_path / 'bars.parquet'}", "training.total_timesteps=256")
    train(config, tmp_path / "run", quiet)
    make_market(2_500, seed=2).save(tmp_path / "bars.parquet")
    with pytest.raises(CheckpointError, match="step_256: saved with different bars"):
        resume_run(tmp_path / "run", quiet)


def test_a_folder_without_a_run_cannot_be_resumed(tmp_path: Path, quiet: Console) -> None:
    with pytest.raises(ConfigError, match=r"no run here: config\.yaml is missing"):
        resume_run(tmp_path / "nothing", quiet)
    assert not (tmp_path / "nothing").exists()


def test_two_processes_cannot_train_one_run(whole: Path, quiet: Console) -> None:
    with (whole / ".lock").open() as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        with pytest.raises(ConfigError, match="another process is training this run"):
            resume_run(whole, quiet)


@pytest.mark.parametrize("name", ["config.yaml", "metrics.jsonl", "tensorboard", "checkpoints", "latest", "agent"])
def test_a_stranger_s_run_folder_cannot_write_through_links(
    tmp_path: Path, whole: Path, quiet: Console, name: str
) -> None:
    import shutil

    folder, outside = tmp_path / "run", tmp_path / "outside"
    shutil.copytree(whole, folder)
    (folder / name).rename(outside)
    (folder / name).symlink_to(outside)
    before = outside.read_bytes() if outside.is_file() else sorted(os.listdir(outside))
    with pytest.raises(ConfigError, match=f"{name}: a symbolic link; links are not followed"):
        resume_run(folder, quiet)
    assert before == (outside.read_bytes() if outside.is_file() else sorted(os.listdir(outside)))


def test_a_replaced_run_leaves_what_is_not_its_own(tmp_path: Path, small_config: Any, quiet: Console) -> None:
    config = small_config("training.total_timesteps=256")
    train(config, tmp_path / "run", quiet)
    (tmp_path / "run" / "notes.txt").write_text("mine")
    train(small_config("training.total_timesteps=128"), tmp_path / "run", quiet, replace=True)
    assert (tmp_path / "run" / "notes.txt").read_text() == "mine"
    assert os.listdir(tmp_path / "run" / "checkpoints") == ["step_128"]


# --- disks ----------------------------------------------------------------------------------------------------------


def test_a_full_disk_ends_the_run_with_the_last_checkpoint_intact(
    tmp_path: Path, whole: Path, small_config: Any, quiet: Console, lines_of: Any
) -> None:
    """The kernel refuses writes beyond a file size, as a full disk refuses them beyond its space."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    folder = tmp_path / "full"
    fill = lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (1_000, hard))  # noqa: E731
    try:
        with when((folder / "latest").exists, fill), pytest.raises(RunError) as found:
            train(small_config(), folder, quiet)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert "File too large. The run has stopped; the checkpoint of step" in str(found.value)
    assert "is intact. Free disk space" in str(found.value)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1_000, hard))
    try:
        with pytest.raises(RunError, match="File too large"):  # the disk is full still
            resume_run(folder, quiet)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    resume_run(folder, quiet)
    assert hashes(folder) == hashes(whole)
    assert lines_of(folder) == lines_of(whole)


def test_a_folder_that_becomes_read_only_ends_the_run_with_the_last_checkpoint_intact(
    open_folder: Path, unprivileged: Any, whole: Path, small_config: Any, quiet: Console, lines_of: Any
) -> None:
    folder = open_folder / "run"
    folder.mkdir()
    with (
        unprivileged(folder) as lock_out,
        when((folder / "latest").exists, lock_out),
        pytest.raises(RunError, match=r"Permission denied\. The run has stopped; the checkpoint of step .* is intact"),
    ):
        train(small_config(), folder, quiet)
    resume_run(folder, quiet)
    assert hashes(folder) == hashes(whole)
    assert lines_of(folder) == lines_of(whole)


def test_a_read_only_folder_is_an_error_before_any_work(
    open_folder: Path, unprivileged: Any, small_config: Any, quiet: Console
) -> None:
    with unprivileged(open_folder) as lock_out:
        lock_out()
        with pytest.raises(ConfigError, match="run: cannot write there: Permission denied"):
            train(small_config(), open_folder / "run", quiet)


def test_a_run_killed_while_its_folder_was_made_begins_again(
    tmp_path: Path, whole: Path, small_config: Any, quiet: Console, lines_of: Any
) -> None:
    folder = tmp_path / "born"
    folder.mkdir()
    for name in (".lock", ".config.yaml.77.partial", ".metrics.jsonl.77.partial"):
        (folder / name).write_text("ppo:")
    train(small_config(), folder, quiet)
    assert hashes(folder) == hashes(whole)
    assert lines_of(folder) == lines_of(whole)
    assert not list(folder.glob("*.partial"))
