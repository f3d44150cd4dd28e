"""Usual costs and rules by kind of market: a starting point, to be replaced by those of one's own broker."""

from __future__ import annotations

import math
from typing import Any, Literal, get_args

from tailguard.errors import ConfigError

Preset = Literal["crypto_perpetual", "crypto_spot", "equity", "futures", "fx"]

PRESETS: dict[Preset, dict[str, Any]] = {
    # The defaults of MarketConfig: taker fee and funding of a large exchange.
    "crypto_perpetual": {},
    # No funding. Selling short needs a margin account, which is off; what longs borrow costs interest.
    "crypto_spot": {
        "fee": 0.001,
        "funding_rate": 0.0,
        "observed_funding": False,
        "borrow_rate": 0.10,
        "allow_short": False,
        "maintenance_margin": 0.1,
    },
    # Broker and exchange fees of a basis point, a spread of at least a cent, whole shares, interest on shorts and on
    # borrowed cash, and the maintenance margin of 25 % of FINRA rule 4210.
    "equity": {
        "fee": 0.0001,
        "half_spread": 0.0001,
        "funding_rate": 0.0,
        "observed_funding": False,
        "borrow_rate": 0.05,
        "maintenance_margin": 0.25,
        "liquidation_fee": 0.001,
        "volatility_halflife": 240.0,
        "lot": 1.0,
        "tick": 0.01,
    },
    # Neither funding nor interest: a contract is bought on margin. Lot and tick depend on the contract (per_symbol).
    "futures": {
        "fee": 0.00002,
        "half_spread": 0.00005,
        "funding_rate": 0.0,
        "observed_funding": False,
        "maintenance_margin": 0.05,
        "liquidation_fee": 0.001,
        "volatility_halflife": 240.0,
    },
    # Financing of 1.1 % a year on the notional, long or short. The volume of currency bars counts ticks, so it neither
    # limits orders nor prices them. Micro lots and tenths of a pip.
    "fx": {
        "fee": 0.00002,
        "half_spread": 0.00003,
        "impact": 0.0,
        "participation": math.inf,
        "funding_rate": 0.00001,
        "observed_funding": False,
        "maintenance_margin": 0.02,
        "liquidation_fee": 0.001,
        "lot": 1_000.0,
        "tick": 0.00001,
    },
}


def preset_settings(name: str) -> dict[str, Any]:
    """The settings of a preset that differ from the defaults of `MarketConfig`."""
    if name not in PRESETS:
        raise ConfigError(f"market.preset: {name!r} is not one of {', '.join(get_args(Preset))}")
    found: dict[str, Any] = PRESETS[name]
    return dict(found)
