"""Statistics in blocks are NumPy's on the whole."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from tailguard.data.disk.order_statistics import streamed_statistics

PROBABILITIES = (0.0, 0.1, 0.25, 0.5, 0.75, 0.999, 1.0)


def in_blocks(values: np.ndarray, size: int):
    return lambda: (values[start : start + size] for start in range(0, len(values), size))


@pytest.mark.parametrize("rows", [1, 2, 3, 1_000, 10_007])
def test_quantiles_are_those_of_numpy_bit_by_bit(rows: int) -> None:
    draw = np.random.default_rng(rows)
    columns = [
        draw.standard_t(2, rows),
        np.round(draw.normal(size=rows), 1),  # many ties
        np.where(draw.random(rows) < 0.7, 1e-4, draw.normal(size=rows)),
        np.full(rows, -3.25),
        np.exp(draw.normal(0, 30, rows)),
    ]
    values = np.stack(columns, axis=1)
    found = streamed_statistics(in_blocks(values, 777), PROBABILITIES)
    assert found.count == rows
    np.testing.assert_array_equal(found.quantiles, np.quantile(values, PROBABILITIES, axis=0))
    np.testing.assert_allclose(found.deviation, values.std(axis=0), rtol=1e-12, atol=1e-15)
    np.testing.assert_array_equal(found.smallest, values.min(axis=0))
    np.testing.assert_array_equal(found.largest, values.max(axis=0))


@given(
    values=arrays(
        np.float64, st.tuples(st.integers(1, 40), st.integers(1, 3)), elements=st.floats(-1e150, 1e150, width=64)
    ),
    size=st.integers(1, 50),
)
@settings(max_examples=60, deadline=None, derandomize=True)
def test_any_numbers_in_any_blocks(values: np.ndarray, size: int) -> None:
    found = streamed_statistics(in_blocks(values, size), PROBABILITIES)
    np.testing.assert_array_equal(found.quantiles, np.quantile(values, PROBABILITIES, axis=0))


def test_no_rows_are_counted_as_none() -> None:
    assert streamed_statistics(lambda: iter([np.zeros((0, 2))]), (0.5,)).count == 0
