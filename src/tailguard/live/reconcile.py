"""Reconciliation: the venue's truth is adopted, and every difference from our books is explained or raises an alarm.

    position at the venue = ours + foreign

Ours is what our orders filled, less liquidations. A difference that neither explains freezes every increase. What
somebody else added is foreign and is never traded; what somebody else took from our position is no longer ours.
"""

from __future__ import annotations

from decimal import Decimal

from tailguard.live.orders import PREFIX, OrderDesk
from tailguard.live.session_state import DAY_MS, ZERO, divide_position
from tailguard.live.venue import VenueAccount

OVERLAP_MS = 600_000
"""How far before the last list of orders the next one begins: an exchange may show an order late."""


def reconcile(desk: OrderDesk) -> VenueAccount:
    """Bring the books in line with the venue; raises `OutcomeUnknown` while it cannot be asked."""
    state, ledger, venue = desk.ledger.state, desk.ledger, desk.venue
    for intent in state.open_intents:
        desk.settle(intent)
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
    for trade in venue.forced_trades(state.forced):
        if trade.symbol in state.ours:
            ledger.record("forced", number=trade.number, symbol=trade.symbol, quantity=str(trade.quantity))
            desk.kill.trip(f"{trade.symbol}: the venue liquidated {plain(-trade.quantity)}")
    account = venue.account()
    for symbol in state.ours:
        found = account.positions.get(symbol, ZERO)
        expected = state.ours[symbol] + state.foreign[symbol]
        if found == expected or desk.has_unknown(symbol):
            continue
        ours, foreign = divide_position(found, state.ours[symbol])
        message = (
            f"{symbol}: the venue has {plain(found)}, our orders explain {plain(state.ours[symbol])} and "
            f"{plain(state.foreign[symbol])} was not ours; now {plain(ours)} is ours and {plain(foreign)} is not"
        )
        # Journalled every time, also where the guard has tripped before: each difference is an event of its own.
        ledger.record("freeze", guard="position", message=message)
        ledger.record("adopt", symbol=symbol, ours=str(ours), foreign=str(foreign))
    return account


def plain(quantity: Decimal) -> str:
    """A quantity for a person: without an exponent and without zeros at its end."""
    return f"{quantity.normalize():f}"
