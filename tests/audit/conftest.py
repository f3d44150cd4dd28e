"""Checks, subjects and faults for the tests of the audit."""

from __future__ import annotations

import contextlib
import importlib
import io
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console

from tailguard.audit.auditor import AuditResult, all_checks, run_check
from tailguard.audit.in_force import small_run
from tailguard.audit.subject import Subject
from tailguard.runs.runner import train

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
def small_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run with two members and a budget, on bars with a signal. Tests that change it work on a copy."""
    place = tmp_path_factory.mktemp("audited") / "run"
    # Two threads: not those that an audit has.
    settings = ("training.members=2", "training.checkpoint_steps=256", "risk.limit=-0.03", "training.threads=2")
    before = torch.get_num_threads()
    try:
        with contextlib.redirect_stdout(io.StringIO()):
            train(small_run(Subject(), *settings), place, Console(file=io.StringIO()))
    finally:
        torch.set_num_threads(before)
    return place


@pytest.fixture(scope="session")
def answer() -> Callable[..., AuditResult]:
    """The answer of one check on a subject, by default the installed code."""
    checks = {check.id: check for check in all_checks()}

    def measure(name: str, subject: Subject | None = None) -> AuditResult:
        return run_check(checks[name], subject or Subject())

    return measure
