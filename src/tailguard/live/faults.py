"""Faults of a venue, drawn from a seed: what a network, an exchange and other people do to a trader."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, fields
from decimal import Decimal

import numpy as np

from tailguard.live.venue import (
    OrderReport,
    OrderRequest,
    OutcomeUnknown,
    RateLimited,
    Refused,
    ServerFailed,
    VenueError,
)

LONGEST_SILENCE = 40
"""Calls that a disconnection lasts, at most."""
LATE_MS = 2_000
"""How late a venue shows an order or a position, at most."""


@dataclass(frozen=True)
class FaultRates:
    """Probabilities, for each call unless it says otherwise."""

    reply_lost: float = 0.0
    """The order was taken, the answer did not arrive."""
    request_lost: float = 0.0
    """The order did not arrive."""
    request_late: float = 0.0
    """The order arrives up to the receive window later, without an answer."""
    unavailable: float = 0.0
    """An HTTP status 5xx: the order was taken in half of the cases."""
    rate_limited: float = 0.0
    """An HTTP status 429: not taken."""
    rejected: float = 0.0
    partial_fill: float = 0.0
    """Only a share of the order is filled."""
    read_fails: float = 0.0
    """A question gets no answer."""
    late_events: float = 0.0
    """An order that was taken is not shown for up to two seconds."""
    repeated_events: float = 0.0
    """A list of orders has every order twice."""
    disconnect: float = 0.0
    """No call gets through for a while, up to `LONGEST_SILENCE` calls."""
    clock_jump: float = 0.0
    """The venue's clock jumps by up to ten seconds, either way."""
    stale_account: float = 0.0
    """Cash and positions are shown as they were up to two seconds ago."""


@dataclass(frozen=True)
class BarFaultRates:
    """Probabilities, for each bar: what happens in the market and in the account, whoever calls."""

    bar_gap: float = 0.0
    """The bar is never shown."""
    external_trade: float = 0.0
    """Somebody else trades in the account."""
    liquidation: float = 0.0
    """The venue closes all positions."""
    resting_fill: float = 0.0
    """A resting order is filled, or partly filled, at its limit."""

    def drawn(self, seed: int, row: int) -> tuple[set[str], np.random.Generator]:
        """What happens in this bar, and a generator for the details. A row has its own, so that a restart changes
        nothing."""
        draw = np.random.default_rng((seed, row))
        chances = {item.name: float(draw.random()) for item in fields(self)}
        return {name for name, chance in chances.items() if chance < getattr(self, name)}, draw


@dataclass
class Faults:
    """The faults of one venue. Without rates it has none."""

    rates: FaultRates = field(default_factory=FaultRates)
    seed: int = 0
    counts: dict[str, int] = field(default_factory=dict)
    """Faults that happened, by name."""
    clock_skew_ms: int = 0
    """The venue's clock less the true time."""

    def __post_init__(self) -> None:
        self._draw = np.random.default_rng(self.seed)
        self._silent = 0
        self._under_way: list[tuple[int, OrderRequest]] = []

    def stop(self) -> None:
        """From now on there are none."""
        self.rates, self.clock_skew_ms, self._silent = FaultRates(), 0, 0

    def before_read(self) -> None:
        """Raise where a question gets no answer."""
        self._connection()
        if self._happens("read_fails"):
            raise OutcomeUnknown("no answer")

    def around_place(
        self, order: OrderRequest, accept: Callable[[OrderRequest, int], OrderReport], now: int
    ) -> OrderReport:
        """Bring an order to the venue and its answer back, or not."""
        self._connection()
        if self._happens("request_lost"):
            raise OutcomeUnknown("connection reset")
        if self._happens("request_late"):
            self._under_way.append((now + int(self._draw.integers(0, 5_000)), order))
            raise OutcomeUnknown("timed out")
        if self._happens("rate_limited"):
            raise RateLimited("429 too many requests", float(self._draw.integers(1, 4)))
        if self._happens("rejected"):
            raise Refused("margin is insufficient")
        if self._happens("unavailable"):
            if self._draw.random() < 0.5:
                self._try(accept, order, now)
            raise ServerFailed("503 service unavailable")
        if self._happens("reply_lost"):
            self._try(accept, order, now)
            raise OutcomeUnknown("timed out")
        return accept(order, now)

    def is_event_late(self) -> bool:
        """Whether an event of a stream arrives after the one that follows it."""
        return self._happens("late_events")

    def event_copies(self) -> int:
        """How often an event of a stream arrives."""
        return 2 if self._happens("repeated_events") else 1

    @property
    def is_silent(self) -> bool:
        """Whether the connection is down."""
        return self._silent > 0

    def arrived(self, now: int) -> list[tuple[int, OrderRequest]]:
        """Orders that were under way and have arrived by now, with the time of their arrival."""
        there = sorted((each for each in self._under_way if each[0] <= now), key=lambda each: each[0])
        self._under_way = [each for each in self._under_way if each[0] > now]
        return there

    def is_hidden(self, accepted_ms: int, now: int) -> bool:
        return now < accepted_ms + LATE_MS and self._happens("late_events")

    def is_account_stale(self) -> bool:
        """Whether cash and positions are shown as they were a moment ago."""
        return self._happens("stale_account")

    def repeated(self, reports: Sequence[OrderReport]) -> list[OrderReport]:
        if self._happens("repeated_events"):
            return [report for report in reports for _ in range(2)]
        return list(reports)

    def partial(self, quantity: Decimal, lot: Decimal) -> Decimal:
        if not self._happens("partial_fill"):
            return quantity
        share = Decimal(repr(float(self._draw.random())))
        return (abs(quantity) * share // lot * lot).copy_sign(quantity)

    def _connection(self) -> None:
        if self._happens("clock_jump"):
            self.clock_skew_ms = int(self._draw.integers(-10_000, 10_000))
        if self._happens("disconnect"):
            self._silent = int(self._draw.integers(1, LONGEST_SILENCE + 1))
        if self._silent:
            self._silent -= 1
            raise OutcomeUnknown("network is unreachable")

    def _try(self, accept: Callable[[OrderRequest, int], OrderReport], order: OrderRequest, now: int) -> None:
        try:
            accept(order, now)
        except VenueError:
            return

    def _happens(self, name: str) -> bool:
        rate = getattr(self.rates, name)
        if not rate or self._draw.random() >= rate:
            return False
        self.counts[name] = self.counts.get(name, 0) + 1
        return True
