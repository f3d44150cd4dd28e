"""A small agent with everything that shapes a decision, and sessions that replay bars."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import tailguard as tg
from tailguard.algorithm.ensemble import Ensemble
from tailguard.data.bars import Bars
from tailguard.envs.shield import Shield
from tailguard.evaluate.decision import Decision
from tailguard.live.bars import BarHistory, LiveBar, ReplaySource
from tailguard.live.decide import AccountAtClose, BarDecider, LiveDecider
from tailguard.live.faults import Faults
from tailguard.live.guards import GuardConfig
from tailguard.live.journal import Journal, nowhere, read_records
from tailguard.live.kill import KillSwitch
from tailguard.live.orders import OrderConfig
from tailguard.live.paper import PaperVenue
from tailguard.live.session import Session, SessionConfig
from tailguard.live.shadow import SimulatedAccount
from tailguard.live.venue import Instrument, SimulatedClock
from tailguard.market import MarketConfig, build_market
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
    """Two members with an exposure, a throttle, a shield and volatility scaling, and positions that are not tiny."""
    bars = tg.make_market(1_100, assets=assets, seed=5).bars
    env = tg.TradingEnv(
        bars,
        num_envs=4,
        episode_length=32,
        accounts="portfolio",
        shield=Shield(shock=0.2, budget=0.1),
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


class RuleDecider:
    """Random target weights by the bar's time: a policy that needs no features, so that many schedules are cheap."""

    def __init__(self, assets: int, gross: float = 1.0) -> None:
        self.assets, self.gross, self.row = assets, gross, -1
        self._time = 0

    def read(self, *bars: LiveBar) -> None:
        self.row += len(bars)
        self._time = bars[-1].time_ms

    def can_decide(self, row: int) -> bool:
        return row >= 0

    def prepare(self, account: AccountAtClose) -> dict[str, Any]:
        return {"window": [account.equity, account.equity, 0]}

    def decide(self, account: AccountAtClose) -> Decision:
        assert account.row == self.row
        return Decision(self.weights_at(self._time))

    def weights_at(self, time_ms: int) -> list[float]:
        drawn = np.random.default_rng(time_ms).uniform(-1, 1, self.assets)
        return (self.gross * drawn / max(1.0, np.abs(drawn).sum())).tolist()

    def restore(self, decisions: Sequence[Mapping[str, Any]]) -> None:
        for record in decisions:
            assert record["target"] == self.weights_at(record["bar"])


@dataclass
class PaperWorld:
    """A venue with a clock, and the files that survive a crash of the session that trades there."""

    folder: Path
    bars: Bars
    first_ms: int
    config: MarketConfig
    make_decider: Callable[[], BarDecider]
    guards: GuardConfig = LOOSE
    orders: OrderConfig = field(default_factory=OrderConfig)
    faults: Faults = field(default_factory=Faults)
    instruments: dict[str, Instrument] | None = None
    window: int = 32
    crash_point: Callable[[str], None] = nowhere

    def __post_init__(self) -> None:
        self.panel = self.bars.panel()
        self.clock = SimulatedClock(self.first_ms)
        market = build_market(self.panel, self.config, dtype=torch.float64)
        self.venue = PaperVenue(market, self.panel, self.clock, instruments=self.instruments, faults=self.faults)
        self.kill = KillSwitch(self.folder / "KILL")
        self.journal_path = self.folder / "journal.jsonl"
        self._open: Journal | None = None
        self._started: Session | None = None

    def session(self) -> Session:
        """A session as a fresh process would make it."""
        if self._open is not None:
            self._open.close()
        self._open = Journal(self.journal_path, crash_point=self.crash_point, sync=False)
        config = SessionConfig(
            run="world",
            mode="paper",
            symbols=self.bars.symbols,
            capital=self.config.capital,
            leverage=self.config.leverage,
            bar_ms=self.panel.frequency_ms,
            window=self.window,
            guards=self.guards,
            orders=self.orders,
        )
        return Session(
            config,
            self.make_decider(),
            self._open,
            self.clock,
            self.kill,
            venue=self.venue,
            crash_point=self.crash_point,
        )

    def trade(self, session: Session, count: int | None = None) -> None:
        """Start the session, if it is new, and give it the next bars."""
        if session is not self._started:
            session.start()
            self._started = session
        state = session.ledger.state
        after = state.bars[-1].time_ms if state.bars else self.first_ms - 1
        source = ReplaySource(self.bars, after, self.clock)
        while (count is None or count > 0) and (bar := source.next_bar()) is not None:
            session.on_bar(bar)
            count = None if count is None else count - 1

    def records(self, kind: str) -> list[dict[str, Any]]:
        return [record for record in read_records(self.journal_path) if record["kind"] == kind]


WorldMaker = Callable[..., PaperWorld]


@pytest.fixture
def paper_world(tmp_path: Path) -> WorldMaker:
    """A world that replays 120 bars of a synthetic market to a rule, or whatever is given."""

    def make(
        bars: Bars | None = None,
        first_row: int = 10,
        make_decider: Callable[[], BarDecider] | None = None,
        config: MarketConfig | None = None,
        **settings: Any,
    ) -> PaperWorld:
        bars = bars or tg.make_market(130, seed=3).bars
        make_decider = make_decider or (lambda: RuleDecider(len(bars.symbols)))
        return PaperWorld(
            tmp_path, bars, open_time(bars, first_row), config or MarketConfig(), make_decider, **settings
        )

    return make
