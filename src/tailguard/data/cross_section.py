"""A synthetic universe with a planted cross-sectional signal: what an asset's score is worth depends on the others'.

    own score      z_i, redrawn from N(0, 1) after `HOLDING_HOURS` on average, each asset by itself
    seen           score_i = z_i + mood, with the mood an AR(1) of all assets together, N(0, 1) as well
    return         R_i = drift·(z_i − mean over assets of z) + σ·(√ρ·common + √(1 − ρ)·own) from open to close

The mood is worth nothing, so that a network that reads each asset alone is half blind: it must compare. With any limits
from above, expected log-growth is at most the expected return, and that is largest where the caps are used up from the
largest |expected return| down. So the optimum that is reported is a bound that no policy exceeds, before all costs.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from datetime import timedelta

import numpy as np
import polars as pl

from tailguard.data.bars import TIME_TYPE, Bars
from tailguard.data.panel import Float
from tailguard.data.processes import autoregression, price_extremes
from tailguard.data.synthetic import HOURS_PER_YEAR, START, VALUE_PER_HOUR, VOLATILITY
from tailguard.validate import check_count, check_range

HOLDING_HOURS = 96.0
MOOD_SIZE, MOOD_HOURS = 1.0, 48.0
CORRELATION = 0.4
LARGEST_SHOCK = 8.0
"""Standard deviations: a bar cannot lose everything."""


@dataclass(frozen=True)
class CrossSection:
    """Bars with a column `score`, and what it is worth. Arrays are [bars, assets]."""

    bars: Bars
    expected: Float
    """Expected return of the next bar, known at the close of each."""

    def best_weights(self, asset_max: float = math.inf, leverage: float = 1.0) -> Float:
        """Weights of the largest expected return with Σ|w| ≤ leverage and |w_i| ≤ asset_max."""
        check_range("asset_max", asset_max, low=0, low_open=True)
        check_range("leverage", leverage, low=0, low_open=True)
        order = np.argsort(-np.abs(self.expected), axis=1, kind="stable")
        each = min(asset_max, leverage)
        left = leverage - each * np.arange(order.shape[1])
        size = np.clip(left, 0, each)
        weights = np.zeros_like(self.expected)
        np.put_along_axis(weights, order, np.broadcast_to(size, order.shape), axis=1)
        return np.asarray(weights * np.sign(self.expected))

    def best_return(self, asset_max: float = math.inf, leverage: float = 1.0) -> Float:
        """The expected return of those weights at each bar, [bars]: a bound on expected log-growth."""
        return np.asarray((self.best_weights(asset_max, leverage) * self.expected).sum(1))


def make_cross_section(
    bars: int = 4_000, *, assets: int = 100, seed: int = 0, signal: float = 4.0, prefix: str = "SYN"
) -> CrossSection:
    """Make hourly `bars` of `assets` that share a market factor, with a score that predicts them.

    `signal`: Sharpe ratio per year, before costs, of holding one asset by its score; `prefix`: of the symbols.
    """
    check_count("bars", bars, low=2)
    check_count("assets", assets, low=2)
    check_range("signal", signal, low=0, high=50)
    draw = np.random.default_rng(np.random.SeedSequence(seed))
    score = _renewed(draw, bars, assets)
    mood = autoregression(draw.standard_normal(bars), size=MOOD_SIZE, relaxation=MOOD_HOURS, hours=1.0)
    deviation = VOLATILITY / math.sqrt(HOURS_PER_YEAR)
    drift = signal * VOLATILITY / HOURS_PER_YEAR
    expected = drift * (score - score.mean(1, keepdims=True))
    common, own = draw.standard_normal((bars, 1)), draw.standard_normal((bars, assets))
    shock = math.sqrt(CORRELATION) * common + math.sqrt(1 - CORRELATION) * own
    moves = deviation * np.clip(shock, -LARGEST_SHOCK, LARGEST_SHOCK)
    moves[1:] += expected[:-1]
    closed = 100 * np.exp(np.cumsum(np.log1p(moves), axis=0))
    opened = np.vstack([np.full((1, assets), 100.0), closed[:-1]])
    value = VALUE_PER_HOUR * np.exp(0.3 * draw.standard_normal((bars, assets)))
    time = pl.datetime_range(START, START + (bars - 1) * timedelta(hours=1), timedelta(hours=1), eager=True)
    frames = []
    for asset in range(assets):
        high, low = price_extremes(
            opened[:, asset], closed[:, asset], np.full(bars, deviation), *draw.random((2, bars))
        )
        columns = {"open": opened[:, asset], "high": high, "low": low, "close": closed[:, asset]}
        columns |= {"volume": value[:, asset] / closed[:, asset], "score": score[:, asset] + mood}
        frame = pl.DataFrame({"time": time.cast(TIME_TYPE), **columns})
        symbol, segment = pl.lit(f"{prefix}{asset + 1:03d}"), pl.lit(asset, dtype=pl.Int32)
        frames.append(frame.select(symbol.alias("symbol"), pl.all(), segment.alias("segment")))
    source = f"synthetic cross-section (seed {seed}, signal {signal:g})"
    return CrossSection(Bars(pl.concat(frames), timedelta(hours=1), source), expected)


def _renewed(draw: np.random.Generator, bars: int, assets: int) -> Float:
    """Standard normal numbers, each of which stays for a geometric number of bars, [bars, assets]."""
    fresh = draw.random((bars, assets)) < -math.expm1(-1 / HOLDING_HOURS)
    fresh[0] = True
    last = np.maximum.accumulate(np.where(fresh, np.arange(bars)[:, None], 0), axis=0)
    return np.take_along_axis(draw.standard_normal((bars, assets)), last, axis=0)
