"""Universes whose members come and go: listings, halts and delistings in one account, by hand."""

from __future__ import annotations

import math
from dataclasses import replace
from datetime import UTC, datetime, timedelta

import numpy as np
import polars as pl
import pytest
import torch

import tailguard as tg
from tailguard.data.features import common_times, compute_features
from tailguard.data.prepare import prepare
from tailguard.data.readiness import TrainingNeeds, ready_report
from tailguard.data.sources import bars_of, check_source, load_bars, read_source
from tailguard.data.splits import split_bars
from tailguard.errors import BarsError
from tailguard.evaluate.baselines import BuyAndHold, Moment
from tailguard.market import MarketConfig, open_accounts

HOUR, START = timedelta(hours=1), datetime(2021, 1, 1, tzinfo=UTC)
FREE = MarketConfig(fee=0, half_spread=0, impact=0, participation=math.inf, funding_rate=0)


def symbol(name: str, hours: list[int], prices: list[float] | None = None) -> pl.DataFrame:
    closes = [100.0 + hour for hour in hours] if prices is None else prices
    return pl.DataFrame({"symbol": name, "time": [START + hour * HOUR for hour in hours], "close": closes})


def three() -> pl.DataFrame:
    """A lives throughout, B is listed at hour 4 and halted at hours 6 and 7, C is delisted after hour 5."""
    return pl.concat(
        [
            symbol("A", list(range(10)), [100.0] * 10),
            symbol("B", [4, 5, 8, 9], [50.0, 55.0, 66.0, 66.0]),
            symbol("C", [0, 1, 2, 3, 4, 5], [10.0, 10.0, 10.0, 11.0, 12.0, 12.0]),
        ]
    )


def ragged(**options: object) -> tg.Bars:
    return load_bars(three(), universe="ragged", frequency="1h", **options)  # type: ignore[arg-type]


def test_the_rows_are_the_times_that_any_symbol_has() -> None:
    panel = ragged().panel()

    assert panel.rows == 10
    assert panel.listed is not None
    assert panel.halted is not None
    assert panel.listed[:, 0].all()
    assert panel.listed[:, 1].tolist() == [False] * 4 + [True] * 6
    assert panel.listed[:, 2].tolist() == [True] * 6 + [False] * 4
    assert np.argwhere(panel.halted).tolist() == [[6, 1], [7, 1]]
    assert np.argwhere(panel.delisted).tolist() == [[6, 2]]
    assert panel.close[6:8, 1].tolist() == [55.0, 55.0]
    assert (panel.segment == 0).all()


def test_members_come_and_go_and_absent_ones_have_no_weight() -> None:
    result = tg.backtest(np.tile([[0.2, 0.3, 0.5]], (10, 1)), ragged(), FREE)
    # Row k of the result is hour k + 1. B is known at the close of hour 4 and bought at hour 5.
    assert (result.weights[:4, 1] == 0).all()
    assert result.weights[4, 1] == pytest.approx(0.3)
    assert (result.weights[5:, 2] == 0).all()
    # Equity by hand: C moves 10 → 11 at hour 3 and 11 → 12 at hour 4 (closes are the fills), each on 0.5.
    equity = [1.0, 1.0, 1.0]
    equity.append(equity[-1] * (1 + 0.5 * 0.1))
    equity.append(equity[-1] * (1 + 0.5 / 11))
    equity.append(equity[-1])  # hour 5: B is bought at 55
    equity += [equity[-1]] * 2  # hours 6 and 7: B is halted, C was sold at 12
    equity.append(equity[-1] * (1 + 0.3 * (66 / 55 - 1)))  # hour 8: B resumes at 66
    equity.append(equity[-1])
    assert result.equity.tolist() == pytest.approx(equity, rel=1e-12)


@pytest.mark.parametrize(("price", "value"), [(None, 1.0), (6.0, 0.5), (0.0, 0.0), (18.0, 1.5)])
def test_a_delisted_symbol_is_worth_its_last_or_a_given_price(price: float | None, value: float) -> None:
    bars = ragged(delistings=None if price is None else {"C": price})
    targets = np.zeros((10, 3))
    targets[4:, 2] = 0.5  # bought at the close of hour 5, at 12
    result = tg.backtest(targets, bars, FREE)
    assert result.equity[-1] == pytest.approx(1 + 0.5 * (value - 1), rel=1e-8)
    assert (result.weights[5:, 2] == 0).all()


