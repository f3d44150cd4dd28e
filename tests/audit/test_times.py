"""The audit is quick enough to be run: the fast one before every first training, the whole one after it."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from typing import Any

import pytest

from tailguard.audit.subject import Subject
from tailguard.experiment.trained_run import open_run

from .conftest import BENCHMARKS


def benchmark() -> Any:
    spec = importlib.util.spec_from_file_location("audit_times", BENCHMARKS / "audit_times.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["audit_times"] = module
    spec.loader.exec_module(module)
    return module


@pytest.mark.slow
def test_the_audit_of_a_run_takes_two_minutes_and_the_fast_one_twenty_seconds(small_folder: Path) -> None:
    measured = benchmark()
    # CPU time: other processes on the machine do not count.
    found = measured.times(Subject.of_run(open_run(small_folder)))
    fast = sum(seconds for quick, seconds in found.values() if quick)
    whole = sum(seconds for _, seconds in found.values())
    print(f"fast {fast:.1f} s, all {whole:.1f} s")
    assert fast < measured.FAST_LIMIT
    assert whole < measured.WHOLE_LIMIT
