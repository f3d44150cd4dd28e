"""The registry, the auditor and its outputs."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from datetime import datetime
from pathlib import Path
from urllib.parse import urlsplit

import numpy as np
import pytest
import torch

from tailguard.audit import CHECKS, Measurement, at_least, at_most, none_of, not_applicable, register_check, within
from tailguard.audit.audit_page import audit_page
from tailguard.audit.auditor import AuditReport, audit, chosen_checks
from tailguard.audit.registry import worst
from tailguard.audit.sarif import artifact, to_sarif
from tailguard.audit.subject import Subject
from tailguard.errors import ConfigError


@pytest.mark.parametrize(
    ("measurement", "verdict", "bound"),
    [
        (at_most("x", 1.0, 1.0), "ok", "≤ 1"),
        (at_most("x", 1.1, 1.0), "fail", "≤ 1"),
        (at_most("x", math.nan, 1.0), "fail", "≤ 1"),
        (at_least("x", 0.9, 1.0), "fail", "≥ 1"),
        (within("x", 2.0, 1.0, 3.0), "ok", "1 to 3"),
        (within("x", math.nan, 1.0, 3.0), "fail", "1 to 3"),
        (none_of("x", []), "ok", "≤ 0"),
        (none_of("x", ["a"]), "fail", "≤ 0"),
        (not_applicable("no memory"), "skipped", "–"),
        (Measurement("x", 3.0), "info", "–"),
    ],
)
def test_the_verdict_follows_the_bound(measurement: Measurement, verdict: str, bound: str) -> None:
    assert (measurement.verdict, measurement.bound) == (verdict, bound)


def test_the_worst_of_several_is_the_failed_one_else_the_nearest_to_its_bound() -> None:
    near, far, failed = at_most("near", 0.9, 1.0), at_most("far", 1e-9, 1.0), at_least("failed", 0.1, 0.5)
    assert worst([far, near]) is near
    assert worst([near, failed, far]) is failed
    assert worst([near, at_most("nan", math.nan, 1.0)]).measured == "nan"


@pytest.fixture
def own_checks() -> Iterator[None]:
    @register_check("own.fails", "Does it hold?", why="Because.", remedy="Repair it.", fast=True)
    def fails(subject: Subject) -> Measurement:
        return at_most("a number", float(torch.rand(())) + subject.seed, -1.0, detail="<b>row 7</b>")

    @register_check("own.raises", "Does it run?", why="Because.", remedy="Repair it.", fast=True)
    def raises(subject: Subject) -> Measurement:  # noqa: ARG001
        raise RuntimeError("the disk is on fire")

    @register_check("own.skipped", "Does it apply?", why="Because.", remedy="Repair it.")
    def skipped(subject: Subject) -> Measurement:  # noqa: ARG001
        return not_applicable("there is no budget")

    yield
    for name in ("own.fails", "own.raises", "own.skipped"):
        del CHECKS[name]


@pytest.fixture
def own_report(own_checks: None) -> AuditReport:  # noqa: ARG001
    return audit(Subject(), only=["own.", "F1"])


def test_a_report_tells_what_failed(own_report: AuditReport) -> None:
    assert [result.verdict for result in own_report.results] == ["ok", "fail", "fail", "skipped"]
    assert own_report.summary.startswith("4 checks, 1 ok, 2 failed, 1 do not apply")
    plain = json.loads(json.dumps(own_report.to_json(), allow_nan=False))
    assert plain["passed"] is False
    assert plain["counts"] == {"ok": 1, "fail": 2, "info": 0, "skipped": 1}
    raised = plain["checks"][2]
    assert raised["number"] is None
    assert "RuntimeError: the disk is on fire" in raised["detail"]


@pytest.mark.usefixtures("own_checks")
def test_an_audit_leaves_the_random_streams_alone_and_is_repeatable() -> None:
    torch.manual_seed(7)
    np.random.seed(7)  # noqa: NPY002
    wanted = float(torch.rand(())), float(np.random.rand())  # noqa: NPY002
    torch.manual_seed(7)
    np.random.seed(7)  # noqa: NPY002
    first, second = (audit(Subject(), only=["own.fails"]).results[0].measurement.number for _ in range(2))
    assert first == second
    assert (float(torch.rand(())), float(np.random.rand())) == wanted  # noqa: NPY002


def test_sarif_has_a_rule_and_a_result_for_each_check(own_report: AuditReport) -> None:
    log = to_sarif(own_report, Path("runs/btc/config.yaml"))
    assert log["version"] == "2.1.0"
    (run,) = log["runs"]
    rules, results = run["tool"]["driver"]["rules"], run["results"]
    assert [rule["id"] for rule in rules] == ["F1", "own.fails", "own.raises", "own.skipped"]
    assert [(one["kind"], one["level"]) for one in results] == [
        ("pass", "none"), ("fail", "error"), ("fail", "error"), ("notApplicable", "none"),
    ]  # fmt: skip
    for one in results:
        assert rules[one["ruleIndex"]]["id"] == one["ruleId"]
    assert "Repair it." in results[1]["message"]["text"]


LOG: dict[str, object] = {
    "$schema": str,
    "version!": "2.1.0",
    "runs!": [
        {
            "tool!": {
                "driver!": {
                    "name!": str,
                    "version": str,
                    "rules": [
                        {
                            "id!": str,
                            "shortDescription": {"text!": str},
                            "fullDescription": {"text!": str},
                            "help": {"text!": str},
                            "defaultConfiguration": {"level": ("none", "note", "warning", "error")},
                        }
                    ],
                }
            },
            "invocations": [{"executionSuccessful!": bool, "endTimeUtc": datetime.fromisoformat}],
            "results": [
                {
                    "ruleId": str,
                    "ruleIndex": range(-1, 1000),
                    "kind": ("notApplicable", "pass", "fail", "review", "open", "informational"),
                    "level": ("none", "note", "warning", "error"),
                    "message!": {"text!": str},
                    "locations": [
                        {
                            "physicalLocation": {
                                "artifactLocation": {"uri": urlsplit, "uriBaseId": str},
                                "region": {"startLine": range(1, 100_000)},
                            }
                        }
                    ],
                    "properties": dict,
                }
            ],
        }
    ],
}
"""The part of the schema of SARIF 2.1.0 that our logs use: names with ! are required, others are not allowed."""


def assert_like(value: object, schema: object, place: str) -> None:
    """The value has the form of the schema: type, choice, range, parser, list or object."""
    match schema:
        case dict():
            assert isinstance(value, dict), place
            names = {name.rstrip("!"): inner for name, inner in schema.items()}
            assert set(value) <= set(names), f"{place}: {sorted(value)}"
            assert {name[:-1] for name in schema if name.endswith("!")} <= set(value), f"{place}: {sorted(value)}"
            for name, inner in value.items():
                assert_like(inner, names[name], f"{place}.{name}")
        case list():
            assert isinstance(value, list), place
            for number, inner in enumerate(value):
                assert_like(inner, schema[0], f"{place}[{number}]")
        case type():
            assert isinstance(value, schema), f"{place}: {value!r}"
        case str():
            assert value == schema, f"{place}: {value!r}"
        case tuple() | range():
            assert value in schema, f"{place}: {value!r}"
        case _:
            schema(value)  # type: ignore[operator]


def test_sarif_follows_its_schema(own_report: AuditReport, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for settings in (None, Path("runs/btc/config.yaml"), Path("/elsewhere/a run/config.yaml")):
        log = json.loads(json.dumps(to_sarif(own_report, settings), allow_nan=False))
        assert_like(log, LOG, "log")
        for one in log["runs"][0]["results"]:
            assert one["kind"] == "fail" or one["level"] == "none", one["ruleId"]  # section 3.27.10 of the standard


def test_sarif_names_files_as_a_code_host_finds_them(
    own_report: AuditReport, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def places(settings: Path | None = None) -> list[dict[str, str]]:
        results = to_sarif(own_report, settings)["runs"][0]["results"]
        return [one["locations"][0]["physicalLocation"]["artifactLocation"] for one in results]

    root = Path(__file__).parents[2]
    monkeypatch.chdir(root)
    formula, own, *_ = places()
    assert (root / formula["uri"]).is_file()
    assert formula["uri"].startswith("src/tailguard/audit/")
    assert own == {"uri": "tests/audit/test_registry.py", "uriBaseId": "%SRCROOT%"}
    monkeypatch.chdir(tmp_path)
    assert places()[1] == {"uri": Path(__file__).resolve().as_uri()}
    assert artifact(Path("runs/50 %/config.yaml")) == {"uri": "runs/50%20%25/config.yaml", "uriBaseId": "%SRCROOT%"}
    assert artifact(Path("/a b/config.yaml")) == {"uri": "file:///a%20b/config.yaml"}


def test_the_page_shows_failures_first_and_escapes_what_checks_say(own_report: AuditReport) -> None:
    page = audit_page(own_report)
    assert page.index("own.fails") < page.index("Formulas")
    assert '<table class="sentences">' in page
    assert "<td>own.fails</td><td>FAIL</td><td>Does it hold?</td>" in page
    assert "&lt;b&gt;row 7&lt;/b&gt;" in page
    assert "<b>row 7" not in page
    assert len(page) < 100_000


@pytest.mark.usefixtures("own_checks")
def test_ids_are_unique_and_own_ones_have_a_dot() -> None:
    for name in ("T1", "own.fails"):
        with pytest.raises(ConfigError, match=r"taken by .*test_registry|taken by .*trajectories"):
            register_check(name, "?", why="w", remedy="r")
    with pytest.raises(ConfigError, match="give an id of your own a dot"):
        register_check("Mine", "?", why="w", remedy="r")
    with pytest.raises(ConfigError, match="its remedy is empty"):
        register_check("own.other", "?", why="w", remedy=" ")
    with pytest.raises(ConfigError, match="no check has this id"):
        chosen_checks(only=["T99"])


def test_fast_is_a_part_of_the_whole() -> None:
    whole, fast = chosen_checks(), chosen_checks(fast=True)
    assert {check.id for check in fast} <= {check.id for check in whole}
    assert all(check.fast for check in fast)
    assert not any(check.of_run for check in whole)
    assert [check.id for check in chosen_checks(only=["T1"])] == ["T1"]
    assert {check.id[0] for check in chosen_checks(only=["T"])} == {"T"}


def test_checks_run_on_one_thread_and_leave_the_process_as_many_as_before(own_checks: None) -> None:  # noqa: ARG001
    @register_check("own.threads", "On one thread?", why="Because.", remedy="Repair it.", replaces=True)
    def threads(subject: Subject) -> Measurement:  # noqa: ARG001
        return at_most("threads", torch.get_num_threads(), 1)

    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        report = audit(Subject(), only=["own.threads"])
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(before)
        del CHECKS["own.threads"]
    assert report.results[0].verdict == "ok"
