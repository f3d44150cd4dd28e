"""Episode figures against a plain loop over rows and environments."""

from __future__ import annotations

import math
from itertools import pairwise

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tailguard.monitor.episode_metrics import WINDOW, EpisodeTracker


@given(
    seed=st.integers(0, 10**6),
    cuts=st.lists(st.integers(1, 29), max_size=4),
    end_share=st.sampled_from([0.0, 0.1, 0.6]),
)
def test_returns_and_lengths_are_those_of_a_loop_however_the_rows_are_cut(
    seed: int, cuts: list[int], end_share: float
) -> None:
    draw = torch.Generator().manual_seed(seed)
    rewards = torch.randn(30, 4, generator=draw)
    ended = torch.rand(30, 4, generator=draw) < end_share
    valid = torch.ones(30, 4, dtype=torch.bool)
    for t in range(1, 30):  # a row after an end may be one in which nothing happened
        dead = ended[t - 1] & valid[t - 1] & (torch.rand(4, generator=draw) < 0.5)
        valid[t], ended[t] = ~dead, ended[t] | dead
    pnl = torch.randn(30, 4, generator=draw)

    expected, total, length = [], np.zeros(4), np.zeros(4)
    for t in range(30):
        for n in range(4):
            if valid[t, n]:
                total[n] += float(rewards[t, n])
                length[n] += 1
            if ended[t, n]:
                if valid[t, n]:
                    expected.append((total[n], length[n], float(pnl[t, n])))
                total[n] = length[n] = 0

    tracker = EpisodeTracker(4, torch.device("cpu"))
    edges = [0, *sorted(set(cuts)), 30]
    for first, last in pairwise(edges):
        part = slice(first, last)
        tracker.add(rewards[part], ended[part], valid[part], {"pnl": pnl[part]})
    assert int(tracker.count) == len(expected)
    lasting = range(max(0, len(expected) - WINDOW), len(expected))
    for number in lasting:
        assert tracker.kept[number % WINDOW].tolist() == pytest.approx(expected[number], rel=1e-6, abs=1e-6)
    assert tracker.kept[len(lasting) : WINDOW].isnan().all()
    means = np.mean(expected[-WINDOW:], axis=0) if expected else [math.nan] * 3
    found = [float(tracker.metrics()[name]) for name in ("return", "length", "pnl")]
    assert found == pytest.approx(list(means), rel=1e-6, abs=1e-6, nan_ok=True)


def test_means_cover_the_last_hundred_episodes() -> None:
    tracker = EpisodeTracker(1, torch.device("cpu"))
    assert all(figure.isnan() for figure in tracker.metrics().values())
    ends = torch.ones(250, 1, dtype=torch.bool)
    tracker.add(torch.arange(250.0).unsqueeze(1), ends, ends, {})
    assert int(tracker.count) == 250
    metrics = tracker.metrics()
    assert float(metrics["return"]) == pytest.approx(np.mean(np.arange(150, 250)))
    assert float(metrics["length"]) == 1.0
    assert metrics["pnl"].isnan()


@pytest.mark.parametrize("poison", [math.nan, math.inf])
def test_a_return_that_is_not_finite_does_not_outlive_its_episode(poison: float) -> None:
    """A rollout that is left out because of such a reward must not spoil the returns of all that follows."""
    tracker = EpisodeTracker(1, torch.device("cpu"))
    rewards, valid = torch.ones(6, 1), torch.ones(6, 1, dtype=torch.bool)
    ended = torch.tensor([0, 1, 0, 1, 0, 0]).bool().unsqueeze(1)
    rewards[1] = poison  # in the first of three episodes, the last of which is open
    tracker.add(rewards, ended, valid, {})
    assert not math.isfinite(tracker.kept[0, 0])
    assert tracker.kept[1].tolist() == pytest.approx([2.0, 2.0, math.nan], nan_ok=True)
    assert tracker.returns.tolist() == [2.0]
    tracker.add(torch.ones(6, 1), ended, valid, {})
    assert tracker.kept[2:4, 0].tolist() == [4.0, 2.0]
