"""Volatility scaling: the weighted mean by brute force, no look-ahead, and the same weights everywhere."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

import tailguard as tg
from tailguard.data.prepare import prepare
from tailguard.envs.spec import TradingSpec, task_for
from tailguard.envs.volatility import VolatilityScaling, ewma_volatility
from tailguard.errors import ConfigError
from tailguard.market import open_accounts

HALF_LIFE = 12
FEATURES = ["return_24"]


def brute_force(close: np.ndarray, half_life: int) -> np.ndarray:
    """Σ 2^(−k/h) r² / Σ 2^(−k/h) over all returns so far, one bar after the other."""
    found = [np.nan]
    returns = np.log(close[1:] / close[:-1])
    for now in range(1, len(close)):
        weight = 0.5 ** (np.arange(now)[::-1] / half_life)
        found.append(np.sqrt((weight * returns[:now] ** 2).sum() / weight.sum()))
    return np.array(found)


def test_volatility_is_the_weighted_mean_of_squared_returns() -> None:
    panel = tg.make_market(300, assets=2, seed=3).bars.panel("portfolio")
    found = ewma_volatility(panel.close, panel.segment, HALF_LIFE)
    for asset in range(2):
        np.testing.assert_allclose(found[:, asset], brute_force(panel.close[:, asset], HALF_LIFE), rtol=1e-10)


def test_a_gap_begins_anew() -> None:
    panel = tg.make_market(120, seed=3).bars.panel("portfolio")
    segment = np.repeat([0, 1], 60)
    found = ewma_volatility(panel.close, segment, HALF_LIFE)
    np.testing.assert_allclose(found[60:, 0], brute_force(panel.close[60:, 0], HALF_LIFE), rtol=1e-10)


def test_the_future_changes_no_past_factor() -> None:
    panel = tg.make_market(200, seed=3).bars.panel("portfolio")
    scaling = VolatilityScaling(HALF_LIFE, (0.004,))
    changed = replace(panel, close=np.concatenate([panel.close[:120], 3 * panel.close[120:]]))
    before, after = scaling.factors(panel), scaling.factors(changed)
    np.testing.assert_array_equal(before[:120], after[:120])
    assert (before[121:] != after[121:]).any()


def test_half_of_the_training_bars_are_scaled_and_none_is_scaled_up() -> None:
    panel = tg.make_market(2_000, seed=4).bars.panel("portfolio")
    scaling = VolatilityScaling.fit(panel, HALF_LIFE)
    factors = scaling.factors(panel)
    volatility = ewma_volatility(panel.close, panel.segment, HALF_LIFE)
    assert factors.max() == 1.0
    assert (factors < 1).mean() == pytest.approx(0.5, abs=0.01)
    np.testing.assert_allclose(
        factors[1:], np.minimum(1, scaling.reference[0] / volatility[1:]).astype(np.float32), rtol=1e-6
    )


def test_prices_that_never_move_have_no_scaling() -> None:
    panel = tg.make_market(100, seed=4).bars.panel("portfolio")
    assert VolatilityScaling.fit(replace(panel, close=np.ones_like(panel.close)), HALF_LIFE) is None


def test_doubled_volatility_halves_the_weights() -> None:
    """Where the scaling binds, the risk of the position stays the same."""
    bars = tg.make_market(600, seed=5).bars
    env = tg.TradingEnv(bars, num_envs=4, episode_length=24, features=FEATURES, volatility_half_life=HALF_LIFE)
    quiet = replace(env.volatility, reference=(1e-6,))
    rows = torch.tensor([200, 300, 400, 500])
    state = env.task.begin(open_accounts(rows, 1))
    task = replace(env.task, volatility_factors=torch.as_tensor(quiet.factors(env.prepared.panel)))
    weights, _ = task.decide(torch.ones(4, 1), state)
    volatility = ewma_volatility(env.prepared.panel.close, env.prepared.panel.segment, HALF_LIFE)
    np.testing.assert_allclose(weights[:, 0], 1e-6 / volatility[rows, 0], rtol=1e-6)
    plain = tg.TradingEnv(bars, num_envs=4, episode_length=24, features=FEATURES).task.decide(torch.ones(4, 1), state)[
        0
    ]
    assert (plain == 1).all()


def test_one_account_is_scaled_as_many_are() -> None:
    bars = tg.make_market(400, assets=2, seed=5).bars
    env = tg.TradingEnv(bars, num_envs=3, episode_length=24, features=FEATURES, volatility_half_life=HALF_LIFE)
    rows = torch.tensor([150, 222, 333])
    actions = torch.tensor([[0.7, -0.9], [0.2, 0.1], [-1.0, 1.0]])
    state = env.task.begin(open_accounts(rows, 2))
    together = env.task.decide(actions, state)[0]
    alone = [env.task.weights_of_one(action.tolist(), int(row)) for action, row in zip(actions, rows, strict=True)]
    np.testing.assert_allclose(alone, together, rtol=1e-6)


def test_an_agent_scales_by_its_training_bars_wherever_it_trades() -> None:
    market = tg.make_market(1_200, seed=6).bars
    split = tg.split_bars(market, validation=0.2, test=0.2)
    env = tg.TradingEnv(split.train, num_envs=2, episode_length=24, features=FEATURES, volatility_half_life=HALF_LIFE)
    spec = TradingSpec.from_dict(TradingSpec.of(env).to_dict())
    assert spec.volatility == env.volatility
    task, _, panel = task_for(spec, split.test, None, torch.float32)
    np.testing.assert_array_equal(task.volatility_factors, env.volatility.factors(panel))
    # An earlier version saved no scaling, and traded without.
    old = TradingSpec.of(env).to_dict()
    del old["volatility"]
    assert TradingSpec.from_dict(old).volatility is None


def test_a_half_life_below_one_bar_is_refused() -> None:
    prepared = prepare(tg.make_market(300, seed=3).bars, FEATURES)
    with pytest.raises(ConfigError, match="volatility_half_life"):
        tg.TradingEnv(prepared, num_envs=2, episode_length=24, volatility_half_life=-1)
    with pytest.raises(ConfigError, match=r"volatility\.reference"):
        VolatilityScaling(12, (0.0,))