def test_a_delisting_leaves_nothing_behind_where_lots_are_whole() -> None:
    lots = replace(FREE, lot=3.0, capital=1_000.0)
    result = tg.backtest(np.tile([[0.2, 0.3, 0.5]], (10, 1)), ragged(), lots)
    assert result.weights[4, 2] > 0
    assert (result.weights[5:, 2] == 0).all()
    # Orders wait in a halt only: hours 6 and 7 are the rows 5 and 6 of the result.
    assert (result.unfilled[[0, 1, 2, 3, 4, 7, 8]] == 0).all()


def test_a_halted_position_cannot_be_sold_and_earns_the_move_of_the_halt() -> None:
    targets = np.zeros((10, 3))
    targets[4, 1] = 1.0  # bought at hour 5; every later target is 0, and the order waits until hour 8
    result = tg.backtest(targets, ragged(), FREE)
    assert result.weights[:, 1].tolist() == pytest.approx([0, 0, 0, 0, 1, 1, 1, 0, 0])
    assert result.equity[-1] == pytest.approx(66 / 55, rel=1e-12)


def test_the_simulator_agrees_with_the_account_bar_by_bar() -> None:
    bars = ragged(delistings={"C": 6.0})
    costly = MarketConfig(fee=0.001, half_spread=0.0005, impact=0, participation=math.inf, funding_rate=0.0001)
    # `backtest` compares the two on every bar and raises where they differ.
    result = tg.backtest(np.tile([[0.2, 0.3, 0.5]], (10, 1)), bars, costly)
    assert result.costs["fee"].sum() > 0


def test_common_universes_are_as_they_were() -> None:
    common = load_bars(three(), frequency="1h", gaps="split").panel()
    assert common.listed is None
    assert common.rows == 2  # hours 4 and 5
    with pytest.raises(BarsError, match="2 bars missing"):
        load_bars(three(), frequency="1h")
    with pytest.raises(BarsError, match="delistings need universe='ragged'"):
        load_bars(three(), frequency="1h", gaps="split", delistings={"C": 1.0})
    with pytest.raises(BarsError, match="no symbol 'D'"):
        ragged(delistings={"D": 1.0})
    with pytest.raises(BarsError, match="A has bars until the end"):
        ragged(delistings={"A": 1.0})


def test_a_time_that_nobody_has_is_a_gap_for_all() -> None:
    frame = pl.concat([symbol("A", [0, 1, 2, 5, 6, 7]), symbol("B", [1, 2, 5, 7])])
    with pytest.raises(BarsError, match="2 bars missing"):
        load_bars(frame, universe="ragged", frequency="1h")
    bars = load_bars(frame, universe="ragged", frequency="1h", gaps="split")
    assert bars.panel().segment.tolist() == [0, 0, 0, 1, 1, 1]
    assert bars.frame.filter(pl.col("symbol") == "B")["segment"].n_unique() == 2


def long_lived(count: int = 400) -> pl.DataFrame:
    """A throughout; B from bar 150 on; C until bar 250."""
    generator = np.random.default_rng(0)
    frames = []
    for name, begin, end in (("A", 0, count), ("B", 150, count), ("C", 0, 250)):
        close = 100 * np.exp(np.cumsum(generator.normal(0, 0.01, count)))[begin:end]
        frames.append(symbol(name, list(range(begin, end)), close.tolist()))
    return pl.concat(frames)


def test_the_agent_sees_a_mask_and_unknown_features_are_nought() -> None:
    bars = load_bars(long_lived(), universe="ragged")
    table = compute_features(bars, ["bollinger_20", "time_of_day_sin"])
    prepared = prepare(bars, ["bollinger_20", "time_of_day_sin"])

    assert prepared.names[-3:] == ("listed:A", "listed:B", "listed:C")
    mask = prepared.features[:, -3:]
    # Listed, and the feature's 19 bars of history are there.
    assert mask[:, 1].tolist() == [0.0] * 169 + [1.0] * 231
    assert mask[:, 2].tolist() == [0.0] * 19 + [1.0] * 231 + [0.0] * 150
    assert np.isfinite(prepared.features).all()
    assert (prepared.features[:169, 1] == 0).all()
    assert table.names == ("bollinger_20:A", "bollinger_20:B", "bollinger_20:C", "time_of_day_sin")
    # The features of a symbol are those it has alone, and its scale is that of the rows on which it lives.
    alone = compute_features(load_bars(long_lived()).select("B"), ["bollinger_20"]).values[:, 0]
    assert np.array_equal(table.values[150:, 1], alone, equal_nan=True)
    assert prepared.scaler.center[1] == pytest.approx(np.nanmedian(alone), abs=1e-12)


