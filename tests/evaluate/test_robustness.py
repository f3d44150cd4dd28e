"""A disturbed agent beside the clean one: what it sees and at what it trades, and what the comparison computes."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

import tailguard as tg
from tailguard.algorithm.ensemble import Ensemble
from tailguard.data.bars import Bars
from tailguard.envs.spec import task_for
from tailguard.errors import ConfigError
from tailguard.evaluate.baselines import Moment
from tailguard.evaluate.budget import Budget, check_budget
from tailguard.evaluate.robustness import (
    CLEAN,
    EVERY_FAULT,
    ONE_OF_EACH,
    Disturbance,
    DisturbedBacktests,
    attack_disturbances,
    feed_disturbances,
    position_changes,
)
from tailguard.evaluate.robustness_of_run import Disturbances, parse_epsilons
from tailguard.experiment.faulty_feed import seen_bars
from tailguard.market import MarketConfig
from tailguard.risk.exposure import Exposure
from tailguard.robust.feed import KINDS, parse_feed

FEATURES = ["return_1", "return_24", "volume_168", "taker_imbalance_6"]


@pytest.fixture(scope="module")
def market() -> Bars:
    return tg.make_market(1_500, seed=2, signal=20).bars


@pytest.fixture(scope="module")
def agents(market: Bars) -> list[Any]:
    """Two agents that have learned a little, with positions that answer to the features."""
    trained = []
    for seed in range(2):
        env = tg.TradingEnv(market, num_envs=32, episode_length=32, features=FEATURES, volatility_half_life=24)
        trained.append(tg.PathwiseLearner(env, n_steps=16, seed=seed, hidden=(16,), lstm_size=8).learn(32 * 16 * 20))
    return trained


class Watched:
    """The agent, with a record of what it is shown."""

    def __init__(self, agent: Any) -> None:
        self.agent, self.spec, self.shown = agent, agent.spec, []

    def predict(
        self, observation: Any, state: Any = None, episode_start: Any = None, deterministic: bool = True
    ) -> Any:
        self.shown.append(np.array(observation[0]))
        return self.agent.predict(observation, state, episode_start, deterministic)


def watched(agent: Any, bars: Bars, **options: Any) -> tuple[np.ndarray, Any]:
    listener = Watched(agent)
    result = tg.backtest(listener, bars, warn_in_sample=False, **options)
    return np.stack(listener.shown), result


def test_an_agent_with_a_late_feed_sees_earlier_bars_and_fills_at_the_next_open(
    agents: list[Any], market: Bars
) -> None:
    clean, result = watched(agents[0], market)
    late, delayed = watched(agents[0], market, feed="late:2")
    count = len(FEATURES)
    np.testing.assert_array_equal(late[2:, :count], clean[:-2, :count])
    # The account is its own: the weight that it is shown is the one it has.
    np.testing.assert_array_equal(late[1:, count].astype(np.float32), delayed.weights[:-1, 0].astype(np.float32))
    # The fill of each decision is at the true open of the next bar: equity follows from targets and true prices.
    task, _, _ = task_for(agents[0].spec, market, None, torch.float64)
    replayed = tg.backtest(_as_array(delayed, market), market)
    np.testing.assert_allclose(
        replayed.equity[-len(delayed.equity) :] / replayed.equity[-len(delayed.equity)], delayed.equity
    )
    assert task.episode_length == 32
    np.testing.assert_array_equal(result.time, delayed.time)


def _as_array(result: Any, bars: Bars) -> np.ndarray:
    """Targets of a result as an array for all rows of the bars; flat before."""
    targets = np.zeros((len(bars), 1))
    targets[len(bars) - 1 - len(result.targets) : -1] = result.targets
    return targets


@pytest.mark.parametrize("kind", [name for name, kind in KINDS.items() if not kind.market])
def test_whatever_the_feed_shows_orders_fill_at_true_prices(kind: str, agents: list[Any], market: Bars) -> None:
    result = tg.backtest(agents[0], market, feed=kind, warn_in_sample=False)
    replayed = tg.backtest(_as_array(result, market), market)
    length = len(result.equity)
    np.testing.assert_allclose(replayed.equity[-length:] / replayed.equity[-length], result.equity, rtol=1e-12)


def test_without_faults_a_backtest_is_bit_for_bit_the_same(agents: list[Any], market: Bars) -> None:
    clean = tg.backtest(agents[0], market, warn_in_sample=False)
    for text in ("bad_tick:0.05@0", "fee:1", "volume:1@0.5"):
        result = tg.backtest(agents[0], market, feed=text, warn_in_sample=False)
        np.testing.assert_array_equal(result.equity, clean.equity)
        np.testing.assert_array_equal(result.targets, clean.targets)


def test_a_threefold_fee_triples_the_fee_in_the_books(agents: list[Any], market: Bars) -> None:
    """The books of the same orders: 3 × 5 basis points of the turnover of every bar, and no other cost changes."""
    result = tg.backtest(agents[0], market, feed="fee:3", warn_in_sample=False)
    np.testing.assert_allclose(result.costs["fee"], 0.0015 * result.turnover, rtol=1e-9)
    np.testing.assert_allclose(result.costs["spread"], 0.0001 * result.turnover, rtol=1e-9)
    assert result.turnover.sum() > 0


def test_a_funding_spike_is_in_the_books(agents: list[Any], market: Bars) -> None:
    result = tg.backtest(agents[0], market, feed="funding:0.01@0.02", warn_in_sample=False)
    due = (result.time // 3_600_000 + 1) % 8 == 0
    assert (result.costs["funding"][~due] == 0).all()
    # Of the position's value at the close, as a share of the equity before the bar.
    rate = result.costs["funding"][due] / np.abs(result.weights[due, 0] * (1 + result.net[due]))
    spiked = rate > 0.001
    assert 0.2 < spiked.mean() < 0.8  # 24 bars for each of 2 % of the bars: about 1 − 0.98²⁴ = 38 % of the time
    np.testing.assert_allclose(rate, np.where(spiked, 0.0101, 0.0001), rtol=1e-6)


def test_volatility_scaling_reads_the_faulty_feed(agents: list[Any], market: Bars) -> None:
    """A price that is 30 % off for a bar looks like a crash, and the agent's positions shrink after it."""
    task, _, _ = task_for(agents[0].spec, market, None, torch.float64)
    from tailguard.experiment.faulty_feed import task_under

    wild, _ = task_under(parse_feed("bad_tick:0.3@0.02"), agents[0].spec, market, None, torch.float64)
    assert task.volatility_factors is not None
    assert wild.volatility_factors is not None
    assert wild.volatility_factors.mean() < 0.5 * task.volatility_factors.mean()


