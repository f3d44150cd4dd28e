"""The state of a session: a fold of its journal.

Nothing changes the state but a record, and every record is on disk before it does. A session that was killed at any
moment therefore comes back as the same fold, and never knows less than it has done.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from decimal import Decimal
from typing import Any

from tailguard.live.bar_history import LiveBar
from tailguard.live.equity_curve import EquityCurve
from tailguard.live.journal import Journal, Record

DAY_MS = 86_400_000
HOUR_MS = 3_600_000
KEPT_MS = DAY_MS + HOUR_MS
"""Time for which finished orders are kept, by the venue's clock: longer than a reconciliation looks back."""
ZERO = Decimal(0)


@dataclass
class Intent:
    """An order that may have been sent, and what is known of it."""

    client_id: str
    bar: int
    """Open time of the bar at whose close it was decided."""
    symbol: str
    attempt: int
    quantity: Decimal
    price: float
    """The venue's price when it was sized."""
    sent_ms: int
    """By the venue's clock, as far as we know it."""
    written_ms: int
    """By our clock."""
    reduce_only: bool
    flatten: bool
    filled: Decimal = Decimal(0)
    fill_price: float = 0.0
    is_open: bool = True
    """Whether the outcome is still unknown or can still change."""
    outcome: str = "sent"

    @property
    def unfilled_notional(self) -> float:
        """What it may still trade, at the price that it was sized at."""
        return float(abs(self.quantity - self.filled)) * self.price


