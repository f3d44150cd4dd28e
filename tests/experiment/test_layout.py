"""The paths of a run folder are those of the documentation, and a name is recognised again."""

from __future__ import annotations

from pathlib import Path

import pytest

from tailguard.experiment.layout import (
    WRITTEN,
    RunLayout,
    checkpoint_name,
    checkpoint_step,
    is_checkpoint_leftover,
    is_leftover,
    is_unplanned,
    removed_name,
    resume_command,
)

RUN = RunLayout(Path("runs/btc"))


def test_the_layout_is_a_promise() -> None:
    """Users, scripts and older versions read these files by name."""
    assert {
        str(path.relative_to(RUN.path))
        for path in (
            *(RUN.config_path, RUN.seal_path, RUN.metrics_path, RUN.tensorboard_path, RUN.latest_path, RUN.agent_path),
            *(RUN.checkpoint_path(1_000), RUN.member_path(3), RUN.fold_path(2, seed=7), RUN.report_path, RUN.lock_path),
            *(RUN.plan_path, RUN.walk_forward_settings_path, RUN.walk_forward_page_path),
        )
    } == {
        *("config.yaml", "settings.json", "metrics.jsonl", "tensorboard", "latest", "agent"),
        *("checkpoints/step_1000", "members/3", "fold_2/seed_7", "report.html", ".lock"),
        *("walk_forward.json", "settings.yaml", "walk_forward.html"),
    }
    assert {path.name for path in (RUN.config_path, RUN.agent_path, RUN.members_path, RUN.lock_path)} <= set(WRITTEN)


def test_nested_names_share_the_record_of_the_runs(tmp_path: Path) -> None:
    runs = tmp_path / "runs"
    assert {RunLayout(runs / name).trials_path for name in ("a", "a/b", "a/b/c")} == {runs / "trials.jsonl"}
    assert RunLayout(tmp_path / "elsewhere" / "a").trials_path == tmp_path / "elsewhere" / "trials.jsonl"


@pytest.mark.parametrize("step", [0, 7, 1_000, 10**17])
def test_the_name_of_a_checkpoint_gives_its_step(step: int) -> None:
    assert checkpoint_step(checkpoint_name(step)) == step
    assert is_checkpoint_leftover(removed_name(step))
    assert not is_checkpoint_leftover(checkpoint_name(step))


@pytest.mark.parametrize(
    "name", ["step_", "step_01", "step_-1", "step_1/..", "step_1\n", "../step_1", f"step_{10**18}"]
)
def test_other_names_are_no_checkpoints(name: str) -> None:
    assert checkpoint_step(name) is None


def test_half_written_files_are_known_by_their_names() -> None:
    leftovers = [".config.yaml.12.partial", ".settings.json.1.partial", ".metrics.jsonl.9.partial", ".latest.3.partial"]
    assert all(map(is_leftover, leftovers))
    assert not any(map(is_leftover, ["config.yaml", ".notes.txt.12.partial", ".agent.12.partial", ".lock"]))
    beginnings = [".lock", "settings.yaml", ".settings.yaml.4.partial", ".walk_forward.json.4.partial"]
    assert all(map(is_unplanned, beginnings))
    assert not any(map(is_unplanned, ["walk_forward.json", "fold_1", "config.yaml"]))


def test_a_run_and_a_walk_forward_are_told_apart(tmp_path: Path) -> None:
    one, other = RunLayout(tmp_path / "one"), RunLayout(tmp_path / "other")
    for layout, path in ((one, one.config_path), (other, other.plan_path)):
        layout.path.mkdir()
        path.write_text("")
    assert (one.is_run(), one.is_walk_forward()) == (True, False)
    assert (other.is_run(), other.is_walk_forward()) == (False, True)


def test_members_have_the_metrics_of_a_run_that_trains_several(tmp_path: Path) -> None:
    for name in ("10", "2", "notes"):
        (tmp_path / "members" / name).mkdir(parents=True)
    assert [layout.path.name for layout in RunLayout(tmp_path).training_folders()] == ["2", "10"]
    assert RunLayout(tmp_path / "elsewhere").training_folders() == [RunLayout(tmp_path / "elsewhere")]


def test_the_command_to_resume_is_ready_to_paste() -> None:
    assert resume_command(Path("runs/my run")) == "tailguard train --resume 'runs/my run'"