def test_a_policy_function_sees_the_feed_too(market: Bars) -> None:
    seen: list[float] = []

    def watch(now: Moment) -> np.ndarray:
        seen.append(float(now.close[-1, 0]))
        return np.array([0.5])

    result = tg.backtest(watch, market, feed="late:3")
    close = market.panel().close[:, 0]
    np.testing.assert_array_equal(seen[3:], close[: len(seen) - 3])
    np.testing.assert_allclose(result.equity, tg.backtest(np.full((1_500, 1), 0.5), market).equity)


def test_positions_moved_and_flipped_are_counted_by_hand(market: Bars) -> None:
    targets = np.zeros((1_500, 1))
    targets[:, 0] = 0.4
    clean = tg.backtest(targets, market)
    other = targets.copy()
    other[100:250] = -0.2  # 150 decisions on the other side, each 0.6 away
    other[300:400] = 0.0  # closed is not flipped
    other[500:600] = 0.9  # nor is larger
    change, flips = position_changes(clean, tg.backtest(other, market))
    assert change == pytest.approx((150 * 0.6 + 100 * 0.4 + 100 * 0.5) / 1_499)
    assert flips == pytest.approx(150 / 1_499)


def test_the_comparison_holds_budget_money_and_error(agents: list[Any], market: Bars) -> None:
    config, budget = MarketConfig(), Budget(-0.03, horizon=24)
    backtests = DisturbedBacktests(agents[0], market, config, budget)
    case = backtests.under(Disturbance("late", parse_feed("late:2")))
    clean = tg.backtest(agents[0], market, config, warn_in_sample=False)
    late = tg.backtest(agents[0], market, config, feed="late:2", warn_in_sample=False)
    np.testing.assert_array_equal(backtests.clean.result.equity, clean.equity)
    np.testing.assert_array_equal(case.result.equity, late.equity)
    assert case.budget == check_budget(late, budget)
    years = len(clean.net) / clean.bars_per_year
    assert case.lost_per_year == pytest.approx((clean.net.sum() - late.net.sum()) / years)
    close = market.panel().close[:, 0]
    error = 1e4 * np.abs(np.concatenate([close[[0, 0]], close[:-2]]) / close - 1).mean()
    assert case.price_error_bp == pytest.approx(error)
    assert case.lost_per_bp == pytest.approx(case.lost_per_year / error)
    assert (case.position_change, case.flips) == position_changes(clean, late)
    assert backtests.clean.name == CLEAN
    assert math.isnan(backtests.under(Disturbance("fee", parse_feed("fee:3"))).lost_per_bp)
    figures = case.to_json()
    assert figures["metrics"]["sharpe"] == pytest.approx(late.metrics["sharpe"])
    assert figures["budget"] in ("kept", "broken", "undecided")
    assert figures["epsilon"] is None


