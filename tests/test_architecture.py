"""Rules of the house that a machine can check."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

SOURCE = Path(__file__).parents[1] / "src" / "tailguard"
ROOMS = ("data", "market", "envs", "models", "returns", "risk", "optim", "algorithm", "monitor", "evaluate", "runs")
"""Data flows this way: a room imports rooms that stand before it. See `ALLOWED` for the exceptions."""
ALLOWED = {
    ("algorithm", "monitor"),  # the learner drives its own progress line and episode figures
}

CORE_ON_ITS_OWN = """
import sys

for name in ("polars", "gymnasium", "pydantic", "typer", "rich", "yaml", "ccxt", "pandas", "scipy", "safetensors"):
    sys.modules[name] = None  # importing it fails, as where it is not installed

import numpy as np
import torch
import tailguard as tg
from tailguard.data.panel import Panel
from tailguard.data.prepare import PreparedBars
from tailguard.data.scaling import Scaler

rows = 200
price = 100 * np.exp(np.cumsum(0.01 * np.random.default_rng(0).normal(size=(rows, 1)), axis=0))
panel = Panel(
    time=3_600_000 * np.arange(rows), open=price, high=1.01 * price, low=0.99 * price, close=price,
    volume=np.full((rows, 1), 1e6), segment=np.zeros(rows, np.int32), tradeable=np.ones(rows, bool),
    symbols=("A",), frequency_ms=3_600_000,
)
features = np.random.default_rng(1).normal(size=(rows, 2)).astype(np.float32)
scaler = Scaler(("a", "b"), ("x", "y"), np.zeros(2), np.ones(2))
bars = PreparedBars(panel, features, ("a", "b"), np.ones(rows, bool), scaler)
env = tg.TradingEnv(bars, num_envs=4, episode_length=16)
agent = tg.DistributionalPPO(env, n_steps=8, twin_critics=True)
agent.learn(64)
assert agent.num_timesteps == 64
print("learned", agent.metrics["train/loss"])
"""


def test_the_numeric_core_trains_with_torch_and_numpy_alone() -> None:
    """As on a GPU machine that has nothing else: market, environment and learner, without any edge library."""
    run = subprocess.run([sys.executable, "-c", CORE_ON_ITS_OWN], capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr
    assert run.stdout.startswith("learned")


def imports_of(path: Path) -> set[str]:
    """Rooms that a module imports at its top level or inside functions, type checking aside."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.ImportFrom) and node.module and node.module.startswith("tailguard."):
            found.add(node.module.split(".")[1])
        elif isinstance(node, ast.Import):
            found |= {alias.name.split(".")[1] for alias in node.names if alias.name.startswith("tailguard.")}
    return found


@pytest.mark.parametrize("room", ROOMS)
def test_a_room_imports_only_rooms_upstream_of_it(room: str) -> None:
    downstream = set(ROOMS[ROOMS.index(room) + 1 :])
    for path in (SOURCE / room).glob("*.py"):
        wrong = {other for other in imports_of(path) & downstream if (room, other) not in ALLOWED}
        assert not wrong, f"{path.name} imports {sorted(wrong)}"


def test_no_pickle_and_no_unsafe_loading_anywhere() -> None:
    for path in SOURCE.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Import | ast.ImportFrom):
                names = [alias.name for alias in node.names] + [getattr(node, "module", None) or ""]
                assert not {"pickle", "cloudpickle", "dill", "marshal", "shelve"} & set(names), path
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
                called = ast.unparse(node.func)
                assert called not in ("torch.load", "yaml.load", "np.load"), f"{path}: {called}"


def test_the_learner_is_imported_without_what_only_some_of_its_users_need() -> None:
    """Each would add to the wait for the first `tailguard.DistributionalPPO`; PyTorch itself is all of it."""
    code = """
import sys
import torch
import tailguard
before = set(sys.modules)
tailguard.DistributionalPPO
print(*sorted({name.split(".")[0] for name in set(sys.modules) - before} - set(sys.stdlib_module_names)))
print("torch._dynamo" in sys.modules, "tensorboard" in sys.modules, "polars" in sys.modules)
"""
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert run.stdout.split() == ["tailguard", "False", "False", "False"]
