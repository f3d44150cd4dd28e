"""Positions that are carried over nights, weekends and holidays: the gap in the P&L, and interest for its days."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pandas as pd
import pytest
import torch
from backtesting.test import GOOG

from tailguard.data.bars import Bars
from tailguard.data.sources import load_bars
from tailguard.evaluate.backtest import backtest
from tailguard.evaluate.baselines import BuyAndHold
from tailguard.market import MarketConfig, build_market, open_accounts, step
from tailguard.market.costs import Cost, Holding, register_cost, unregister_cost

FREE = MarketConfig(fee=0, half_spread=0, impact=0, participation=math.inf, funding_rate=0)


@pytest.fixture(scope="module")
def bars() -> Bars:
    return load_bars(GOOG[:60], calendar="XNYS")  # from Thursday, 19 August 2004


def test_interest_is_due_for_the_days_of_a_weekend(bars: Bars) -> None:
    result = backtest(BuyAndHold(exposure=2.0), bars, replace(FREE, borrow_rate=0.10, leverage=2.0))
    days = np.diff(GOOG.index[:60].to_numpy()).astype("timedelta64[D]").astype(int)

    # At the first fill 2 are bought with an equity of 1: 1 is borrowed, from Friday's open to Monday's.
    assert days[:3].tolist() == [1, 3, 1]
    assert result.costs["borrow"][0] == pytest.approx(0.10 * 3 / 365.25 * 1.0, rel=1e-12)
    # Later the debt, as a share of equity, is what the position exceeds the equity by.
    held = result.weights[0, 0] * (1 + (GOOG["Open"].iloc[2] / GOOG["Close"].iloc[1] - 1))
    equity = 1 + result.weights[0, 0] * (GOOG["Open"].iloc[2] / GOOG["Close"].iloc[1] - 1)
    assert result.costs["borrow"][1] == pytest.approx(0.10 * 1 / 365.25 * (held - equity), rel=1e-9)


def test_a_year_of_interest_is_a_year_of_interest(bars: Bars) -> None:
    """A short position of constant size: all calendar days are paid, however the bars lie among them."""
    panel = load_bars(GOOG, calendar="XNYS").panel()
    market = build_market(panel, replace(FREE, borrow_rate=0.05), dtype=torch.float64)
    row = torch.arange(panel.rows - 1)
    _, books = step(market, open_accounts(row, 1, torch.float64), torch.full((len(row), 1), -1.0).double())
    days = (panel.time[-1] - panel.time[1]) / 86_400_000 + 1  # the last bar is held for its own day
    assert books.costs["borrow"].sum().item() == pytest.approx(0.05 * days / 365.25, rel=1e-9)
    assert bars.sessions is not None


def test_funding_is_due_at_the_stamps_of_a_weekend(bars: Bars) -> None:
    result = backtest(BuyAndHold(), bars, replace(FREE, funding_rate=0.001))
    # Friday 00:00 to Monday 00:00 passes nine stamps of eight hours, a weekday three; on the value at the close.
    value = GOOG["Close"].iloc[1] / GOOG["Open"].iloc[1]
    assert result.costs["funding"][0] == pytest.approx(9 * 0.001 * value, rel=1e-12)
    assert result.costs["funding"][1] == pytest.approx(3 * 0.001 * result.weights[1, 0] * (1 + result.net[1]), rel=1e-9)


def test_a_gap_over_the_weekend_belongs_to_the_position(bars: Bars) -> None:
    result = backtest(BuyAndHold(), bars, FREE)
    friday, monday = GOOG["Close"].iloc[1], GOOG["Close"].iloc[2]
    assert result.pnl[1] == pytest.approx(monday / friday - 1, rel=1e-12)
    assert result.metrics["time_in_market"] == 1.0


def test_a_yearly_cost_of_ones_own_is_charged_for_elapsed_time(bars: Bars) -> None:
    def custody(rate: torch.Tensor, holding: Holding[torch.Tensor, torch.Tensor]) -> torch.Tensor:
        return rate * holding.positions.abs()

    register_cost(Cost("custody", custody, charged="close", rate=0.02, yearly=True))
    try:
        result = backtest(BuyAndHold(), bars, replace(FREE, extra_costs={"custody": 0.02}))
    finally:
        unregister_cost("custody")
    assert result.costs["custody"][0] == pytest.approx(0.02 * 3 / 365.25, rel=1e-12)


def intraday() -> pd.DataFrame:
    """Twelve weekdays of seven hourly bars from 14:30; each session opens 1 % above the close before it."""
    rows, price = [], 100.0
    for day in pd.bdate_range("2021-06-01", periods=12):
        price *= 1.01
        for bar in range(7):
            close = price * (1.002 if bar % 2 else 0.999)
            rows.append((day + pd.Timedelta(hours=14.5 + bar), price, max(price, close), min(price, close), close, 1e6))
            price = close
    return pd.DataFrame(rows, columns=["time", "open", "high", "low", "close", "volume"])


def test_flat_by_the_close_sells_at_the_open_of_the_last_bar_and_misses_the_night() -> None:
    frame = intraday()
    bars = load_bars(frame, calendar="auto")
    always = backtest(BuyAndHold(), bars, FREE)
    flat = backtest(BuyAndHold(), bars, FREE, flat_by_close=True)

    last = np.arange(len(frame)) % 7 == 6
    weights = np.concatenate([[0.0], flat.weights[:, 0]])  # by bar; the first decision fills in the second bar
    assert (weights[last][:-1] == 0).all()  # where the record ends there is no close to be flat by
    assert (weights[~last][1:] > 0).all()
    # By hand: each session from its first open to the open of its last bar; the first starts one bar later.
    opened = frame["open"].to_numpy().reshape(12, 7)
    sessions = opened[:, 6] / opened[:, 0]
    sessions[0] = opened[0, 6] / opened[0, 1]
    sessions[-1] = frame["close"].iloc[-1] / opened[-1, 0]
    assert flat.equity[-1] == pytest.approx(np.prod(sessions), rel=1e-12)
    assert always.equity[-1] == pytest.approx(frame["close"].iloc[-1] / opened[0, 1], rel=1e-12)
    assert always.equity[-1] / flat.equity[-1] == pytest.approx(
        1.01**11 * np.prod([frame["close"].iloc[7 * day + 6] / opened[day, 6] for day in range(11)]), rel=1e-9
    )
