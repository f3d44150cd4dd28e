"""No false alarms: every check passes on clean code, whatever parts and seed its learners have."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from tailguard.audit.auditor import AuditResult, all_checks
from tailguard.audit.subject import Subject

SLOW = {"B1", "B2", "B3", "B4", "B5", "P1", "P3", "P9"}
IDS = [
    pytest.param(check.id, marks=[pytest.mark.slow] if check.id in SLOW else [])
    for check in all_checks()
    if not check.of_run
]
OF_LEARNERS = ("C1", "C3", "T1", "T2", "F2", "F3", "F4", "F10", "F12", "F13")
PARTS: list[dict[str, Any]] = [
    {"critic": "categorical", "twin_critics": True, "memory": "shared", "optimizer": "upgd"},
    {"critic": "scalar", "memory": "none", "std": "state", "optimizer": "adamw"},
    {"critic": "quantile", "twin_critics": True, "twin_trunk": "own", "lstm_layers": 2, "squash": False},
]


@pytest.mark.parametrize("name", IDS)
def test_clean_code_passes(name: str, answer: Callable[..., AuditResult]) -> None:
    found = answer(name)
    assert found.verdict in ("ok", "info"), found.measurement


@pytest.mark.parametrize("parts", PARTS, ids=lambda parts: "-".join(map(str, parts.values())))
def test_other_parts_and_seeds_raise_no_alarm(parts: dict[str, Any], answer: Callable[..., AuditResult]) -> None:
    for name in OF_LEARNERS:
        found = answer(name, Subject(parts, seed=3))
        assert found.verdict == "ok", (name, found.measurement)
