"""Means over minibatches against NumPy's, and figures read back as they went in."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from tailguard.algorithm.tally import Figures, Tally


def minibatch(draw: np.random.Generator) -> dict[str, np.ndarray]:
    """A number, a row of three, a row of one, and one more number."""
    shapes = {"loss": (), "groups": (3,), "single": (1,), "norm": ()}
    return {name: np.asarray(10 * draw.normal(size=shape), np.float32) for name, shape in shapes.items()}


def tensors(figures: dict[str, np.ndarray]) -> dict[str, Tensor]:
    return {name: torch.tensor(value) for name, value in figures.items()}


@given(seed=st.integers(0, 10**6), counted=st.lists(st.booleans(), min_size=1, max_size=12))
def test_means_are_those_of_the_minibatches_that_counted(seed: int, counted: list[bool]) -> None:
    draw = np.random.default_rng(seed)
    tally, seen = Tally(), []
    for counts in counted:
        figures = minibatch(draw)
        if not counts:  # one that does not count may hold anything
            figures["loss"], figures["groups"] = np.float32(math.nan), np.full(3, math.inf, np.float32)
        tally.add(tensors(figures), torch.tensor(counts))
        seen += [figures] if counts else []
    means = tally.means()
    assert list(means) == ["loss", "groups", "single", "norm"]
    assert float(tally.count) == len(seen)
    for name, found in means.items():
        if not seen:
            assert found.isnan().all()
            continue
        expected = np.mean([figures[name].astype(np.float64) for figures in seen], axis=0)
        np.testing.assert_allclose(found.numpy(), expected.reshape(found.shape), rtol=1e-12, atol=1e-12)
    assert means["groups"].shape == (3,)
    assert means["loss"].shape == means["norm"].shape == ()


def test_without_a_flag_every_minibatch_counts() -> None:
    draw = np.random.default_rng(0)
    flagged, plain = Tally(), Tally()
    for _ in range(5):
        figures = tensors(minibatch(draw))
        flagged.add(figures, torch.tensor(True))
        plain.add(figures)
    for name, value in plain.means().items():
        assert torch.equal(value, flagged.means()[name])


def test_clearing_begins_anew_in_the_same_place() -> None:
    tally = Tally()
    assert tally.means() == {}
    tally.clear()
    tally.add({"loss": torch.tensor(3.0)})
    places = tally.sums.data_ptr(), tally.count.data_ptr()
    tally.clear()
    assert float(tally.count) == 0
    tally.add({"loss": torch.tensor(5.0)})
    tally.add({"loss": torch.tensor(6.0)})
    assert float(tally.means()["loss"]) == 5.5
    assert (tally.sums.data_ptr(), tally.count.data_ptr()) == places


def test_a_sum_of_many_loses_nothing() -> None:
    """10,000 times 0.1 in float32 sums would be off by 1e-4."""
    tally = Tally()
    for _ in range(10_000):
        tally.add({"loss": torch.tensor(0.1)})
    assert float(tally.means()["loss"]) == pytest.approx(float(np.float32(0.1)), rel=1e-11)


def test_the_tally_keeps_no_graph() -> None:
    weight = torch.ones((), requires_grad=True)
    tally = Tally()
    tally.add({"loss": 2 * weight})
    assert not tally.means()["loss"].requires_grad


def test_figures_that_are_named_otherwise_are_not_added_to_the_wrong_sums() -> None:
    """The terms of the loss may change from one iteration to the next, when an extension is added or removed."""
    tally = Tally()
    tally.add({"loss": torch.tensor(3.0), "bc": torch.tensor(7.0)})
    tally.clear()
    tally.add({"loss": torch.tensor(4.0), "other": torch.tensor(9.0)})
    assert {name: float(value) for name, value in tally.means().items()} == {"loss": 4.0, "other": 9.0}


@given(
    st.dictionaries(
        st.text(min_size=1, max_size=8), st.floats(allow_nan=False, allow_infinity=True, width=64), min_size=1
    )
)
def test_figures_come_back_by_name(numbers: dict[str, float]) -> None:
    figures = Figures.of({name: torch.tensor(value, dtype=torch.float64) for name, value in numbers.items()})
    assert figures.read() == numbers
    assert list(figures.read()) == list(numbers)


def test_figures_of_every_type_are_read_at_once() -> None:
    weight = torch.tensor(1.5, requires_grad=True)
    figures = Figures.of(
        {
            "flag": torch.tensor(True),
            "count": torch.tensor(2**40, dtype=torch.int64),
            "narrow": torch.tensor(0.5, dtype=torch.bfloat16),
            "loss": 2 * weight,
            "nothing": torch.tensor(math.nan),
        }
    )
    assert figures.row.shape == (5,)
    assert not figures.row.requires_grad
    read = figures.read()
    assert math.isnan(read.pop("nothing"))
    assert read == {"flag": 1.0, "count": float(2**40), "narrow": 0.5, "loss": 3.0}
