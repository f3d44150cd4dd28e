"""Out of memory is a message that names the setting, the bytes and the way out."""

from __future__ import annotations

import os
import platform
import subprocess
import sys

import numpy as np
import pytest
import torch

from tailguard.errors import ConfigError
from tailguard.memory_limits import explain_out_of_memory, format_bytes, free_memory, is_out_of_memory


def test_bytes_as_people_write_them() -> None:
    assert [format_bytes(size) for size in (0, 999, 1_500, 61.34e9, 3.7e12, 4e30)] == [
        *("0 bytes", "999 bytes", "1.5 kB", "61.3 GB", "3.7 TB"),
        "4,000,000,000,000 EB",
    ]


def test_free_memory_is_that_of_the_machine_or_of_the_limit() -> None:
    with open("/proc/meminfo") as file:
        total = next(int(line.split()[1]) * 1024 for line in file if line.startswith("MemTotal"))
    assert 0 < free_memory() <= total
    script = (
        "import resource; from tailguard.memory_limits import free_memory, _kilobytes; from pathlib import Path\n"
        "used = _kilobytes(Path('/proc/self/status'), 'VmData')\n"
        "resource.setrlimit(resource.RLIMIT_DATA, (int(used) + 50_000_000, -1)); print(free_memory())"
    )
    found = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert float(found.stdout) == pytest.approx(50_000_000, rel=0.2)


FAULTS = """
import resource, sys
import tailguard as tg
assets, steps = map(int, sys.argv[1:])
bars = tg.make_market(3_000 if assets == 1 else 400, assets=assets, seed=0).bars
env = tg.TradingEnv(bars, num_envs=256, episode_length=64, features=["return_24"], shared_scaling=assets > 1)
encoder, epochs = ("flat", 2) if assets == 1 else ("shared", 1)
learner = tg.DistributionalPPO(env, n_steps=steps, epochs=epochs, encoder=encoder)
def faults():
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt
for _ in range(3 if assets == 1 else 2):
    learner.iterate()
before = faults()
for _ in range(2 if assets == 1 else 1):
    learner.iterate()
print(faults() - before)
"""


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="options of glibc")
@pytest.mark.parametrize(("assets", "steps"), [(1, 32), (50, 16)])
def test_a_learner_keeps_freed_memory_so_that_its_pages_need_not_be_cleared_again(assets: int, steps: int) -> None:
    """Page faults of an iteration or two, as it is and where the user has set glibc's defaults himself.

    With 50 assets single tensors have 50 MB, more than glibc keeps of a block with a mapping of its own.
    """

    def faults(**environment: str) -> int:
        command = [sys.executable, "-c", FAULTS, str(assets), str(steps)]
        found = subprocess.run(command, capture_output=True, text=True, check=True, env=os.environ | environment)
        return int(found.stdout)

    assert 10 * faults() < faults(MALLOC_TRIM_THRESHOLD_="131072")


@pytest.mark.parametrize("allocate", [lambda: torch.empty(2**60, dtype=torch.int8), lambda: np.ones((2**50,))])
def test_an_allocation_that_fails_is_told_in_one_sentence(allocate) -> None:
    message = r"out of memory when allocating .*\. Make it smaller"
    with pytest.raises(ConfigError, match=message) as caught, explain_out_of_memory("Make it smaller"):
        allocate()
    assert is_out_of_memory(caught.value.__cause__)
    assert "\n" not in str(caught.value)


def test_other_errors_pass() -> None:
    with pytest.raises(RuntimeError, match="shape"), explain_out_of_memory("Make it smaller"):
        torch.zeros(2).reshape(3)
