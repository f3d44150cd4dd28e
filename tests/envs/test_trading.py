"""The trading environment: restarts, seeds, saved states, and the same numbers through every door."""

from __future__ import annotations

import gymnasium
import numpy as np
import pytest
import torch
from gymnasium.utils.env_checker import check_env

import tailguard as tg
from tailguard.envs.protocol import VectorEnv
from tailguard.errors import ConfigError, TailguardError
from tailguard.market import MarketConfig, MarketState, step


def test_it_speaks_the_protocol(bars) -> None:
    assert isinstance(tg.TradingEnv(bars, num_envs=2, episode_length=20), VectorEnv)


def test_an_episode_is_the_simulator_bar_by_bar(make_panel, prepare_panel) -> None:
    env = tg.TradingEnv(prepare_panel(make_panel(200)), num_envs=3, episode_length=30, dtype=torch.float64)
    env.reset(seed=1)
    account = env.state.market
    rewards, expected = [], []
    for index in range(29):
        action = torch.full((3, 1), 0.9 - 0.06 * index)
        account, transition = step(env.task.market, account, action.double())
        result = env.step(action)
        rewards.append(result.reward)
        expected.append(torch.log1p(transition.net).float())
        assert not result.ended.any()
        assert torch.equal(result.obs, result.final_obs)
        torch.testing.assert_close(result.outcome["pnl"], (account.equity - 1).float())
    torch.testing.assert_close(torch.stack(rewards), torch.stack(expected), rtol=0, atol=0)


def test_a_time_limit_truncates_and_restarts_in_the_same_step(make_panel, prepare_panel) -> None:
    env = tg.TradingEnv(prepare_panel(make_panel(200)), num_envs=4, episode_length=5)
    env.reset(seed=0)
    for _ in range(4):
        env.step(torch.full((4, 1), 0.5))
    last_row = env.state.market.row + 1
    result = env.step(torch.full((4, 1), 0.5))
    assert result.truncated.all()
    assert not result.terminated.any()
    # The final observation is the old episode's: its features, its weight, no time left.
    torch.testing.assert_close(result.final_obs[:, :3], env.task.features[last_row])
    assert (result.final_obs[:, 3] > 0.4).all()
    assert (result.final_obs[:, -1] == 0).all()
    # What comes next is a flat account with all its time.
    torch.testing.assert_close(result.obs[:, :3], env.task.features[env.state.market.row])
    assert (result.obs[:, 3:6] == 0).all()
    assert (result.obs[:, -1] == 1).all()


def test_a_liquidated_account_terminates(make_panel, prepare_panel) -> None:
    panel = make_panel(60, volatility=0.2)
    env = tg.TradingEnv(prepare_panel(panel), MarketConfig(leverage=20.0), num_envs=64, episode_length=20)
    env.reset(seed=0)
    ended = torch.zeros(64, dtype=torch.bool)
    for _ in range(19):
        result = env.step(torch.ones(64, 1))
        assert torch.equal(result.terminated, result.outcome["liquidated"])
        assert (result.outcome["pnl"] >= -1).all()
        assert (env.state.age[result.terminated] == 0).all()
        assert (env.state.market.equity[result.terminated] == 1).all()
        ended |= result.terminated
    assert ended.float().mean() > 0.9


def test_same_seed_same_episodes_and_another_seed_others(bars) -> None:
    def run(seed: int) -> torch.Tensor:
        env = tg.TradingEnv(bars, num_envs=8, episode_length=10)
        found = [env.reset(seed=seed)]
        found += [env.step(torch.full((8, 1), 0.3)).obs for _ in range(25)]
        return torch.stack(found)

    assert torch.equal(run(5), run(5))
    assert not torch.equal(run(5), run(6))


def test_stagger_spreads_the_first_ends_over_its_multiples(bars) -> None:
    env = tg.TradingEnv(bars, num_envs=256, episode_length=40, stagger=10)
    env.reset(seed=0)
    assert sorted(set(env.state.age.tolist())) == [0, 10, 20, 30]
    ends = [int(env.step(torch.zeros(256, 1)).truncated.sum()) for _ in range(40)]
    assert [index for index, count in enumerate(ends) if count] == [9, 19, 29, 39]


