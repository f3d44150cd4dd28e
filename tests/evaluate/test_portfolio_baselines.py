"""Baselines for portfolios, against SciPy, scikit-learn and numbers worked out by hand."""

from __future__ import annotations

import itertools
from dataclasses import replace
from typing import Any

import numpy as np
import polars as pl
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy.optimize import minimize
from sklearn.covariance import ledoit_wolf

import tailguard as tg
from tailguard.data.pace import Pace
from tailguard.data.sources import load_bars
from tailguard.errors import ConfigError
from tailguard.evaluate.baselines import BASELINES, PORTFOLIO_BASELINES, baseline, standard_baselines
from tailguard.evaluate.moment import HOLD, Moment
from tailguard.evaluate.portfolio_baselines import (
    EqualWeight,
    InverseVolatility,
    MinimumVariance,
    Momentum,
    Rebalanced,
    bars_back,
    bars_between,
    long_only_solution,
    shrunk_covariance,
)
from tailguard.market import MarketConfig

FREE = MarketConfig(fee=0.0, half_spread=0.0, impact=0.0, funding_rate=0.0, participation=float("inf"))


def moment(close: np.ndarray, weights: np.ndarray | None = None, **options: Any) -> Moment:
    assets = close.shape[1]
    held = np.zeros(assets) if weights is None else weights
    given: dict[str, Any] = {
        "row": len(close) - 1,
        "first": False,
        "time_ms": 0,
        "equity": 1.0,
        "bars_per_year": 8766.0,
    }
    return Moment(
        open=close, high=close, low=close, close=close, volume=np.ones_like(close), weights=held, **given | options
    )


def prices(rows: int, assets: int, seed: int = 0) -> np.ndarray:
    draw = np.random.default_rng(seed)
    mixing = np.eye(assets) + 0.5 * draw.normal(size=(assets, assets))
    return 100 * np.exp(np.cumsum(0.01 * draw.normal(size=(rows, assets)) @ mixing, axis=0))


def log_returns(close: np.ndarray, window: int) -> np.ndarray:
    return np.diff(np.log(close[-window - 1 :]), axis=0)


def test_equal_weights() -> None:
    close = prices(5, 4)
    np.testing.assert_array_equal(EqualWeight(0.8)(moment(close)), [0.2] * 4)
    listed = np.array([True, False, True, True])
    np.testing.assert_allclose(EqualWeight()(moment(close, listed=listed)), [1 / 3, 0, 1 / 3, 1 / 3])


def test_inverse_volatility_by_hand() -> None:
    """Log-prices that step ±1 % and ±3 % in turn: volatilities of 1 to 3, weights of 3/4 and 1/4."""
    steps = np.arange(60)[:, None] % 2 * np.array([0.01, 0.03])
    np.testing.assert_allclose(InverseVolatility(window=40)(moment(np.exp(steps))), [0.75, 0.25], rtol=1e-12)


def test_momentum_by_hand() -> None:
    """Six assets that rise by their rank: a third of them is two."""
    ranks = np.array([3.0, 6, 1, 5, 2, 4])
    close = np.exp(0.001 * ranks * np.arange(50)[:, None] + 1e-4 * np.random.default_rng(0).normal(size=(50, 6)))
    np.testing.assert_array_equal(Momentum(window=40)(moment(close)), [0, 0.25, -0.25, 0.25, -0.25, 0])
    np.testing.assert_array_equal(Momentum(0.6, window=40, allow_short=False)(moment(close)), [0, 0.3, 0, 0.3, 0, 0])


def test_the_covariance_is_ledoit_and_wolfs() -> None:
    for assets in (2, 10, 60):
        returns = log_returns(prices(200, assets, seed=assets), 40)
        np.testing.assert_allclose(shrunk_covariance(returns), ledoit_wolf(returns)[0], rtol=1e-9, atol=1e-15)


@given(assets=st.integers(1, 12), seed=st.integers(0, 10_000))
def test_minimum_variance_keeps_the_conditions_of_the_optimum(assets: int, seed: int) -> None:
    """Held assets have one marginal variance, and no other would lower it (Karush-Kuhn-Tucker)."""
    draw = np.random.default_rng(seed)
    factor = draw.normal(size=(assets, 2 * assets)) + 2 * draw.random() * draw.normal(size=2 * assets)
    covariance = factor @ factor.T
    weights = long_only_solution(covariance)
    assert (weights >= 0).all()
    slope = covariance @ weights
    np.testing.assert_allclose(slope[weights > 0], 1, rtol=1e-7)
    assert (slope[weights == 0] >= 1 - 1e-7).all()


def test_minimum_variance_is_scipys() -> None:
    close = prices(300, 8, seed=4)
    covariance = ledoit_wolf(log_returns(close, 120))[0]
    found = MinimumVariance(window=120)(moment(close))
    expected = minimize(
        lambda w: 1e4 * w @ covariance @ w, np.full(8, 1 / 8), bounds=[(0, 1)] * 8, tol=1e-14,
        constraints={"type": "eq", "fun": lambda w: w.sum() - 1},
    ).x  # fmt: skip
    assert (found == 0).any()
    np.testing.assert_allclose(found, expected, atol=1e-5)
    assert found @ covariance @ found <= expected @ covariance @ expected * (1 + 1e-12)


