"""Figures of a track record, against numbers worked out by hand or by another library."""

from __future__ import annotations

import math

import numpy as np
import pytest
from scipy import stats

from tailguard.evaluate import metrics


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
    assert math.isnan(metrics.sharpe(np.zeros(4), 100))


def test_drawdown_is_the_deepest_fall_from_a_high() -> None:
    equity = np.array([1.0, 1.5, 1.2, 1.8, 0.9, 1.7])
    np.testing.assert_allclose(metrics.drawdowns(equity), [0, 0, -0.2, 0, -0.5, 1.7 / 1.8 - 1])
    assert metrics.max_drawdown(equity) == pytest.approx(-0.5)


def test_cvar_weights_the_boundary_and_meets_the_normal_closed_form() -> None:
    # 5 % of 30 observations is one and a half: the worst whole, the second worst by half.
    returns = np.arange(30.0)
    assert metrics.cvar(returns, 0.05) == pytest.approx((0 + 0.5 * 1) / 1.5)
    assert metrics.cvar(returns, 1.0) == pytest.approx(14.5)
    quantiles = stats.norm.ppf((np.arange(200_000) + 0.5) / 200_000)
    assert metrics.cvar(quantiles, 0.05) == pytest.approx(-2.06271, abs=1e-4)
    assert metrics.value_at_risk(quantiles, 0.05) == pytest.approx(-1.64485, abs=1e-4)


def test_horizon_returns_are_all_overlapping_windows() -> None:
    equity = np.array([1.0, 2.0, 3.0, 6.0])
    np.testing.assert_allclose(metrics.horizon_returns(equity, 2), [2.0, 2.0])
