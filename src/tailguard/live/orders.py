"""From target weights to orders, and from orders to outcomes that are known.

The rules that keep an order from being sent twice:

- Its client id is a hash of run, bar, symbol and attempt, and its intent is on disk before it is sent.
- A symbol with an order whose outcome is unknown gets no other order.
- An unknown outcome is asked for, never sent again. Once both clocks, the venue's and ours, have passed the order's
  receive window, an order that the venue does not know never will be.
- Only what the venue has refused is tried again, as the next attempt, while the decision is fresh.

A style may divide an order into parts. Each part is an order by these rules; what a crash leaves of a division is not
sent, and the next bar's order makes up for it.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import dataclass
from decimal import ROUND_CEILING, ROUND_DOWN, ROUND_FLOOR, Decimal
from itertools import pairwise
from typing import Literal, get_args

from tailguard.errors import ConfigError
from tailguard.live.guards import Guards
from tailguard.live.kill import KillSwitch
from tailguard.live.session_state import Intent, Ledger
from tailguard.live.venue import (
    Clock,
    Instrument,
    OrderKind,
    OrderReport,
    OrderRequest,
    OutcomeUnknown,
    RateLimited,
    Refused,
    Venue,
    WrongClock,
)
from tailguard.validate import check_count, check_range

PREFIX = "tg"
"""Client ids begin with it: it marks an order as ours."""
LONGEST_RETRY_S = 60.0
"""Longest pause between two questions while the venue does not answer."""
PAUSE_STEP_S = 5.0
"""Longest sleep at once while the venue wants a pause and nothing is sent anyway."""


Style = Literal["immediate", "market", "limit_then_market", "twap"]


@dataclass(frozen=True)
class OrderConfig:
    """How orders are sent, and the patience with a venue."""

    style: Style = "immediate"
    """immediate: at once, at most `guards.slippage` from the price. market: at once, at any price. limit_then_market:
    rests at the price, and what is left after `spread_s` is sent at once. twap: slices over `spread_s`."""
    spread_s: float = 60.0
    """Time that the orders of a bar may take, seconds; several symbols share it."""
    slices: int = 5
    """Most slices of a twap; fewer where they would be below the venue's minima."""
    attempts: int = 3
    """Most attempts at an order that the venue refuses for the moment."""
    patience_s: float = 60.0
    """Longest wait for an outcome before it is left to the next reconciliation."""
    poll_s: float = 1.0
    """Pause between two questions; it doubles with each that gets no answer, up to a minute."""
    visible_s: float = 3.0
    """Time after which the venue shows an order that it has taken, beyond its receive window."""

    def __post_init__(self) -> None:
        check_count("orders.attempts", self.attempts)
        check_count("orders.slices", self.slices)
        if self.style not in get_args(Style):
            raise ConfigError(f"orders.style {self.style!r}: there are {', '.join(get_args(Style))}")
        for name in ("patience_s", "poll_s", "visible_s", "spread_s"):
            check_range(f"orders.{name}", getattr(self, name), low=0, low_open=True)


def client_id(run: str, bar_ms: int, symbol: str, attempt: int, *, flatten: bool = False) -> str:
    """34 characters, as exchanges allow 36: the same order always has the same one."""
    text = f"{run}\n{bar_ms}\n{symbol}\n{attempt}\n{'flatten' if flatten else 'target'}"
    return PREFIX + hashlib.sha256(text.encode()).hexdigest()[:32]


def size_order(
    target: float, equity: float, held: Decimal, price: float, rules: Instrument, *, reduce_only: bool = False
) -> Decimal:
    """Signed quantity that brings the position to `target · equity` at this price; 0 where nothing can be sent.

    Quantities are whole lots, rounded towards zero, so that an order never passes its target. With `reduce_only` a
    position is never increased or reversed, and the venue's smallest notional does not apply.
    """
    if target != target:
        return Decimal(0)
    quantity = Decimal(repr(target * equity / price)) - held
    if reduce_only:
        opposite = held * quantity < 0
        quantity = min(abs(quantity), abs(held)).copy_sign(quantity) if opposite else Decimal(0)
    quantity = to_lots(quantity, rules.lot)
    too_small = abs(quantity) < rules.min_quantity or (
        not reduce_only and abs(quantity) * Decimal(repr(price)) < rules.min_notional
    )
    return Decimal(0) if too_small else quantity


def to_lots(quantity: Decimal, lot: Decimal) -> Decimal:
    """The nearest multiple of the lot towards zero."""
    return (quantity / lot).to_integral_value(ROUND_DOWN) * lot


