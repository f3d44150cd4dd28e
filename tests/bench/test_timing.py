"""Candidates are timed in turns, and figures are medians of what was counted."""

from __future__ import annotations

import time

import pytest
import torch

from tailguard.bench.own_learner import Shape
from tailguard.bench.timing import Workload, speed_of, take_turns, torch_threads


def test_candidates_take_turns_and_only_counted_turns_count() -> None:
    order: list[str] = []
    made: list[str] = []

    def candidate(name: str, seconds: float) -> Workload:
        made.append(name)

        def turn() -> None:
            first = name not in order
            order.append(name)
            time.sleep(0.1 if first else seconds)

        return Workload(turn, steps=100)

    names: list[str] = []
    group = {"slow": lambda: candidate("slow", 0.02), "fast": lambda: candidate("fast", 0.01)}
    found = take_turns(group, turns=3, before_each=names.append, warm_up=1)
    assert made == ["slow", "fast"]
    assert order == names == ["slow", "fast"] * 4
    # Sleeping takes at least its time, and the long first turn must not show.
    assert 100 / 0.06 < found["slow"].per_second <= 100 / 0.02
    assert found["slow"].per_second < found["fast"].per_second <= 100 / 0.01


def test_speed_is_the_median_and_its_spread_the_quartiles_over_it() -> None:
    speed = speed_of([1.0, 2.0, 3.0, 4.0, 1_000.0])
    assert speed.per_second == 3.0
    assert speed.spread == pytest.approx((4.0 - 2.0) / 3.0)


def test_threads_are_given_back_even_after_a_failure() -> None:
    before, inside = torch.get_num_threads(), []

    def fail() -> None:
        with torch_threads(before + 1):
            inside.append(torch.get_num_threads())
            raise KeyError

    with pytest.raises(KeyError):
        fail()
    assert (inside, torch.get_num_threads()) == ([before + 1], before)


@pytest.mark.parametrize(("envs", "kept"), [(16, Shape(16, 64, 256)), (64, Shape(64, 64, 1_024)), (99, None)])
def test_a_smaller_shape_keeps_the_number_of_minibatches(envs: int, kept: Shape | None) -> None:
    shape = Shape(64, 64, 1_024)
    cut = shape.at_most(envs)
    assert cut == (kept or shape)
    assert cut.samples // cut.minibatch == shape.samples // shape.minibatch
