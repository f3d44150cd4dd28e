"""Every test starts from the same random state and the same process settings, in any order."""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st


@pytest.fixture(scope="module")
def drawn_once() -> float:
    """A fixture of the module that draws from the global generator."""
    return float(torch.rand(()))


@pytest.mark.parametrize("repetition", [0, 1])
def test_global_generators_start_from_the_same_seeds(repetition: int) -> None:  # noqa: ARG001
    """Each repetition draws from all three generators; the second one sees what the first one saw."""
    assert torch.equal(torch.rand(3), torch.rand(3, generator=torch.Generator().manual_seed(0)))
    assert (np.random.random(3) == np.random.RandomState(0).random(3)).all()  # noqa: NPY002
    assert random.random() == random.Random(0).random()


@pytest.mark.parametrize("repetition", [0, 1])
def test_a_fixture_of_the_module_moves_no_generator(drawn_once: float, repetition: int) -> None:  # noqa: ARG001
    """Only the first test that asks for the fixture runs it; all see the same number and the same stream after it."""
    expected = float(torch.rand((), generator=torch.Generator().manual_seed(0)))
    assert drawn_once == expected
    assert float(torch.rand(())) == expected


def test_hypothesis_draws_the_same_examples_in_every_run() -> None:
    seen: list[list[int]] = []

    def collect() -> None:
        found: list[int] = []

        @settings(max_examples=20)
        @given(st.integers())
        def draw(value: int) -> None:
            found.append(value)

        draw()
        seen.append(found)

    random.seed(1)
    collect()
    random.seed(2)
    collect()
    assert seen[0] == seen[1]
    assert len(set(seen[0])) > 5
