"""`tailguard audit` as a person meets it: a line for each check, files, and the exit status."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tailguard.audit import CHECKS, Measurement, at_most, register_check
from tailguard.audit.subject import Subject
from tailguard.cli import main


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
