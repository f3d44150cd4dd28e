"""What a person sees of a session in a terminal."""

from __future__ import annotations

from datetime import UTC, datetime

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from tailguard.live.journal import Record
from tailguard.live.session import Session


def render(session: Session) -> RenderableType:
    """Position, target, equity, budget used, distance to the guards, age of the last bar and the last decision."""
    state, config, now = session.ledger.state, session.config, session.clock.now()
    decision = state.last_decision
    head = Table.grid(padding=(0, 2))
    head.add_row("session", config.run)
    head.add_row("mode", config.mode)
    if decision is None:
        head.add_row("state", "waiting for the first bar")
        return head
    equity = decision["equity"]
    closed = decision["bar"] + config.bar_ms
    head.add_row("last bar", f"{_moment(closed)} UTC, closed {max(0, now - closed) / 1000:,.0f} s ago")
    head.add_row("equity", f"{equity:.4f}, {equity * config.capital:,.2f} in money")
    head.add_row("decision", "closes all: features warm up" if decision["flat"] else _decision(decision))
    open_orders = len(state.open_intents)
    head.add_row("orders", f"{open_orders} with an unknown outcome" if open_orders else "all known")
    positions = Table("symbol", "weight", "target", "ours", "not ours")
    for place, symbol in enumerate(config.symbols):
        positions.add_row(
            symbol,
            f"{decision['weights'][place]:+.4f}",
            f"{decision['target'][place]:+.4f}",
            f"{float(state.ours[symbol]):+g}",
            f"{float(state.foreign[symbol]):+g}" if state.foreign[symbol] else "",
        )
    limits = Table("guard", "used", "")
    for name, share in session.guards.distances(equity, state, now).items():
        limits.add_row(name, f"{share:.0%}", _meter(share))
    alarms = [Text(f"{guard}: {message}", style="bold red") for guard, message in state.frozen.items()]
    if alarms:
        alarms.insert(0, Text("increases are frozen until a person runs this command with --release", style="red"))
    if state.killed is not None:
        alarms.insert(0, Text(f"killed: {state.killed}", style="bold red"))
    return Group(head, positions, limits, *alarms)


def line(session: Session) -> str:
    """The session in one line, where there is no terminal."""
    state, decision = session.ledger.state, session.ledger.state.last_decision
    if decision is None:
        return f"{session.config.run}: no decision yet"
    frozen = f", frozen by {', '.join(state.frozen)}" if state.frozen else ""
    target = ", ".join(f"{weight:+.4f}" for weight in decision["target"])
    return f"{_moment(decision['bar'])}  equity {decision['equity']:.6f}  target {target}{frozen}"


def _decision(decision: Record) -> str:
    text = f"made at the close of the bar of {_moment(decision['bar'])}"
    if decision["throttle"] < 1:
        text += f", throttled to {decision['throttle']:.0%}"
    return text + (", reduced by the shield" if decision["shielded"] else "")


def _meter(share: float, width: int = 20) -> Text:
    full = min(width, round(width * max(share, 0.0)))
    return Text("█" * full + "·" * (width - full), style="red" if share > 0.8 else "green")


def _moment(time_ms: int) -> str:
    return datetime.fromtimestamp(time_ms / 1000, UTC).strftime("%Y-%m-%d %H:%M")
