"""Notes on results: assumed funding, orders cut by volume or halts, and what a throttle did."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING

import numpy as np

from tailguard.evaluate.baselines import BUY_AND_HOLD
from tailguard.evaluate.formatting import percent

if TYPE_CHECKING:
    from tailguard.data.bars import Bars
    from tailguard.evaluate.backtest import BacktestResult
    from tailguard.market import MarketConfig

CUT_OFTEN = 0.02
"""Smallest share of bars with orders cut by volume that gives a note."""


def baseline_notes(results: Mapping[str, BacktestResult], bars: Bars, market: MarketConfig) -> list[str]:
    """Notes on results over these bars under these costs, in words, without a full stop."""
    return [
        *_closes_only(bars),
        *_funding(results, bars, market),
        *_cut_orders(results, bars, market),
        *_throttled(results),
    ]


def _closes_only(bars: Bars) -> list[str]:
    frame = bars.frame
    if any((frame[name] != frame["close"]).any() for name in ("open", "high", "low")):
        return []
    return ["the bars hold closes only, so orders fill at the next close and no price inside a bar is known"]


def _funding(results: Mapping[str, BacktestResult], bars: Bars, market: MarketConfig) -> list[str]:
    observed = market.observed_funding and "funding_rate" in bars.frame.columns
    paid = results[BUY_AND_HOLD].metrics["cost_funding_per_year"] if BUY_AND_HOLD in results else 0.0
    if observed or not paid > 0:
        return []
    why = "their funding rates are not used" if "funding_rate" in bars.frame.columns else "they carry no funding rate"
    return [
        f"on these bars {BUY_AND_HOLD} pays {percent(paid, sign=False)} of equity a year in funding: {why}, so "
        f"market.funding_rate, {100 * market.funding_rate:g} % per eight hours, is charged. "
        "For spot set market.preset=crypto_spot, or market.funding_rate=0"
    ]


def _cut_orders(results: Mapping[str, BacktestResult], bars: Bars, market: MarketConfig) -> list[str]:
    limited = market.impact > 0 or math.isfinite(market.participation)
    why, settings = "volume cut its orders", ""
    if bars.universe is not None:
        why = "volume or halts of symbols cut its orders" if limited else "halts of symbols kept its orders waiting"
    if limited or bars.universe is None:
        settings = f" (market.participation {market.participation:g}, market.capital {market.capital:,.0f})"
    notes = []
    for name, result in results.items():
        cut = float((result.unfilled > 0).mean())
        if cut >= CUT_OFTEN:
            reached = np.abs(result.weights).sum(-1)
            notes.append(
                f"{name}: {why} at {percent(cut, sign=False)} of bars{settings}. It reached an exposure of "
                f"{reached.max():.2g} of equity at most and {reached.mean():.2g} on average"
            )
    return notes


def _throttled(results: Mapping[str, BacktestResult]) -> list[str]:
    notes = []
    for name, result in results.items():
        if result.throttle is None or not (result.throttle < 1).any():
            continue
        acted = percent(float((result.throttle < 1).mean()), sign=False)
        lowest, mean = float(result.throttle.min()), float(result.throttle.mean())
        words = f"{name}: its losses throttled it at {acted} of bars, to ×{lowest:.2f} of its exposure at the lowest"
        words += f" and ×{mean:.2f} on average"
        if result.unthrottled_return is not None:
            made, instead = percent(float(result.equity[-1] - 1)), percent(result.unthrottled_return)
            words += f"; without it the period's {made} would have been about {instead}"
        notes.append(words)
    return notes
