"""The published ordering in small: on a stream of tasks UPGD keeps what SGD and Adam lose."""

from __future__ import annotations

import importlib.util
import statistics
import sys
from pathlib import Path
from types import ModuleType

import pytest


@pytest.fixture(scope="module")
def continual() -> ModuleType:
    path = Path(__file__).parents[2] / "benchmarks" / "continual.py"
    spec = importlib.util.spec_from_file_location("continual", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["continual"] = module
    spec.loader.exec_module(module)
    return module


@pytest.mark.slow
def test_upgd_improves_over_tasks_where_sgd_and_adam_decay(continual: ModuleType) -> None:
    first, last = {}, {}
    for method in continual.METHODS[:3]:
        assert method.weight_decay == 0
        runs = [continual.online_accuracy(method, method.tuned, seed, continual.Stream()) for seed in range(3)]
        ends = [continual.first_and_last(accuracies) for accuracies in runs]
        first[method.name], last[method.name] = (statistics.mean(values) for values in zip(*ends, strict=True))
    change = {name: last[name] - first[name] for name in first}
    assert change["UPGD"] > 0.01
    assert change["SGD"] < -0.01
    assert change["Adam"] < -0.05
    assert last["UPGD"] > last["SGD"] + 0.02
    assert last["UPGD"] > last["Adam"] + 0.05
