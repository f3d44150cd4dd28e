"""What a person sees of a session in a terminal."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from tailguard.live.session import Session
from tailguard.live.view import View

ALARMS = 5
"""Past alarms that are shown, the newest first."""


def render(view: View) -> RenderableType:
    """Position, target, equity, budget used, distance to the guards, age of the last bar and the last decision.

    What blocks trading comes first: a small terminal cuts off the end.
    """
    head = Table.grid(padding=(0, 2))
    head.add_row("session", view["run"])
    head.add_row("mode", view["mode"])
    if view["decision"] is None:
        head.add_row("state", "waiting for the first bar")
        return Group(*_blocked(view), head, *_alarms(view))
    head.add_row("state", Text(view["state"], style="bold red" if view["state"] in ("frozen", "killed") else ""))
    head.add_row("last bar", f"{moment(view['closed_ms'])} UTC, closed {view['age_s']:,.0f} s ago")
    head.add_row("equity", f"{view['equity']:.4f}" + ("" if view["simulated"] else f", {view['money']:,.2f} in money"))
    head.add_row("decision", decision_text(view["decision"]))
    for symbol, found in view["moved"].items():
        head.add_row("moved by", Text(moved_text(symbol, found)))
    open_orders = len(view["orders"])
    known = "none, as the account is simulated" if view["simulated"] else "the outcome of every order is known"
    head.add_row("orders", f"{open_orders} with an unknown outcome" if open_orders else known)
    columns = ["symbol", "weight at the close", "target", *([] if view["simulated"] else ["ours", "not ours"])]
    positions = Table(*columns, box=None, padding=(0, 2, 0, 0))
    for row in view["positions"]:
        target = "held" if row["target"] is None else f"{row['target']:+.4f}"
        sizes = [] if view["simulated"] else [f"{row['ours']:+g}", f"{row['foreign']:+g}" if row["foreign"] else ""]
        positions.add_row(Text(row["symbol"]), f"{row['weight']:+.4f}", target, *sizes)
    limits = Table("limit", "used", "", box=None, padding=(0, 2, 0, 0))
    budget = view["budget"]
    if budget is not None:
        limits.add_row(f"budget, bar {budget['age']} of {budget['window']}", *_used(budget["used"]))
    for row in view["limits"]:
        limits.add_row(row["name"], *_used(row["used"]))
    return Group(*_blocked(view), head, "", positions, "", limits, *_alarms(view))


def line(session: Session) -> str:
    """The session in one line, where there is no terminal."""
    state, decision = session.ledger.state, session.ledger.state.last_decision
    if decision is None:
        return f"{session.config.run}: no decision yet"
    frozen = f", frozen by {', '.join(state.frozen)}" if state.frozen else ""
    target = ", ".join(f"{weight:+.4f}" for weight in decision["target"])
    return f"{moment(decision['bar'])}  equity {decision['equity']:.6f}  target {target}{frozen}"


def decision_text(decision: dict[str, Any]) -> str:
    """When the decision was made and what reduced it."""
    if decision["flat"]:
        return "closes all: features warm up"
    text = f"made at the close of {moment(decision['made_ms'])}"
    if decision["throttle"] < 1:
        text += f", throttled to {decision['throttle']:.0%}"
    return text + (", reduced by the shield" if decision["shielded"] else "")


def moved_text(symbol: str, found: dict[str, Any], most: int = 3) -> str:
    """The inputs that moved a weight the most, each with its size in standard deviations from its mean."""
    parts = [f"{name} {share:+.3f} (at {size:+.1f} sd)" for name, share, size in found["moved"][:most]]
    return f"{symbol} {found['weight']:+.3f} = {found['typical']:+.3f} typical, {', '.join(parts)}, …"


def _alarms(view: View) -> list[Text]:
    """The last alarms that block nothing, or no longer."""
    told = [alarm for alarm in view["alarms"] if not alarm["active"]][:ALARMS]
    lines = [Text(f"{moment(alarm['time_ms'])} UTC  {alarm['guard']}: {alarm['message']}") for alarm in told]
    return [Text(""), *lines] if lines else []


def _blocked(view: View) -> list[Text]:
    """What blocks trading, and how to go on."""
    since = {guard: f" (since {moment(time_ms)} UTC)" for guard, time_ms in view["since"].items()}
    lines = [Text(f"{guard}: {message}{since[guard]}", style="bold red") for guard, message in view["frozen"].items()]
    if lines:
        lines.insert(0, Text(f"increases are frozen until a person runs {view['command']}", style="red"))
    if view["killed"] is not None:
        lines.insert(0, Text(f"killed: {view['killed']}{since['kill']}", style="bold red"))
        lines.append(Text(f"nothing is sent until a person runs {view['command']}", style="red"))
    return lines


def _used(share: float, width: int = 20) -> tuple[str, Text]:
    full = min(width, round(width * max(share, 0.0)))
    return f"{share:.0%}", Text("█" * full + "·" * (width - full), style="red" if share > 0.8 else "green")


def moment(time_ms: int) -> str:
    return datetime.fromtimestamp(time_ms / 1000, UTC).strftime("%Y-%m-%d %H:%M")
