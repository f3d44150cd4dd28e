"""Checks, subjects and faults for the tests of the audit."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tailguard.audit.auditor import AuditResult, all_checks, run_check
from tailguard.audit.subject import Subject

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


def load_faults() -> Any:
    """The table of faults, with those of every file `audit_faults_*.py` beside it."""
    sys.path.insert(0, str(BENCHMARKS))
    try:
        for path in sorted(BENCHMARKS.glob("audit_faults_*.py")):
            importlib.import_module(path.stem)
        return importlib.import_module("audit_faults")
    finally:
        sys.path.remove(str(BENCHMARKS))


@pytest.fixture(scope="session")
def answer() -> Callable[..., AuditResult]:
    """The answer of one check on a subject, by default the installed code."""
    checks = {check.id: check for check in all_checks()}

    def measure(name: str, subject: Subject | None = None) -> AuditResult:
        return run_check(checks[name], subject or Subject())

    return measure
