"""Settings of the market that differ from symbol to symbol."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from difflib import get_close_matches
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from tailguard.errors import ConfigError
from tailguard.validate import check_range

if TYPE_CHECKING:
    from tailguard.market.config import MarketConfig

Float = NDArray[np.float64]

LARGEST = {
    "fee": 0.05,
    "half_spread": 0.05,
    "impact": 10.0,
    "participation": math.inf,
    "funding_rate": 0.01,
    "borrow_rate": 1.0,
    "maintenance_margin": 0.5,
    "lot": 1e12,
    "tick": 1e12,
}
"""Settings that a symbol may have for itself, and their largest values; the smallest is 0."""


def check_per_symbol(table: Any) -> None:
    """Refuse settings that do not exist for single symbols, and values out of range."""
    if not isinstance(table, Mapping):
        raise ConfigError(f"market.per_symbol: {str(table)[:80]!r} must be a table such as {{AAPL: {{fee: 0.0002}}}}")
    for symbol, settings in table.items():
        if not isinstance(settings, Mapping):
            raise ConfigError(f"market.per_symbol.{symbol}: {settings!r} must be a table such as {{fee: 0.0002}}")
        for name, value in settings.items():
            if name not in LARGEST:
                raise ConfigError(f"market.per_symbol.{symbol}: no setting {name!r}; there are {', '.join(LARGEST)}")
            positive = name == "participation"
            check_range(f"market.per_symbol.{symbol}.{name}", value, low=0, low_open=positive, high=LARGEST[name])


def for_assets(config: MarketConfig, name: str, symbols: Sequence[str]) -> float | Float:
    """A setting for each asset, [A]; one number where no symbol has its own."""
    common = float(getattr(config, name))
    own = {symbol: settings[name] for symbol, settings in config.per_symbol.items() if name in settings}
    if not own.keys() & set(symbols):
        return common
    return np.array([own.get(symbol, common) for symbol in symbols], np.float64)


def check_known(config: MarketConfig, symbols: Sequence[str], source: str) -> None:
    """Refuse settings of symbols that the bars do not have: they would have no effect."""
    unknown = [symbol for symbol in config.per_symbol if symbol not in symbols]
    if unknown:
        near = get_close_matches(unknown[0], symbols, 1)
        meant = f"; {near[0]} is near" if near else ""
        raise ConfigError(f"market.per_symbol: {source} has no symbol {unknown[0]!r}{meant}. Remove or correct it")


def check_assets(config: MarketConfig, symbols: Sequence[str], assets: int) -> None:
    """Refuse settings of symbols that share one column of a panel: each account then trades another symbol."""
    if len(symbols) != assets and set(config.per_symbol) & set(symbols):
        raise ConfigError(
            f"market.per_symbol: {', '.join(config.per_symbol)}: settings of single symbols need "
            "env.accounts=portfolio, or one symbol at a time"
        )
