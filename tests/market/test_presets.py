"""Presets of markets: what they set, and what wins over them."""

from __future__ import annotations

import math
from typing import get_args

import polars as pl
import pytest

from tailguard.config import load_config, to_yaml
from tailguard.data.synthetic import make_market
from tailguard.errors import ConfigError
from tailguard.evaluate.backtest import backtest
from tailguard.evaluate.baselines import BuyAndHold
from tailguard.market import MarketConfig
from tailguard.market.presets import PRESETS, Preset


@pytest.mark.parametrize("name", get_args(Preset))
def test_a_preset_has_the_same_settings_from_python_and_from_a_file(name: Preset, tmp_path) -> None:  # type: ignore[no-untyped-def]
    file = tmp_path / "run.yaml"
    file.write_text(f"market: {{preset: {name}}}\n")
    config = MarketConfig.for_market(name)

    assert load_config(file).market == config
    assert load_config(overrides=[f"market.preset={name}"]).market == config
    # A run's own record names every setting, so it is the same when it is read again.
    file.write_text(to_yaml(load_config(file)))
    assert load_config(file).market == config


def test_explicit_settings_win_wherever_they_stand(tmp_path) -> None:  # type: ignore[no-untyped-def]
    file = tmp_path / "run.yaml"
    file.write_text("market: {fee: 0.0005, preset: equity}\n")
    market = load_config(file, ["market.tick=0", "market.preset=equity", "market.borrow_rate=0.0"]).market

    assert (market.fee, market.tick, market.borrow_rate) == (0.0005, 0, 0)
    assert (market.lot, market.maintenance_margin) == (1, 0.25)
    assert MarketConfig.for_market("equity", fee=0.0005).fee == 0.0005


def test_another_preset_replaces_all_of_the_first(tmp_path) -> None:  # type: ignore[no-untyped-def]
    file = tmp_path / "run.yaml"
    file.write_text("market: {preset: fx}\n")
    assert load_config(file, ["market.preset=equity"]).market == MarketConfig.for_market("equity")


def test_the_first_preset_is_the_default_and_the_name_alone_is_refused() -> None:
    assert MarketConfig.for_market("crypto_perpetual") == MarketConfig()
    with pytest.raises(ConfigError, match=r"use MarketConfig\.for_market\('equity'"):
        MarketConfig(preset="equity")
    with pytest.raises(ConfigError, match=r"market\.preset"):
        load_config(overrides=["market.preset=bonds"])
    with pytest.raises(ConfigError, match="'bonds' is not one of crypto_perpetual"):
        MarketConfig.for_market("bonds")  # type: ignore[arg-type]


def test_spot_pays_no_funding_even_where_the_bars_have_rates() -> None:
    bars = make_market(500, seed=0).bars
    funded = type(bars)(bars.frame.with_columns(funding_rate=pl.lit(0.001)), bars.frequency, bars.source)
    costs = {
        name: backtest(BuyAndHold(), funded, MarketConfig.for_market(name)).costs["funding"].sum()
        for name in ("crypto_perpetual", "crypto_spot")
    }
    assert costs["crypto_perpetual"] > 0.05  # 62 stamps of a thousandth
    assert costs["crypto_spot"] == 0


def test_every_preset_is_a_valid_market_of_finite_costs() -> None:
    for name in PRESETS:
        config = MarketConfig.for_market(name)
        assert config.fee + config.half_spread < 0.002
        assert (config.funding_rate == 0) == (name not in ("crypto_perpetual", "fx"))
        assert math.isinf(config.participation) == (name == "fx")
