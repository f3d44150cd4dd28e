"""The inputs of a market step for every bar, computed once in float64 and packed into one table for fast gathers."""

from __future__ import annotations

import math
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Generic, NamedTuple, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from tailguard.data.pace import DAY_MS, YEAR_MS
from tailguard.data.panel import Float, Panel
from tailguard.errors import BarsError
from tailguard.market.config import MarketConfig
from tailguard.market.costs import COSTS, ChargedAt, Cost, costs_by_moment
from tailguard.market.per_symbol import check_assets, for_assets

EIGHT_HOURS_MS = 8 * 3_600_000

Values = TypeVar("Values")


class Bar(NamedTuple, Generic[Values]):
    """What a step reads of its fill bar: the columns of `Market.table`, [N, A] each, or A floats for one account."""

    gap: Values
    """open / previous close − 1 (0 on a segment's first row)"""
    move: Values
    """close / open − 1"""
    low: Values
    """low / open − 1"""
    high: Values
    """high / open − 1"""
    impact: Values
    """Price impact of an order worth the whole starting capital; it grows with the root of the order."""
    capacity: Values
    """Largest order as a multiple of the starting capital."""
    funding: Values
    """Rate due on the notional held at the bar's close."""
    reach: Values
    """The most margin a position can lose or need in the bar, as a share of its value at the fill."""
    held: Values | None = None
    """Calendar time from the bar's open to the next one's, in mean bars: yearly rates are due for all of it, nights and
    weekends included. None: every bar is one, around the clock."""
    lot: Values | None = None
    """Value of one lot at the open, as a multiple of the starting capital; None: any amount can be traded."""
    tick: Values | None = None
    """What half a tick exceeds the half spread by, as a share of the price at the open; None: any price."""


def bar_of(columns: Sequence[str], values: Sequence[Values]) -> Bar[Values]:
    """A bar from the columns of a table."""
    if len(values) == len(COLUMNS):
        return Bar(*values)
    return Bar(**dict(zip(columns, values, strict=True)))


COLUMNS = tuple(name for name in Bar._fields if name not in Bar._field_defaults)
"""Columns of every market; some have further ones, see `table_columns`."""


def table_columns(config: MarketConfig, has_sessions: bool = False) -> tuple[str, ...]:
    """The columns of a market with these settings: `held` where it closes, `lot` and `tick` where they are set."""
    optional = {"held": has_sessions, "lot": uses(config, "lot"), "tick": uses(config, "tick")}
    return (*COLUMNS, *(name for name, needed in optional.items() if needed))


def uses(config: MarketConfig, name: str) -> bool:
    """Whether a setting that is 0 by default is set, for all symbols or for one."""
    return getattr(config, name) > 0 or any(settings.get(name, 0) > 0 for settings in config.per_symbol.values())


@dataclass(frozen=True)
class Rates:
    """The config's numbers as 0-dim tensors: they change without recompiling and mix with tensors at full speed."""

    costs: dict[str, Tensor]
    """Rate of each cost per use or per bar, by kind."""
    maintenance_margin: Tensor
    """[], or [A] where assets differ, as are the rates of costs."""
    zero: Tensor
    one: Tensor
    slack: Tensor
    """Margin excess, as a share of equity, below which an account's margin is checked exactly; far above rounding."""
    tiny: Tensor
    """Smallest positive number of the type: keeps the division defined where equity is zero."""
    short_borrow: Tensor | None = None
    """Interest on shorts per bar, [A]; None: that of borrowed cash, for all assets."""


