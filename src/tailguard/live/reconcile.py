"""Reconciliation: the venue's truth is adopted, and every difference from our books is explained or raises an alarm.

    position at the venue = ours + foreign

Ours is what our orders filled, less liquidations. A difference that neither explains freezes every increase. What
somebody else added is foreign and is never traded; what somebody else took from our position is no longer ours.

Exchanges show positions late. A difference is therefore asked for again until an order would be visible, and one that
goes away later gives the position back: as somebody else's it would be left alone and bought a second time.
"""

from __future__ import annotations

from decimal import Decimal

from tailguard.live.orders import PREFIX, OrderDesk
from tailguard.live.session_state import DAY_MS, ZERO, LiveState, divide_position
from tailguard.live.venue import VenueAccount

OVERLAP_MS = 600_000
"""How far before the last list of orders the next one begins: an exchange may show an order late."""


def reconcile(desk: OrderDesk) -> VenueAccount:
    """Bring the books in line with the venue; raises `OutcomeUnknown` while it cannot be asked."""
    state = desk.ledger.state
    for intent in state.open_intents:
        desk.settle(intent)
    until: float | None = None
    while True:
        _take_in_orders(desk)
        _take_in_liquidations(desk)
        account = desk.venue.account()
        differing = [symbol for symbol in state.ours if _differs(desk, account, symbol)]
        now = desk.clock.now()
        until = now + 1000 * desk.config.visible_s if until is None else until
        if not differing or now >= until:
            break
        desk.clock.sleep(min(desk.config.poll_s, (until - now) / 1000))
    for symbol in differing:
        _adopt(desk, symbol, account.positions.get(symbol, ZERO))
    return account


def _take_in_orders(desk: OrderDesk) -> None:
    """What the venue says of our orders; one with our mark that we do not know freezes increases."""
    state, ledger, venue = desk.ledger.state, desk.ledger, desk.venue
    started = 0 if state.started is None else int(state.started["time"]) + desk.clock_offset
    now = venue.time()
    # An order whose outcome is known does not change, and what was listed is known. A new process looks back a day.
    since = now - DAY_MS if desk.listed_ms is None else desk.listed_ms - OVERLAP_MS
    since = min([since, *(intent.sent_ms - OVERLAP_MS for intent in state.open_intents)])
    for report in venue.orders(max(since, started)):
        known = state.intents.get(report.client_id)
        if known is not None:
            desk.report(known, report)
        elif (
            report.client_id.startswith(PREFIX) and report.symbol in state.ours and "unknown_order" not in state.frozen
        ):
            message = f"{report.symbol}: the order {report.client_id} is not in the journal"
            ledger.record("freeze", guard="unknown_order", message=message)
    desk.listed_ms = now


def _take_in_liquidations(desk: OrderDesk) -> None:
    state = desk.ledger.state
    for trade in desk.venue.forced_trades(state.forced):
        if trade.symbol in state.ours:
            desk.ledger.record("forced", number=trade.number, symbol=trade.symbol, quantity=str(trade.quantity))
            desk.kill.trip(f"{trade.symbol}: the venue liquidated {plain(-trade.quantity)}")


def _differs(desk: OrderDesk, account: VenueAccount, symbol: str) -> bool:
    """Whether the venue's position is not that of the books, and no order under way may be the reason."""
    state = desk.ledger.state
    expected = state.ours[symbol] + state.foreign[symbol]
    return account.positions.get(symbol, ZERO) != expected and not desk.has_unknown(symbol)


def _adopt(desk: OrderDesk, symbol: str, found: Decimal) -> None:
    """Take over the venue's position, which our orders do not explain, and freeze increases."""
    state, ledger = desk.ledger.state, desk.ledger
    ours, foreign = _divided(state, symbol, found)
    message = (
        f"{symbol}: the venue has {plain(found)}, our orders explain {plain(state.ours[symbol])} and "
        f"{plain(state.foreign[symbol])} was not ours; now {plain(ours)} is ours and {plain(foreign)} is not"
    )
    # Journalled every time, also where the guard has tripped before: each difference is an event of its own.
    ledger.record("freeze", guard="position", message=message)
    ledger.record("adopt", symbol=symbol, ours=str(ours), foreign=str(foreign))


def _divided(state: LiveState, symbol: str, found: Decimal) -> tuple[Decimal, Decimal]:
    """What of the venue's position is ours and what is not: as before, where the difference has gone away."""
    before = state.disputed.get(symbol)
    if before is not None and sum(before) == found:
        return before
    return divide_position(found, state.ours[symbol])


def plain(quantity: Decimal) -> str:
    """A quantity for a person: without an exponent and without zeros at its end."""
    return f"{quantity.normalize():f}"