@dataclass
class LiveState:
    """Everything that a session knows."""

    started: Record | None = None
    bars: list[LiveBar] = field(default_factory=list)
    """Those that the decider has not taken in, and the last one."""
    confirmed: Record | None = None
    """The last terms of live trading that a person has agreed to."""
    decisions: list[Record] = field(default_factory=list)
    """Those since the agent's window began: a replay of them restores the policy's memory."""
    last_decision: Record | None = None
    """Also one that closed all positions because the agent could not decide."""
    explanation: Record | None = None
    """What moved the last decision that was explained."""
    intents: dict[str, Intent] = field(default_factory=dict)
    """Open orders and those of the last day, by client id."""
    ours: dict[str, Decimal] = field(default_factory=dict)
    """Our positions: what our orders filled, less what the venue or a stranger took from them."""
    foreign: dict[str, Decimal] = field(default_factory=dict)
    """Positions of the account that are not ours, by symbol. They are never traded."""
    disputed: dict[str, tuple[Decimal, Decimal]] = field(default_factory=dict)
    """Ours and foreign by our own orders, where the venue has said otherwise since a person last looked."""
    forced: int = 0
    """Number of the last liquidation that was taken in."""
    frozen: dict[str, str] = field(default_factory=dict)
    """Guards that block every increase of a position, with their messages, until a person releases them."""
    since: dict[str, int] = field(default_factory=dict)
    """When each of these guards has tripped, and `kill`."""
    killed: str | None = None
    """Why trading has ended; a person has to release it."""
    flatten_due: bool = False
    """Whether the kill asked for all our positions to be closed."""
    traded: deque[tuple[int, float]] = field(default_factory=deque)
    """Time and notional of the orders of the last day."""
    errors: deque[int] = field(default_factory=deque)
    """Times of the errors of the last hour."""
    peak_equity: float = 0.0
    equities: list[float] = field(default_factory=list)
    """Equity at the decisions of the current window of the budget."""
    outcomes: deque[float] = field(default_factory=lambda: deque(maxlen=10_000))
    """Returns of the finished windows of the budget."""
    alarms: deque[Record] = field(default_factory=lambda: deque(maxlen=100))
    curve: EquityCurve = field(default_factory=EquityCurve)
    """Equity at all decisions, thinned for a chart."""
    ended: bool = False
    """Whether the last session ended by itself, with its bars or on demand."""

    @property
    def open_intents(self) -> list[Intent]:
        return [intent for intent in self.intents.values() if intent.is_open]

    def apply(self, record: Record) -> None:
        """Take in one record."""
        getattr(self, f"_on_{record['kind']}")(record)

    def _on_start(self, record: Record) -> None:
        self.started = record
        self.ours = {symbol: Decimal(0) for symbol in record["symbols"]}
        self.foreign = dict(self.ours)

    def _on_resume(self, _: Record) -> None:
        self.ended = False

    def _on_stop(self, _: Record) -> None:
        self.ended = True

    def _on_confirm(self, record: Record) -> None:
        self.confirmed = record

    def _on_bar(self, record: Record) -> None:
        self.bars.append(LiveBar.from_dict(record))

    def _on_decision(self, record: Record) -> None:
        self.last_decision = record
        equity = record["equity"]
        self.peak_equity = max(self.peak_equity, equity)
        self.curve.add(record["bar"], equity)
        if record["flat"]:
            return
        if record["age"] == 0:
            self.decisions.clear()
        self.decisions.append(record)
        assert self.started is not None
        self.equities.append(equity)
        if len(self.equities) > self.started["window"]:
            self.outcomes.append(equity / self.equities[0] - 1)
            self.equities = [equity]

    def _on_explanation(self, record: Record) -> None:
        self.explanation = record

    def _on_intent(self, record: Record) -> None:
        intent = Intent(
            record["id"],
            record["bar"],
            record["symbol"],
            record["attempt"],
            Decimal(record["quantity"]),
            record["price"],
            record["sent"],
            record["time"],
            record["reduce_only"],
            record["flatten"],
        )
        self.intents[intent.client_id] = intent
        # Those of the current bar stay: the number of an attempt counts them.
        old = intent.sent_ms - KEPT_MS
        for name in [name for name, each in self.intents.items() if each.sent_ms < old]:
            if not self.intents[name].is_open and self.intents[name].bar != intent.bar:
                del self.intents[name]

    def _on_order(self, record: Record) -> None:
        intent = self.intents[record["id"]]
        filled = Decimal(record["filled"])
        # Fills are cumulative, so a report that comes twice, or late, changes nothing.
        fresh = filled - intent.filled
        self.ours[intent.symbol] += fresh
        if intent.symbol in self.disputed:
            ours, foreign = self.disputed[intent.symbol]
            self.disputed[intent.symbol] = ours + fresh, foreign
        intent.filled, intent.fill_price = filled, record["price"]
        intent.is_open, intent.outcome = record["open"], record["outcome"]
        if fresh:
            self.traded.append((record["time"], abs(float(fresh)) * record["price"]))
            _forget(self.traded, lambda each: each[0] <= record["time"] - DAY_MS)

    def _on_forced(self, record: Record) -> None:
        self.forced, symbol = record["number"], record["symbol"]
        left = self.ours[symbol] + self.foreign[symbol] + Decimal(record["quantity"])
        self.ours[symbol], self.foreign[symbol] = divide_position(left, self.ours[symbol])
        self.disputed.pop(symbol, None)

    def _on_adopt(self, record: Record) -> None:
        symbol, found = record["symbol"], (Decimal(record["ours"]), Decimal(record["foreign"]))
        before = self.disputed.setdefault(symbol, (self.ours[symbol], self.foreign[symbol]))
        if found == before:
            del self.disputed[symbol]
        self.ours[symbol], self.foreign[symbol] = found

    def _on_freeze(self, record: Record) -> None:
        self.frozen[record["guard"]] = record["message"]
        self.since.setdefault(record["guard"], record["time"])
        self.alarms.append(record)

    def _on_kill(self, record: Record) -> None:
        self.killed, self.flatten_due = record["message"], record["flatten"]
        self.since.setdefault("kill", record["time"])
        self.alarms.append(record)

    def _on_flattened(self, _: Record) -> None:
        self.flatten_due = False

    def _on_settled(self, _: Record) -> None:
        """For a person who has tripped the switch; nothing follows from it."""

    def _on_release(self, record: Record) -> None:
        self.frozen.clear()
        self.since.clear()
        self.disputed.clear()
        self.killed, self.flatten_due = None, False
        self.errors.clear()
        # The person has seen the drawdown and goes on from here.
        self.peak_equity = record["equity"] or self.peak_equity
        self.outcomes.clear()

    def _on_error(self, record: Record) -> None:
        self.errors.append(record["time"])
        _forget(self.errors, lambda each: each <= record["time"] - HOUR_MS)

    def _on_alarm(self, record: Record) -> None:
        self.alarms.append(record)

    def forget_bars(self) -> None:
        """The decider has the bars: all but the last are of no more use here."""
        del self.bars[:-1]

    def traded_since(self, time_ms: int) -> float:
        """Notional traded after this time."""
        return sum(notional for moment, notional in self.traded if moment > time_ms)


def _forget(queue: deque[Any], is_old: Callable[[Any], bool]) -> None:
    while queue and is_old(queue[0]):
        queue.popleft()


def divide_position(found: Decimal, ours: Decimal) -> tuple[Decimal, Decimal]:
    """What of the venue's position is ours and what is not: ours never grows, and never beyond what is there."""
    kept = ZERO if found * ours <= 0 else min(abs(found), abs(ours)).copy_sign(ours)
    return kept, found - kept


class Ledger:
    """The journal and the state that follows from it."""

    def __init__(self, journal: Journal, now: Callable[[], int]) -> None:
        self.journal, self.now = journal, now
        self.state = LiveState()
        for record in journal.records:
            self.state.apply(record)
        journal.records.clear()
        self.listeners: list[Callable[[Record], None]] = []
        """Called with each record once it is in the state. They must neither wait nor raise."""

    def record(self, kind: str, **content: Any) -> None:
        """Write a record to disk, then take it in."""
        record = self.journal.append(kind, self.now(), **content)
        self.state.apply(record)
        for listener in self.listeners:
            listener(record)
