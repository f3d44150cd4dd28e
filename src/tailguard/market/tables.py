"""What a step needs to know about a bar, worked out once in float64 and packed into one table for fast gathers."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from tailguard.data.panel import Float, Panel
from tailguard.errors import BarsError
from tailguard.market.config import MarketConfig

EIGHT_HOURS_MS = 8 * 3_600_000
DAY_MS = 86_400_000

COLUMNS = ("gap", "move", "low", "high", "impact", "capacity", "funding")
"""Columns of `Market.table`, all about the fill bar:

gap       open / previous close − 1 (0 on a segment's first row)
move      close / open − 1
low       low / open − 1
high      high / open − 1
impact    price impact of an order worth the whole starting capital; it grows with the root of the order
capacity  largest order as a multiple of the starting capital
funding   rate due on the notional held at the bar's close
"""


@dataclass(frozen=True)
class Rates:
    """The config's numbers as 0-dim tensors: they can change without recompiling, and mix with tensors at full speed."""

    fee: Tensor
    half_spread: Tensor
    maintenance_margin: Tensor
    liquidation_fee: Tensor
    borrow_per_bar: Tensor
    one: Tensor
    tiny: Tensor
    """Smallest positive number of the type: keeps the division by an emptied account's equity defined."""


@dataclass(frozen=True)
class Market:
    """Bars as a simulator reads them. Memory grows with the bars, never with the number of environments."""

    table: Tensor
    """[R, K, A], K as in `COLUMNS`."""
    segment: Tensor
    """Gap-free stretch each row belongs to, [R] int64."""
    time: Tensor
    """Open time of each bar in ms, [R] int64."""
    config: MarketConfig
    rates: Rates
    signed_funding: bool
    """True: `funding` holds observed rates, paid by longs and received by shorts. False: a cost for both."""
    charges_borrow: bool
    bars_per_year: float
    symbols: tuple[str, ...]

    @property
    def rows(self) -> int:
        return self.table.shape[0]

    @property
    def assets(self) -> int:
        return self.table.shape[2]

    @property
    def device(self) -> torch.device:
        return self.table.device

    @property
    def dtype(self) -> torch.dtype:
        return self.table.dtype


def build_market(
    panel: Panel,
    config: MarketConfig | None = None,
    *,
    device: torch.device | str = "cpu",
    dtype: torch.dtype = torch.float32,
) -> Market:
    """Work out the table for these bars and costs."""
    config = config or MarketConfig()
    first = np.concatenate([[True], np.diff(panel.segment) != 0])
    previous_close = np.vstack([panel.open[:1], panel.close[:-1]])
    gap = np.where(first[:, None], 0.0, panel.open / previous_close - 1)
    sigma_day, notional_day = _trailing_day(panel, config.volatility_halflife, first)
    with np.errstate(divide="ignore"):
        impact = config.impact * sigma_day * np.sqrt(config.capital / notional_day)
    # A market without any volume yet has no price for size; its capacity is zero too, so no order meets this value.
    impact = np.where(np.isfinite(impact), impact, 0.0)
    capacity = config.participation * panel.volume * panel.open / config.capital
    if np.isinf(config.participation):
        capacity = np.full_like(panel.open, np.inf)
    signed = config.observed_funding and panel.funding is not None
    rate = panel.funding if signed and panel.funding is not None else np.full_like(panel.open, config.funding_rate)
    stamps = (panel.time + panel.frequency_ms) // EIGHT_HOURS_MS - panel.time // EIGHT_HOURS_MS
    columns = {
        "gap": gap,
        "move": panel.close / panel.open - 1,
        "low": panel.low / panel.open - 1,
        "high": panel.high / panel.open - 1,
        "impact": impact,
        "capacity": capacity,
        "funding": stamps[:, None] * rate,
    }
    for name, values in columns.items():
        bad = np.isnan(values) if name == "capacity" else ~np.isfinite(values)
        if bad.any():
            row, asset = np.argwhere(bad)[0]
            raise BarsError(
                f"{panel.symbols[min(int(asset), len(panel.symbols) - 1)]}: row {row + 1}: {name} is "
                f"{values[row, asset]}, so this bar cannot be traded. Check the bars with: tailguard data check"
            )
    table = np.stack([columns[name] for name in COLUMNS], axis=1)
    return Market(
        table=torch.as_tensor(table, dtype=dtype, device=device),
        segment=torch.as_tensor(panel.segment.astype(np.int64), device=device),
        time=torch.as_tensor(panel.time, device=device),
        config=config,
        rates=_rates(config, panel.bars_per_year, dtype, device),
        signed_funding=signed,
        charges_borrow=config.borrow_rate > 0,
        bars_per_year=panel.bars_per_year,
        symbols=panel.symbols,
    )


def _rates(
    config: MarketConfig, bars_per_year: float, dtype: torch.dtype, device: torch.device | str
) -> Rates:
    def tensor(value: float) -> Tensor:
        return torch.tensor(value, dtype=dtype, device=device)

    return Rates(
        fee=tensor(config.fee),
        half_spread=tensor(config.half_spread),
        maintenance_margin=tensor(config.maintenance_margin),
        liquidation_fee=tensor(config.liquidation_fee),
        borrow_per_bar=tensor(config.borrow_rate / bars_per_year),
        one=tensor(1.0),
        tiny=tensor(torch.finfo(dtype).tiny),
    )


def _trailing_day(panel: Panel, halflife_hours: float, first: NDArray[np.bool_]) -> tuple[Float, Float]:
    """Daily volatility and daily notional known before each bar opens, [R, A] each.

    Both are exponential averages over the bars before it: of Parkinson's (1980) range variance ln(H/L)² / (4 ln 2),
    which is there from the first bar on, and of the notional. A segment's first row, which nothing can trade, repeats
    the second row's.
    """
    bars_per_day = DAY_MS / panel.frequency_ms
    decay = 0.5 ** (panel.frequency_ms / 3_600_000 / halflife_hours)
    variance = _ema(np.log(panel.high / panel.low) ** 2 / (4 * np.log(2)), decay, first)
    notional = _ema(panel.volume * panel.close, decay, first)
    return np.sqrt(_previous(variance, first) * bars_per_day), _previous(notional, first) * bars_per_day


def _previous(values: Float, first: NDArray[np.bool_]) -> Float:
    """The value of the row before, and on a segment's first row its own."""
    return np.where(first[:, None], values, np.vstack([values[:1], values[:-1]]))


def _ema(values: Float, decay: float, first: NDArray[np.bool_]) -> Float:
    """Bias-corrected exponential average along rows, started anew at each segment's first row."""
    out = np.empty_like(values)
    total = np.zeros(values.shape[1])
    weight = 0.0
    for row, (value, restart) in enumerate(zip(values, first, strict=True)):
        if restart:
            total, weight = np.zeros(values.shape[1]), 0.0
        total = decay * total + (1 - decay) * value
        weight = decay * weight + (1 - decay)
        out[row] = total / weight
    return out
