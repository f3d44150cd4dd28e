"""The audit that `tailguard train` runs first: made once for a version of the code, and in the way when it fails."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tailguard.audit import CHECKS, Measurement, at_most, register_check
from tailguard.audit import before_training as before
from tailguard.audit.auditor import all_checks
from tailguard.audit.subject import Subject
from tailguard.cli import main
from tailguard.errors import RunError
from tailguard.evaluate.report.audit_record import read_audit
from tailguard.runs import runner

from .conftest import load_faults

FAULTS = load_faults()
SMALL = (
    "data.synthetic_bars=2500",
    "data.synthetic_signal=30",
    "data.features=[return_24, taker_imbalance_6]",
    "data.embargo=1d",
    "env.num_envs=8",
    "env.episode_length=32",
    "learner=ppo",
    "ppo.n_steps=16",
    "ppo.minibatch_size=64",
    "ppo.epochs=1",
    "ppo.learning_rate=linear:1e-2:0",
    "ppo.network.hidden=[8]",
    "ppo.network.lstm_size=8",
    "training.total_timesteps=768",
    "training.checkpoint_steps=256",
    "training.evaluation_steps=256",
    "training.threads=1",
)


@pytest.fixture
def few(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[list[int]]:
    """Two real checks and one of one's own as the whole audit, which counts its runs, and a cache folder."""
    runs: list[int] = []
    kept = {check.id: check for check in all_checks() if check.id in ("F1", "F9")}
    before_all = dict(CHECKS)
    CHECKS.clear()
    CHECKS.update(kept)

    @register_check("own.counted", "Does it run?", why="Because.", remedy="Count.", fast=True)
    def counted(subject: Subject) -> Measurement:
        runs.append(subject.seed)
        return at_most("a number", 0.0, 1.0)

    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    yield runs
    CHECKS.clear()
    CHECKS.update(before_all)


def test_it_is_made_once_for_a_version_of_the_code(few: list[int], tmp_path: Path) -> None:
    first, second = before.fast_audit(), before.fast_audit()
    assert len(few) == 1
    assert (first.kept, second.kept) == (False, True)
    assert [check["id"] for check in second.record["checks"]] == ["F1", "F9", "own.counted"]
    assert first.in_words.startswith("3 fast checks of this code passed in ")
    assert "kept from then" in second.in_words
    (path,) = (tmp_path / "cache" / "tailguard").iterdir()
    assert json.loads(path.read_text())["passed"] is True


def test_a_changed_line_and_another_plugin_make_a_new_one(
    few: list[int], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    key = before.installed_key()
    package = tmp_path / "package"
    package.mkdir()
    (package / "a.py").write_text("x = 1\n")
    monkeypatch.setattr(before, "PACKAGE", package)
    small = before.installed_key()
    (package / "a.py").write_text("x = 2\n")
    assert len({key, small, before.installed_key()}) == 3
    del CHECKS["own.counted"]
    assert before.installed_key() not in (key, small)
    assert few == []


@pytest.mark.parametrize(
    "damage", ["", "{", "[]", '{"passed": true}', '{"passed": false, "fast": true, "checks": [1]}']
)
def test_a_damaged_record_is_made_anew(few: list[int], tmp_path: Path, damage: str) -> None:
    before.fast_audit()
    (path,) = (tmp_path / "cache" / "tailguard").iterdir()
    path.write_text(damage)
    assert not before.fast_audit().kept
    assert len(few) == 2


@pytest.mark.usefixtures("few")
def test_a_failure_stops_and_is_not_kept(tmp_path: Path) -> None:
    fault = next(one for one in FAULTS.FAULTS if one.check == "F1")
    with FAULTS.injected(fault):
        for _ in range(2):
            with pytest.raises(RunError, match=r"F1 .*bound ≤ 1e-12[\s\S]*--no-audit"):
                before.fast_audit()
    assert not (tmp_path / "cache").exists()
    assert not before.fast_audit().kept


def test_a_cache_that_cannot_be_written_costs_nothing_else(
    few: list[int], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    assert not before.fast_audit().kept
    assert not before.fast_audit().kept
    assert len(few) == 2


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder to train in, with nothing in the environment that turns the audit off."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("TAILGUARD_AUDIT", raising=False)
    return tmp_path


def train(*options: str) -> int:
    with pytest.MonkeyPatch.context() as patch:
        small = [part for setting in SMALL for part in ("--set", setting)]
        patch.setattr(sys, "argv", ["tailguard", "train", "--name", "a", *small, *options])
        with pytest.raises(SystemExit) as end:
            main()
    return int(end.value.code or 0)


@pytest.mark.filterwarnings("ignore::tailguard.errors.BarsWarning")
def test_a_training_begins_with_it_and_its_report_shows_it(
    few: list[int], folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert train() == 0
    shown = capsys.readouterr().out
    assert shown.index("audit    3 fast checks of this code passed") < shown.index("saved")
    record = read_audit(folder / "runs" / "a" / "audit.json")
    assert record is not None
    assert (record.fast, record.counts["ok"], record.failed) == (True, 3, ())
    assert len(few) == 1


def test_a_failed_audit_trains_nothing_unless_it_is_turned_off(
    few: list[int], folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    class Reached(Exception):
        pass

    def reached(*given: object, **named: object) -> None:  # noqa: ARG001
        raise Reached

    fault = next(one for one in FAULTS.FAULTS if one.check == "F1")
    with FAULTS.injected(fault):
        assert train() != 0
        assert "nothing was trained" in capsys.readouterr().err
        assert not (folder / "runs").exists()
        monkeypatch.setattr(runner, "train", reached)
        with pytest.raises(Reached):
            train("--no-audit")
        monkeypatch.setenv("TAILGUARD_AUDIT", "0")
        with pytest.raises(Reached):
            train()
    assert len(few) == 1
