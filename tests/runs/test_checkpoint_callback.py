"""Validation chooses: the agent that a run saves, tests and reports is the best-scored one, however the run went."""

from __future__ import annotations

import json
import math
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from tailguard.config import to_yaml
from tailguard.evaluate.backtest import backtest
from tailguard.experiment.trained_run import load_run_agent, open_run
from tailguard.runs.runner import resume_run, train
from tailguard.runs.validation import Validation

QUICK = ("training.total_timesteps=1536", "training.evaluation_steps=128", "ppo.learning_rate=0.05")
"""Twelve iterations, each of them scored; every other one is a checkpoint. The best is in the middle."""


def files(folder: Path) -> dict[str, str]:
    return {name: e["sha256"] for name, e in json.loads((folder / "manifest.json").read_text())["files"].items()}


def scores(lines: list[dict[str, Any]]) -> dict[int, float]:
    return {int(line["time/total_timesteps"]): line["eval/score"] for line in lines if "eval/score" in line}


def told(console: Console) -> str:
    return " ".join(console.export_text().split())


@pytest.fixture
def heard() -> Console:
    return Console(record=True, width=250, file=open(os.devnull, "w"))


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory, small_config: Any) -> tuple[Path, str, Any]:
    """A run that nobody disturbed, what it said, and its result."""
    folder = tmp_path_factory.mktemp("runs") / "whole"
    console = Console(record=True, width=250, file=open(os.devnull, "w"))  # noqa: SIM115
    result = train(small_config(*QUICK), folder, console)
    return folder, told(console), result


def test_the_result_is_the_agent_with_the_best_score(whole: tuple[Path, str, Any], lines_of: Any) -> None:
    folder, said, result = whole
    found = scores(lines_of(folder))
    assert list(found) == [128 * number for number in range(1, 13)]
    best = max(found, key=lambda step: found[step])
    assert best < 1536, "a best in the middle, or nothing is tested here"
    assert files(folder / "agent") == files(folder / "checkpoints" / f"step_{best}")
    assert f"chosen step {best:,} of 1,536: best on validation (+{found[best]:.1f} a year); later ones" in said
    run = open_run(folder)
    assert Validation(run.agent, run.part("validation")).evaluate(run.agent).score == found[best]
    assert result.agent.num_timesteps == best
    # What is tested is what is saved.
    again = backtest(load_run_agent(folder), run.part("test"))
    assert again.equity[-1] == result.results["agent"].equity[-1]


def test_a_checkpoint_is_written_when_due_or_when_it_is_the_best_so_far(
    tmp_path: Path, small_config: Any, quiet: Console, lines_of: Any
) -> None:
    train(small_config(*QUICK, "training.keep_checkpoints=99"), tmp_path / "run", quiet)
    expected, best = set(range(256, 1537, 256)), -math.inf
    for step, score in scores(lines_of(tmp_path / "run")).items():
        expected |= {step} if score > best else set()
        best = max(best, score)
    written = {int(path.name.removeprefix("step_")) for path in (tmp_path / "run" / "checkpoints").iterdir()}
    assert written == expected
    assert written != set(range(128, 1537, 128))


def test_the_last_agent_is_the_result_where_that_is_asked_for(
    tmp_path: Path, whole: tuple[Path, str, Any], small_config: Any, heard: Console, lines_of: Any
) -> None:
    train(small_config(*QUICK, "training.select=last"), tmp_path / "run", heard)
    assert "chosen step 1,536 of 1,536: the last one (training.select: last)" in told(heard)
    assert files(tmp_path / "run" / "agent") == files(whole[0] / "checkpoints" / "step_1536")
    assert lines_of(tmp_path / "run") == lines_of(whole[0])


def test_a_validation_part_shorter_than_an_episode_chooses_nothing(
    tmp_path: Path, small_config: Any, heard: Console, lines_of: Any
) -> None:
    train(small_config("data.validation=1d", "training.total_timesteps=256"), tmp_path / "run", heard)
    said = told(heard)
    assert "note the validation part is shorter than an episode, so nothing is scored" in said
    assert "chosen step 256 of 256: the last one; the validation part is shorter than an episode" in said
    assert scores(lines_of(tmp_path / "run")) == {}


# --- early end ------------------------------------------------------------------------------------------------------


def test_training_ends_when_patience_does_and_stays_ended(
    tmp_path: Path, whole: tuple[Path, str, Any], small_config: Any, heard: Console, lines_of: Any
) -> None:
    folder = tmp_path / "run"
    train(small_config(*QUICK, "training.patience=3"), folder, heard)
    found = scores(lines_of(whole[0]))
    best = max(found, key=lambda step: found[step])
    end = best + 3 * 128
    assert f"ended early, after {end:,} of 1,536 steps: 3 evaluations in a row were no better" in told(heard)
    assert lines_of(folder) == lines_of(whole[0])[: end // 128]
    assert files(folder / "agent") == files(whole[0] / "agent")
    resume_run(folder, Console(quiet=True))
    assert len(lines_of(folder)) == end // 128
    assert files(folder / "agent") == files(whole[0] / "agent")


# --- kills ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("lines", [6, 10])
def test_a_killed_run_chooses_the_same_agent(
    tmp_path: Path, whole: tuple[Path, str, Any], small_config: Any, lines_of: Any, lines: int
) -> None:
    """SIGKILL before the best score and after it, with patience, whose count must survive too."""
    folder, config = tmp_path / "killed", small_config(*QUICK, "training.patience=3")
    settings = tmp_path / "run.yaml"
    settings.write_text(to_yaml(config))
    code = (
        "import sys; from pathlib import Path; from rich.console import Console; from tailguard.config import "
        "load_config; from tailguard.runs.runner import train; "
        "train(load_config(Path(sys.argv[1])), Path(sys.argv[2]), Console(quiet=True))"
    )
    process = subprocess.Popen([sys.executable, "-c", code, str(settings), str(folder)])
    metrics, deadline = folder / "metrics.jsonl", time.monotonic() + 120
    while process.poll() is None and time.monotonic() < deadline:
        if metrics.exists() and metrics.read_bytes().count(b"\n") >= lines:
            break
        time.sleep(0.001)
    process.send_signal(signal.SIGKILL)
    process.wait()
    resume_run(folder, Console(quiet=True))
    assert files(folder / "agent") == files(whole[0] / "agent")
    found = scores(lines_of(whole[0]))
    end = max(found, key=lambda step: found[step]) + 3 * 128
    assert lines_of(folder) == lines_of(whole[0])[: end // 128]
