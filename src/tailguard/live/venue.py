"""What trading needs of a venue: a small interface that a paper venue and an exchange both have, and its errors.

The errors say what is known about an order: `Refused` means that the venue has not taken it, `OutcomeUnknown` that it
may have. The difference decides whether anything may be sent again.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from decimal import Decimal
from typing import Literal, Protocol


class VenueError(Exception):
    """A call to the venue failed."""


class OutcomeUnknown(VenueError):
    """No answer, or none that says anything: the venue may or may not have acted."""


class DuplicateOrder(OutcomeUnknown):
    """The venue has an order with this client id: it may be this very one."""


class ServerFailed(OutcomeUnknown):
    """The venue answered with an error of its own, and may have acted before it."""


class Refused(VenueError):
    """The venue answered that it has not acted."""


class RateLimited(Refused):
    """Refused because of too many requests; `seconds` to wait."""

    def __init__(self, message: str, seconds: float) -> None:
        super().__init__(message)
        self.seconds = seconds


class WrongClock(Refused):
    """Refused because the request's time is not the venue's."""


@dataclass(frozen=True)
class Instrument:
    """Rules of the venue for the orders of one symbol."""

    symbol: str
    lot: Decimal
    """Quantities are multiples of it."""
    tick: Decimal
    """Prices are multiples of it."""
    min_quantity: Decimal = Decimal(0)
    min_notional: Decimal = Decimal(0)
    """Smallest quantity times price, in the quote currency."""


OrderKind = Literal["immediate", "market", "resting"]
"""immediate: filled at once up to its limit price, what is left expires. market: filled at once at any price.
resting: what is not filled at once stays open at its limit price until it is cancelled."""


@dataclass(frozen=True)
class OrderRequest:
    """An order, as it is sent."""

    client_id: str
    symbol: str
    quantity: Decimal
    """Above 0 buys, below 0 sells."""
    limit: Decimal
    reduce_only: bool
    sent_ms: int
    """Our estimate of the venue's clock; the venue refuses a request that arrives `receive_window_ms` after it."""
    kind: OrderKind = "immediate"


@dataclass(frozen=True)
class OrderReport:
    """What the venue says of an order."""

    client_id: str
    symbol: str
    quantity: Decimal
    filled: Decimal
    """Signed as the quantity."""
    price: float
    """Average price of the fills; 0 without one."""
    open: bool
    """Whether more can still be filled."""


@dataclass(frozen=True)
class ForcedTrade:
    """A trade that the venue made against our account's will: a liquidation."""

    number: int
    """Unique, and rising with time."""
    symbol: str
    quantity: Decimal


@dataclass(frozen=True)
class VenueAccount:
    """Cash and positions; equity at any prices is cash + Σ quantity · price."""

    cash: float
    positions: Mapping[str, Decimal]

    def equity(self, prices: Mapping[str, float]) -> float:
        """In the quote currency. Positions in symbols without a price are part of the cash."""
        held = [float(self.positions[symbol]) * price for symbol, price in prices.items() if symbol in self.positions]
        return self.cash + sum(held)


class Venue(Protocol):
    """Every call may raise `OutcomeUnknown`; those that act may raise `Refused`."""

    receive_window_ms: int
    """A request that is this late is refused; one that was not seen by then never will be."""

    def time(self) -> int:
        """The venue's clock, milliseconds UTC."""
        ...

    def instruments(self) -> Mapping[str, Instrument]:
        """The rules of now: venues change them."""
        ...

    def prices(self) -> Mapping[str, float]:
        """Prices at which orders would trade now, without costs."""
        ...

    def account(self) -> VenueAccount: ...

    def place(self, order: OrderRequest) -> OrderReport: ...

    def find(self, client_id: str, symbol: str) -> OrderReport | None:
        """The order with this client id; None if the venue does not know it (yet)."""
        ...

    def orders(self, since_ms: int) -> list[OrderReport]:
        """Every order of the account since a time, whoever placed it."""
        ...

    def cancel(self, client_id: str, symbol: str) -> None:
        """Cancel an order; nothing happens where it is not open."""
        ...

    def forced_trades(self, after: int) -> list[ForcedTrade]:
        """Liquidations with a number above `after`."""
        ...


class Clock(Protocol):
    """Our own clock: of the machine, or a simulated one."""

    def now(self) -> int:
        """Milliseconds UTC."""
        ...

    def sleep(self, seconds: float) -> None: ...

    def wait_until(self, time_ms: int) -> None: ...


class SystemClock:
    """The machine's clock."""

    def now(self) -> int:
        return round(time.time() * 1000)

    def sleep(self, seconds: float) -> None:
        time.sleep(seconds)

    def wait_until(self, time_ms: int) -> None:
        time.sleep(max(0.0, (time_ms - self.now()) / 1000))


class SimulatedClock:
    """A clock that moves only when somebody waits; `observers` are told every new time."""

    def __init__(self, start_ms: int) -> None:
        self._now = start_ms
        self.observers: list[Callable[[int], None]] = []

    def now(self) -> int:
        return self._now

    def sleep(self, seconds: float) -> None:
        self.wait_until(self._now + round(seconds * 1000))

    def wait_until(self, time_ms: int) -> None:
        if time_ms > self._now:
            self._now = time_ms
            for observer in self.observers:
                observer(time_ms)
