"""The section of the report on the audit."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tailguard.errors import ConfigError
from tailguard.evaluate.report.audit_record import add_audit, read_audit
from tailguard.evaluate.report.page import Page


def record(*verdicts: str, fast: bool = False) -> dict[str, Any]:
    checks = [
        {"id": f"F{n}", "question": "Is 1 < 2?", "verdict": verdict, "measured": "the larger", "number": 2.0,
         "bound": "≤ 1", "detail": "", "why": "Order.", "remedy": "Count again.", "of_run": n == 1}
        for n, verdict in enumerate(verdicts)
    ]  # fmt: skip
    counts = {verdict: verdicts.count(verdict) for verdict in ("ok", "fail", "info", "skipped")}
    return {
        "subject": "runs/a · tailguard 9", "when": "2030-01-02T03:04:05+00:00", "fast": fast, "counts": counts,
        "checks": checks,
    }  # fmt: skip


def shown(path: Path, values: Any) -> str:
    path.write_text(json.dumps(values))
    found = read_audit(path)
    assert found is not None
    page = Page()
    add_audit(page, found)
    return page.html("x")


def test_a_passed_audit_is_one_sentence(tmp_path: Path) -> None:
    text = shown(tmp_path / "audit.json", record("ok", "ok", "skipped"))
    assert "All 2 checks that apply passed in the audit. 1 of them measured this run itself" in text
    assert "2030-01-02: runs/a · tailguard 9" in text
    assert "What to do" not in text


def test_a_failed_check_says_what_was_found_and_what_to_do(tmp_path: Path) -> None:
    text = shown(tmp_path / "audit.json", record("ok", "fail", fast=True))
    assert "1 of 2 checks failed in the fast checks of the installed code, before training: F1." in text
    for words in ("F1 · Is 1 &lt; 2?", "the larger", "≤ 1", "Count again."):
        assert words in text


def test_a_run_without_an_audit_has_no_section_and_a_damaged_record_is_named(tmp_path: Path) -> None:
    assert read_audit(tmp_path / "audit.json") is None
    for text in ("{", "[]", '{"checks": 3}'):
        (tmp_path / "audit.json").write_text(text)
        with pytest.raises(ConfigError, match=r"audit\.json: not the record of an audit"):
            read_audit(tmp_path / "audit.json")