def test_a_saved_state_goes_on_exactly(bars) -> None:
    env = tg.TradingEnv(bars, num_envs=8, episode_length=7)
    env.reset(seed=3)
    for _ in range(10):
        env.step(torch.full((8, 1), 0.7))
    saved = {name: value.clone() for name, value in env.state_dict().items()}
    expected = [env.step(torch.full((8, 1), -0.4)).obs for _ in range(20)]
    other = tg.TradingEnv(bars, num_envs=8, episode_length=7, seed=99)
    other.load_state_dict(saved)
    found = [other.step(torch.full((8, 1), -0.4)).obs for _ in range(20)]
    assert torch.equal(torch.stack(found), torch.stack(expected))


def test_several_symbols_trade_in_accounts_of_their_own() -> None:
    market = tg.make_market(800, assets=2, seed=4)
    env = tg.TradingEnv(market.bars, num_envs=64, episode_length=20, accounts="per_symbol")
    env.reset(seed=0)
    assert env.task.market.assets == 1
    rows = env.prepared.panel.rows
    assert rows == 1_600
    half = env.state.market.row >= 800
    assert 0.2 < half.float().mean() < 0.8
    # Nothing crosses from one symbol to the other: every episode stays in its half.
    for _ in range(19):
        env.step(torch.ones(64, 1))
        assert torch.equal(env.state.market.row >= 800, half)


def test_too_few_bars_is_an_error_that_says_what_is_needed(bars) -> None:
    with pytest.raises(ConfigError, match="no unbroken stretch of 5,001 bars"):
        tg.TradingEnv(bars, episode_length=5_000)


def test_a_step_before_reset_is_an_error(bars) -> None:
    with pytest.raises(ConfigError, match="reset"):
        tg.TradingEnv(bars, num_envs=1, episode_length=10).step(torch.zeros(1, 1))


@pytest.mark.filterwarnings("ignore:.*A Box observation space.*")
def test_the_gymnasium_environment_passes_gymnasiums_own_check(bars) -> None:
    env = gymnasium.make("tailguard/Trading-v0", bars=bars, episode_length=30)
    check_env(env.unwrapped)


def test_both_gymnasium_doors_show_the_same_numbers_as_the_tensor_environment(bars) -> None:
    options = {"episode_length": 6, "seed": 0}
    native = tg.TradingEnv(bars, num_envs=1, **options)
    single = gymnasium.make("tailguard/Trading-v0", bars=bars, **options)
    vector = gymnasium.make_vec("tailguard/Trading-v0", num_envs=1, bars=bars, **options)
    seen = native.reset(7)
    assert np.array_equal(single.reset(seed=7)[0], seen[0].numpy())
    assert np.array_equal(vector.reset(seed=7)[0], seen.numpy())
    for index in range(6):
        action = np.array([0.8 - 0.3 * index], np.float32)
        expected = native.step(torch.from_numpy(action)[None])
        obs, reward, terminated, truncated, info = single.step(action)
        assert np.array_equal(obs, expected.final_obs[0].numpy())
        assert reward == expected.reward.item()
        assert (terminated, truncated) == (False, index == 5)
        assert info["fee"] == expected.outcome["fee"].item()
        batch_obs, batch_reward, _, batch_truncated, infos = vector.step(action[None])
        assert np.array_equal(batch_obs, expected.obs.numpy())
        assert batch_reward[0] == reward
        assert batch_truncated[0] == truncated
    assert np.array_equal(infos["final_obs"][0], obs)
    assert infos["_final_obs"].all()


def test_a_non_finite_action_is_refused(bars) -> None:
    env = gymnasium.make("tailguard/Trading-v0", bars=bars, episode_length=6).unwrapped
    env.reset(seed=0)
    with pytest.raises(TailguardError, match="not finite"):
        env.step(np.array([np.nan], np.float32))


def test_costs_by_kind_are_finite_and_add_up(bars) -> None:
    env = tg.TradingEnv(bars, num_envs=32, episode_length=50, dtype=torch.float64)
    env.reset(seed=0)
    equity = env.state.market.equity.clone()
    for index in range(49):
        before: MarketState = env.state.market
        result = env.step(torch.full((32, 1), float(np.sin(index))))
        paid = sum(result.outcome[kind] for kind in ("fee", "spread", "impact", "funding", "borrow", "liquidation"))
        assert result.outcome["finite"].all()
        assert (paid >= 0).all()
        gross = env.state.market.equity / before.equity - 1 + paid
        equity = equity * (1 + gross - paid)
    torch.testing.assert_close(equity, env.state.market.equity, rtol=1e-12, atol=0)
