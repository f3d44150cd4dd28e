"""Accounts that are flat by the close: in training, after saving, and where it is refused."""

from __future__ import annotations

import math

import numpy as np
import pandas as pd
import pytest
import torch

import tailguard as tg
from tailguard.config import load_config
from tailguard.envs.spec import TradingSpec
from tailguard.errors import ConfigError
from tailguard.market import MarketConfig

FREE = MarketConfig(fee=0, half_spread=0, impact=0, participation=math.inf, funding_rate=0)


@pytest.fixture(scope="module")
def bars() -> tg.Bars:
    """Forty weekdays of seven hourly bars from 14:30."""
    times = [
        day + pd.Timedelta(hours=14.5 + bar) for day in pd.bdate_range("2021-06-01", periods=40) for bar in range(7)
    ]
    close = 100 * np.exp(np.cumsum(np.random.default_rng(0).normal(0, 0.01, len(times))))
    return tg.load_bars(pd.DataFrame({"time": times, "close": close}))


def env_of(bars: tg.Bars, **options: object) -> tg.TradingEnv:
    return tg.TradingEnv(bars, FREE, num_envs=32, episode_length=50, features=["bollinger_20"], **options)  # type: ignore[arg-type]


def test_no_position_is_carried_over_a_night_in_training(bars: tg.Bars) -> None:
    env = env_of(bars, flat_by_close=True)
    env.reset(seed=0)
    ends = bars.panel().session_ends
    held = 0
    for _ in range(60):
        assert env.state is not None
        row = (env.state.market.row + 1).numpy()
        weights = env.step(torch.ones(32, 1)).outcome["weights"].numpy()[:, 0]
        assert (weights[ends[row]] == 0).all()
        assert (weights[~ends[row]] > 0).all()
        held += int((weights > 0).sum())
    assert held > 1_000


def test_without_the_switch_positions_are_carried(bars: tg.Bars) -> None:
    env = env_of(bars)
    env.reset(seed=0)
    assert env.task.flat_rows is None
    for _ in range(20):
        assert (env.step(torch.ones(32, 1)).outcome["weights"] > 0).all()


def test_an_agent_keeps_its_rule_and_its_pace_when_it_is_saved(bars: tg.Bars) -> None:
    spec = TradingSpec.of(env_of(bars, flat_by_close=True))
    again = TradingSpec.from_dict(spec.to_dict())
    assert again.flat_by_close
    assert again.sessions == bars.sessions
    assert again.pace.per_day == 7
    old = {name: value for name, value in spec.to_dict().items() if name not in ("flat_by_close", "sessions")}
    assert not TradingSpec.from_dict(old).flat_by_close


def test_there_must_be_a_close_to_be_flat_by(bars: tg.Bars) -> None:
    with pytest.raises(ConfigError, match="trades around the clock, so there is no close"):
        env_of(tg.make_market(400, seed=0).bars, flat_by_close=True)
    daily = pd.DataFrame({"time": pd.bdate_range("2020-01-01", periods=300), "close": 100 + np.sin(np.arange(300.0))})
    with pytest.raises(ConfigError, match="has daily bars"):
        env_of(tg.load_bars(daily), flat_by_close=True)
    assert load_config(overrides=["env.flat_by_close=true"]).env.flat_by_close
    assert bars.pace.per_week == 35
