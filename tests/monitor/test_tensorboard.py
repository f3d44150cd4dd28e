"""Histograms against NumPy's."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tailguard.monitor.tensorboard import histograms


@given(
    seed=st.integers(0, 10**6), size=st.integers(1, 300), bins=st.integers(1, 70), scale=st.sampled_from([1e-6, 1, 1e8])
)
def test_counts_and_edges_are_those_of_numpy(seed: int, size: int, bins: int, scale: float) -> None:
    values = scale * np.random.default_rng(seed).standard_t(3, size)
    found = histograms({"x": torch.as_tensor(values)}, bins)["x"]
    counts, edges = np.histogram(values, bins)
    np.testing.assert_allclose(found.edges, edges[1:], rtol=1e-9, atol=1e-12 * scale)
    # The last digit decides on which side of an edge a value falls.
    assert np.abs(np.cumsum(found.counts) - np.cumsum(counts)).max() <= 1
    assert (found.low, found.high, found.number) == (values.min(), values.max(), size)
    assert found.total == pytest.approx(values.sum(), rel=1e-9, abs=1e-9 * scale)
    assert found.squares == pytest.approx((values**2).sum(), rel=1e-9)


def test_equal_values_stand_in_the_middle_of_one_unit() -> None:
    found = histograms({"x": torch.full((5, 2), 3.0)}, bins=4)["x"]
    counts, edges = np.histogram(np.full(10, 3.0), 4)
    assert found.counts == counts.tolist()
    assert found.edges == edges[1:].tolist()


def test_whole_numbers_are_counted_one_by_one() -> None:
    found = histograms({"x": torch.tensor([0, 2, 2, 1, 2])}, bins=3)["x"]
    assert found.counts == [1, 1, 3]


def test_what_is_not_finite_is_left_out_and_nothing_else() -> None:
    tensors = {
        "mixed": torch.tensor([1.0, torch.nan, 4.0, torch.inf, 2.0, -torch.inf]),
        "hopeless": torch.full((3,), torch.nan),
        "sound": torch.tensor([1.0, 2.0]),
    }
    found = histograms(tensors, bins=3)
    assert list(found) == ["mixed", "sound"]
    assert found["mixed"].counts == [1, 1, 1]
    assert (found["mixed"].low, found["mixed"].high, found["mixed"].number, found["mixed"].total) == (1, 4, 3, 7)


def test_no_tensors_no_histograms() -> None:
    assert histograms({}) == {}
