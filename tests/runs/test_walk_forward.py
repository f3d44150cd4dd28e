"""A walk forward survives whatever stops it: finished folds stay, and the one under way goes on to the last bit."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml
from rich.console import Console

import tailguard as tg
from tailguard.config import RunConfig, to_dict
from tailguard.data.bars import Bars
from tailguard.errors import CheckpointError, ConfigError
from tailguard.evaluate.trials import read_trials
from tailguard.evaluate.walk_forward_results import WalkForwardPlan, WalkForwardResults
from tailguard.runs.walk_forward import _write_or_check_plan, run_walk_forward

PLAN = WalkForwardPlan(folds=2, seeds=2, train=1_400)
MAIN = [sys.executable, "-c", "from tailguard.cli import main; main()"]
QUIET = Console(quiet=True)


@pytest.fixture(scope="module")
def config(small_config: Any) -> RunConfig:
    return small_config()


@pytest.fixture(scope="module")
def market() -> Bars:
    return tg.make_market(2_500, seed=4, signal=20).bars


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("walk") / "run"


@pytest.fixture(scope="module")
def walked(config: RunConfig, market: Bars, folder: Path) -> WalkForwardResults:
    return run_walk_forward(config, market, folder, PLAN, QUIET)


def weights(place: Path) -> bytes:
    return (place / "agent" / "weights.safetensors").read_bytes()


def figures(place: Path) -> list[dict[str, Any]]:
    lines = [json.loads(line) for line in (place / "metrics.jsonl").read_text().splitlines()]
    return [{name: value for name, value in line.items() if name != "time/fps"} for line in lines]


def test_finished_folds_are_kept_and_a_lost_one_is_trained_again(
    walked: WalkForwardResults, config: RunConfig, market: Bars, folder: Path
) -> None:
    kept = folder / "fold_1" / "seed_0" / "agent" / "manifest.json"
    lost = folder / "fold_2" / "seed_1"
    before, trained = kept.stat().st_mtime_ns, weights(lost)
    shutil.rmtree(lost / "agent")
    console = Console(record=True, width=200, file=open("/dev/null", "w"))  # noqa: SIM115
    again = run_walk_forward(config, market, folder, PLAN, console)
    assert kept.stat().st_mtime_ns == before
    text = console.export_text()
    assert text.count("is finished:") == 3
    assert text.count("trains:") == 1
    assert weights(lost) == trained
    assert len(figures(lost)) == 6
    assert not (lost / "checkpoints").exists()
    for mine, theirs in zip(again.stitched, walked.stitched, strict=True):
        np.testing.assert_array_equal(mine.equity, theirs.equity)


def test_every_seed_is_a_trial_and_going_on_is_none(walked: WalkForwardResults, folder: Path) -> None:
    trials, unreadable = read_trials(folder.parent / "trials.jsonl")
    assert unreadable == []
    assert [trial.run for trial in trials] == ["run, seed 0", "run, seed 1"]
    assert [trial.sharpe for trial in trials] == [each.metrics["sharpe"] for each in walked.stitched]
    assert walked.trials is not None
    assert walked.trials.count == 2


def test_a_killed_fold_goes_on_exactly(tmp_path: Path, small_config: Any) -> None:
    """SIGKILL in the middle of the second fold, as a machine that goes down; then the same again."""
    tg.make_market(2_000, seed=4, signal=20).save(tmp_path / "bars.parquet")
    steps = ("training.total_timesteps=3840", "training.checkpoint_steps=640")
    config = small_config(f"data.path={tmp_path / 'bars.parquet'}", *steps)
    bars, plan = tg.load_bars(tmp_path / "bars.parquet"), WalkForwardPlan(folds=2)
    run_walk_forward(config, bars, tmp_path / "runs" / "whole", plan, QUIET)
    (tmp_path / "run.yaml").write_text(yaml.safe_dump(to_dict(config)))
    command = [*MAIN, "train", "run.yaml", "--walk-forward", "--folds", "2", "--name", "killed"]
    process = subprocess.Popen(command, cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    place = tmp_path / "runs" / "killed" / "fold_2" / "seed_0"
    while not (place / "latest").exists():
        assert process.poll() is None
        time.sleep(0.002)
    os.kill(process.pid, signal.SIGKILL)
    process.communicate(timeout=60)
    assert not (place / "agent").exists()
    console = Console(record=True, width=200, file=open("/dev/null", "w"))  # noqa: SIM115
    run_walk_forward(config, bars, tmp_path / "runs" / "killed", plan, console)
    text = console.export_text()
    assert text.count("is finished:") == 1
    assert "resume   from step 0" not in text
    assert "resume   from step" in text
    for number in (1, 2):
        mine, theirs = (tmp_path / "runs" / name / f"fold_{number}" / "seed_0" for name in ("killed", "whole"))
        assert weights(mine) == weights(theirs)
        assert figures(mine) == figures(theirs)
    # The same settings on the same bars: one trial under two names.
    assert len((tmp_path / "runs" / "trials.jsonl").read_text().splitlines()) == 1


@pytest.mark.usefixtures("walked")
def test_other_settings_other_folders_and_damage_are_named(
    config: RunConfig, market: Bars, folder: Path, small_config: Any, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError, match=r"started with other settings: ppo\.gamma was 0\.99 and is 0\.9"):
        run_walk_forward(small_config("ppo.gamma=0.9"), market, folder, PLAN, QUIET)
    with pytest.raises(ConfigError, match="started with other sizes: folds was 2 and is 4"):
        run_walk_forward(config, market, folder, WalkForwardPlan(folds=4, train=1_400), QUIET)
    with pytest.raises(ConfigError, match="started with other bars: sha256 was"):
        run_walk_forward(config, tg.make_market(2_500, seed=5).bars, folder, PLAN, QUIET)
    (tmp_path / "note.txt").write_text("mine")
    with pytest.raises(ConfigError, match="holds no walk forward"):
        run_walk_forward(config, market, tmp_path, PLAN, QUIET)
    file = folder / "fold_1" / "seed_0" / "agent" / "weights.safetensors"
    whole = file.read_bytes()
    file.write_bytes(whole[:-1])
    with pytest.raises(CheckpointError, match=r"Remove .*fold_1/seed_0 to train this fold again"):
        run_walk_forward(config, market, folder, PLAN, QUIET)
    file.write_bytes(whole)
    assert json.loads((folder / "walk_forward.json").read_text())["sizes"]["folds"] == 2


def test_a_walk_forward_that_was_killed_while_it_began_begins(config: RunConfig, tmp_path: Path) -> None:
    """Killed before each rename in turn: only the settings, only the plan, half-written files."""
    plan = WalkForwardPlan(folds=2, train=1_400)
    for left in ("settings.yaml", ".settings.yaml.77.partial", ".walk_forward.json.77.partial", ".lock"):
        folder = tmp_path / left.strip(".") / "run"
        folder.mkdir(parents=True)
        (folder / left).write_text("")
        _write_or_check_plan(folder, config, "0" * 64, plan, [])
        assert json.loads((folder / "walk_forward.json").read_text())["sizes"]["folds"] == 2
        assert (folder / "settings.yaml").is_file()
    (folder / "settings.yaml").unlink()
    _write_or_check_plan(folder, config, "0" * 64, plan, [])
    assert (folder / "settings.yaml").is_file()


@pytest.mark.parametrize("text", ["", "{", "[1]", "null", "{" * 100_000, "\x00"])
def test_a_damaged_plan_is_named_with_the_way_out(config: RunConfig, tmp_path: Path, text: str) -> None:
    (tmp_path / "walk_forward.json").write_text(text)
    with pytest.raises(ConfigError, match=r"remove that folder to start over, or choose another --name"):
        _write_or_check_plan(tmp_path, config, "0" * 64, PLAN, [])
