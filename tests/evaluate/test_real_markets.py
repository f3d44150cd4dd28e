"""Real bars of shares and currencies: an account without costs earns what the prices say."""

from __future__ import annotations

import math

import numpy as np
import pandas as pd
import pytest
from backtesting.test import EURUSD, GOOG
from skfolio.datasets import load_sp500_dataset

from tailguard.data.sources import load_bars
from tailguard.evaluate.backtest import backtest
from tailguard.evaluate.baselines import BuyAndHold
from tailguard.market import MarketConfig

FREE = MarketConfig(fee=0, half_spread=0, impact=0, participation=math.inf, funding_rate=0)


def growth_and_sharpe(returns: np.ndarray, bars_per_year: float) -> tuple[float, float]:
    growth = math.exp(np.log1p(returns).mean() * bars_per_year) - 1
    return growth, returns.mean() / returns.std(ddof=1) * math.sqrt(bars_per_year)


def held(frame: pd.DataFrame) -> np.ndarray:
    """Returns of a position bought at the second open: to its close, then from close to close."""
    opened, close = frame["Open"].to_numpy(), frame["Close"].to_numpy()
    return np.concatenate([[close[1] / opened[1] - 1], close[2:] / close[1:-1] - 1])


@pytest.mark.filterwarnings("ignore::tailguard.errors.BarsWarning")
@pytest.mark.parametrize(
    ("frame", "calendar", "bars_per_year", "growth", "sharpe"),
    [
        (GOOG, "XNYS", 251.7, 0.276, 0.88),
        (GOOG, "auto", None, 0.276, 0.88),
        (EURUSD, "fx", 6_216.0, 0.185, 2.35),
        (EURUSD, "auto", None, 0.185, 2.35),
    ],
)
def test_buy_and_hold_is_what_the_prices_say(
    frame: pd.DataFrame, calendar: str, bars_per_year: float | None, growth: float, sharpe: float
) -> None:
    bars = load_bars(frame, calendar=calendar)
    result = backtest(BuyAndHold(), bars, FREE)
    yearly = bars.pace.per_year if bars_per_year is None else bars_per_year
    expected = growth_and_sharpe(held(frame), yearly)

    assert result.bars_per_year == bars.panel().bars_per_year == yearly
    assert result.equity[-1] == pytest.approx(frame["Close"].iloc[-1] / frame["Open"].iloc[1], rel=1e-9)
    assert result.metrics["growth_per_year"] == pytest.approx(expected[0], abs=1e-9)
    assert result.metrics["sharpe"] == pytest.approx(expected[1], abs=1e-9)
    assert expected == pytest.approx((growth, sharpe), abs=0.006)
    assert result.costs["borrow"].sum() == result.costs["funding"].sum() == 0


@pytest.fixture(scope="module")
def stocks() -> pd.DataFrame:
    """Closes of 20 large American companies, 1990 to 2022, [days, 20]."""
    return load_sp500_dataset()


@pytest.mark.filterwarnings("ignore::tailguard.errors.BarsWarning")
def test_twenty_stocks_in_one_account_earn_their_mean(stocks: pd.DataFrame) -> None:
    long = stocks.stack().rename("close").rename_axis(["date", "symbol"]).reset_index()
    prices = dict.fromkeys(("open", "high", "low"), long["close"])
    bars = load_bars(long.assign(**prices, volume=1e6).sort_values(["symbol", "date"]), calendar="XNYS")
    result = backtest(BuyAndHold(), bars, FREE)

    close = stocks.to_numpy()
    # Bought in equal parts at the second day's price and never rebalanced.
    equity = (close[1:] / close[1]).mean(1)
    expected = growth_and_sharpe(np.concatenate([[0.0], equity[1:] / equity[:-1] - 1]), bars.pace.per_year)
    assert np.abs(result.equity[1:] / equity - 1).max() < 1e-9
    assert result.metrics["growth_per_year"] == pytest.approx(expected[0], abs=1e-9)
    assert result.metrics["sharpe"] == pytest.approx(expected[1], abs=1e-9)
    # 1990 to 2022 had 8,315 sessions; the record ends two before.
    assert bars.pace.per_year == pytest.approx((len(stocks) + 2) / 33, abs=1e-9)