def test_an_ensemble_is_disturbed_with_its_exposure_and_its_throttle(agents: list[Any], market: Bars) -> None:
    calibration = Exposure(0.5, -0.001, 0.05, 0.9, -0.002, -0.001, -0.001, 5.0)
    ensemble = Ensemble(agents, calibration, throttled=True)
    backtests = DisturbedBacktests(ensemble, market, MarketConfig())
    (attack,) = attack_disturbances(ensemble, ["fgsm"], [0.3])
    for case in (Disturbance("volume", parse_feed("volume:20@0.2")), attack):
        found = backtests.under(case)
        assert found.result.throttle is not None
        assert found.result.throttle.min() < 1
        assert np.abs(found.result.targets).max() <= 0.5 + 1e-6
        assert found.position_change > 0


def test_a_stronger_attack_moves_positions_more_than_noise_of_its_size(agents: list[Any], market: Bars) -> None:
    short = replace(market, frame=market.frame.head(1_000))
    cases = attack_disturbances(agents[0], ["random", "pgd"], [0.2, 0.05], steps=4)
    assert [case.name for case in cases] == ["random ε 0.05", "random ε 0.2", "pgd ε 0.05", "pgd ε 0.2"]
    backtests = DisturbedBacktests(agents[0], short, MarketConfig())
    moved = {case.name: backtests.under(case).position_change for case in cases}
    assert moved["pgd ε 0.2"] > 1.5 * moved["random ε 0.2"] > 0
    assert moved["pgd ε 0.2"] > moved["pgd ε 0.05"] > 0


def test_an_attack_on_the_side_turns_more_positions(agents: list[Any], market: Bars) -> None:
    short = replace(market, frame=market.frame.head(1_000))
    backtests = DisturbedBacktests(agents[0], short, MarketConfig())
    cases = [attack_disturbances(agents[0], ["pgd"], [0.5], steps=4, target=aim)[0] for aim in ("action", "reverse")]
    size, side = (backtests.under(case) for case in cases)
    assert side.flips > size.flips


def test_feeds_are_named_once_and_all_is_every_kind() -> None:
    names = [case.name for case in feed_disturbances(["all", "late:2", "late:2+fee"])]
    assert names[:3] == ["late:1", "late:2", "late:3"]
    assert len(names) == len(set(names)) == len(EVERY_FAULT) + 1
    assert {name.split(":")[0] for name in ONE_OF_EACH} == set(KINDS)


def test_what_cannot_be_shown_is_a_note_beside_the_others(agents: list[Any], market: Bars) -> None:
    """Of a market without funding: the spike is named with the reason, and the late feed is shown."""
    backtests = DisturbedBacktests(agents[0], market, MarketConfig.for_market("equity"))
    begun: list[str] = []
    found, notes = backtests.under_each(feed_disturbances(["funding", "late:2"]), begun.append)
    assert [case.name for case in found] == [CLEAN, "late:2"]
    assert begun == ["funding:0.003@0.005", "late:2"]
    (note,) = notes
    assert note.startswith("funding:0.003@0.005: this market charges no funding")


def test_another_seed_draws_other_faults() -> None:
    feeds = [feed_disturbances(["bad_tick"], seed)[0].feed for seed in (0, 1, 1)]
    seen = [seen_bars(tg.make_market(300, seed=0).bars, feed).frame["close"].to_list() for feed in feeds if feed]
    assert seen[0] != seen[1] == seen[2]


def test_disturbances_that_make_no_sense_are_refused_before_the_work() -> None:
    assert parse_epsilons(["0.02,0.05", "0.1"]) == (0.02, 0.05, 0.1)
    with pytest.raises(ConfigError, match="give numbers"):
        parse_epsilons(["big"])
    with pytest.raises(ConfigError, match="name one, as --attack pgd"):
        Disturbances(epsilons=(0.1,))
    with pytest.raises(ConfigError, match="--attack"):
        Disturbances(attacks=("tickle",))
    with pytest.raises(ConfigError, match="no fault 'lost'"):
        Disturbances(feeds=("lost:2",))
    with pytest.raises(ConfigError, match="--feed-seed"):
        Disturbances(feeds=("drift",), feed_seed=-1)
    with pytest.raises(ConfigError, match="--epsilon"):
        Disturbances(attacks=("pgd",), epsilons=(-0.1,))
    assert not Disturbances()
    assert Disturbances(feeds=("late:1",), attacks=("pgd", "random"), epsilons=(0.1,)).count == 3