@dataclass(frozen=True)
class Market:
    """Bars as a simulator reads them. Memory grows with the bars, never with the number of environments."""

    table: Tensor
    """[K, R, A], K as in `columns`."""
    columns: tuple[str, ...]
    """Fields of `Bar` that the table holds."""
    segment: Tensor
    """Gap-free stretch each row belongs to, [R] int32."""
    time: Tensor
    """Open time of each bar in ms, [R] int64."""
    config: MarketConfig
    rates: Rates
    costs: Mapping[ChargedAt, tuple[Cost, ...]]
    """The table of costs as it was when the market was built, by the moment at which they are charged."""
    signed_funding: bool
    """True: `funding` holds observed rates, paid by longs and received by shorts. False: a cost for both."""
    charges_borrow: bool
    bars_per_year: float
    symbols: tuple[str, ...]

    @property
    def rows(self) -> int:
        return self.table.shape[1]

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
    """Compute the table for these bars and costs."""
    config = config or MarketConfig()
    stream = TableStream(config)
    columns = stream.extend(panel)
    stream.check_volume()
    table = torch.as_tensor(columns, dtype=dtype, device=device)
    check_table(table, panel)
    return market_of_table(panel, table, config)


def market_of_table(panel: Panel, table: Tensor, config: MarketConfig) -> Market:
    """The market of an existing table [K, R, A], on the table's device."""
    return Market(
        table=table,
        columns=table_columns(config, panel.held_ms is not None),
        segment=as_tensor(panel.segment).to(table.device),
        time=as_tensor(panel.time).to(table.device),
        config=config,
        rates=_rates(config, panel, table.dtype, table.device),
        costs=costs_by_moment(),
        signed_funding=config.observed_funding and panel.funding is not None,
        charges_borrow=uses(config, "borrow_rate"),
        bars_per_year=panel.bars_per_year,
        symbols=panel.symbols,
    )


def as_tensor(array: NDArray[Any]) -> Tensor:
    """A tensor that shares the array's memory, also for a read-only memory map."""
    with warnings.catch_warnings():
        # PyTorch warns that such a tensor must not be written to; a market is never written to.
        warnings.filterwarnings("ignore", message="The given NumPy array is not writable")
        return torch.from_numpy(array)


TABLE_SETTINGS = (
    "capital",
    "impact",
    "participation",
    "funding_rate",
    "observed_funding",
    "borrow_rate",
    "maintenance_margin",
    "volatility_halflife",
    "lot",
    "tick",
    "per_symbol",
)
"""Settings of the market that the table depends on; all others apply in the step."""


class TableStream:
    """The table of bars that come piece by piece, each following the previous one."""

    def __init__(self, config: MarketConfig) -> None:
        self._config = config
        self._last: Panel | None = None
        """The last row so far."""
        self._sums: Float | None = None
        """The exponential averages at that row, before their division."""
        self.traded: NDArray[np.bool_] = np.zeros(0, bool)
        """Assets that had volume in any bar so far."""
        self._symbols: tuple[str, ...] = ()

    def extend(self, panel: Panel) -> Float:
        """The table's columns for these rows, [K, r, A]; `segment` numbers continue from piece to piece."""
        last = self._last
        whole = panel if last is None else last.followed_by(panel)
        columns, sums = _columns(whole, self._config, self._sums)
        self._last, self._sums = panel.rows_between(panel.rows - 1, panel.rows), sums
        traded = np.asarray(panel.volume.any(axis=0))
        self.traded = traded if last is None else self.traded | traded
        self._symbols = panel.symbols
        return np.stack(list(columns.values()))[:, 0 if last is None else 1 :]

    def check_volume(self) -> None:
        """Raise if an asset has no volume although orders are limited or priced by it."""
        check_traded(self._config, [self._symbols[asset] for asset in np.flatnonzero(~self.traded)])


def check_traded(config: MarketConfig, silent: Sequence[str]) -> None:
    """Raise if there are symbols without volume although orders are limited or priced by it."""
    if silent and (uses(config, "impact") or math.isfinite(config.participation)):
        raise BarsError(
            f"{', '.join(silent)}: volume is 0 in every bar, so no order would ever fill. "
            "Use bars with volume, or trade without it: market.participation=inf and market.impact=0"
        )


