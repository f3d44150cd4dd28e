"""Sessions in a simulated world: a paper venue, a simulated clock, and the files that survive a crash."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch

from tailguard.data.bars import Bars
from tailguard.data.panel import Panel
from tailguard.evaluate.decision import Decision
from tailguard.live.bar_history import LiveBar, bars_of
from tailguard.live.decide import AccountAtClose, BarDecider
from tailguard.live.faults import Faults
from tailguard.live.guards import GuardConfig
from tailguard.live.journal import Journal, nowhere, read_records
from tailguard.live.kill import KillSwitch
from tailguard.live.orders import OrderConfig
from tailguard.live.paper import PaperVenue
from tailguard.live.session import Session, SessionConfig
from tailguard.live.venue import Instrument, SimulatedClock, Venue
from tailguard.market import Market, MarketConfig, build_market


class RandomWeights:
    """Target weights drawn by the bar's time: a policy without features or memory, so that many sessions are cheap."""

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

    def explain(self, _: AccountAtClose) -> None:
        return None

    def weights_at(self, time_ms: int) -> list[float]:
        drawn = np.random.default_rng(time_ms).uniform(-1, 1, self.assets)
        weights: list[float] = (self.gross * drawn / max(1.0, np.abs(drawn).sum())).tolist()
        return weights

    def restore(self, decisions: Sequence[Mapping[str, Any]]) -> None:
        for record in decisions:
            assert record["target"] == self.weights_at(record["bar"])


@dataclass(frozen=True)
class ReplayedMarket:
    """Bars to replay, with the tables of the venue; many worlds can share one."""

    bars: Bars
    panel: Panel
    market: Market
    live_bars: tuple[LiveBar, ...]
    """Those that a session gets, one by one."""

    @classmethod
    def of(cls, bars: Bars, config: MarketConfig, first_row: int) -> ReplayedMarket:
        panel = bars.panel()
        market = build_market(panel, config, dtype=torch.float64)
        return cls(bars, panel, market, tuple(bars_of(bars, int(panel.time[first_row]))))

    def after(self, time_ms: int) -> LiveBar | None:
        """The first bar that opens after this time."""
        return next((bar for bar in self.live_bars if bar.time_ms > time_ms), None)


@dataclass
class World:
    """A venue with a clock, and the files of the session that trades there."""

    folder: Path
    replayed: ReplayedMarket
    make_decider: Callable[[], BarDecider]
    guards: GuardConfig = field(default_factory=GuardConfig)
    orders: OrderConfig = field(default_factory=OrderConfig)
    faults: Faults = field(default_factory=Faults)
    instruments: Mapping[str, Instrument] | None = None
    window: int = 32
    crash_point: Callable[[str], None] = nowhere

    def __post_init__(self) -> None:
        self.bars, self.panel, self.config = self.replayed.bars, self.replayed.panel, self.replayed.market.config
        self.first_ms = self.replayed.live_bars[0].time_ms
        self.clock = SimulatedClock(self.first_ms)
        self.venue = PaperVenue(
            self.replayed.market, self.panel, self.clock, instruments=self.instruments, faults=self.faults
        )
        self.kill = KillSwitch(self.folder / "KILL")
        self.journal_path = self.folder / "journal.jsonl"
        self._open: Journal | None = None
        self._started: Session | None = None

    def session(self, venue: Venue | None = None) -> Session:
        """A session as a new process would make it; the one before is gone, with all that it had in memory."""
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
            venue=venue or self.venue,
            crash_point=self.crash_point,
        )

    def trade(self, session: Session, count: int | None = None) -> None:
        """Start the session, if it is new, and give it the next bars."""
        if session is not self._started:
            session.start()
            self._started = session
        bars = session.ledger.state.bars
        after = bars[-1].time_ms if bars else self.first_ms - 1
        while (count is None or count > 0) and (bar := self.replayed.after(after)) is not None:
            self.clock.wait_until(bar.close_ms(self.panel.frequency_ms))
            session.on_bar(bar)
            after, count = bar.time_ms, None if count is None else count - 1

    def records(self, kind: str) -> list[dict[str, Any]]:
        return [record for record in read_records(self.journal_path) if record["kind"] == kind]
