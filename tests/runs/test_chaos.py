"""The short form of benchmarks/chaos.py: a run that is killed at random moments ends as if nobody had touched it."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

CHAOS = Path(__file__).parents[2] / "benchmarks" / "chaos.py"


@pytest.mark.parametrize("kills", [1, pytest.param(3, marks=pytest.mark.slow)])
def test_killed_at_random_moments_the_run_ends_bit_by_bit_as_it_would_have(kills: int) -> None:
    command = [sys.executable, str(CHAOS), "--kills", str(kills), "--iterations", str(4 * kills), "--seed", "1"]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stdout + result.stderr
    assert f"killed {kills} time" in result.stdout
    assert "lost or damaged checkpoints: 0 · end bit-identical: yes" in result.stdout