def _columns(panel: Panel, config: MarketConfig, sums: Float | None) -> tuple[dict[str, Float], Float]:
    """The columns of the table by name, [R, A] each, and the sums of the averages at the last row.

    `sums`: those at the first row, where it repeats the last one of an earlier piece; the columns of such a row are
    undefined.
    """
    first = np.concatenate([[sums is None], np.diff(panel.segment) != 0])
    previous_close = np.vstack([panel.open[:1], panel.close[:-1]])
    gap = np.where(first[:, None], 0.0, panel.open / previous_close - 1)

    sigma_day, notional_day, sums = _trailing_day(panel, config.volatility_halflife, first, sums)
    traded_before = notional_day > 0
    check_assets(config, panel.symbols, panel.assets)
    per_asset = partial(for_assets, config, symbols=panel.symbols)
    participation = per_asset("participation")
    impact = per_asset("impact") * sigma_day * np.sqrt(config.capital / np.where(traded_before, notional_day, np.inf))
    if isinstance(participation, float) and math.isinf(participation):
        capacity = np.full_like(panel.open, np.inf)
    else:
        # An infinite share of no volume is no limit either.
        with np.errstate(invalid="ignore"):
            capacity = participation * panel.volume * panel.open / config.capital
        capacity = np.where(np.isinf(participation), np.inf, capacity)
    if uses(config, "impact"):
        # Before the first trade the impact is undefined, and an order without impact would be free.
        capacity = np.where(traded_before, capacity, 0.0)

    held_ms = panel.frequency_ms if panel.held_ms is None else panel.held_ms
    stamps = (panel.time + held_ms) // EIGHT_HOURS_MS - panel.time // EIGHT_HOURS_MS
    observed = panel.funding if config.observed_funding else None
    assumed = panel.assumed_funding
    if assumed is None:
        assumed = np.broadcast_to(per_asset("funding_rate"), panel.open.shape)
    funding = stamps[:, None] * (assumed if observed is None else observed)
    low, high = panel.low / panel.open - 1, panel.high / panel.open - 1
    furthest = np.maximum(np.abs(low), np.abs(high))
    reach = furthest + (per_asset("maintenance_margin") + np.abs(funding)) * (1 + furthest)
    borrow_rate = np.maximum(per_asset("borrow_rate"), config.borrow_rate)
    if panel.held_ms is None:
        interest: float | Float = borrow_rate / panel.bars_per_year
    else:
        interest = borrow_rate * (panel.held_ms[:, None] / np.float64(YEAR_MS))
    columns = {
        "gap": gap,
        "move": panel.close / panel.open - 1,
        "low": low,
        "high": high,
        "impact": impact,
        "capacity": capacity,
        "funding": funding,
        "reach": reach + interest,
    }
    if panel.held_ms is not None:
        bars = panel.held_ms[:, None] / YEAR_MS * panel.bars_per_year
        columns["held"] = np.broadcast_to(bars, panel.open.shape)
    if uses(config, "lot"):
        columns["lot"] = per_asset("lot") * panel.open / config.capital
    if uses(config, "tick"):
        columns["tick"] = np.maximum(per_asset("tick") / (2 * panel.open) - per_asset("half_spread"), 0.0)
    if panel.listed is not None:
        _close_absent(columns, panel)
    return columns, sums


def _close_absent(columns: dict[str, Float], panel: Panel) -> None:
    """Assets without a bar cannot be traded; on the row of their delisting everything is sold.

    A halted position is held: its price stands still, and the gap comes with the first bar after the halt.
    """
    assert panel.listed is not None
    assert panel.halted is not None
    columns["capacity"] = np.where(panel.halted | ~panel.listed, 0.0, columns["capacity"])
    columns["capacity"] = np.where(panel.delisted, np.inf, columns["capacity"])
    if "lot" in columns:
        # Everything is sold, to the last bit: a remainder of a rounding could never be sold later.
        columns["lot"] = np.where(panel.delisted, 0.0, columns["lot"])
    for name in ("impact", "funding", "reach", "move", "low", "high"):
        columns[name] = np.where(~panel.listed, 0.0, columns[name])


def _column_name(place: int) -> str:
    return COLUMNS[place] if place < len(COLUMNS) else "a lot, a tick or the time held"


