"""Means over minibatches against NumPy's, and figures read back as they went in."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from tailguard.monitor.device_metrics import DeviceMetrics, MeanMetrics


def minibatch(draw: np.random.Generator) -> dict[str, np.ndarray]:
    """A number, a row of three, a row of one, and one more number."""
    shapes = {"loss": (), "groups": (3,), "single": (1,), "norm": ()}
    return {name: np.asarray(10 * draw.normal(size=shape), np.float32) for name, shape in shapes.items()}


def tensors(metrics: dict[str, np.ndarray]) -> dict[str, Tensor]:
    return {name: torch.tensor(value) for name, value in metrics.items()}


@given(seed=st.integers(0, 10**6), counted=st.lists(st.booleans(), min_size=1, max_size=12))
def test_means_are_those_of_the_minibatches_that_counted(seed: int, counted: list[bool]) -> None:
    draw = np.random.default_rng(seed)
    minibatch_metrics, seen = MeanMetrics(), []
    for counts in counted:
        metrics = minibatch(draw)
        if not counts:  # one that does not count may hold anything
            metrics["loss"], metrics["groups"] = np.float32(math.nan), np.full(3, math.inf, np.float32)
        minibatch_metrics.add(tensors(metrics), torch.tensor(counts))
        seen += [metrics] if counts else []
    means = minibatch_metrics.means()
    assert list(means) == ["loss", "groups", "single", "norm"]
    assert float(minibatch_metrics.count) == len(seen)
    for name, found in means.items():
        if not seen:
            assert found.isnan().all()
            continue
        expected = np.mean([metrics[name].astype(np.float64) for metrics in seen], axis=0)
        np.testing.assert_allclose(found.numpy(), expected.reshape(found.shape), rtol=1e-12, atol=1e-12)
    assert means["groups"].shape == (3,)
    assert means["loss"].shape == means["norm"].shape == ()


def test_without_a_flag_every_minibatch_counts() -> None:
    draw = np.random.default_rng(0)
    flagged, plain = MeanMetrics(), MeanMetrics()
    for _ in range(5):
        metrics = tensors(minibatch(draw))
        flagged.add(metrics, torch.tensor(True))
        plain.add(metrics)
    for name, value in plain.means().items():
        assert torch.equal(value, flagged.means()[name])


def test_clearing_begins_anew_in_the_same_place() -> None:
    minibatch_metrics = MeanMetrics()
    assert minibatch_metrics.means() == {}
    minibatch_metrics.clear()
    minibatch_metrics.add({"loss": torch.tensor(3.0)})
    places = minibatch_metrics.sums.data_ptr(), minibatch_metrics.count.data_ptr()
    minibatch_metrics.clear()
    assert float(minibatch_metrics.count) == 0
    minibatch_metrics.add({"loss": torch.tensor(5.0)})
    minibatch_metrics.add({"loss": torch.tensor(6.0)})
    assert float(minibatch_metrics.means()["loss"]) == 5.5
    assert (minibatch_metrics.sums.data_ptr(), minibatch_metrics.count.data_ptr()) == places


def test_a_sum_of_many_loses_nothing() -> None:
    """10,000 times 0.1 in float32 sums would be off by 1e-4."""
    minibatch_metrics = MeanMetrics()
    for _ in range(10_000):
        minibatch_metrics.add({"loss": torch.tensor(0.1)})
    assert float(minibatch_metrics.means()["loss"]) == pytest.approx(float(np.float32(0.1)), rel=1e-11)


def test_the_tally_keeps_no_graph() -> None:
    weight = torch.ones((), requires_grad=True)
    minibatch_metrics = MeanMetrics()
    minibatch_metrics.add({"loss": 2 * weight})
    assert not minibatch_metrics.means()["loss"].requires_grad


def test_figures_that_are_named_otherwise_are_not_added_to_the_wrong_sums() -> None:
    """The terms of the loss may change from one iteration to the next, when an extension is added or removed."""
    minibatch_metrics = MeanMetrics()
    minibatch_metrics.add({"loss": torch.tensor(3.0), "bc": torch.tensor(7.0)})
    minibatch_metrics.clear()
    minibatch_metrics.add({"loss": torch.tensor(4.0), "other": torch.tensor(9.0)})
    assert {name: float(value) for name, value in minibatch_metrics.means().items()} == {"loss": 4.0, "other": 9.0}


@given(
    st.dictionaries(
        st.text(min_size=1, max_size=8), st.floats(allow_nan=False, allow_infinity=True, width=64), min_size=1
    )
)
def test_figures_come_back_by_name(numbers: dict[str, float]) -> None:
    metrics = DeviceMetrics.of({name: torch.tensor(value, dtype=torch.float64) for name, value in numbers.items()})
    assert metrics.read() == numbers
    assert list(metrics.read()) == list(numbers)


def test_figures_of_every_type_are_read_at_once() -> None:
    weight = torch.tensor(1.5, requires_grad=True)
    metrics = DeviceMetrics.of(
        {
            "flag": torch.tensor(True),
            "count": torch.tensor(2**40, dtype=torch.int64),
            "narrow": torch.tensor(0.5, dtype=torch.bfloat16),
            "loss": 2 * weight,
            "nothing": torch.tensor(math.nan),
        }
    )
    assert metrics.row.shape == (5,)
    assert not metrics.row.requires_grad
    read = metrics.read()
    assert math.isnan(read.pop("nothing"))
    assert read == {"flag": 1.0, "count": float(2**40), "narrow": 0.5, "loss": 3.0}
