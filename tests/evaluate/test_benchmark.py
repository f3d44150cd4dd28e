"""A result against a benchmark and a risk-free rate: the numbers of a regression, obtained another way."""

from __future__ import annotations

import math

import numpy as np
import pandas as pd
import pytest
from backtesting.test import GOOG
from scipy import stats

import tailguard as tg
from tailguard.errors import BarsError
from tailguard.evaluate.baselines import BuyAndHold
from tailguard.evaluate.benchmark import compare_with, finite_values
from tailguard.market import MarketConfig

FREE = MarketConfig(fee=0, half_spread=0, impact=0, participation=math.inf, funding_rate=0)


@pytest.fixture(scope="module")
def bars() -> tg.Bars:
    return tg.load_bars(GOOG[:800], calendar="XNYS", symbol="GOOG")


def market(seed: int = 3) -> pd.Series:
    """An index that explains half of GOOG's moves."""
    noise = np.random.default_rng(seed).normal(0, 0.01, 800)
    moves = np.diff(np.log(GOOG["Close"][:800].to_numpy()), prepend=np.log(GOOG["Close"].iloc[0]))
    return pd.Series(1_000 * np.exp(np.cumsum(0.5 * moves + noise)), index=GOOG.index[:800], name="SPX")


def test_beta_and_alpha_are_those_of_a_regression(bars: tg.Bars) -> None:
    result = tg.backtest(BuyAndHold(), bars, FREE)
    index = market()
    found = compare_with(result, tg.load_bars(index.to_frame()), risk_free=0.03)

    free = 1.03 ** (1 / bars.pace.per_year) - 1
    theirs = index.to_numpy()[2:] / index.to_numpy()[1:-1] - 1  # the first bar traded is the second
    line = stats.linregress(theirs - free, result.net[1:] - free)
    assert found.beta == pytest.approx(line.slope, rel=1e-9)
    assert found.alpha == pytest.approx(line.intercept * bars.pace.per_year, rel=1e-9)
    assert found.correlation == pytest.approx(line.rvalue, rel=1e-9)
    excess = result.net[1:] - free
    assert found.own_sharpe == pytest.approx(excess.mean() / excess.std(ddof=1) * math.sqrt(251.7), rel=0.01)
    difference = result.net[1:] - theirs
    assert found.information_ratio == pytest.approx(
        difference.mean() / difference.std(ddof=1) * math.sqrt(bars.pace.per_year), rel=1e-9
    )
    assert "against SPX" in found.describe()
    assert finite_values(found)["risk_free"] == 0.03


def test_the_benchmark_itself_has_beta_one_and_no_alpha(bars: tg.Bars) -> None:
    result = tg.backtest(BuyAndHold(), bars, FREE)
    found = compare_with(result, bars)
    assert found.beta == pytest.approx(1, abs=1e-9)
    assert found.alpha == pytest.approx(0, abs=1e-9)
    assert found.tracking_error == pytest.approx(0, abs=1e-9)
    assert found.own_sharpe == pytest.approx(found.sharpe, rel=1e-9)


def test_a_benchmark_must_cover_the_record_and_be_one_symbol(bars: tg.Bars) -> None:
    result = tg.backtest(BuyAndHold(), bars, FREE)
    with pytest.raises(BarsError, match=r"do not cover the result's, 2004-08-20 to"):
        compare_with(result, tg.load_bars(market()[:500].to_frame()))
    two = pd.DataFrame({"SPX": market(), "NDX": market(4)})
    with pytest.raises(BarsError, match="2 symbols; choose one of"):
        compare_with(result, tg.load_bars(two))


def test_a_rate_of_nothing_changes_nothing(bars: tg.Bars) -> None:
    result = tg.backtest(BuyAndHold(), bars, FREE)
    found = compare_with(result, tg.load_bars(market().to_frame()), risk_free=0.0)
    own = result.net[1:]
    assert found.own_sharpe == pytest.approx(own.mean() / own.std(ddof=1) * math.sqrt(bars.pace.per_year), rel=1e-12)
