"""Episodes side by side: how they are laid out, and a ruined account stays ruined."""

from __future__ import annotations

import pytest
import torch

import tailguard as tg
from tailguard.envs.episodes import GROWTH_FLOOR
from tailguard.evaluate.held_out import HeldOutEpisodes, episodes_on, spaced_starts, stride_of


def test_episodes_overlap_until_there_are_many() -> None:
    assert stride_of(5_000, 192) == 24
    assert stride_of(98_304, 192) == 48  # 2,048 of them
    assert stride_of(10**7, 192) == 192  # one after the other, never less than all bars
    assert stride_of(100, 4) == 1
    assert spaced_starts(torch.tensor([3, 4, 5, 9, 10, 14]), 4).tolist() == [3, 9, 14]


def test_consecutive_episodes_that_share_a_bar_are_counted() -> None:
    bars = tg.make_market(600, seed=5).bars
    env = tg.TradingEnv(bars, num_envs=2, episode_length=24, features=["return_24"])
    agent = tg.PathwiseLearner(env, n_steps=24, hidden=(6,), lstm_size=5)
    (part,) = episodes_on(agent.spec, bars)
    assert (part.stride, part.overlap) == (3, 8)
    assert HeldOutEpisodes(part.task, part.starts[::8], 24).overlap == 1
    traded = part.trade(agent)
    assert len(traded.growth) == len(part) == len(part.starts)
    alone = HeldOutEpisodes(part.task, part.starts[5:6], 3).trade(agent)
    assert alone.growth.item() == pytest.approx(traded.growth[5].item(), abs=1e-7)


def test_a_ruined_account_trades_no_more() -> None:
    """A policy that always bets everything with leverage 20, in a market that moves 50 % a bar at once."""
    bars = tg.make_market(400, seed=5).bars
    env = tg.TradingEnv(bars, tg.MarketConfig(leverage=20.0), num_envs=2, episode_length=100, features=["return_24"])
    agent = tg.PathwiseLearner(env, n_steps=20, hidden=(6,), lstm_size=5)
    agent.policy.action_head.linear.bias.data[0] = 10.0  # always long
    (part,) = episodes_on(agent.spec, bars)
    bar_returns = part.trade(agent, "bar")
    ruined = bar_returns.measured.abs().flip(1).cumsum(1).flip(1)[:, 1:] == 0  # nothing moves any more
    assert ruined.any()
    assert bar_returns.growth.min() > 100 * torch.tensor(GROWTH_FLOOR).log()
    equity = torch.prod(1 + bar_returns.measured, 1) - 1
    torch.testing.assert_close(part.trade(agent).measured[:, 0], equity, atol=1e-4, rtol=1e-4)
