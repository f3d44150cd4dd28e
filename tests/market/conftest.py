"""Bars for the market's tests: random ones that gap, jump and sometimes do not trade, and hand-made ones."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch
from numpy.typing import ArrayLike

from tailguard.data.panel import Panel
from tailguard.market import Market, MarketConfig, MarketState, Transition, open_accounts, step

HOUR_MS = 3_600_000
START_MS = 1_609_459_200_000  # 2021-01-01 00:00 UTC


def _random_panel(
    seed: int,
    rows: int,
    assets: int = 1,
    *,
    volatility: float = 0.01,
    price: float = 100.0,
    volume: float = 1e4,
    gap_volatility: float = 0.005,
    silent: float = 0.05,
    funding: float | None = None,
    frequency_ms: int = HOUR_MS,
    start_ms: int = START_MS,
) -> Panel:
    """Heavy-tailed bars with gaps between them; a share `silent` of them has no volume, `funding` scales its rates."""
    rng = np.random.default_rng(seed)
    shape = (rows, assets)
    gap = gap_volatility * rng.standard_t(4, shape)
    move = volatility * rng.standard_t(4, shape)
    open_ = price * np.exp(np.cumsum(gap, axis=0) + np.cumsum(move, axis=0) - move)
    close = open_ * np.exp(move)
    high = np.maximum(open_, close) * np.exp(volatility * rng.exponential(size=shape))
    low = np.minimum(open_, close) * np.exp(-volatility * rng.exponential(size=shape))
    traded = volume * rng.lognormal(0, 1, shape) * (rng.random(shape) >= silent)
    return Panel(
        time=start_ms + frequency_ms * np.arange(rows, dtype=np.int64),
        open=open_,
        high=high,
        low=low,
        close=close,
        volume=traded,
        segment=np.zeros(rows, dtype=np.int32),
        tradeable=np.ones(rows, dtype=np.bool_),
        symbols=tuple(f"ASSET{asset}" for asset in range(assets)),
        frequency_ms=frequency_ms,
        funding=None if funding is None else rng.normal(0, funding, shape),
    )


def _hand_panel(
    open: ArrayLike,
    close: ArrayLike | None = None,
    high: ArrayLike | None = None,
    low: ArrayLike | None = None,
    volume: float = 1e9,
    funding: ArrayLike | None = None,
    frequency_ms: int = HOUR_MS,
    start_ms: int = START_MS,
) -> Panel:
    """Bars of one asset from lists of prices; without a range the high and the low are the open and the close."""

    def column(values: ArrayLike) -> np.ndarray:
        return np.asarray(values, dtype=np.float64).reshape(-1, 1)

    opens = column(open)
    closes = opens if close is None else column(close)
    rows = len(opens)
    return Panel(
        time=start_ms + frequency_ms * np.arange(rows, dtype=np.int64),
        open=opens,
        high=np.maximum(opens, closes) if high is None else column(high),
        low=np.minimum(opens, closes) if low is None else column(low),
        close=closes,
        volume=np.full_like(opens, volume),
        segment=np.zeros(rows, dtype=np.int32),
        tradeable=np.ones(rows, dtype=np.bool_),
        symbols=("ASSET",),
        frequency_ms=frequency_ms,
        funding=None if funding is None else column(funding),
    )


def _free_market(**settings: float) -> MarketConfig:
    """No cost and no limit but those named."""
    free: dict[str, float] = {
        "fee": 0.0,
        "half_spread": 0.0,
        "impact": 0.0,
        "participation": np.inf,
        "funding_rate": 0.0,
        "maintenance_margin": 0.0,
        "liquidation_fee": 0.0,
    }
    return MarketConfig(**(free | settings))


def _trade(
    market: Market, targets: torch.Tensor, *, start: int = 0, hold: torch.Tensor | None = None
) -> tuple[list[MarketState], list[Transition]]:
    """Accounts opened at one row and traded bar by bar: targets [T, N, A] -> T + 1 states and T transitions."""
    accounts = targets.shape[1]
    states = [open_accounts(torch.full((accounts,), start), market.assets, market.dtype)]
    transitions = []
    for time, target in enumerate(targets):
        state, transition = step(market, states[-1], target, None if hold is None else hold[time])
        states.append(state)
        transitions.append(transition)
    return states, transitions


@pytest.fixture(scope="session")
def random_panel() -> Callable[..., Panel]:
    return _random_panel


@pytest.fixture(scope="session")
def hand_panel() -> Callable[..., Panel]:
    return _hand_panel


@pytest.fixture(scope="session")
def free_market() -> Callable[..., MarketConfig]:
    return _free_market


@pytest.fixture(scope="session")
def trade() -> Callable[..., tuple[list[MarketState], list[Transition]]]:
    return _trade
