"""Equity against two backtesters that people already trust, in float64 over hundreds of random bars."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from types import ModuleType
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch

from tailguard.data.panel import Panel
from tailguard.market import MarketConfig, build_market

BARS = 600
CASH = 1e8
TOLERANCE = 1e-9


@pytest.fixture(scope="module")
def vectorbt() -> ModuleType:
    return pytest.importorskip("vectorbt")


@pytest.mark.parametrize("seed", [0, 1, 2])
@pytest.mark.parametrize("assets", [1, 4])
def test_equity_equals_vectorbt_with_target_percent_orders_at_the_next_open(
    vectorbt: ModuleType,
    random_panel: Callable[..., Panel],
    free_market: Callable[..., MarketConfig],
    trade: Callable[..., Any],
    assets: int,
    seed: int,
) -> None:
    """vectorbt values the group at the order prices before any fee and sizes every order on that, as we do.

    It pays from cash and has no leverage: an order that its cash cannot pay, fee included, is cut, so gross weights
    stay at 0.9 here. Within a row `call_seq="auto"` sells before it buys, so that the proceeds are there to buy with.
    """
    fee = 0.001
    panel = random_panel(seed, BARS, assets)
    rng = np.random.default_rng(100 + seed)
    targets = rng.uniform(-1, 1, (BARS - 1, assets))
    targets *= 0.9 * rng.random((BARS - 1, 1)) / np.abs(targets).sum(axis=1, keepdims=True)

    market = build_market(panel, free_market(fee=fee), dtype=torch.float64)
    states, _ = trade(market, torch.tensor(targets).unsqueeze(1))

    theirs = vectorbt.Portfolio.from_orders(
        close=pd.DataFrame(panel.close),
        price=pd.DataFrame(panel.open),
        size=pd.DataFrame(np.vstack([np.full(assets, np.nan), targets])),
        size_type="targetpercent",
        fees=fee,
        init_cash=CASH,
        group_by=True,
        cash_sharing=True,
        call_seq="auto",
    )
    assert theirs.orders.count() == (BARS - 1) * assets
    np.testing.assert_allclose(
        np.array([state.equity.item() for state in states]), theirs.value().to_numpy() / CASH, rtol=TOLERANCE
    )


@pytest.mark.parametrize("seed", [0, 1, 2])
def test_equity_equals_backtesting_with_leverage(
    random_panel: Callable[..., Panel],
    free_market: Callable[..., MarketConfig],
    trade: Callable[..., Any],
    seed: int,
) -> None:
    """backtesting.py trades whole units, so each bar names a target in units for up to 2.7 times the equity.

    The same target in our terms is units × open / equity at that open. It checks an order's margin with the *close* of
    the fill bar, a price the order cannot know, and cancels it when that falls short: margin=1/3 leaves room for it,
    and a cancelled order fails the test.
    """
    from backtesting import Backtest, Strategy

    fee = 0.0008
    panel = random_panel(seed, BARS, price=1.0, volatility=0.004)
    wanted_leverage = np.random.default_rng(200 + seed).uniform(-2.7, 2.7, BARS)
    units = np.zeros(BARS)
    equity = np.full(BARS, CASH)

    class RandomUnits(Strategy):
        def init(self) -> None:
            pass

        def next(self) -> None:
            bar = len(self.data) - 1
            units[bar] = self.position.size
            equity[bar] = self.equity
            target = int(wanted_leverage[bar] * self.equity / self.data.Close[-1])
            if order := target - self.position.size:
                (self.buy if order > 0 else self.sell)(size=abs(order))

    frame = pd.DataFrame(
        {name: getattr(panel, name.lower())[:, 0] for name in ("Open", "High", "Low", "Close", "Volume")},
        index=pd.to_datetime(panel.time, unit="ms"),
    )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        warnings.filterwarnings("error", message=".*Broker canceled.*")
        Backtest(
            frame, RandomUnits, cash=CASH, commission=fee, margin=1 / 3, hedging=False, exclusive_orders=False
        ).run()
    assert np.abs(units[2:] * panel.close[2:, 0] / equity[2:]).max() > 2.5

    equity_at_open = equity[:-1] + units[:-1] * (panel.open[1:, 0] - panel.close[:-1, 0])
    targets = units[1:] * panel.open[1:, 0] / equity_at_open
    market = build_market(panel, free_market(fee=fee, leverage=3.0), dtype=torch.float64)
    states, _ = trade(market, torch.tensor(targets).reshape(-1, 1, 1))
    np.testing.assert_allclose(np.array([state.equity.item() for state in states]), equity / CASH, rtol=TOLERANCE)
