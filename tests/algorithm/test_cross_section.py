"""Gradients through the market find a planted cross-sectional signal, within limits, for symbols never seen too."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import polars as pl
import pytest

import tailguard as tg
from tailguard.data.bars import Bars
from tailguard.data.cross_section import CrossSection, make_cross_section
from tailguard.data.sources import load_bars

CAP = 0.1
LIMITS = tg.Constraints(asset_max=CAP, net_min=-0.2, net_max=0.2)


def share(agent: Any, bars: Bars, universe: CrossSection) -> float:
    """Log-growth, net of all costs, as a share of the bound on these bars."""
    result = tg.backtest(agent, bars, warn_in_sample=False, progress_bar=False)
    assert np.abs(result.targets).max() <= CAP * (1 + 1e-6)
    times = universe.bars.frame["time"].unique(maintain_order=True).dt.epoch("ms").to_numpy()
    rows = np.searchsorted(times, result.time) - 1
    return math.log(result.equity[-1]) / universe.best_return(CAP)[rows].sum()


@pytest.mark.slow
def test_a_shared_encoder_compares_assets(own_parts: None) -> None:  # noqa: ARG001 (the feature is forgotten)
    """Twenty assets, 2,000 bars of training: at least 70 % of the bound on later bars, 50 % on other symbols, the same
    trades in another order, and nothing where the scores are dealt out anew."""
    tg.feature("score", needs=("score",))(lambda: pl.col("score"))
    universe = make_cross_section(3_000, assets=20, seed=0)
    split = tg.split_bars(universe.bars, validation=0.02, test=0.25)
    env = tg.TradingEnv(
        split.train, num_envs=128, episode_length=64, features=["score"], shared_scaling=True, constraints=LIMITS
    )
    agent = tg.PathwiseLearner(
        env, n_steps=8, encoder="shared", hidden=(32,), lstm_size=8, learning_rate="linear:3e-3:3e-4", seed=1
    ).learn(330_000)
    assert share(agent, split.test, universe) >= 0.7
    other = make_cross_section(1_000, assets=20, seed=99, prefix="NEW")
    assert share(agent, other.bars, other) >= 0.5

    names = other.bars.symbols
    renamed = dict(zip(names, reversed(names), strict=True))
    frame = other.bars.frame.drop("segment").with_columns(pl.col("symbol").replace_strict(renamed))
    plain, turned = (
        tg.backtest(agent, bars, warn_in_sample=False, progress_bar=False) for bars in (other.bars, load_bars(frame))
    )
    np.testing.assert_allclose(turned.weights[:, ::-1], plain.weights, atol=2e-5)
    dealt = np.random.default_rng(0).permutation(20)
    parts = other.bars.frame.drop("segment").partition_by("symbol", maintain_order=True)
    frame = pl.concat([part.with_columns(parts[dealt[number]]["score"]) for number, part in enumerate(parts)])
    assert share(agent, load_bars(frame), other) < 0.2
