"""Months against pandas, drawdowns against numbers worked out by hand and against vectorbt."""

from __future__ import annotations

import numpy as np
import pandas as pd
import pytest

from tailguard.evaluate import metrics
from tailguard.evaluate.periods import monthly_returns, worst_drawdowns, year_return

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
    numba = pytest.importorskip("numba")
    numba.config.DISABLE_JIT = True
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
