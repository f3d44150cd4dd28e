"""What a person is shown of a session, as plain data: the terminal and the page draw the same."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tailguard.live.journal import Record
from tailguard.live.session import Session
from tailguard.live.session_state import Intent, LiveState

ALARMS = 20
"""Alarms that are shown, the newest first."""
View = Mapping[str, Any]


def session_view(session: Session, command: str) -> dict[str, Any]:
    """The session now. JSON-serialisable; it holds nothing of the session's own objects.

    `command`: what a person runs to go on after a freeze or a kill.
    """
    state, config, now = session.ledger.state, session.config, session.clock.now()
    decision = state.last_decision
    view: dict[str, Any] = {
        "run": config.run,
        "mode": config.mode,
        "simulated": session.desk is None,
        "state": _state_of(state),
        "now_ms": now,
        "command": command,
        "killed": state.killed,
        "frozen": dict(state.frozen),
        "since": dict(state.since),
        "alarms": [_alarm(record, state) for record in reversed(state.alarms)][:ALARMS],
        "orders": [_order(intent) for intent in state.open_intents],
        "decision": None,
    }
    if decision is None:
        return view
    equity = decision["equity"]
    closed = decision["bar"] + config.bar_ms
    return view | {
        "closed_ms": closed,
        "age_s": max(0, now - closed) / 1000,
        "equity": equity,
        "money": equity * config.capital,
        "drawdown": session.guards.drawdown(equity, state),
        "curve": [[opened + config.bar_ms, *equities] for opened, *equities in state.curve.points],
        "curve_stride": state.curve.stride,
        "positions": [
            {
                "symbol": symbol,
                "weight": decision["weights"][place],
                "target": _number(decision["target"][place]),
                "ours": float(state.ours[symbol]),
                "foreign": float(state.foreign[symbol]),
            }
            for place, symbol in enumerate(config.symbols)
        ],
        "limits": [
            {"name": name, "used": share} for name, share in session.guards.distances(equity, state, now).items()
        ],
        "budget": _budget(session, equity),
        "decision": {
            "made_ms": closed,
            "flat": decision["flat"],
            "throttle": decision.get("throttle", 1.0),
            "shielded": decision.get("shielded", False),
        },
        "moved": _moved(state),
    }


def _state_of(state: LiveState) -> str:
    if state.killed is not None:
        return "killed"
    if state.ended:
        return "ended"
    if state.frozen:
        return "frozen"
    return "waiting" if state.last_decision is None else "trading"


def _alarm(record: Record, state: LiveState) -> dict[str, Any]:
    """`active`: whether it still blocks something."""
    guard = record.get("guard", "kill")
    active = guard in state.frozen if record["kind"] == "freeze" else record["kind"] == "kill" and bool(state.killed)
    return {
        "time_ms": record["time"],
        "kind": record["kind"],
        "guard": guard,
        "message": record["message"],
        "active": active,
    }


def _order(intent: Intent) -> dict[str, Any]:
    return {
        "symbol": intent.symbol,
        "quantity": str(intent.quantity),
        "sent_ms": intent.written_ms,
        "id": intent.client_id,
    }


def _budget(session: Session, equity: float) -> dict[str, Any] | None:
    """The window that is open and the share of the budget that it has lost; None for an agent without a budget."""
    state, limit = session.ledger.state, session.guards.config.cvar_limit
    if limit >= 0 or not state.equities:
        return None
    change = equity / state.equities[0] - 1
    return {
        "limit": limit,
        "change": change,
        "used": max(0.0, change / limit),
        "age": len(state.equities) - 1,
        "window": session.config.window,
    }


def _moved(state: LiveState) -> dict[str, Any]:
    """What moved the last decision, by symbol; empty where it is not explained."""
    decision, found = state.last_decision, state.explanation
    return dict(found["moved"]) if found and decision and found["bar"] == decision["bar"] else {}


def _number(value: float) -> float | None:
    """None for a weight that is held as it is."""
    return value if value == value else None
