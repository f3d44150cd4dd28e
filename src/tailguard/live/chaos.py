"""Seeded chaos: a session that is crashed, starved and killed at random moments, and what must be true of it after all.

A crash drops everything in memory, at any call to the venue, any wait and any stage of writing a line of the journal.
The next session starts from the journal, as a new process would.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field, fields
from decimal import Decimal
from pathlib import Path
from typing import Any, get_args

import numpy as np

from tailguard.errors import TailguardError
from tailguard.live.bar_history import LiveBar
from tailguard.live.faults import FaultRates, Faults
from tailguard.live.guards import GuardConfig
from tailguard.live.journal import read_records
from tailguard.live.orders import OrderConfig, Style
from tailguard.live.session import Killed, Session
from tailguard.live.simulation import RandomWeights, ReplayedMarket, World

CALLS = ("time", "prices", "account", "place", "find", "orders", "cancel", "forced_trades")
GUARDS = GuardConfig(
    order_notional=1e6,
    hour_notional=1e6,
    day_notional=1e6,
    turnover=1e6,
    drawdown=0.99,
    slippage=0.5,
    price_difference=10,
    jump=10,
    errors_per_hour=1_000_000,
)
"""Guards that do not trip: chaos is about orders, and a killed session would send none."""
MOST_RESTARTS = 2_000


class Crash(BaseException):
    """The process is gone. Not an `Exception`, so that nothing can catch it by accident."""


@dataclass
class Outcome:
    """What a schedule did, and what it found wrong."""

    seed: int
    wrong: list[str] = field(default_factory=list)
    crashes: int = 0
    kills: int = 0
    counts: Counter[str] = field(default_factory=Counter)
    """Faults by name, orders accepted, bars decided."""


class CrashingVenue:
    """A venue whose every call may be the last thing that the process does, before it or after it."""

    receive_window_ms = 5_000

    def __init__(self, chaos: Chaos) -> None:
        self._chaos = chaos

    def __getattr__(self, name: str) -> Any:
        inner = getattr(self._chaos.world.venue, name)
        if name not in CALLS:
            return inner

        def call(*arguments: Any) -> Any:
            self._chaos.point(f"before {name}")
            answer = inner(*arguments)
            self._chaos.point(f"after {name}")
            return answer

        return call


class Chaos:
    """One schedule of faults, crashes, kills and strangers, drawn from a seed."""

    def __init__(self, seed: int, replayed: ReplayedMarket, folder: Path) -> None:
        self.draw = np.random.default_rng(seed)
        self.outcome = Outcome(seed)
        rates = {
            item.name: float(np.exp(self.draw.uniform(np.log(0.005), np.log(0.3))))
            for item in fields(FaultRates)
            if item.name != "stale_account" and self.draw.random() < 0.5
        }
        for name in ("disconnect", "clock_jump"):
            rates[name] = rates.get(name, 0.0) / 10
        self.crash_rate = float(np.exp(self.draw.uniform(np.log(0.001), np.log(0.01))))
        self.kill_rate = 0.002 if self.draw.random() < 0.4 else 0.0
        self.stranger_rate = 0.05 if self.draw.random() < 0.3 else 0.0
        self.liquidation_rate = 0.02 if self.draw.random() < 0.15 else 0.0
        self.bar_fault_rate = 0.1 if self.draw.random() < 0.5 else 0.0
        assets = replayed.panel.assets
        # Generators of their own: they change no other draw.
        style = np.random.default_rng((seed, 1)).choice(["immediate", *get_args(Style)])
        self.starts = np.random.default_rng((seed, 3))
        rates["stale_account"] = float(np.random.default_rng((seed, 2)).choice([0.0, 0.3]))
        self.orders = OrderConfig(str(style), spread_s=60.0, slices=3)  # type: ignore[arg-type]
        self.world = World(
            folder,
            replayed,
            lambda: RandomWeights(assets),
            guards=GUARDS,
            orders=self.orders,
            faults=Faults(FaultRates(**rates), seed=seed),
            crash_point=self.point,
        )
        self.clock_sleep = self.world.clock.sleep
        self.world.clock.sleep = self._sleep  # type: ignore[method-assign]  # a wait is a moment to crash, too
        self.tripped: list[tuple[int, int | None]] = []
        """Number of sends when the switch was tripped, and when it was released."""
        self.strangers = 0
        self.calm = False

    def point(self, name: str) -> None:
        """A moment at which anything may happen to the process."""
        if self.is_quiet:
            return
        # Between the desk's look at the switch and the call an order is on its way: nothing can hold it back.
        if (
            name != "before place"
            and self.kill_rate
            and self.draw.random() < self.kill_rate
            and not self.world.kill.is_tripped()
        ):
            self.world.kill.trip("chaos", flatten=bool(self.draw.random() < 0.5))
            self.tripped.append((len(self.world.venue.sends), None))
            self.outcome.kills += 1
        if self.draw.random() < self.crash_rate:
            self.outcome.crashes += 1
            raise Crash

    @property
    def is_quiet(self) -> bool:
        """Whether nothing happens to the process any more: a venue that has closed for good answers no order, and a
        session that is to close its positions there would be crashed for ever."""
        books, panel = self.world.venue.books, self.world.panel
        return self.calm or (books.closed and books.row == panel.rows - 1)

    def _sleep(self, seconds: float) -> None:
        self.point("before sleep")
        self.clock_sleep(seconds)
        self.point("after sleep")

    def run(self) -> Outcome:
        """Trade all bars through it, then calm the world, settle, and check."""
        venue: Any = CrashingVenue(self)
        for _ in range(MOST_RESTARTS):
            try:
                self.trade_as_a_process(venue)
                break
            except Crash:
                # Somebody notices and starts it again, at once or after hours.
                later_s = float(self.draw.exponential(600))
                self.clock_sleep(later_s if self.starts.random() < 0.5 else 0.0)
            except Killed:
                self._person(venue)
            except TailguardError:  # the venue could not be reached at the very first start
                self.clock_sleep(60)
        else:
            self.outcome.wrong.append("the session never came to an end")
        self._settle()
        self._check()
        return self.outcome

    def trade_as_a_process(self, venue: Any) -> None:
        """From the journal to the last bar, or to a crash."""
        session = self.world.session(venue)
        session.start()
        self._trade(session)

    def release_as_a_process(self, venue: Any) -> None:
        self.world.session(venue).release("chaos")

    def _trade(self, session: Session) -> None:
        world = self.world
        bars = session.ledger.state.bars
        after = bars[-1].time_ms if bars else world.first_ms - 1
        while (bar := world.replayed.after(after)) is not None:
            world.clock.wait_until(bar.close_ms(world.panel.frequency_ms))
            after = bar.time_ms
            self.strangers_trade()
            for given in self.given(bar):
                session.on_bar(given)

    def given(self, bar: LiveBar) -> list[LiveBar]:
        """The bar as the source gives it: missing, late, twice, or as it is."""
        if self.draw.random() >= self.bar_fault_rate:
            return [bar]
        kind = self.draw.integers(3)
        if kind == 0:
            return []
        if kind == 1:
            self.clock_sleep(float(self.draw.uniform(0, 3_000)))
            return [bar]
        return [bar, bar]

    def strangers_trade(self) -> None:
        """Somebody else trades in the account, or the venue liquidates it."""
        venue = self.world.venue
        if self.draw.random() < self.stranger_rate:
            symbol = str(self.draw.choice(venue.panel.symbols))
            venue.trade_outside(symbol, Decimal(int(self.draw.integers(-3, 4))) / 10)
            self.strangers += 1
        if self.draw.random() < self.liquidation_rate:
            venue.liquidate_now()

    def _person(self, venue: Any) -> None:
        """After a kill a person looks and goes on; a crash may come in between."""
        self.clock_sleep(float(self.draw.uniform(1, 7_200)))
        try:
            self.release_as_a_process(venue)
        except Crash:
            if self.world.kill.is_tripped():
                return
        if self.tripped and self.tripped[-1][1] is None:
            self.tripped[-1] = (self.tripped[-1][0], len(self.world.venue.sends))

    def _settle(self) -> None:
        """The world is calm; a last session learns what has become of everything."""
        self.calm = True
        self.world.faults.stop()
        self.clock_sleep(3_600)
        self.session = self.world.session()
        try:
            self.session.start()
        except Killed:
            self.outcome.counts["ended killed"] += 1

    # --- what must be true --------------------------------------------------------------------------------------------

    def _check(self) -> None:
        world, wrong = self.world, self.outcome.wrong
        records = list(read_records(world.journal_path))
        intents = {record["id"]: record for record in records if record["kind"] == "intent"}
        sends = [name for _, name in world.venue.sends]
        accepted = world.venue.books.orders
        if len(set(sends)) != len(sends):
            wrong.append("an order was sent twice")
        if not set(sends) <= set(intents):
            wrong.append("an order was sent before its intent was on disk")
        taken = Counter(
            (intents[name]["bar"], intents[name]["symbol"]) for name in accepted if not intents[name]["flatten"]
        )
        most = {"limit_then_market": 2, "twap": self.orders.slices}.get(self.orders.style, 1)
        if any(count > most for count in taken.values()):
            wrong.append("too many orders of one bar and symbol were accepted")
        self._check_quantities(intents)
        self._check_positions(records)
        for first, last in self.tripped:
            if any(not intents[name]["flatten"] for name in sends[first:last]):
                wrong.append("an order was sent after the kill switch")
        bars = [record["bar"] for record in records if record["kind"] == "decision"]
        if len(set(bars)) != len(bars):
            wrong.append("a bar was decided on twice")
        self.outcome.counts.update(world.faults.counts)
        self.outcome.counts.update(
            {"accepted orders": len(accepted), "decisions": len(bars), "strangers": self.strangers}
        )

    def _check_quantities(self, intents: dict[str, dict[str, Any]]) -> None:
        """No bar trades more of a symbol than was decided: the first order's quantity, times the slices of a twap."""
        orders, lots = self.world.venue.books.orders, self.world.venue.rules
        parts = self.orders.slices if self.orders.style == "twap" else 1
        decided: dict[tuple[int, str], Decimal] = {}
        traded = Counter[tuple[int, str]]()
        for name, intent in intents.items():
            if not intent["flatten"]:
                key = intent["bar"], intent["symbol"]
                # Slices of whole lots differ by one.
                slack = (parts - 1) * lots[intent["symbol"]].lot
                decided.setdefault(key, parts * abs(Decimal(intent["quantity"])) + slack)
                filled = abs(Decimal(orders[name]["filled"])) if name in orders else Decimal(0)
                traded[key] += filled  # type: ignore[assignment]
        if any(traded[key] > most for key, most in decided.items()):
            self.outcome.wrong.append("a bar has traded more than was decided")

    def _check_positions(self, records: list[dict[str, Any]]) -> None:
        world, state, wrong = self.world, self.session.ledger.state, self.outcome.wrong
        if state.open_intents:
            wrong.append("an outcome is still unknown")
        filled = Counter[str]()
        for order in world.venue.books.orders.values():
            filled[order["symbol"]] += Decimal(order["filled"])  # type: ignore[assignment]
        adopted = [record for record in records if record["kind"] == "adopt"]
        for symbol, position in world.venue.books.positions.items():
            ours, foreign = state.ours[symbol], state.foreign[symbol]
            if ours + foreign != position:
                wrong.append(f"{symbol}: {position} at the venue, {ours} ours, {foreign} not")
            if not self.strangers and not world.venue.books.forced and ours != filled[symbol]:
                wrong.append(f"{symbol}: our orders filled {filled[symbol]}, our books say {ours}")
        if not self.strangers and (adopted or "position" in state.frozen):
            wrong.append("a position was not explained although nobody else traded")
