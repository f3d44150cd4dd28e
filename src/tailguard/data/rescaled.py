"""Bars with another volatility: the same path with larger or smaller returns."""

from __future__ import annotations

from dataclasses import replace

import polars as pl

from tailguard.data.bars import Bars

PRICES = ("open", "high", "low", "close")
BASE_VOLUMES = ("volume", "taker_buy_base")


def rescale_returns(bars: Bars, factor: float) -> Bars:
    """The bars with all log-returns, within and between bars, multiplied by the factor.

    Each segment starts at the same first open. Amounts of money (quote volumes) stay as they are, so that base volumes
    are divided by the change of the price: an order of the same size meets the same liquidity.
    """
    anchor = pl.col("open").first().over("segment").log()
    change = ((factor - 1) * (pl.col("close").log() - anchor)).exp()
    columns = [name for name in BASE_VOLUMES if name in bars.frame.columns]
    frame = bars.frame.with_columns(
        *((anchor + factor * (pl.col(name).log() - anchor)).exp().alias(name) for name in PRICES),
        *((pl.col(name) / change).alias(name) for name in columns),
    )
    return replace(bars, frame=frame, source=f"{bars.source}, returns × {factor:g}")
