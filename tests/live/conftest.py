"""A small agent with everything that shapes a decision, and sessions that replay bars."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import tailguard as tg
from tailguard.algorithm.ensemble import Ensemble
from tailguard.data.bars import Bars
from tailguard.envs.constraints import Constraints
from tailguard.envs.shield import Shield
from tailguard.live.bar_history import BarHistory
from tailguard.live.decide import BarDecider, LiveDecider
from tailguard.live.guards import GuardConfig
from tailguard.live.journal import Journal
from tailguard.live.kill import KillSwitch
from tailguard.live.orders import OrderConfig
from tailguard.live.session import Session, SessionConfig
from tailguard.live.shadow import SimulatedAccount
from tailguard.live.simulation import RandomWeights, ReplayedMarket, World
from tailguard.live.venue import SimulatedClock
from tailguard.market import MarketConfig
from tailguard.risk.exposure import Exposure

HOUR = 3_600_000
LOOSE = GuardConfig(
    order_notional=1e6, hour_notional=1e6, day_notional=1e6, turnover=1e6, drawdown=0.99, jump=10, slippage=0.5,
    price_difference=10, errors_per_hour=100_000,
)  # fmt: skip
"""Guards that never trip, for tests of something else."""


FEATURES = ("return_24", "rsi_14", "macd", "bollinger_20", "trend_24", "volume_168")
"""Features with a warm-up of 188 bars."""


def make_agent(assets: int, features: tuple[str, ...] | None = FEATURES) -> Ensemble:
    """Two members with an exposure, a throttle, limits, a shield and volatility scaling, and large positions."""
    bars = tg.make_market(1_100, assets=assets, seed=5).bars
    env = tg.TradingEnv(
        bars,
        num_envs=4,
        episode_length=32,
        accounts="portfolio",
        shield=Shield(shock=0.2, budget=0.1),
        constraints=Constraints(asset_max=0.45, turnover_max=0.3),
        volatility_half_life=24,
        features=features,
    )
    members = []
    for seed in (1, 2):
        member = tg.DistributionalPPO(env, n_steps=16, hidden=(16,), lstm_size=16, seed=seed).learn(128)
        with torch.no_grad():
            member.policy.action_head.linear.weight.mul_(100)
        members.append(member)
    exposure = Exposure(0.8, -0.005, 0.05, 0.9, -0.01, -0.004, -0.0049, 5.0)
    return Ensemble(members, exposure, throttled=True)


@pytest.fixture(scope="session")
def agent() -> Ensemble:
    return make_agent(1)


@pytest.fixture(scope="session")
def two_assets() -> Ensemble:
    return make_agent(2)


def open_time(bars: Bars, row: int) -> int:
    """Open time of a row of the first symbol."""
    return int(bars.frame["time"].dt.epoch("ms")[row])


ShadowMaker = Callable[..., Session]


@pytest.fixture
def shadow_session(tmp_path: Path) -> ShadowMaker:
    """A shadow session of an agent on the bars before `first_ms`; its journal is in the test's folder."""

    def make(agent: Ensemble, bars: Bars, first_ms: int, clock: SimulatedClock, name: str = "shadow") -> Session:
        decider = LiveDecider(agent, BarHistory(bars, first_ms))
        config = SessionConfig(
            run=name,
            mode="shadow",
            symbols=bars.symbols,
            capital=1.0,
            leverage=agent.spec.market.leverage,
            bar_ms=HOUR,
            window=agent.spec.episode_length,
            guards=LOOSE,
            orders=OrderConfig(),
        )
        journal = Journal(tmp_path / name / "journal.jsonl", sync=False)
        kill = KillSwitch(tmp_path / name / "KILL")
        return Session(config, decider, journal, clock, kill, shadow=SimulatedAccount(decider))

    return make


WorldMaker = Callable[..., World]


@pytest.fixture
def paper_world(tmp_path: Path) -> WorldMaker:
    """A world that replays 120 bars of a synthetic market to a rule, or whatever is given."""

    def make(
        bars: Bars | None = None,
        first_row: int = 10,
        make_decider: Callable[[], BarDecider] | None = None,
        config: MarketConfig | None = None,
        **settings: Any,
    ) -> World:
        bars = bars or tg.make_market(130, seed=3).bars
        make_decider = make_decider or (lambda: RandomWeights(len(bars.symbols)))
        market = ReplayedMarket.of(bars, config or MarketConfig(), first_row)
        return World(tmp_path, market, make_decider, **{"guards": LOOSE, **settings})

    return make
