"""Settings out of range are refused by name."""

from __future__ import annotations

import math

import pytest

from tailguard.errors import ConfigError
from tailguard.market import MarketConfig


@pytest.mark.parametrize(
    ("setting", "value"),
    [
        ("capital", 0.0),
        ("capital", math.inf),
        ("fee", -0.0001),
        ("fee", 5.0),
        ("half_spread", -1e-9),
        ("impact", 11.0),
        ("participation", 0.0),
        ("funding_rate", -0.0001),
        ("borrow_rate", 2.0),
        ("leverage", 0.0),
        ("leverage", 126.0),
        ("maintenance_margin", 0.6),
        ("liquidation_fee", 0.2),
        ("volatility_halflife", 0.0),
        ("volatility_halflife", math.inf),
        ("fee", math.nan),
    ],
)
def test_a_value_out_of_range_is_named(setting: str, value: float) -> None:
    with pytest.raises(ConfigError, match=rf"market\.{setting}: {value:g} is out of range"):
        MarketConfig(**{setting: value})


def test_leverage_that_the_maintenance_margin_liquidates_at_once_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"market\.leverage: 20 with market\.maintenance_margin 0\.05"):
        MarketConfig(leverage=20.0, maintenance_margin=0.05)
    MarketConfig(leverage=19.0, maintenance_margin=0.05)


def test_participation_may_be_unlimited() -> None:
    assert MarketConfig(participation=math.inf).participation == math.inf