def check_table(table: Tensor, panel: Panel, offset: int = 0) -> None:
    """Raise at the first invalid value; only a capacity may be infinite.

    `offset`: rows before the first of this table, for the message.
    """
    bad = ~torch.isfinite(table)
    bad[COLUMNS.index("capacity")] = torch.isnan(table[COLUMNS.index("capacity")])
    if bad.any():
        column, row, asset = (int(index) for index in bad.nonzero()[0])
        opened = np.datetime64(int(panel.time[row]), "ms").astype("datetime64[s]")
        name = f"{panel.symbols[asset]}: " if len(panel.symbols) == panel.assets else ""
        raise BarsError(
            f"{name}row {offset + row + 1} ({str(opened).replace('T', ' ')}): {_column_name(column)} is "
            f"{float(table[column, row, asset])}, so this bar cannot be traded. "
            "Check the bars with: tailguard data check"
        )


def _rates(config: MarketConfig, panel: Panel, dtype: torch.dtype, device: torch.device | str) -> Rates:
    def tensor(value: float | Float) -> Tensor:
        return torch.tensor(value, dtype=dtype, device=device)

    def rate(cost: Cost) -> float | Float:
        # Cash is borrowed by the account, so `borrow` has one rate; that of shorts is in `short_borrow`.
        if cost.kind in ("fee", "spread") and cost.setting is not None:
            return for_assets(config, cost.setting, panel.symbols)
        return cost.rate_per_bar(config, panel.bars_per_year)

    shorts = for_assets(config, "borrow_rate", panel.symbols)
    return Rates(
        costs={kind: tensor(rate(cost)) for kind, cost in COSTS.items()},
        maintenance_margin=tensor(for_assets(config, "maintenance_margin", panel.symbols)),
        short_borrow=None if isinstance(shorts, float) else tensor(shorts / panel.bars_per_year),
        zero=tensor(0.0),
        one=tensor(1.0),
        slack=tensor(1e-3),
        tiny=tensor(torch.finfo(dtype).tiny),
    )


def _trailing_day(
    panel: Panel, halflife_hours: float, first: NDArray[np.bool_], sums: Float | None
) -> tuple[Float, Float, Float]:
    """Daily volatility and daily notional known before each bar opens, [R, A] each, and their sums at the last row.

    Both are exponential averages over the bars before it: of Parkinson's (1980) range variance ln(H/L)² / (4 ln 2),
    which is defined from the first bar on, and of the notional. A segment's first row, which nothing can trade, repeats
    the second row's.
    """
    bars_per_day = DAY_MS / panel.frequency_ms if panel.sessions is None else panel.sessions.per_day
    decay = 0.5 ** (panel.frequency_ms / 3_600_000 / halflife_hours)
    variance = np.log(panel.high / panel.low) ** 2 / (4 * np.log(2))
    average, last = _ema(np.hstack([variance, panel.volume * panel.close]), decay, first, sums)
    variance, notional = np.hsplit(_previous(average, first), 2)
    return np.sqrt(variance * bars_per_day), notional * bars_per_day, last


def _previous(values: Float, first: NDArray[np.bool_]) -> Float:
    """The value of the previous row; on a segment's first row its own."""
    return np.where(first[:, None], values, np.vstack([values[:1], values[:-1]]))


def _ema(values: Float, decay: float, first: NDArray[np.bool_], before: Float | None = None) -> tuple[Float, Float]:
    """Bias-corrected exponential average along rows, restarted at each segment's first row, and its last sums.

    `before`: the sums at the first row, where they are known from an earlier piece.

    Numerator and weight both follow y[t] = a[t]·y[t−1] + x[t], where a is the decay and 0 on first rows. After the pass
    with shift s, y[t] holds the terms of the last 2s rows and a[t] the factor of the earlier terms, so
    log₂(rows) passes over whole arrays replace a loop over rows.
    """
    carry = np.where(first, 0.0, decay)[:, None]
    sums = np.concatenate([values, np.ones((len(values), 1))], axis=1)
    if before is not None:
        sums[0], carry[0] = before, 0.0
    shift = 1
    while shift < len(values) and carry.any():
        sums[shift:] += carry[shift:] * sums[:-shift]
        carry[shift:] *= carry[:-shift]
        shift *= 2
    average: Float = sums[:, :-1] / sums[:, -1:]
    return average, sums[-1]
