"""Figures of a track record, against numbers worked out by hand, by SciPy or by vectorbt's copy of empyrical."""

from __future__ import annotations

import math
from types import ModuleType

import numpy as np
import pandas as pd
import pytest
from scipy import stats

import tailguard as tg
from tailguard.evaluate import metrics
from tailguard.evaluate.metrics import monthly_returns, worst_drawdowns, year_return

HOURS = 8766.0


@pytest.fixture(scope="module")
def returns() -> np.ndarray:
    return 2e-4 + 0.01 * np.random.default_rng(3).standard_t(4, 3_000)


@pytest.fixture(scope="module")
def equity(returns: np.ndarray) -> np.ndarray:
    return np.concatenate([[1.0], np.cumprod(1 + returns)])


@pytest.fixture(scope="module")
def empyrical() -> ModuleType:
    """empyrical's formulas as vectorbt carries them."""
    return pytest.importorskip("vectorbt").returns.nb


def test_figures_equal_empyricals(returns: np.ndarray, equity: np.ndarray, empyrical: ModuleType) -> None:
    ours = metrics.track_record(equity, returns, HOURS)
    theirs = {
        "growth_per_year": empyrical.annualized_return_1d_nb(returns, HOURS),
        "volatility": empyrical.annualized_volatility_1d_nb(returns, HOURS, 2.0, 1),
        "sharpe": empyrical.sharpe_ratio_1d_nb(returns, HOURS, 0.0, 1),
        "sortino": empyrical.sortino_ratio_1d_nb(returns, HOURS, 0.0),
        "max_drawdown": empyrical.max_drawdown_1d_nb(returns),
        "calmar": empyrical.calmar_ratio_1d_nb(returns, HOURS),
        "tail_ratio": empyrical.tail_ratio_1d_nb(returns),
        "profit_factor": empyrical.omega_ratio_1d_nb(returns, HOURS, 0.0, 0.0),
        # Over whole numbers of observations all definitions of the tail agree.
        "cvar_5_bar": empyrical.cond_value_at_risk_1d_nb(returns, 150 / 3_000),
    }
    for name, value in theirs.items():
        assert ours[name] == pytest.approx(value, rel=1e-10), name


def test_moments_equal_scipys(returns: np.ndarray) -> None:
    assert metrics.skewness(returns) == pytest.approx(stats.skew(returns), rel=1e-10)
    assert metrics.kurtosis(returns) == pytest.approx(stats.kurtosis(returns, fisher=False), rel=1e-10)


def test_growth_compounds_to_a_year() -> None:
    # 21 % in two years is 10 % a year.
    equity = np.array([1.0, 1.1, 1.0, 1.21])
    assert metrics.growth_per_year(equity, bars_per_year=1.5) == pytest.approx(0.1)
    assert metrics.growth_per_year(np.array([1.0, 0.5, 0.0]), 1.0) == -1.0


def test_sharpe_sortino_and_volatility_by_hand() -> None:
    returns = np.array([0.02, -0.01, 0.03, 0.0])
    mean, deviation = 0.01, math.sqrt((0.01**2 + 0.02**2 + 0.02**2 + 0.01**2) / 3)
    assert metrics.sharpe(returns, 100) == pytest.approx(mean / deviation * 10)
    assert metrics.volatility(returns, 100) == pytest.approx(deviation * 10)
    # One loss of 1 % in four bars: downside deviation √(0.0001 / 4) = 0.005.
    assert metrics.sortino(returns, 100) == pytest.approx(0.01 / 0.005 * 10)
    # Three gains or losses of which two are gains; 5 % won for 1 % lost.
    assert metrics.hit_rate(returns) == pytest.approx(2 / 3)
    assert metrics.profit_factor(returns) == pytest.approx(5)


def test_what_is_not_defined_is_nan() -> None:
    still, rising = np.zeros(4), np.full(4, 0.01)
    assert math.isnan(metrics.sharpe(still, 100))
    assert math.isnan(metrics.sharpe(np.full(1_000, 0.1), 100))  # equal returns whose deviation is rounding
    assert math.isnan(metrics.sharpe_autocorrelated(still, 100))
    assert math.isnan(metrics.sortino(rising, 100))
    assert math.isnan(metrics.hit_rate(still))
    assert math.isnan(metrics.profit_factor(rising))
    assert math.isnan(metrics.calmar(np.array([1.0, 1.1, 1.2]), 100))
    assert math.isnan(metrics.tail_ratio(still))
    assert math.isnan(metrics.skewness(still))


@pytest.mark.parametrize(("rho", "factor"), [(0.1, 14.3648), (0.2, 12.9722), (-0.1, 17.5429), (0.0, 15.8745)])
def test_annualisation_of_an_autoregression_is_los(rho: float, factor: float) -> None:
    """Lo (2002): from a daily Sharpe ratio to that of a year of 252 days."""
    assert metrics.annualisation(rho ** np.arange(1, 252), 252) == pytest.approx(factor, abs=5e-5)


