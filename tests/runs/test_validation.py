"""An evaluation on the validation part: growth and tail of the agent's own episodes, over all its accounts."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any

import numpy as np
import pytest
import torch

import tailguard as tg
from tailguard.envs.trading import TradingEnv
from tailguard.market import open_accounts
from tailguard.risk.config import RiskConfig
from tailguard.risk.exposure import MOST_EXPOSURE
from tailguard.runs.validation import BestScore, Validation, ValidationResult, budget_score, calibrated_score


def make_agent(bars: Any, risk: RiskConfig | None = None, **env: Any) -> tg.DistributionalPPO:
    market = TradingEnv(bars, num_envs=4, episode_length=24, features=["return_24"], **env)
    sizes = {"n_steps": 12, "minibatch_size": 24, "hidden": (6,), "lstm_size": 5, "quantiles": 4, "epochs": 1}
    return tg.DistributionalPPO(market, risk=risk, **sizes)


def test_symbols_in_accounts_of_their_own_are_evaluated_one_by_one() -> None:
    bars = tg.make_market(900, assets=2, seed=5).bars
    agent = make_agent(bars, accounts="per_symbol")
    agent.learn(96)
    both = Validation(agent, bars)
    alone = [Validation(agent, bars.select(symbol)) for symbol in bars.symbols]
    assert both.episodes == sum(each.episodes for each in alone) > 20
    growth = [each.evaluate(agent).growth for each in alone]
    assert growth[0] != growth[1]
    expected = sum(each.episodes * found for each, found in zip(alone, growth, strict=True)) / both.episodes
    assert both.evaluate(agent).growth == pytest.approx(expected)


def test_a_part_shorter_than_an_episode_has_no_evaluation() -> None:
    bars = tg.make_market(900, seed=5).bars
    agent = make_agent(bars)
    short = bars.between(bars.end_points[1] - 10 * bars.frequency, bars.end_points[1], lead_in=100)
    assert Validation(agent, short).evaluate(agent) is None


@pytest.mark.parametrize("measure", ["episode", "drawdown", "bar"])
def test_growth_and_tail_are_those_of_episodes_traded_one_by_one(measure: Any) -> None:
    """Each window again, alone, with equity and tail in plain numbers."""
    bars = tg.make_market(330, seed=5).bars
    risk = RiskConfig(limit=-1e-5, alpha=0.25, measure=measure, window=400, confidence=0)
    agent = make_agent(bars, risk)
    agent.learn(96)
    validation = Validation(agent, bars)
    found = validation.evaluate(agent)
    (part,) = validation.parts
    assert np.diff(part.starts).tolist() == [3] * (len(part.starts) - 1)
    growth, outcomes = [], []
    task = TradingEnv(bars, num_envs=1, episode_length=24, features=["return_24"]).task
    for start in part.starts:
        state, memory = task.begin(open_accounts(torch.tensor([start]), 1)), None
        equity, bar_returns = [1.0], []
        for _ in range(24):
            action, memory = agent.predict(task.observe(state).numpy(), state=memory, deterministic=True)
            state, step = task.advance(state, task.decide(torch.as_tensor(np.asarray(action)), state)[0])
            bar_returns.append(float(step.net))
            equity.append(equity[-1] * (1 + bar_returns[-1]))
        growth.append(np.log(equity[-1]))
        falls = np.array(equity) / np.maximum.accumulate(equity) - 1
        outcomes += {"episode": [equity[-1] - 1], "drawdown": [falls.min()], "bar": bar_returns}[measure]
    worst = np.sort(outcomes)
    share = 0.25 * len(worst)
    whole = int(share)
    cvar = (worst[:whole].sum() + (share - whole) * worst[whole]) / share
    assert found.growth == pytest.approx(np.mean(growth) / 24 * 365.25 * 24, rel=1e-4)
    assert found.cvar == pytest.approx(cvar, rel=1e-3)
    assert found.score == budget_score(found.growth, found.cvar, -1e-5) < found.growth


def test_training_growth_is_that_of_the_finished_episodes_where_a_policy_does_not_explore() -> None:
    """The mean of the finished episodes' log returns, taken from the environment's own outcomes."""
    bars = tg.make_market(900, seed=5).bars
    env = TradingEnv(bars, num_envs=4, episode_length=24, features=["return_24"])
    agent = tg.PathwiseLearner(env, n_steps=24, hidden=(6,), lstm_size=5, quantiles=4, learning_rate=0.02)
    agent.learn(1920)
    growth = Validation(agent, bars).training_growth(agent)
    pnl = agent.episodes.kept[:80, 2].numpy()  # 80 episodes of 24 bars, a day each
    assert abs(growth) > 0.02
    assert growth == pytest.approx(np.log1p(pnl).mean() * 365.25, abs=1e-4)


def test_what_a_policy_that_explores_has_learned_of_its_bars_is_traded_without_exploration() -> None:
    """Against backtests of single training episodes; only of those that a member trains on."""
    bars = tg.make_market(900, seed=5).bars
    explorer = make_agent(bars)
    explorer.learn(960)
    env, validation = explorer.env, Validation(explorer, bars)
    env.restrict_starts(env.starts[300:340])  # fewer than are traded
    made = []
    for row in range(40):
        first = int(env.prepared.panel.time[env.starts[row]])
        start = datetime.fromtimestamp(first / 1000, UTC)
        part = bars.between(start, start + 25 * bars.frequency, lead_in=200)
        made.append(np.log(tg.backtest(explorer, part, warn_in_sample=False).equity[-1]))
    found = validation.training_growth(explorer)
    assert found == pytest.approx(np.mean(made) * 365.25, rel=1e-3)
    before = explorer.generator.get_state()
    validation.training_growth(explorer)
    assert torch.equal(explorer.generator.get_state(), before)  # a resumed run is the same


def test_ppo_is_told_that_it_has_memorised_its_bars() -> None:
    """Trained on a few days of noise until it knows them: growth is there in training, and not on validation bars."""
    noise = tg.make_market(700, seed=1, signal=0.0).bars
    first, last = noise.end_points
    middle = first + (last - first) / 2
    train, other = noise.between(first, middle), noise.between(middle, last)
    free = tg.MarketConfig(fee=0.0, half_spread=0.0, funding_rate=0.0)
    env = TradingEnv(train, free, num_envs=64, episode_length=24, features=["return_1", "return_4", "return_24"])
    agent = tg.DistributionalPPO(
        env, n_steps=24, minibatch_size=384, epochs=6, hidden=(32,), lstm_size=16, quantiles=4, learning_rate=1e-2
    )
    validation, said = Validation(agent, other), []
    for _ in range(2):
        agent.learn(20 * 24 * 64, reset_num_timesteps=False)
        growth = validation.evaluate(agent).growth
        metrics = {"eval/growth": growth, "eval/gap": validation.training_growth(agent) - growth}
        said += agent.health.evaluated(metrics, agent.num_timesteps)
    assert [alarm.name for alarm in said] == ["memorised"]


# --- scores ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("growth", "cvar", "limit", "expected"),
    [
        (1.2, -0.03, -0.04, 1.2),  # kept
        (1.2, -0.04, -0.04, 1.2),  # just kept
        (1.2, -0.05, -0.04, 1.2 - 5 * 0.25),  # 5 % where 4 % were allowed: a quarter too much
        (3.0, -0.12, -0.04, 3.0 - 5 * 2.0),
        (1.2, 0.01, -0.04, 1.2),  # even the worst episodes gain
        (1.2, -0.9, None, 1.2),
        (1.2, None, -0.04, 1.2),
    ],
)
def test_growth_counts_within_the_limit_and_a_breach_costs_more_than_growth(
    growth: float, cvar: float | None, limit: float | None, expected: float
) -> None:
    assert budget_score(growth, cvar, limit) == pytest.approx(expected)


def test_where_exposure_is_calibrated_growth_counts_in_proportion_to_the_tail() -> None:
    """Normal outcomes: ES = 2.0627 σ − μ; twice the exposure has the same score, and losses are not scaled."""
    outcomes = 0.01 + 0.02 * torch.tensor([-1.0, 1.0]).repeat(50)
    shortfall = 2.0627128 * 0.02 - 0.01
    assert calibrated_score(1.5, outcomes, 0.05, -0.04) == pytest.approx(1.5 * 0.04 / shortfall)
    assert calibrated_score(3.0, 2 * outcomes, 0.05, -0.04) == pytest.approx(1.5 * 0.04 / shortfall)
    assert calibrated_score(-0.3, outcomes, 0.05, -0.04) == -0.3
    assert calibrated_score(1.5, outcomes, 0.05, -0.9) == 1.5 * MOST_EXPOSURE


def test_the_best_stays_until_a_better_one_comes() -> None:
    best = BestScore()
    seen = []
    for score in (-2.0, -1.0, -1.0, float("nan"), -3.0, -0.5):
        best = best.after(score)
        seen.append((best.score, best.since))
    assert seen == [(-2.0, 0), (-1.0, 0), (-1.0, 1), (-1.0, 2), (-1.0, 3), (-0.5, 0)]


def test_an_evaluation_is_told_in_a_few_words() -> None:
    assert ValidationResult(3.14, -0.0344, 3.14).describe() == "+3.1 a year, CVaR −3.4 %"
    assert ValidationResult(-0.25, None, -0.25).describe() == "−0.2 a year"
