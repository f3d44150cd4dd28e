"""`tailguard audit` as a person meets it: a line for each check, files, and the exit status."""

from __future__ import annotations

import io
import json
import re
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from rich.console import Console

from tailguard.audit import CHECKS, Measurement, at_most, register_check
from tailguard.audit.auditor import chosen_checks
from tailguard.audit.in_force import small_run
from tailguard.audit.subject import Subject
from tailguard.cli import main
from tailguard.runs.runner import train


def run(*arguments: object) -> int:
    """Exit status of the command in this process."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", ["tailguard", "audit", *map(str, arguments)])
        with pytest.raises(SystemExit) as end:
            main()
    return int(end.value.code or 0)


@pytest.fixture
def broken() -> Iterator[None]:
    @register_check("own.broken", "Is the floor dry?", why="It is a museum.", remedy="Call the plumber.", fast=True)
    def wet(subject: Subject) -> Measurement:
        return at_most("water in the cellar, metres", 0.3 + subject.seed, 0.0, "since Tuesday")

    yield
    del CHECKS["own.broken"]


def test_checks_that_pass_exit_with_0_and_write_every_form(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    page, record, log = tmp_path / "a.html", tmp_path / "a.json", tmp_path / "a.sarif"
    assert run("--only", "F1", "--only", "F9", "--html", page, "--json", record, "--sarif", log) == 0
    shown = capsys.readouterr().out
    assert "F1" in shown
    assert "2 checks, 2 ok" in shown
    assert [check["id"] for check in json.loads(record.read_text())["checks"]] == ["F1", "F9"]
    assert json.loads(log.read_text())["version"] == "2.1.0"
    assert page.read_text().startswith("<!DOCTYPE html>")


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small run, as `tailguard train` leaves it."""
    folder = tmp_path_factory.mktemp("audited") / "runs" / "small"
    train(small_run(Subject(), "training.checkpoint_steps=256"), folder, Console(file=io.StringIO()))
    return folder


def test_an_audit_of_a_run_is_left_in_its_folder(trained: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(trained, "--only", "U1", "--only", "E2", "--only", "F1") == 0
    assert "3 checks, 3 ok" in capsys.readouterr().out
    record = json.loads((trained / "audit.json").read_text())
    assert record["passed"] is True
    assert record["subject"].startswith(str(trained))
    assert [check["id"] for check in record["checks"]] == ["E2", "F1", "U1"]
    assert "<h1>" in (trained / "audit.html").read_text()
    results = json.loads((trained / "audit.sarif").read_text())["runs"][0]["results"]
    places = [one["locations"][0]["physicalLocation"]["artifactLocation"]["uri"] for one in results]
    assert places[0] == (trained / "config.yaml").as_uri()  # a check of the run is about its settings
    assert places[1].startswith("src/tailguard/audit/")


def test_a_run_whose_record_was_changed_fails(
    trained: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    changed = shutil.copytree(trained, tmp_path / "changed")
    metrics = changed / "metrics.jsonl"
    lines = [json.loads(line) for line in metrics.read_text().splitlines()]
    for line in lines:
        line |= {name: 1.01 * line[name] for name in line if line[name] and not name.startswith("time/")}
    metrics.write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert run(changed, "--only", "E2") == 1
    assert "bring back the bars, or train again" in capsys.readouterr().out
    record = json.loads((changed / "audit.json").read_text())
    assert (record["passed"], record["checks"][0]["verdict"]) == (False, "fail")
    assert json.loads((changed / "audit.sarif").read_text())["runs"][0]["results"][0]["level"] == "error"


@pytest.mark.slow
def test_every_check_of_a_run_passes(trained: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(trained) == 0
    shown = capsys.readouterr().out
    assert re.search(rf"^{len(chosen_checks(of_run=True))} checks, \d+ ok", shown, re.MULTILINE)
    assert "FAIL" not in shown


@pytest.mark.usefixtures("broken")
def test_a_check_that_fails_says_what_to_do_and_exits_with_1(capsys: pytest.CaptureFixture[str]) -> None:
    assert run("--only", "own.broken", "--only", "F1") == 1
    shown = capsys.readouterr().out
    for words in (
        "water in the cellar, metres: 0.3, bound ≤ 0",
        "since Tuesday",
        "It is a museum.",
        "Call the plumber.",
    ):
        assert words in shown
    assert "2 checks, 1 ok, 1 failed" in shown


def test_json_for_a_pipe_is_json_alone(capsys: pytest.CaptureFixture[str]) -> None:
    assert run("--only", "F1", "--json", "-") == 0
    assert json.loads(capsys.readouterr().out)["passed"] is True


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--only", "T99"), "--only T99: no check has this id"),
        (("nowhere",), "nowhere: no run here"),
        (("--only", "F1", "--html", "no/such/folder/a.html"), "no/such/folder"),
    ],
)
def test_a_mistake_is_one_message(arguments: tuple[str, ...], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(*arguments) in (1, 2)
    assert message in capsys.readouterr().err