def test_training_on_a_ragged_universe_never_holds_who_is_absent() -> None:
    bars = load_bars(long_lived(), universe="ragged")
    env = tg.TradingEnv(bars, FREE, num_envs=64, episode_length=100, features=["bollinger_20"], dtype=torch.float64)
    env.reset(seed=0)
    assert env.state is not None
    listed = bars.panel().listed
    assert listed is not None
    for _ in range(120):
        before = env.state
        step = env.step(torch.tensor([[0.5, -0.8, 0.9]]).expand(64, 3))
        row = (before.market.row + 1).numpy()
        weights = step.outcome["weights"].numpy()
        assert (weights[~listed[row]] == 0).all()
        # Absent members take no share of the leverage: the gross weight is 1 wherever it can be.
        there = env.task.holdable[before.market.row].numpy()  # type: ignore[index]
        gross = np.abs(weights).sum(1)
        assert (gross[there.sum(1) >= 2] > 0.9).all()


def test_gradients_reach_the_weights_of_members_that_are_there_only() -> None:
    bars = load_bars(long_lived(), universe="ragged")
    env = tg.TradingEnv(bars, FREE, num_envs=2, episode_length=20, features=["bollinger_20"], dtype=torch.float64)
    state = env.task.begin(open_accounts(torch.tensor([100, 300]), 3, torch.float64))
    action = torch.full((2, 3), 0.2, dtype=torch.float64, requires_grad=True)
    target, _ = env.task.decide(action, state)
    after, _ = env.task.advance(state, target)
    after, books = env.task.advance(after, target)
    books.net.sum().backward()
    assert action.grad is not None
    assert (action.grad[0, [0, 2]] != 0).all()  # row 100: A and C
    assert action.grad[0, 1] == 0
    assert (action.grad[1, [0, 1]] != 0).all()  # row 300: A and B
    assert action.grad[1, 2] == 0


def test_parts_of_a_split_keep_all_members() -> None:
    bars = load_bars(long_lived(), universe="ragged")
    split = split_bars(bars, train=0.5, validation=0.2, test=0.3, lead_in=0)
    assert len(common_times(bars)) == 400
    for part in (split.train, split.validation, split.test):
        assert part.symbols == ("A", "B", "C")
        assert part.panel().assets == 3
    # C goes on after the training part's end: it is not delisted there.
    assert split.train.panel().listed[-1].all()  # type: ignore[index]
    assert not split.test.panel().listed[:, 2].any()  # type: ignore[index]


def test_a_policy_function_knows_who_is_listed() -> None:
    seen = []

    def policy(moment: Moment) -> np.ndarray:
        assert moment.listed is not None
        seen.append(moment.listed.tolist())
        return np.where(moment.listed, 1 / 3, 0.0)

    tg.backtest(policy, ragged(), FREE)
    assert seen[0] == [True, False, True]
    assert seen[-1] == [True, True, False]


def test_buy_and_hold_buys_members_when_they_are_listed() -> None:
    result = tg.backtest(BuyAndHold(), ragged(), FREE)
    assert result.weights[0].tolist() == pytest.approx([1 / 3, 0, 1 / 3])
    assert result.weights[4, 1] > 0
    assert result.weights[-1, 2] == 0


def test_the_check_shows_lives_and_names_survivorship() -> None:
    def notes(frame: pl.DataFrame, universe: str) -> str:
        source = read_source(frame)
        report = check_source(source, universe=universe)  # type: ignore[arg-type]
        bars = bars_of(source, report, universe=universe)  # type: ignore[arg-type]
        needs = TrainingNeeds(0.15, 0.15, "1d", 10, uses_volume=False)
        return "\n".join(ready_report(report, bars, needs).notes)

    lives = notes(long_lived(), "ragged")
    assert "listed later: B 2021-01-07" in lives
    assert "delisted: C 2021-01-11 at its last close" in lives
    assert "survivorship" not in lives
    survivors = long_lived().filter(pl.col("symbol") != "C")
    assert "survivorship: all 2 symbols have bars to the end" in notes(survivors, "ragged")