def test_autocorrelated_sharpe_finds_the_correlation_and_leaves_independent_returns_alone() -> None:
    draw = np.random.default_rng(0)
    noise = draw.normal(1e-3, 0.01, 50_000)
    assert metrics.sharpe_autocorrelated(noise, 252) == pytest.approx(metrics.sharpe(noise, 252))
    smoothed = noise[1:] + noise[:-1]  # ρ_1 = 1/2 and nothing after it
    assert metrics.significant_lags(smoothed) == 1
    factor = 252 / math.sqrt(252 + 2 * 251 * 0.5)
    expected = smoothed.mean() / smoothed.std(ddof=1) * factor
    assert metrics.sharpe_autocorrelated(smoothed, 252) == pytest.approx(expected, rel=0.01)


def test_autocorrelations_equal_a_direct_sum() -> None:
    values = np.random.default_rng(1).normal(size=40)
    centred = values - values.mean()
    expected = [sum(centred[t] * centred[t - lag] for t in range(lag, 40)) / sum(centred**2) for lag in (1, 2, 3)]
    np.testing.assert_allclose(metrics.autocorrelations(values, 3), expected, rtol=1e-12)
    assert metrics.autocorrelations(values, 0).shape == (0,)


def test_drawdown_is_the_deepest_fall_from_a_high() -> None:
    equity = np.array([1.0, 1.5, 1.2, 1.8, 0.9, 1.7])
    np.testing.assert_allclose(metrics.drawdowns(equity), [0, 0, -0.2, 0, -0.5, 1.7 / 1.8 - 1])
    assert metrics.max_drawdown(equity) == pytest.approx(-0.5)
    assert metrics.deepest_drawdown(equity) == metrics.Drawdown(-0.5, peak=3, trough=4, recovery=None, bars=2)
    assert metrics.calmar(equity, bars_per_year=5.0) == pytest.approx(0.7 / 0.5)


def test_drawdown_lengths_run_from_the_high_to_the_recovery() -> None:
    # A short deep fall (2 bars), then a long shallow one (4 bars) that recovers exactly at the old high.
    equity = np.array([1.0, 2.0, 2.0, 1.0, 2.0, 1.9, 1.8, 1.9, 2.0, 2.1])
    assert metrics.deepest_drawdown(equity) == metrics.Drawdown(-0.5, peak=2, trough=3, recovery=4, bars=2)
    assert metrics.longest_drawdown(equity) == 4
    assert metrics.longest_drawdown(np.append(equity, [2.0] * 7)) == 7  # not recovered: counted to the end
    assert metrics.longest_drawdown(np.array([1.0, 1.0, 1.1, 1.2])) == 0
    assert metrics.deepest_drawdown(np.array([1.0, 1.1])).bars == 0


def test_cvar_weights_the_boundary_and_meets_the_normal_closed_form() -> None:
    # 5 % of 30 observations is one and a half: the worst whole, the second worst by half.
    returns = np.arange(30.0)[::-1]
    assert metrics.cvar(returns, 0.05) == pytest.approx((0 + 0.5 * 1) / 1.5)
    assert metrics.cvar(returns, 1.0) == pytest.approx(14.5)
    assert metrics.cvar(returns, 0.01) == 0  # less than one observation: the worst
    quantiles = stats.norm.ppf((np.arange(200_000) + 0.5) / 200_000)
    assert metrics.cvar(quantiles, 0.05) == pytest.approx(-2.06271, abs=1e-4)
    assert metrics.value_at_risk(quantiles, 0.05) == pytest.approx(-1.64485, abs=1e-4)
    np.testing.assert_allclose(metrics.cvar_of_rows(np.stack([quantiles, 2 * quantiles]), 0.05)[1], -4.1254, atol=2e-4)


def test_horizon_returns_are_all_overlapping_windows() -> None:
    equity = np.array([1.0, 2.0, 3.0, 6.0])
    np.testing.assert_allclose(metrics.horizon_returns(equity, 2), [2.0, 2.0])
    ruined = np.array([1.0, 0.5, 0.0, 0.0, 0.0])
    np.testing.assert_array_equal(metrics.horizon_returns(ruined, 1), [-0.5, -1.0, 0.0, 0.0])


def test_tails_are_given_for_bar_day_and_week(equity: np.ndarray) -> None:
    assert metrics.horizons(HOURS) == {"bar": 1, "day": 24, "week": 168}
    assert metrics.horizons(365.25) == {"bar": 1, "day": 1, "week": 7}
    assert metrics.horizons(365.25 / 7) == {"bar": 1, "week": 1}
    assert metrics.horizons(12.0) == {"bar": 1}
    figures = metrics.tail_metrics(equity, metrics.horizons(HOURS))
    weeks = np.sort([equity[i + 168] / equity[i] - 1 for i in range(len(equity) - 168)])
    assert figures["cvar_10_week"] == pytest.approx(weeks[:283].sum() / 283.3 + 0.3 * weeks[283] / 283.3, rel=1e-9)
    assert figures["var_1_week"] == pytest.approx(weeks[28])  # the 29th worst of 2,833: the first at 1 % or more
    assert len(figures) == 2 * 3 * 3
    assert "cvar_5_week" not in metrics.tail_metrics(equity[:150], metrics.horizons(HOURS))


