"""Episodes: what the agent sees, what its action means, where an episode may start."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import tailguard as tg
from tailguard.envs.episodes import EpisodeState, TradingTask, episode_starts
from tailguard.market import MarketConfig, MarketState, Transition, build_market


@given(
    seed=st.integers(0, 10_000),
    rows=st.integers(2, 60),
    length=st.integers(1, 9),
)
def test_starts_are_exactly_the_rows_with_a_whole_episode_ahead(seed: int, rows: int, length: int) -> None:
    draw = np.random.default_rng(seed)
    segment = np.cumsum(draw.random(rows) < 0.1)
    usable = draw.random(rows) > 0.1
    begin = draw.random(rows) > 0.2
    expected = [
        row
        for row in range(rows - length)
        if begin[row]
        and usable[row : row + length + 1].all()
        and (segment[row : row + length + 1] == segment[row]).all()
    ]
    found = episode_starts(torch.tensor(begin), torch.tensor(usable), torch.tensor(segment), length)
    assert found.tolist() == expected


def task_with(make_panel, assets: int = 1, **settings) -> TradingTask:
    market = build_market(make_panel(50, assets), MarketConfig(**settings), dtype=torch.float64)
    return TradingTask(market, torch.arange(100.0).reshape(50, 2), ("a", "b"), episode_length=8)


def test_observation_holds_features_weights_gain_drawdown_and_time_left(make_panel) -> None:
    task = task_with(make_panel)
    market = MarketState(torch.tensor([7]), torch.tensor([1.1]).double(), torch.tensor([[0.5]]).double())
    state = EpisodeState(market, torch.tensor([0.8]).double(), torch.tensor([1.25]).double(), torch.tensor([6]))
    # Gain 1.1 / 0.8 − 1 = 0.375, drawdown 1.1 / 1.25 − 1 = −0.12, time left 1 − 6/8.
    expected = torch.tensor([[14.0, 15.0, 0.5, 0.375, -0.12, 0.25]])
    torch.testing.assert_close(task.observe(state), expected)
    assert task.observation_names == ("a", "b", "weight", "pnl", "drawdown", "time_left")
    assert task.observe(state).dtype == torch.float32


@pytest.mark.parametrize(
    ("action", "settings", "expected"),
    [
        ([0.5, -0.25], {}, [0.5, -0.25]),
        ([1.0, -1.0], {}, [0.5, -0.5]),  # gross 2 is scaled to the leverage of 1
        ([1.0, -1.0], {"leverage": 3.0}, [1.5, -1.5]),
        ([0.2, 0.1], {"leverage": 3.0}, [0.6, 0.3]),
        ([0.5, -0.25], {"allow_short": False}, [0.5, 0.0]),
    ],
)
def test_actions_become_weights_inside_the_leverage(make_panel, action, settings, expected) -> None:
    task = task_with(make_panel, assets=2, **settings)
    weights = task.to_weights(torch.tensor([action]))
    torch.testing.assert_close(weights, torch.tensor([expected]))
    assert weights.abs().sum() <= settings.get("leverage", 1.0) + 1e-6


@pytest.mark.parametrize(
    ("reward", "net", "expected"),
    [
        ("log", 0.1, math.log(1.1)),
        ("log", -1.0, math.log(0.01)),  # a lost account is rewarded as if 1 % were left
        ("simple", -0.25, -0.25),
        ("pnl", 0.1, 0.1 * 1.5 / 0.75),  # of the episode's first equity
    ],
)
def test_rewards(make_panel, reward, net, expected) -> None:
    base = task_with(make_panel)
    task = TradingTask(base.market, base.features, base.feature_names, 8, reward)
    value = torch.tensor([net]).double()
    nothing = torch.zeros_like(value)
    transition = Transition(value, nothing, {}, *[nothing] * 3, torch.zeros(1, dtype=torch.bool))
    market = MarketState(torch.tensor([3]), torch.tensor([1.5]).double(), torch.zeros(1, 1).double())
    state = EpisodeState(market, torch.tensor([0.75]).double(), torch.tensor([1.5]).double(), torch.tensor([1]))
    assert task.reward_of(transition, state).item() == pytest.approx(expected, rel=1e-6)


@pytest.mark.parametrize("allow_short", [True, False])
@pytest.mark.parametrize("assets", [1, 3])
def test_weights_of_one_account_are_those_of_many(allow_short: bool, assets: int) -> None:
    bars = tg.make_market(50, assets=assets, seed=0).bars.panel("portfolio")
    market = build_market(bars, MarketConfig(leverage=1.7, allow_short=allow_short), dtype=torch.float64)
    task = TradingTask(market, torch.zeros(50, 0), (), episode_length=10)
    actions = torch.rand(200, assets, generator=torch.Generator().manual_seed(0), dtype=torch.float64) * 2 - 1
    one_by_one = [task.weights_of_one(action.tolist(), 7) for action in actions]
    np.testing.assert_allclose(one_by_one, task.to_weights(actions), rtol=1e-15)
    assert np.isnan(task.weights_of_one([float("nan")] * assets, 7)).all()
