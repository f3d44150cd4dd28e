"""Keeps the terminal and the page up to date while a session trades."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from rich.console import Console
from rich.live import Live

from tailguard.live.bar_history import BarSource, LiveBar
from tailguard.live.journal import Record
from tailguard.live.page_server import PageServer
from tailguard.live.screen import render
from tailguard.live.session import Session
from tailguard.live.view import View, session_view

PAUSE_S = 0.25
"""Least time between two drawings; what blocks trading is drawn at once."""
URGENT = ("freeze", "kill", "alarm", "release", "stop")


@dataclass
class Display:
    """Everything that shows the session. Only the session's own thread may call it."""

    session: Session
    command: str
    """What a person runs to go on after a freeze or a kill."""
    outputs: list[Callable[[View], None]] = field(default_factory=list)
    _drawn: float = -1e9
    _waited: float = -1e9

    def refresh(self, *, at_once: bool = False) -> None:
        """Draw the session as it is now, unless it was drawn a moment ago."""
        now = time.monotonic()
        if not self.outputs or (now - self._drawn < PAUSE_S and not at_once):
            return
        self._drawn = now
        view = session_view(self.session, self.command)
        for output in self.outputs:
            output(view)

    def before_waiting(self) -> None:
        """Draw before a wait, however short ago a line of the journal was drawn: what followed it is news, too."""
        now = time.monotonic()
        if now - self._waited >= PAUSE_S:
            self._waited = now
            self.refresh(at_once=True)

    def hear(self, record: Record) -> None:
        """A listener of the ledger."""
        self.refresh(at_once=record["kind"] in URGENT)


@contextmanager
def shown(session: Session, command: str, console: Console, page: PageServer | None) -> Iterator[Display]:
    """Show the session in a terminal and on a page, as far as there are any; its last state stays in the terminal."""
    display = Display(session, command)
    session.ledger.listeners.append(display.hear)
    if page is not None:
        display.outputs.append(page.publish)
    try:
        if not console.is_terminal:
            display.refresh(at_once=True)
            yield display
            return
        with Live(render(session_view(session, command)), console=console, auto_refresh=False) as screen:
            display.outputs.append(lambda view: screen.update(render(view), refresh=True))
            display.refresh(at_once=True)
            yield display
            display.refresh(at_once=True)
    finally:
        session.ledger.listeners.remove(display.hear)


@dataclass
class WatchedSource:
    """A source of bars that calls `beat` before it waits for the next bar."""

    source: BarSource
    beat: Callable[[], None]

    def next_bar(self) -> LiveBar | None:
        self.beat()
        return self.source.next_bar()