def test_a_backtests_figures_come_from_its_books(bars) -> None:
    targets = np.zeros((len(bars), 1))
    targets[600:900] = -0.5
    result = tg.backtest(targets, bars)
    figures = result.metrics
    assert figures["time_in_market"] == pytest.approx(300 / 1_199)
    assert figures["net_exposure"] == pytest.approx(-figures["exposure"])
    assert figures["exposure"] == pytest.approx(0.5 * 300 / 1_199, rel=0.02)
    assert figures["turnover_per_day"] == pytest.approx(result.turnover.sum() / (1_199 / 24))
    assert figures["cost_fee_per_year"] == pytest.approx(0.0005 * result.turnover.sum() / (1_199 / HOURS))
    assert figures["sharpe"] == pytest.approx(result.net.mean() / result.net.std(ddof=1) * math.sqrt(HOURS))


def test_the_deepest_fall_within_each_window_is_that_of_the_window_alone() -> None:
    draw = np.random.default_rng(4)
    equity = np.cumprod(1 + draw.normal(0, 0.05, 300))
    found = metrics.horizon_drawdowns(equity, 20)
    assert found.shape == (280,)
    expected = [metrics.max_drawdown(equity[start : start + 21]) for start in range(280)]
    np.testing.assert_allclose(found, expected)
    np.testing.assert_allclose(metrics.horizon_drawdowns(equity, 1), np.minimum(equity[1:] / equity[:-1] - 1, 0))
    assert (metrics.horizon_drawdowns(np.array([1.0, 0.0, 0.0, 0.0]), 1) == [-1, 0, 0]).all()


# --- months and drawdowns --------------------------------------------------------------------------------------------

HOUR_MS = 3_600_000


def test_months_are_those_of_pandas_and_multiply_to_the_whole_record() -> None:
    time = 1_606_000_000_000 // HOUR_MS * HOUR_MS + HOUR_MS * np.arange(10_000)
    net = np.random.default_rng(0).normal(0, 0.01, len(time))
    found = monthly_returns(time, net)
    theirs = pd.Series(1 + net, pd.to_datetime(time, unit="ms")).resample("ME").prod() - 1
    flat = {(year, month): value for year, months in found.items() for month, value in months.items()}
    assert list(flat) == [(when.year, when.month) for when in theirs.index]
    np.testing.assert_allclose(list(flat.values()), theirs.to_numpy(), rtol=1e-12)
    whole = np.prod([1 + year_return(months) for months in found.values()])
    assert whole == pytest.approx(np.prod(1 + net), rel=1e-12)


def test_a_month_without_bars_is_not_there() -> None:
    time = np.array(["2021-01-31T23", "2021-03-01T00"], dtype="datetime64[ms]").astype(np.int64)
    assert monthly_returns(time, np.array([0.1, -0.2])) == {2021: {1: pytest.approx(0.1), 3: pytest.approx(-0.2)}}


def test_drawdowns_by_hand() -> None:
    #        0    1    2    3    4    5    6    7    8
    equity = np.array([1.0, 1.2, 1.08, 1.2, 1.5, 0.9, 1.2, 1.6, 1.52])
    worst = worst_drawdowns(equity)
    assert [(fall.peak, fall.trough, fall.recovery, fall.bars) for fall in worst] == [
        (4, 5, 7, 3),
        (1, 2, 3, 2),
        (7, 8, None, 1),
    ]
    assert [fall.depth for fall in worst] == pytest.approx([-0.4, -0.1, -0.05])
    assert worst_drawdowns(equity, count=1) == worst[:1]
    assert worst_drawdowns(np.array([1.0, 1.1, 1.1])) == []


def test_drawdowns_are_those_of_vectorbt() -> None:
    vectorbt = pytest.importorskip("vectorbt")
    equity = np.cumprod(1 + np.random.default_rng(3).normal(0.001, 0.01, 800))
    theirs = vectorbt.Drawdowns.from_ts(pd.Series(equity)).records
    theirs = theirs.assign(depth=theirs["valley_val"] / theirs["peak_val"] - 1).sort_values("depth", kind="stable")
    mine = worst_drawdowns(equity, count=len(theirs))
    assert [fall.peak for fall in mine] == theirs["peak_idx"].tolist()
    assert [fall.trough for fall in mine] == theirs["valley_idx"].tolist()
    np.testing.assert_allclose([fall.depth for fall in mine], theirs["depth"], rtol=1e-12)
    recovered = [fall.recovery for fall in mine if fall.recovery is not None]
    assert recovered == theirs.loc[theirs["status"] == 1, "end_idx"].tolist()
    assert mine[0].depth == metrics.max_drawdown(equity)
