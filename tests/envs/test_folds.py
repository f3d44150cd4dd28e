"""Folds by time: every episode is held out once, and nothing that trains comes near the fold it is judged on."""

from __future__ import annotations

import numpy as np
import pytest
import torch

import tailguard as tg
from tailguard.envs.folds import cut_folds
from tailguard.errors import ConfigError

HOUR = 3_600_000


def make(assets: int = 1, accounts: str = "portfolio") -> tg.TradingEnv:
    bars = tg.make_market(1_000, assets=assets, seed=2).bars
    return tg.TradingEnv(bars, num_envs=4, episode_length=24, features=["return_24"], accounts=accounts)


@pytest.mark.parametrize(("assets", "accounts"), [(1, "portfolio"), (2, "per_symbol")])
def test_no_training_episode_touches_the_fold_or_its_embargo(assets: int, accounts: str) -> None:
    env = make(assets, accounts)
    time = env.prepared.panel.time
    for fold in cut_folds(env, 4, 10 * HOUR):
        held = {int(moment) for start in fold.inside.tolist() for moment in time[start : start + 25]}
        assert min(held) >= fold.first_ms
        assert max(held) == fold.last_ms
        trained = np.concatenate([time[start : start + 25] for start in fold.outside.tolist()])
        assert not held & set(trained.tolist())
        near = (trained > fold.first_ms - 10 * HOUR) & (trained < fold.last_ms + 10 * HOUR)
        assert not near.any()


def test_folds_cover_all_bars_and_are_equally_long() -> None:
    env = make()
    folds = cut_folds(env, 4, 0)
    starts = torch.cat([fold.inside for fold in folds])
    assert len(starts.unique()) == len(starts)
    # Only episodes across an edge of two folds are in none.
    assert len(starts) == len(env.starts) - 3 * 24
    sizes = [len(fold.inside) for fold in folds]
    assert max(sizes) - min(sizes) <= 26  # the last one loses no episode to an edge


def test_symbols_are_cut_at_the_same_times() -> None:
    env = make(2, "per_symbol")
    time, rows = env.prepared.panel.time, env.prepared.panel.rows
    for fold in cut_folds(env, 3, 0):
        first, second = (fold.inside[mask] for mask in (fold.inside < rows // 2, fold.inside >= rows // 2))
        assert time[first].tolist() == time[second].tolist()


def test_too_few_bars_for_folds_are_refused_with_a_way_out() -> None:
    bars = tg.make_market(230, seed=2).bars
    env = tg.TradingEnv(bars, num_envs=4, episode_length=24, features=["return_24"])
    with pytest.raises(ConfigError, match=r"training\.members: 4 folds.*fewer members"):
        cut_folds(env, 4, 24 * HOUR)
