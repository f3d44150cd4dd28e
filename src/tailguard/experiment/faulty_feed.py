"""Faulty feeds on bars: what an agent sees, what the market does, and training bars that show several feeds.

`robust/feed.py` has the arithmetic of the faults on plain arrays; here they meet data frames and features.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np
import torch
from numpy.typing import NDArray

from tailguard.data.panel import Panel
from tailguard.data.prepare import PreparedBars, prepare
from tailguard.envs.episodes import TradingTask
from tailguard.envs.feed_copies import RandomisedBars, randomise
from tailguard.envs.spec import TradingSpec, task_on
from tailguard.errors import ConfigError
from tailguard.market.per_symbol import check_assets, for_assets
from tailguard.market.tables import uses
from tailguard.robust.feed import FUNDING, Columns, Feed

if TYPE_CHECKING:
    from tailguard.config import RunConfig
    from tailguard.data.bars import Accounts, Bars
    from tailguard.data.scaling import Scaler
    from tailguard.market import MarketConfig

Float = NDArray[np.float64]

FIXED = ("symbol", "time", "segment")
"""Columns that no fault changes: the agent's own clock is right, and bars keep their places in the table."""


def seen_bars(bars: Bars, feed: Feed) -> Bars:
    """The bars as the agent sees them."""
    return _changed(bars, feed.seen_bars)


def market_panel(bars: Bars, feed: Feed, config: MarketConfig, accounts: Accounts) -> Panel:
    """The bars as the market trades them: true prices, and the funding rates that the feed's faults make."""
    panel = _changed(bars, feed.true_bars).panel(accounts)
    if not any(fault.kind == "funding" for fault in feed.faults):
        return panel
    if panel.funding is not None and config.observed_funding:
        return panel
    if not uses(config, "funding_rate"):
        raise ConfigError(
            f"feed: {feed}: this market charges no funding, so that its rate cannot spike. Leave the fault out, or set "
            "market.funding_rate"
        )

    def spikes(_: Columns, segment: NDArray[np.integer], symbol: str) -> dict[str, Float]:
        return {FUNDING: feed.funding_spikes(segment, symbol)}

    # As a column of bars, the spikes come into the panel's rows and assets as prices do.
    added = _changed(bars, spikes).panel(accounts).funding
    assert added is not None
    rates = _assumed_funding(panel, config)
    return replace(panel, assumed_funding=rates + np.where(rates > 0, added, 0.0))


def _assumed_funding(panel: Panel, config: MarketConfig) -> Float:
    """The rates that the market charges where the bars carry none, [R, A]."""
    check_assets(config, panel.symbols, panel.assets)
    return np.broadcast_to(for_assets(config, "funding_rate", panel.symbols), panel.open.shape).copy()


def market_config(feed: Feed, config: MarketConfig) -> MarketConfig:
    """The market's costs under the feed's faults."""
    factor = feed.fee_factor
    if factor == 1:
        return config
    own = {
        symbol: {name: value * factor if name == "fee" else value for name, value in settings.items()}
        for symbol, settings in config.per_symbol.items()
    }
    try:
        return replace(config, fee=factor * config.fee, per_symbol=own)
    except ConfigError as error:
        raise ConfigError(f"feed: {feed}: {error}. Choose a smaller factor") from error


def prepare_under(feed: Feed, bars: Bars, scaler: Scaler, config: MarketConfig, accounts: Accounts) -> PreparedBars:
    """Bars for an agent with this scaler: the market's own prices, and features of what the feed shows."""
    seen = prepare(seen_bars(bars, feed), scaler=scaler, accounts=accounts)
    return replace(seen, panel=market_panel(bars, feed, config, accounts), seen_close=seen.panel.close)


def task_under(
    feed: Feed, spec: TradingSpec, bars: Bars, config: MarketConfig | None, dtype: torch.dtype
) -> tuple[TradingTask, PreparedBars]:
    """The agent's task on bars that it sees through this feed, and these bars; as `task_for` without one."""
    config = market_config(feed, config or spec.market)
    prepared = prepare_under(feed, bars, spec.scaler, config, spec.accounts)
    return task_on(spec, prepared, config, dtype), prepared


def randomised_feeds(config: RunConfig, bars: Bars, clean: PreparedBars) -> RandomisedBars:
    """Training bars for `robust.feed`: the clean ones and those of every draw of every entry."""
    accounts, feeds = config.env.accounts, [feed for draws in config.robust.feeds() for feed in draws]
    faulty = [prepare_under(feed, bars, clean.scaler, config.market, accounts) for feed in feeds]
    copies = [clean, *faulty]
    if any(copy.panel.assumed_funding is not None for copy in faulty):
        # One market for all copies: where no rate spikes, the assumed one stands in every row.
        copies = [_with_assumed_funding(copy, config.market) for copy in copies]
    return randomise(copies[0], copies[1:], config.robust.feed_probability)


def _with_assumed_funding(prepared: PreparedBars, config: MarketConfig) -> PreparedBars:
    panel = prepared.panel
    if panel.assumed_funding is not None:
        return prepared
    return replace(prepared, panel=replace(panel, assumed_funding=_assumed_funding(panel, config)))


def _changed(bars: Bars, change: Callable[[Columns, NDArray[np.integer], str], dict[str, Float]]) -> Bars:
    """The bars with the columns that a function of one symbol's columns, segments and name returns."""
    import polars as pl  # not needed to import a backtest

    pieces = []
    for symbol in bars.symbols:
        own = bars.frame.filter(pl.col("symbol") == symbol)
        columns = {name: own[name].cast(pl.Float64).to_numpy() for name in own.columns if name not in FIXED}
        after = change(columns, own["segment"].to_numpy(), symbol)
        changed = [
            pl.Series(name, values, nan_to_null=True)
            for name, values in after.items()
            if name not in columns or values is not columns[name]
        ]
        pieces.append(own.with_columns(changed))
    return replace(bars, frame=pl.concat(pieces))
