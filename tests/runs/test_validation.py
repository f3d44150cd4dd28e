"""The score of a checkpoint is the growth of the agent's own episodes, over all accounts that it would trade."""

from __future__ import annotations

import pytest

import tailguard as tg
from tailguard.envs.trading import TradingEnv
from tailguard.runs.validation import Validation


def test_symbols_in_accounts_of_their_own_are_scored_one_by_one() -> None:
    bars = tg.make_market(900, assets=2, seed=5).bars
    env = TradingEnv(bars, num_envs=4, episode_length=24, features=["return_24"], accounts="per_symbol")
    agent = tg.DistributionalPPO(env, n_steps=12, minibatch_size=24, hidden=(6,), lstm_size=5, quantiles=4, epochs=1)
    agent.learn(96)
    both = Validation(agent, bars)
    alone = [Validation(agent, bars.select(symbol)) for symbol in bars.symbols]
    assert both.episodes == sum(each.episodes for each in alone) > 20
    scores = [each.score(agent) for each in alone]
    assert scores[0] != scores[1]
    expected = sum(each.episodes * score for each, score in zip(alone, scores, strict=True)) / both.episodes
    assert both.score(agent) == pytest.approx(expected)


def test_a_part_shorter_than_an_episode_has_no_score() -> None:
    bars = tg.make_market(900, seed=5).bars
    env = TradingEnv(bars, num_envs=4, episode_length=24, features=["return_24"])
    agent = tg.DistributionalPPO(env, n_steps=12, minibatch_size=24, hidden=(6,), lstm_size=5, quantiles=4)
    short = bars.between(bars.end_points[1] - 10 * bars.frequency, bars.end_points[1], lead_in=100)
    assert Validation(agent, short).score(agent) is None
