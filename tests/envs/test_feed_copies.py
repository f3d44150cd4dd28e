"""Episodes under several feeds: how they are drawn, what they see, and that a saved state continues exactly."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
import torch

from tailguard.data.panel import Panel
from tailguard.data.prepare import PreparedBars
from tailguard.envs.feed_copies import MixedStarts, RandomisedBars, randomise
from tailguard.envs.folds import cut_folds
from tailguard.envs.trading import TradingEnv
from tailguard.errors import ConfigError

ROWS = 400


@pytest.fixture
def mixed(make_panel: Callable[..., Panel], prepare_panel: Callable[..., PreparedBars]) -> RandomisedBars:
    """Clean bars and two feeds, whose features are those of the clean ones plus 100 and plus 200."""
    clean = prepare_panel(make_panel(rows=ROWS))
    faulty = [
        replace(clean, features=clean.features + 100 * number, seen_close=clean.panel.close * (1 + number))
        for number in (1, 2)
    ]
    return randomise(clean, faulty, 0.3)


def test_each_feed_is_drawn_as_often_as_it_should_be(mixed: RandomisedBars) -> None:
    env = TradingEnv(mixed, num_envs=20_000, episode_length=8, seed=1)
    feed = (env.reset()[:, 0] / 100).round().long()
    shares = torch.bincount(feed, minlength=3) / 20_000
    # 70 %, 15 % and 15 %, with a standard deviation of at most 0.33 % in 20,000 draws.
    torch.testing.assert_close(shares, torch.tensor([0.70, 0.15, 0.15]), atol=0.013, rtol=0)
    starts = env.starts
    assert isinstance(starts, MixedStarts)
    offsets = starts.offsets / ROWS
    assert [(offsets == number).double().mean().item() for number in range(3)] == pytest.approx([0.7, 0.15, 0.15])


@pytest.mark.parametrize(
    ("probability", "shares"), [(0.0, [1, 0, 0]), (1.0, [0, 0.5, 0.5]), (0.123, [0.877, 0.0615, 0.0615])]
)
def test_probabilities_are_exact(mixed: RandomisedBars, probability: float, shares: list[float]) -> None:
    starts = MixedStarts.of(torch.arange(5), replace(mixed, probability=probability))
    everything = starts.index_select(0, torch.arange(starts.numel()))
    assert [(everything // ROWS == number).double().mean().item() for number in range(3)] == pytest.approx(shares)
    assert torch.equal(torch.unique(everything % ROWS), torch.arange(5))


def test_an_episode_keeps_its_feed_and_trades_the_same_market(mixed: RandomisedBars) -> None:
    env = TradingEnv(mixed, num_envs=64, episode_length=30, seed=2)
    clean = TradingEnv(prepared_part(mixed), num_envs=64, episode_length=30, seed=2)
    obs = env.reset()
    feed = (obs[:, 0] / 100).round()
    assert set(feed.tolist()) == {0.0, 1.0, 2.0}
    assert env.state is not None
    clean.reset()
    clean.state = replace(env.state, market=replace(env.state.market, row=env.state.market.row % ROWS))
    draw = torch.Generator().manual_seed(0)
    for _ in range(29):
        action = 2 * torch.rand(64, 1, generator=draw) - 1
        step, expected = env.step(action), clean.step(action)
        torch.testing.assert_close((step.obs[:, 0] / 100).round(), feed)
        torch.testing.assert_close(step.reward, expected.reward)
        torch.testing.assert_close(step.obs[:, 0] - 100 * feed, expected.obs[:, 0], atol=1e-4, rtol=0)
        torch.testing.assert_close(step.obs[:, 3:], expected.obs[:, 3:])


def prepared_part(mixed: RandomisedBars) -> PreparedBars:
    return PreparedBars(
        mixed.panel.rows_between(0, ROWS), mixed.features[:ROWS], mixed.names, mixed.usable[:ROWS], mixed.scaler
    )


def test_volatility_scaling_reads_the_closes_that_the_feed_shows(mixed: RandomisedBars) -> None:
    jump = mixed.panel.close.copy()
    jump[ROWS + 200] *= 1.5  # a tick in the first feed alone
    env = TradingEnv(replace(mixed, seen_close=jump), num_envs=1, episode_length=8, volatility_half_life=10)
    plain = TradingEnv(prepared_part(mixed), num_envs=1, episode_length=8, volatility_half_life=10)
    factors, expected = env.task.volatility_factors, plain.task.volatility_factors
    assert factors is not None
    assert expected is not None
    assert env.volatility == plain.volatility  # fitted on true prices
    for number in (0, 2):
        torch.testing.assert_close(factors[number * ROWS : (number + 1) * ROWS], expected)
    feed = factors[ROWS : 2 * ROWS]
    torch.testing.assert_close(feed[:200], expected[:200])
    assert feed[200, 0] < 0.3 * expected[200, 0]


def test_a_saved_state_continues_with_the_same_feeds(mixed: RandomisedBars) -> None:
    env = TradingEnv(mixed, num_envs=16, episode_length=5, seed=3)
    env.reset()
    action = torch.full((16, 1), 0.5)
    for _ in range(7):
        env.step(action)
    saved = {name: value.clone() for name, value in env.state_dict().items()}
    rest = [env.step(action).obs for _ in range(12)]
    other = TradingEnv(mixed, num_envs=16, episode_length=5, seed=99)
    other.load_state_dict(saved)
    for expected in rest:
        assert torch.equal(other.step(action).obs, expected)


def test_folds_are_those_of_the_clean_bars_and_leave_every_feed_out(mixed: RandomisedBars) -> None:
    env = TradingEnv(mixed, num_envs=4, episode_length=8)
    plain = TradingEnv(prepared_part(mixed), num_envs=4, episode_length=8)
    folds, expected = (cut_folds(each, 4, 10 * 3_600_000) for each in (env, plain))
    for ours, theirs in zip(folds, expected, strict=True):
        assert torch.equal(ours.inside, theirs.inside)
        assert torch.equal(ours.outside, theirs.outside)
    env.restrict_starts(folds[1].outside)
    drawn = torch.cat([env.draw() for _ in range(500)])
    assert set((drawn // ROWS).tolist()) == {0, 1, 2}
    assert set((drawn % ROWS).tolist()) == set(folds[1].outside.tolist())


def test_feeds_of_other_bars_are_refused(
    make_panel: Callable[..., Panel], prepare_panel: Callable[..., PreparedBars]
) -> None:
    clean, other = (prepare_panel(make_panel(rows=rows)) for rows in (400, 300))
    with pytest.raises(ConfigError, match="must have the rows and features of the clean ones"):
        randomise(clean, [other], 0.5)


def test_rows_that_a_feed_leaves_undefined_are_used_by_none(
    make_panel: Callable[..., Panel], prepare_panel: Callable[..., PreparedBars]
) -> None:
    clean = prepare_panel(make_panel(rows=100))
    usable = np.arange(100) != 50
    mixed = randomise(clean, [replace(clean, usable=usable)], 0.5)
    np.testing.assert_array_equal(mixed.usable, np.tile(usable, 2))
