"""Preparing bars: features scaled by training rows alone, and the same scaling on later bars."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import polars as pl
import pytest

import tailguard as tg
from tailguard.data.prepare import prepare
from tailguard.errors import ConfigError

NAMES = ("return_24", "rsi_14", "time_of_day_sin")


def test_the_scaler_is_fitted_on_tradeable_rows_and_carried_to_later_bars(bars) -> None:
    split = tg.split_bars(bars, validation=0.2, test=0.2)
    train = prepare(split.train, NAMES)
    table = tg.compute_features(split.train, NAMES)
    rows = table.valid & split.train.panel().tradeable
    center = np.median(table.values[rows], axis=0)
    np.testing.assert_allclose(train.scaler.center, center)
    test = prepare(split.test, scaler=train.scaler)
    assert test.names == train.names
    expected = (tg.compute_features(split.test, NAMES).values - center) / train.scaler.scale
    np.testing.assert_allclose(
        test.features[test.usable], np.clip(expected, -10, 10)[test.usable], rtol=1e-5, atol=1e-6
    )


def test_wild_test_bars_do_not_move_the_training_features(bars) -> None:
    """What comes later changes neither statistics nor values of the training part."""
    split = tg.split_bars(bars, validation=0.2, test=0.2)
    calm = prepare(split.train, NAMES)
    factor = pl.when(pl.col("time") >= split.validation.start).then(7.0).otherwise(1.0)
    wild = bars.frame.with_columns(pl.col("open", "high", "low", "close") * factor)
    again = prepare(tg.split_bars(replace(bars, frame=wild), validation=0.2, test=0.2).train, NAMES)
    assert again.scaler.digest() == calm.scaler.digest()
    np.testing.assert_array_equal(again.features, calm.features)


def test_several_assets_are_prepared_by_the_names_their_scaler_knows() -> None:
    market = tg.make_market(600, assets=2, seed=2)
    first = prepare(market.bars, NAMES)
    assert first.names == (
        "return_24:SYN01",
        "rsi_14:SYN01",
        "return_24:SYN02",
        "rsi_14:SYN02",
        "time_of_day_sin",
    )
    again = prepare(market.bars, scaler=first.scaler)
    np.testing.assert_array_equal(first.features, again.features)


def test_an_unknown_feature_is_named(bars) -> None:
    with pytest.raises(ConfigError, match=r"return_240.*return_24"):
        prepare(bars, ("return_240",))
