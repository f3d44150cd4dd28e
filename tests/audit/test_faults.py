"""Each check can fail: a fault in the real object is caught by it, and without the fault it passes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from tailguard.audit.auditor import AuditResult, all_checks

from .conftest import load_faults

FAULTS = load_faults()
SLOW = {"B1", "B2", "B3", "B4", "B5", "C7", "P1", "P3", "P9"}
"""Checks whose measurement takes seconds."""


@pytest.mark.parametrize(
    "fault",
    [pytest.param(one, marks=[pytest.mark.slow] if one.check in SLOW else []) for one in FAULTS.FAULTS],
    ids=lambda one: f"{one.check}: {one.name}",
)
def test_a_fault_is_caught(fault: Any, answer: Callable[..., AuditResult]) -> None:
    with FAULTS.injected(fault):
        found = answer(fault.check)
    assert found.verdict == "fail", found.measurement
    assert "error" not in found.measurement.measured, found.measurement.detail


def test_every_check_of_the_code_has_a_fault() -> None:
    without = {check.id for check in all_checks() if not check.of_run} - {one.check for one in FAULTS.FAULTS}
    assert without == set()


def test_a_fault_that_breaks_nothing_is_an_error() -> None:
    with FAULTS.Injection() as injection:
        with pytest.raises(LookupError, match="would break nothing"):
            injection.function(object(), None)
        with pytest.raises(LookupError, match="no such_method"):
            injection.method(FAULTS.Fault, "such_method", None)