@pytest.mark.parametrize("policy", [EqualWeight(), InverseVolatility(), MinimumVariance(), Momentum()])
def test_they_trade_on_rebalancing_days_and_know_only_the_past(policy: Rebalanced) -> None:
    """Once every 24 bars from the warm-up on; a change of later prices changes no earlier weight."""
    bars = tg.make_market(500, assets=3, seed=2).bars
    result = tg.backtest(policy, bars, FREE, progress_bar=False)
    traded = np.flatnonzero(result.turnover > 0)
    start = 0 if isinstance(policy, EqualWeight) else 168
    assert traded[0] == start
    expected = [start, *range(start + 24 - start % 24, 499, 24)]
    assert set(traded) <= set(expected)
    assert len(traded) >= len(expected) - 2  # a portfolio of one winner and one loser may stay as it is
    frame = bars.frame.with_columns(
        [
            pl.when(pl.col("time") > bars.frame["time"][350]).then(pl.col(name) * 2).otherwise(pl.col(name))
            for name in ("open", "high", "low", "close")
        ]
    )
    other = tg.backtest(policy, replace(bars, frame=frame), FREE, progress_bar=False)
    np.testing.assert_array_equal(other.targets[:351], result.targets[:351])
    assert not np.array_equal(other.weights, result.weights)


@pytest.mark.parametrize(
    ("pace", "every", "window"),
    [
        (Pace.of_frequency(3_600_000), 24, 168),  # hours around the clock
        (Pace.of_frequency(60_000), 1_440, 10_080),  # minutes
        (Pace(1_764, 7, 35, has_sessions=True), 24, 168),  # hours of New York
        (Pace(98_280, 390, 1_950, has_sessions=True), 390, 1_950),  # minutes of New York
        (Pace(252, 1, 5, has_sessions=True), 21, 168),  # its days
        (Pace.of_frequency(86_400_000), 30, 244),  # days around the clock
        (Pace.of_frequency(7 * 86_400_000), 4, 35),  # weeks
    ],
)
def test_the_pace_is_that_of_the_market(pace: Pace, every: int, window: int) -> None:
    assert (bars_between(pace), bars_back(pace)) == (every, window)
    close = np.exp(np.cumsum(np.tile([[0.001, 0.01], [-0.003, -0.03]], (window, 1)), axis=0))
    own = {"bars_per_year": pace.per_year, "sessions": pace if pace.has_sessions else None}
    assert not InverseVolatility()(moment(close[:window], **own)).any()
    late = moment(close[: window + 1], first=True, **own)
    np.testing.assert_allclose(InverseVolatility()(late), InverseVolatility(window=window)(late), rtol=1e-12)
    held = np.array([0.4, 0.6])
    for rows in (every, every + 1, 2 * every):
        decided = EqualWeight()(moment(np.ones((rows + 1, 2)), weights=held, **own))
        assert np.array_equal(decided, [0.5, 0.5] if rows % every == 0 else [HOLD, HOLD], equal_nan=True)


def test_equal_weight_earns_what_prices_say() -> None:
    """Rebalanced every 24 bars without costs: the product of the mean growths between two rebalancing opens."""
    bars = tg.make_market(242, assets=3, seed=5).bars
    result = tg.backtest(EqualWeight(), bars, FREE, progress_bar=False)
    panel = bars.panel("portfolio")
    opens = [1, *range(25, 242, 24)]
    stops = [panel.open[at] for at in opens] + [panel.close[-1]]
    growth = [np.mean(after / before) for before, after in itertools.pairwise(stops)]
    assert result.equity[-1] == pytest.approx(np.prod(growth), rel=1e-9)


def test_a_newcomer_waits_for_its_window() -> None:
    frame = tg.make_market(700, assets=3, seed=1).bars.frame.drop("segment")
    time = frame["time"].unique().sort()
    bars = load_bars(frame.filter((pl.col("symbol") != "SYN03") | (pl.col("time") >= time[300])), universe="ragged")
    result = tg.backtest(InverseVolatility(), bars, FREE, progress_bar=False)
    held = result.weights[:, 2] > 0
    # Listed at row 300; the first rebalancing with 168 returns since is at row 480, and fills at 481.
    assert result.time[held][0] == int(time[481].timestamp() * 1000)
    equal = tg.backtest(EqualWeight(), bars, FREE, progress_bar=False)
    assert equal.time[equal.weights[:, 2] > 0][0] == int(time[313].timestamp() * 1000)


def test_an_order_that_the_volume_cap_cuts_is_repeated() -> None:
    bars = tg.make_market(300, assets=2, seed=3).bars
    thin = replace(FREE, capital=2e9, participation=0.1)
    result = tg.backtest(EqualWeight(every=1_000), bars, thin, progress_bar=False)
    assert result.unfilled[0] > 0.1
    assert np.abs(result.weights).sum(1)[:-1].max() > 0.9
    assert np.isnan(result.targets[-1]).all()


def test_they_are_shown_where_an_account_trades_several_assets() -> None:
    assert list(standard_baselines()) == list(BASELINES)
    several = standard_baselines(0.5, allow_short=False, assets=2)
    assert list(several) == [*BASELINES, "equal weight", "inverse volatility", "minimum variance", "momentum"]
    assert several["momentum"] == Momentum(0.5, allow_short=False)
    with pytest.raises(ConfigError, match="registered already"):
        baseline("momentum")


def test_one_of_your_own_for_portfolios(own_parts: None) -> None:  # noqa: ARG001 (what is registered is forgotten)
    baseline("weekly", portfolio=True)(lambda exposure, _: EqualWeight(exposure, every=168))
    assert "weekly" not in standard_baselines()
    assert standard_baselines(assets=3)["weekly"] == EqualWeight(every=168)
    assert "weekly" in PORTFOLIO_BASELINES
