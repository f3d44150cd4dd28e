"""Small markets that many tests share."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from tailguard.data.bars import Bars
from tailguard.data.panel import Panel
from tailguard.data.prepare import PreparedBars
from tailguard.data.scaling import Scaler
from tailguard.data.synthetic import make_market

PanelMaker = Callable[..., Panel]


@pytest.fixture(scope="session")
def bars() -> Bars:
    """1,200 hourly bars of one synthetic asset."""
    return make_market(1_200, seed=11).bars


@pytest.fixture(scope="session")
def make_panel() -> PanelMaker:
    """Random but consistent bars as arrays: rows, assets, seed, volatility of a bar."""

    def build(rows: int = 600, assets: int = 1, seed: int = 0, volatility: float = 0.01) -> Panel:
        draw = np.random.default_rng(seed)
        shape = (rows, assets)
        close = 100 * np.exp(np.cumsum(volatility * draw.standard_t(5, shape), axis=0))
        start = np.vstack([np.full((1, assets), 100.0), close[:-1]]) * np.exp(
            0.1 * volatility * draw.normal(size=shape)
        )
        high = np.maximum(start, close) * np.exp(0.5 * volatility * np.abs(draw.normal(size=shape)))
        low = np.minimum(start, close) * np.exp(-0.5 * volatility * np.abs(draw.normal(size=shape)))
        return Panel(
            time=1_609_459_200_000 + 3_600_000 * np.arange(rows),
            open=start,
            high=high,
            low=low,
            close=close,
            volume=1e4 * np.exp(draw.normal(size=shape)),
            segment=np.zeros(rows, np.int32),
            tradeable=np.ones(rows, bool),
            symbols=tuple(f"ASSET{index}" for index in range(assets)),
            frequency_ms=3_600_000,
        )

    return build


@pytest.fixture(scope="session")
def prepare_panel() -> Callable[..., PreparedBars]:
    """A panel with features that are random numbers: for tests of accounting, where their meaning does not matter."""

    def build(panel: Panel, features: int = 3, seed: int = 0) -> PreparedBars:
        values = np.random.default_rng(seed).normal(size=(panel.rows, features)).astype(np.float32)
        names = tuple(f"noise{index}" for index in range(features))
        scaler = Scaler(names, ("test",) * features, np.zeros(features), np.ones(features))
        return PreparedBars(panel, values, names, np.ones(panel.rows, bool), scaler)

    return build
