"""A population in the terminal: a live table of its members, or a line a round where there is no terminal."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager

from rich.console import Console
from rich.live import Live
from rich.table import Table

from tailguard.console import say
from tailguard.monitor.writers import number
from tailguard.population.evolution import RoundReport
from tailguard.population.executor import Value
from tailguard.population.lineage import Lineage
from tailguard.population.pbt import Move, ranked
from tailguard.runs.validation import signed

ROWS = 16
"""Members shown; the best of more."""


class Screen:
    """Shows rounds as they end. `limit`: of the budget that members are judged by; None: there is none."""

    def __init__(self, console: Console, live: Live | None, limit: float | None = None) -> None:
        self.console, self.live, self.limit = console, live, limit

    def show(self, report: RoundReport) -> None:
        """A round that has just ended."""
        if self.live is not None:
            self.live.update(table_of(report.lineage, self.limit, tails_of(report)), refresh=True)
        else:
            say(self.console, line_of(report))


@contextmanager
def shown_population(lineage: Lineage, console: Console, limit: float | None = None) -> Iterator[Screen]:
    """A screen for as long as it is entered."""
    if not console.is_terminal:
        yield Screen(console, None)
        return
    with Live(table_of(lineage, limit), console=console, auto_refresh=False) as live:
        yield Screen(console, live, limit)


def tails_of(report: RoundReport) -> dict[int, float]:
    """CVaR on validation by member, as far as it was judged."""
    last = {each.member: each.metrics[-1] for each in report.outcomes if each.metrics}
    return {member: metrics["eval/cvar"] for member, metrics in last.items() if "eval/cvar" in metrics}


def line_of(report: RoundReport) -> str:
    """A round in a line."""
    last = report.lineage.rounds[-1]
    order = ranked(last.standings)
    alive = [each for each in order if not each.failed]
    moves = len(last.decision.moves)
    words = f"best {order[0].score:+.3f} (member {order[0].member})" if alive else "no member is left"
    words += f" · median {alive[len(alive) // 2].score:+.3f}" if alive else ""
    changed = f" · {moves} take over another's state" if moves else ""
    failed = f" · {len(order) - len(alive)} failed" if len(alive) < len(order) else ""
    stopped = f" · {len(last.decision.stopped)} stop" if last.decision.stopped else ""
    return f"round    {report.number} of {report.lineage.settings.rounds} · {words}{changed}{failed}{stopped}"


def table_of(lineage: Lineage, limit: float | None = None, tails: Mapping[int, float] | None = None) -> Table:
    """The members after the last round, best first. `tails`: CVaR on validation by member, shown beside the limit."""
    names, settings = lineage.space.names, lineage.settings
    done = len(lineage.rounds)
    step = f" · step {lineage.rounds[-1].step:,}" if done else ""
    table = Table(
        title=f"round {done} of {settings.rounds}{step} · {settings.members} members · {settings.strategy}",
        title_justify="left",
    )
    tail = [] if limit is None else [f"CVaR, limit {signed(100 * limit)} %"]
    for heading in ("member", f"{settings.metric} on validation", *tail, "from", "rounds"):
        table.add_column(heading, justify="right")
    for name in names:
        table.add_column(name.partition(".")[2], justify="right")
    if not lineage.rounds:
        table.caption = "the first round is under way"
        return table
    moves = {move.member: move for finished in lineage.rounds[-2:-1] for move in finished.decision.moves}
    order = ranked(lineage.rounds[-1].standings)
    for each in order[:ROWS]:
        score = "failed" if each.failed else f"{each.score:+.3f}"
        cells = [str(each.member), score]
        if limit is not None:
            tail_of = (tails or {}).get(each.member)
            cells.append("–" if tail_of is None else f"{signed(100 * tail_of)} %")
        cells += [_origin(moves.get(each.member)), str(each.age)]
        table.add_row(*cells, *(shown(each.hyper[name]) for name in names))
    if len(order) > ROWS:
        table.caption = f"and {len(order) - ROWS} more"
    return table


def _origin(move: Move | None) -> str:
    """Whose state a member went on from; "restarted" where its own had failed."""
    if move is None:
        return "–"
    return f"{move.parent}, restarted" if move.reason == "replace" else str(move.parent)


def shown(value: Value) -> str:
    """A searched value in a few characters."""
    return str(value) if isinstance(value, str | bool) else number(float(value))


def in_words(values: Sequence[tuple[str, Value]]) -> str:
    """Values with their names, as `pathwise.learning_rate 0.01`."""
    return ", ".join(f"{name} {shown(value)}" for name, value in values)