def limit_price(quantity: Decimal, price: float, slippage: float, tick: Decimal) -> Decimal:
    """The worst price that the order accepts, on the tick that does not exceed the slippage."""
    worst = Decimal(repr(price)) * (1 + Decimal(repr(slippage)).copy_sign(quantity))
    rounding = ROUND_FLOOR if quantity > 0 else ROUND_CEILING
    return (worst / tick).to_integral_value(rounding) * tick


def resting_price(quantity: Decimal, price: float, tick: Decimal) -> Decimal:
    """The tick at the price, or the next one on the side that waits."""
    rounding = ROUND_FLOOR if quantity > 0 else ROUND_CEILING
    return (Decimal(repr(price)) / tick).to_integral_value(rounding) * tick


def slices_of(quantity: Decimal, most: int, price: float, rules: Instrument) -> list[Decimal]:
    """The order in at most so many slices of whole lots, none below the venue's minima, that differ by a lot."""
    lots, size = int(abs(quantity) / rules.lot), abs(quantity)
    count = min(most, lots)
    while count > 1:
        smallest = lots // count * rules.lot
        if smallest >= rules.min_quantity and smallest * Decimal(repr(price)) >= rules.min_notional:
            break
        count -= 1
    ends = [lots * place // count * rules.lot for place in range(count)] + [size] if count else [Decimal(0), size]
    return [(after - before).copy_sign(quantity) for before, after in pairwise(ends)]


@dataclass(frozen=True)
class Wanted:
    """An order that a decision asks for, before it is divided."""

    bar_ms: int
    symbol: str
    quantity: Decimal
    price: float
    """The venue's price when it was sized."""
    rules: Instrument
    reduce_only: bool
    is_fresh: Callable[[], bool]
    flatten: bool = False
    """It belongs to a kill, and is the only kind that is sent after one."""
    seconds: float = 0.0
    """Time that it may take."""


class OrderDesk:
    """Sends orders and finds out what became of them."""

    def __init__(
        self,
        venue: Venue,
        clock: Clock,
        ledger: Ledger,
        guards: Guards,
        kill: KillSwitch,
        config: OrderConfig,
        run: str,
        crash_point: Callable[[str], None],
    ) -> None:
        self.venue, self.clock, self.ledger, self.guards, self.kill = venue, clock, ledger, guards, kill
        self.config, self.run, self.crash_point = config, run, crash_point
        self.clock_offset = 0
        """The venue's clock less ours, milliseconds."""
        self.listed_ms: int | None = None
        """Time of the last complete list of orders, by the venue's clock; None in a new process."""
        self.cancelled: set[str] = set()
        """Orders that were withdrawn after the kill switch had been tripped."""
        self._failures = 0
        """Questions without an answer since the last one that had one."""
        self._refusing: set[str] = set()
        """Symbols whose last order the venue has refused for good."""

    def sync_clock(self) -> None:
        """Measure the venue's clock; a journalled alarm where it is far from ours."""
        asked = self.clock.now()
        offset = self.venue.time() - (asked + self.clock.now()) // 2
        if abs(offset - self.clock_offset) > self.venue.receive_window_ms // 2:
            self.ledger.record("alarm", guard="clock", message=f"the venue's clock is {offset / 1000:+.1f} s from ours")
        self.clock_offset = offset

    def failed(self, error: Exception) -> None:
        """A question got no answer: the next one waits longer."""
        self._failures += 1
        self._error(error)

    def answered(self) -> None:
        self._failures = 0

    @property
    def retry_s(self) -> float:
        """Pause before the next question."""
        doubled = self.config.poll_s * 2.0 ** min(max(self._failures - 1, 0), 10)
        return min(doubled, LONGEST_RETRY_S)

    @property
    def cancelled_now(self) -> int:
        """Orders that the kill switch has withdrawn before they were filled."""
        intents = [self.ledger.state.intents[name] for name in self.cancelled]
        return sum(not each.is_open and each.filled != each.quantity for each in intents)

    def has_unknown(self, symbol: str) -> bool:
        """Whether an order of the symbol has an unknown outcome."""
        return any(intent.symbol == symbol for intent in self.ledger.state.open_intents)

    def send(self, wanted: Wanted) -> None:
        """Send an order in the style that was chosen, and wait for its outcome within the desk's patience."""
        # After a restart nobody knows why an earlier attempt ended, so a bar's order is not tried again. Closing a
        # position for a kill goes on until it is closed.
        if self._sent(wanted) and not wanted.flatten:
            return
        style = "immediate" if wanted.flatten else self.config.style
        if style == "limit_then_market":
            filled = self._send_part(wanted, wanted.quantity, wanted.price, "resting")
            self._send_rest(wanted, wanted.quantity - filled)
        elif style == "twap":
            self._send_slices(wanted)
        else:
            self._send_part(wanted, wanted.quantity, wanted.price, "market" if style == "market" else "immediate")

    def _sent(self, wanted: Wanted) -> int:
        """Orders that were sent for this decision."""
        key = wanted.bar_ms, wanted.symbol, wanted.flatten
        return sum((each.bar, each.symbol, each.flatten) == key for each in self.ledger.state.intents.values())

    def _send_rest(self, wanted: Wanted, left: Decimal) -> None:
        """Send at once what is left, at the price that the venue has now."""
        price = self._price_now(wanted) if left else None
        if price is None:
            return
        rules = wanted.rules
        enough = wanted.reduce_only or abs(left) * Decimal(repr(price)) >= rules.min_notional
        if enough and abs(left) >= rules.min_quantity:
            self._send_part(wanted, left, price, "immediate")

    def _send_slices(self, wanted: Wanted) -> None:
        """Send slices at equal distances, each with what the ones before have left undone."""
        slices = slices_of(wanted.quantity, self.config.slices, wanted.price, wanted.rules)
        began, due = self.clock.now(), Decimal(0)
        for place, part in enumerate(slices):
            due += part
            self._wait(wanted, began + round(1000 * wanted.seconds * place / len(slices)), self.config.poll_s)
            price = self._price_now(wanted) if place else wanted.price
            if price is None:
                return
            due -= self._send_part(wanted, due, price, "immediate")

    def _price_now(self, wanted: Wanted) -> float | None:
        """The venue's price; None where it is unknown, or so far from the order's that nothing more is sent."""
        try:
            price = self.venue.prices()[wanted.symbol]
        except OutcomeUnknown as error:
            self.failed(error)
            return None
        breach = self.guards.price(wanted.symbol, wanted.price, price)
        if breach is None:
            return price
        if breach.guard not in self.ledger.state.frozen:
            self.ledger.record("freeze", guard=breach.guard, message=breach.message)
        return None

    def _may_send(self, wanted: Wanted) -> bool:
        # A fill of an earlier part may have frozen increases.
        is_frozen = bool(self.ledger.state.frozen) and not wanted.reduce_only
        is_known = not self.has_unknown(wanted.symbol)
        return is_known and not is_frozen and wanted.is_fresh() and self._may_wait(wanted)

    def _may_wait(self, wanted: Wanted) -> bool:
        return wanted.flatten or not self.kill.is_tripped()

    def _wait(self, wanted: Wanted, until_ms: int, step_s: float) -> None:
        """Wait in steps, after each of which the kill switch is read."""
        while (left := until_ms - self.clock.now()) > 0 and self._may_wait(wanted):
            self.clock.sleep(min(left / 1000, step_s))

    def _send_part(self, wanted: Wanted, quantity: Decimal, price: float, kind: OrderKind) -> Decimal:
        """Send one order and wait for its outcome; returns what was filled."""
        state, symbol, tick = self.ledger.state, wanted.symbol, wanted.rules.tick
        for _ in range(self.config.attempts):
            if not quantity or not self._may_send(wanted):
                break
            attempt = self._sent(wanted)
            name = client_id(self.run, wanted.bar_ms, symbol, attempt, flatten=wanted.flatten)
            slippage = self.guards.config.slippage
            limit = (
                resting_price(quantity, price, tick)
                if kind == "resting"
                else limit_price(quantity, price, slippage, tick)
            )
            sent = self.clock.now() + self.clock_offset
            self.ledger.record(
                "intent",
                id=name,
                bar=wanted.bar_ms,
                symbol=symbol,
                attempt=attempt,
                quantity=str(quantity),
                limit=str(limit),
                price=price,
                reduce_only=wanted.reduce_only,
                flatten=wanted.flatten,
                sent=sent,
                type=kind,
            )
            request = OrderRequest(name, symbol, quantity, limit, wanted.reduce_only, sent, kind)
            intent = state.intents[name]
            if not self._attempt(intent, request, wanted):
                return intent.filled
        return Decimal(0)

    def _attempt(self, intent: Intent, request: OrderRequest, wanted: Wanted) -> bool:
        """Send once; returns whether the venue refused it in a way that may pass."""
        # The last moment: the intent is on disk, and from here on the order may be on its way.
        if self.kill.is_tripped() and not intent.flatten:
            self._close(intent, "withheld: the kill switch")
            return False
        try:
            report = self.venue.place(request)
        except RateLimited as error:
            self._refused(intent, error)
            # Exchanges ban for days: the desk waits no longer than for an outcome, and obeys the kill switch meanwhile.
            pause_s = min(error.seconds, self.config.patience_s)
            self._wait(wanted, self.clock.now() + round(1000 * pause_s), PAUSE_STEP_S)
            return True
        except WrongClock as error:
            self._refused(intent, error)
            try:
                self.sync_clock()
            except OutcomeUnknown as unknown:
                self.failed(unknown)
            return True
        except Refused as error:
            self._refused(intent, error)
            self._tell_refusal(intent.symbol, error)
            return False
        except OutcomeUnknown as error:
            self.failed(error)
            self.crash_point("outcome unknown")
            self.settle(intent)
            return False
        self.crash_point("after place")
        self._refusing.discard(intent.symbol)
        self.report(intent, report)
        if intent.is_open and request.kind == "resting":
            self._rest(intent, wanted)
        if intent.is_open:
            self.settle(intent)
        return False

    def _rest(self, intent: Intent, wanted: Wanted) -> None:
        """Leave an order open for its time, unless the kill switch is tripped or its bar grows old."""
        until = self.clock.now() + round(1000 * wanted.seconds)
        while intent.is_open and self.clock.now() < until and self._may_wait(wanted) and wanted.is_fresh():
            asked_at = min(until, self.clock.now() + round(1000 * self.retry_s))
            self._wait(wanted, asked_at, self.config.poll_s)
            try:
                report = self.venue.find(intent.client_id, intent.symbol)
            except (OutcomeUnknown, Refused) as error:
                self.failed(error)
                continue
            self.answered()
            if report is not None:
                self.report(intent, report)

    def settle(self, intent: Intent) -> None:
        """Ask for the outcome of an order until it is known or the patience ends."""
        deadline = self.clock.now() + round(1000 * self.config.patience_s)
        window = self.venue.receive_window_ms + round(1000 * self.config.visible_s)
        while intent.is_open:
            try:
                # The clock first: an answer is only proof of absence if the question came after the window.
                has_passed = min(self.venue.time() - intent.sent_ms, self.clock.now() - intent.written_ms) > window
                report = self.venue.find(intent.client_id, intent.symbol)
                if report is not None:
                    self.report(intent, report)
                    if report.open:
                        # Its time is over. It is withdrawn, and asked for again.
                        self.venue.cancel(intent.client_id, intent.symbol)
                        if self.kill.is_tripped():
                            self.cancelled.add(intent.client_id)
                elif has_passed:
                    self._close(intent, "lost: the venue never took it")
                self.answered()
            except (OutcomeUnknown, Refused) as error:
                self.failed(error)
            if intent.is_open:
                left = deadline - self.clock.now()
                if left <= 0:
                    return
                self.clock.sleep(min(self.retry_s, left / 1000))

    def report(self, intent: Intent, report: OrderReport) -> None:
        """Take in what the venue says of an order; a report that is older than what is known changes nothing."""
        if abs(report.filled) < abs(intent.filled):
            return
        ended = not intent.is_open and report.open
        if ended or (report.filled == intent.filled and report.open == intent.is_open and intent.outcome != "sent"):
            return
        outcome = "open" if report.open else "filled" if report.filled == intent.quantity else "partly filled"
        outcome = "expired" if not report.open and not report.filled else outcome
        self.ledger.record(
            "order",
            id=intent.client_id,
            filled=str(report.filled),
            price=report.price,
            open=report.open,
            outcome=outcome,
        )
        breach = self.guards.fill(intent.symbol, intent.price, report.price)
        if breach is not None and breach.guard not in self.ledger.state.frozen:
            self.ledger.record("freeze", guard=breach.guard, message=breach.message)

    def _refused(self, intent: Intent, error: Refused) -> None:
        self._close(intent, f"refused: {error}")
        self._error(error)

    def _tell_refusal(self, symbol: str, error: Refused) -> None:
        """An alarm, once for all orders of a symbol until one is taken: nobody sees that nothing is traded."""
        if symbol not in self._refusing:
            self._refusing.add(symbol)
            self.ledger.record("alarm", guard="refused", message=f"{symbol}: the venue refuses our orders: {error}")

    def _close(self, intent: Intent, outcome: str) -> None:
        self.ledger.record(
            "order",
            id=intent.client_id,
            filled=str(intent.filled),
            price=intent.fill_price,
            open=False,
            outcome=outcome,
        )

    def _error(self, error: Exception) -> None:
        self.ledger.record("error", message=f"{type(error).__name__}: {error}")
