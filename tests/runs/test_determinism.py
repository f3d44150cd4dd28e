"""Same seed, same run. A stored trace shows when a change of the code has changed the numbers.

After a change that is meant to alter them: python tests/runs/test_determinism.py
"""

from __future__ import annotations

import hashlib
import json
import platform
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tailguard.algorithm.ppo import DistributionalPPO
from tailguard.data.synthetic import make_market
from tailguard.envs.trading import TradingEnv
from tailguard.optim.config import VGSConfig

TRACE = Path(__file__).with_name("trace.json")
TOLERANCE = 1e-5
"""Other kernels round otherwise: without vector instructions the figures of this run differ by 2e-7 at most."""


def learner(num_envs: int = 8, **options: Any) -> DistributionalPPO:
    env = TradingEnv(make_market(1_500, seed=3).bars, num_envs=num_envs, episode_length=32, stagger=16, seed=5)
    sizes = {"n_steps": 16, "minibatch_size": 64, "epochs": 2, "hidden": (16,), "lstm_size": 12, "quantiles": 8}
    return DistributionalPPO(env, seed=5, **(sizes | options))


def iterations(agent: DistributionalPPO, count: int) -> Iterator[dict[str, Any]]:
    """A hash of all weights after each iteration, and sums that can be compared with a tolerance."""
    for _ in range(count):
        figures = agent.iterate()
        weights = torch.cat([parameter.detach().flatten().double() for parameter in agent.policy.parameters()])
        yield {
            "weights": hashlib.sha256(weights.numpy().tobytes()).hexdigest()[:16],
            "mean_square": float(weights.square().mean()),
            "loss": figures["train/loss"],
            "entropy": figures["train/entropy"],
        }


def trace() -> list[dict[str, Any]]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        return list(iterations(learner(twin_critics=True, vgs=VGSConfig(enabled=True)), 5))
    finally:
        torch.set_num_threads(threads)


def machine() -> dict[str, str]:
    """What bit-identical arithmetic depends on. Matrix libraries choose their kernels by the processor's model."""
    facts = {}
    if Path("/proc/cpuinfo").exists():
        lines = (line.partition(":") for line in Path("/proc/cpuinfo").read_text().splitlines())
        facts = {name.strip(): value.strip() for name, _, value in lines}
    return {
        "torch": str(torch.__version__),
        "numpy": np.__version__,
        "capability": torch.backends.cpu.get_cpu_capability(),
        "machine": platform.machine(),
        "processor": " ".join(facts.get(name, "") for name in ("model name", "cpu family", "model", "stepping")),
    }


def test_the_numbers_are_those_of_the_stored_trace() -> None:
    stored = json.loads(TRACE.read_text())
    found = trace()
    if stored["machine"] == machine():
        assert found == stored["iterations"], "the code computes other numbers now; if it is meant to, see the top"
    for mine, theirs in zip(found, stored["iterations"], strict=True):
        for name in ("mean_square", "loss", "entropy"):
            assert mine[name] == pytest.approx(theirs[name], rel=TOLERANCE, abs=TOLERANCE), name


@pytest.mark.parametrize("threads", [1, 2])
def test_the_same_seed_makes_the_same_numbers(threads: int) -> None:
    """With one thread and with two; the two need not agree, since sums are then taken in another order."""
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        options = {"num_envs": 128, "minibatch_size": 1024, "hidden": (32,), "epochs": 1}
        first, second = (list(iterations(learner(**options), 2)) for _ in range(2))
    finally:
        torch.set_num_threads(before)
    assert first == second


def test_another_seed_makes_other_numbers() -> None:
    mine = next(iterations(learner(), 1))
    other = learner()
    other.generator.manual_seed(6)
    assert next(iterations(other, 1))["weights"] != mine["weights"]


if __name__ == "__main__":
    TRACE.write_text(json.dumps({"machine": machine(), "iterations": trace()}, indent=2) + "\n")
