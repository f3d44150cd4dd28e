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


def reconcile(desk: OrderDesk) -> VenueAccount:
    """Bring the books in line with the venue; raises `OutcomeUnknown` while it cannot be asked."""
    state, ledger, venue = desk.ledger.state, desk.ledger, desk.venue
    for intent in state.open_intents:
        desk.settle(intent)
    started = 0 if state.started is None else int(state.started["time"]) + desk.clock_offset
    for report in venue.orders(max(venue.time() - DAY_MS, started)):
        known = state.intents.get(report.client_id)
        if known is not None:
            desk.report(known, report)
        elif (
            report.client_id.startswith(PREFIX) and report.symbol in state.ours and "unknown_order" not in state.frozen
        ):
            message = f"{report.symbol}: the order {report.client_id} is not in the journal"
            ledger.record("freeze", guard="unknown_order", message=message)
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
