"""Each check can fail: a fault in the real object is caught by it, and without the fault it passes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from tailguard.audit.auditor import AuditResult, all_checks
from tailguard.audit.subject import Subject
from tailguard.experiment.trained_run import open_run

from .conftest import load_faults

FAULTS = load_faults()
SLOW = {"B1", "B2", "B3", "B4", "B5", "C7", "P1", "P3", "P9"}
"""Checks whose measurement takes seconds."""
INFORMATION = {"E1", "E5", "E6", "E8"}
"""Numbers to know, without a bound: they cannot fail."""
OF_RUN = {check.id for check in all_checks() if check.of_run}


@pytest.mark.parametrize(
    "fault",
    [pytest.param(one, marks=[pytest.mark.slow] if one.check in SLOW else []) for one in FAULTS.FAULTS],
    ids=lambda one: f"{one.check}: {one.name}",
)
def test_a_fault_is_caught(fault: Any, answer: Callable[..., AuditResult], request: pytest.FixtureRequest) -> None:
    subject = Subject()
    if fault.check in OF_RUN:
        subject = Subject.of_run(open_run(request.getfixturevalue("small_folder")))
    with FAULTS.injected(fault):
        found = answer(fault.check, subject)
    assert found.verdict == "fail", found.measurement
    assert "error" not in found.measurement.measured, found.measurement.detail


def test_every_check_with_a_bound_has_a_fault() -> None:
    without = {check.id for check in all_checks()} - {one.check for one in FAULTS.FAULTS}
    assert without == INFORMATION


def test_a_fault_that_breaks_nothing_is_an_error() -> None:
    with FAULTS.Injection() as injection:
        with pytest.raises(LookupError, match="would break nothing"):
            injection.function(object(), None)
        with pytest.raises(LookupError, match="no such_method"):
            injection.method(FAULTS.Fault, "such_method", None)
