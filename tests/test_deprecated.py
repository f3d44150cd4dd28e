"""Old names lead to the new ones, with a warning that says where."""

from __future__ import annotations

import importlib
import subprocess
import sys

import pytest
import torch

from tailguard.deprecated import MOVED
from tailguard.optim import UPGD, VarianceGradientScaler
from tailguard.risk import CVaRConstraint, RiskConfig

OLD_NAMES = [(module, name) for module, names in MOVED.items() for name in names]


@pytest.mark.parametrize(("module", "name"), OLD_NAMES, ids=".".join)
def test_an_old_name_is_the_new_one_and_says_so(module: str, name: str) -> None:
    place, _, new_name = MOVED[module][name].rpartition(".")
    with pytest.warns(DeprecationWarning, match=rf"{module}\.{name} is now {place}\.{new_name}"):
        old = getattr(importlib.import_module(module), name)
    assert old is getattr(importlib.import_module(place), new_name)


def test_what_never_was_there_is_not_found() -> None:
    with pytest.raises(ImportError, match="nothing"):
        importlib.import_module("tailguard.evaluate.nothing")
    with pytest.raises(AttributeError, match="has no attribute 'nothing'"):
        importlib.import_module("tailguard.evaluate.trained").nothing  # noqa: B018


def test_the_documented_imports_of_before_work_and_point_to_the_caller() -> None:
    code = (
        "from tailguard.evaluate import bootstrap, calibration\n"
        "from tailguard.evaluate.standing import Budget\n"
        "from tailguard.evaluate.trained import open_run\n"
        "print(Budget(-0.04).alpha, calibration.risk_budget.__name__, open_run.__module__)\n"
    )
    run = subprocess.run([sys.executable, "-W", "always", "-c", code], capture_output=True, text=True, check=False)
    assert run.stdout == "0.05 check_limit tailguard.experiment.trained_run\n", run.stderr
    assert [line.partition(" DeprecationWarning")[0] for line in run.stderr.splitlines() if "is now" in line] == [
        "<string>:2:",
        "<string>:3:",
        "<string>:4:",
    ]


def test_a_renamed_method_gives_what_the_new_one_gives_and_says_so() -> None:
    weight = torch.nn.Parameter(torch.tensor([1.0, -2.0]))
    optimizer = UPGD([weight], lr=0.1)
    scaler = VarianceGradientScaler(torch.optim.SGD([weight], lr=0.1))
    weight.grad = torch.tensor([0.5, 0.25])
    scaler.update_statistics()
    optimizer.step()
    for named in (optimizer, scaler, CVaRConstraint(RiskConfig(limit=-0.04))):
        kind = type(named).__name__
        with pytest.warns(DeprecationWarning, match=rf"{kind}\.figures is now {kind}\.metrics"):
            old = named.figures()
        new = named.metrics()
        assert set(old) == set(new) != set()
        assert all(torch.equal(old[name].nan_to_num(7.0), new[name].nan_to_num(7.0)) for name in new)
