"""Bars without a fault, for tests that break them."""

from __future__ import annotations

from collections.abc import Callable
from datetime import UTC, datetime, timedelta

import numpy as np
import polars as pl
import pytest

GoodBars = Callable[..., pl.DataFrame]


def make_good_bars(
    count: int = 400,
    seed: int = 0,
    *,
    price: float = 40_000.0,
    frequency: timedelta = timedelta(hours=1),
    symbol: str = "BTCUSDT",
    start: datetime = datetime(2021, 1, 1, tzinfo=UTC),
) -> pl.DataFrame:
    """Bars as the checks take them: Laplace returns whose size varies over the day, volume that follows them."""
    generator = np.random.default_rng(seed)
    size = 0.003 * (1 + 0.5 * np.sin(2 * np.pi * np.arange(count) / 24))
    close = price * np.exp(np.cumsum(generator.laplace(0, size)))
    open_ = np.concatenate([[price], close[:-1]])
    wick = generator.exponential(0.5 * size, (2, count))
    base = 1e8 / price * np.exp(generator.normal(0, 0.5, count)) * size / 0.003
    columns = {
        "open": open_,
        "high": np.maximum(open_, close) * np.exp(wick[0]),
        "low": np.minimum(open_, close) * np.exp(-wick[1]),
        "close": close,
        "volume": base,
    }
    time = pl.Series([start], dtype=pl.Datetime("ms", "UTC")).new_from_index(0, count)
    return pl.DataFrame(columns).select(
        file=pl.lit("bars.parquet"),
        row=pl.int_range(1, pl.len() + 1, dtype=pl.Int64),
        unreadable=pl.lit(None, pl.String),
        symbol=pl.lit(symbol),
        time=time + pl.int_range(pl.len()) * frequency,
        **{name: pl.col(name) for name in columns},
    )


@pytest.fixture(scope="session")
def good_bars() -> GoodBars:
    return make_good_bars
