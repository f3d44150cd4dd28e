"""Settings of costs, margin and account size."""

from __future__ import annotations

import math
from dataclasses import dataclass, field, fields
from typing import Any

from tailguard.errors import ConfigError
from tailguard.market.costs import extra_rates
from tailguard.market.per_symbol import check_per_symbol
from tailguard.market.presets import Preset, preset_settings
from tailguard.validate import check_range


@dataclass(frozen=True)
class MarketConfig:
    """Costs, margin and size of the account. Rates are fractions: 0.0005 is 5 basis points."""

    preset: Preset = "crypto_perpetual"
    """Kind of market: crypto_perpetual, crypto_spot, equity, futures or fx. It sets fees, spread, funding, interest,
    margin, lot and tick; settings that are given explicitly win."""
    capital: float = 100_000.0
    """Equity at the start of an episode, in quote currency, above 0 to 1e15; it sets how large orders are against the
    market's volume."""
    fee: float = 0.0005
    """Taker fee on the traded notional, 0 to 0.05."""
    half_spread: float = 0.0001
    """Half the bid-ask spread, paid on the traded notional, 0 to 0.05."""
    impact: float = 1.0
    """Y of the square-root law: an order of Q units moves its own price by Y·σ_day·√(Q / V_day), 0 (off) to 10."""
    participation: float = 0.1
    """Largest share of the fill bar's volume one order may take, above 0; the rest is not filled. inf: no cap."""
    funding_rate: float = 0.0001
    """Holding cost per eight hours on the absolute notional at 00, 08 and 16 UTC, used when the bars carry no observed
    rates, 0 to 0.01. It is charged to longs and shorts alike: an assumed rate must not become an income."""
    observed_funding: bool = True
    """Use the bars' own funding rates when they have them: longs pay a positive rate and shorts receive it."""
    borrow_rate: float = 0.0
    """Yearly interest on short notional and on cash borrowed by longs, 0 to 1. Perpetuals pay funding instead."""
    leverage: float = 1.0
    """Largest gross exposure as a multiple of equity, above 0 to 125."""
    allow_short: bool = True
    """Whether weights may be negative."""
    maintenance_margin: float = 0.005
    """Equity must stay above this share of the gross notional, or the account is liquidated, 0 to 0.5."""
    liquidation_fee: float = 0.005
    """Fee on the notional closed in a liquidation, 0 to 0.1."""
    volatility_halflife: float = 24.0
    """Half-life in hours of the trailing daily volatility and volume that the impact uses, above 0 to 10,000."""
    lot: float = 0.0
    """Smallest amount of an asset that can be traded, in its units (1 share, 50 for a contract on 50 units); orders are
    rounded down to whole lots. 0: any amount."""
    tick: float = 0.0
    """Smallest price step; the half spread is at least half a tick. 0: any price."""
    per_symbol: dict[str, dict[str, float]] = field(default_factory=dict, hash=False)
    """Settings of single symbols, as {ES: {lot: 50, tick: 0.25}}: fee, half_spread, impact, participation,
    funding_rate, borrow_rate (of shorts), maintenance_margin, lot and tick."""
    extra_costs: dict[str, float] = field(default_factory=extra_rates, hash=False)
    """Rates, 0 or more, of costs added with tailguard.market.costs.register_cost, by kind; their defaults where left
    out."""

    @classmethod
    def for_market(cls, preset: Preset, **settings: Any) -> MarketConfig:
        """The settings of a preset; `settings` win."""
        return cls(**{"preset": preset, **preset_settings(preset), **settings})

    def __post_init__(self) -> None:
        defaults = {each.name: each.default for each in fields(self)}
        usual = {name: value for name, value in preset_settings(self.preset).items() if value != defaults[name]}
        if usual and not any(getattr(self, name) == value for name, value in usual.items()):
            raise ConfigError(
                f"MarketConfig(preset={self.preset!r}) names a preset and has none of its settings; use "
                f"MarketConfig.for_market({self.preset!r}, …)"
            )
        check_range("market.capital", self.capital, low=0, low_open=True, high=1e15)
        check_range("market.fee", self.fee, low=0, high=0.05)
        check_range("market.half_spread", self.half_spread, low=0, high=0.05)
        check_range("market.impact", self.impact, low=0, high=10)
        check_range("market.participation", self.participation, low=0, low_open=True)
        check_range("market.funding_rate", self.funding_rate, low=0, high=0.01)
        check_range("market.borrow_rate", self.borrow_rate, low=0, high=1)
        check_range("market.leverage", self.leverage, low=0, low_open=True, high=125)
        check_range("market.maintenance_margin", self.maintenance_margin, low=0, high=0.5)
        check_range("market.liquidation_fee", self.liquidation_fee, low=0, high=0.1)
        check_range("market.volatility_halflife", self.volatility_halflife, low=0, low_open=True, high=10_000)
        check_range("market.lot", self.lot, low=0, high=1e12)
        check_range("market.tick", self.tick, low=0, high=1e12)
        check_per_symbol(self.per_symbol)
        known = extra_rates()
        for kind, rate in self.extra_costs.items():
            if kind not in known:
                raise ConfigError(
                    f"market.extra_costs: no cost {kind!r} is registered; there are {', '.join(known) or 'none'}. "
                    "Register it first: tailguard.market.costs.register_cost"
                )
            check_range(f"market.extra_costs.{kind}", rate, low=0, high=math.inf, high_open=True)
        if self.leverage * self.maintenance_margin >= 1:
            raise ConfigError(
                f"market.leverage: {self.leverage:g} with market.maintenance_margin {self.maintenance_margin:g} would "
                "liquidate every full position at its fill; their product must be below 1"
            )
