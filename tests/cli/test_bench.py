"""`tailguard bench` as a person meets it."""

from __future__ import annotations

import re
import subprocess
import sys

import pytest
import torch

WITHOUT_PEER = """
import sys
sys.modules["sb3_contrib"] = None  # as where it is not installed
"""


def run(*arguments: str, first: str = "") -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", f"{first}\nfrom tailguard.cli import main; main()", "bench", *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=False)


def figures(line: str) -> list[float]:
    """The numbers of a table's row after its name, which ends with the shape."""
    return [float(word.replace(",", "")) for word in re.findall(r"(?<!\S)[\d,.]+(?=[×\s]|$)", line)]


def row(text: str, name: str) -> str:
    return next(line for line in text.splitlines() if line.startswith(name)).removeprefix(name)


def test_all_parts_are_measured_beside_the_peer() -> None:
    result = run("--turns", "1", "--max-envs", "2", "--threads", "1")
    assert result.returncode == 0, result.stderr
    text = result.stdout
    environments, microseconds, rate = figures(row(text, "market with all costs"))
    assert environments == 1
    assert rate == pytest.approx(1e6 / microseconds, rel=0.01)
    peer, *_ = figures(row(text, "sb3-contrib, 2 × 64, 32"))
    for name in ("Tailguard plain, 2 × 64, 32", "Tailguard all on, 2 × 64, 32"):
        own, *_, ratio = figures(row(text, name))
        assert ratio == pytest.approx(own / peer, rel=0.05)
    assert "sb3-contrib as people run it, 2 × 128, 32" in text
    assert ("no CUDA device found" in text) != torch.cuda.is_available()


def test_without_the_peer_it_says_what_is_missing_and_measures_the_rest() -> None:
    result = run("training", "--turns", "1", "--max-envs", "1", first=WITHOUT_PEER)
    assert result.returncode == 0, result.stderr
    assert "sb3-contrib is not installed" in result.stdout
    assert "tailguard[dev]" in result.stdout
    assert "Tailguard all on" in result.stdout
    assert "simulator" not in result.stdout


@pytest.mark.parametrize(
    ("arguments", "message"),
    [(("speed",), "speed"), (("--turns", "0"), "--turns: 0"), (("--max-envs", "-1"), "--max-envs: -1")],
)
def test_a_mistake_is_one_message_and_status_2(arguments: tuple[str, ...], message: str) -> None:
    result = run(*arguments)
    assert result.returncode == 2
    assert message in result.stderr
    assert "Traceback" not in result.stderr
