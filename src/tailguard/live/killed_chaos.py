"""Chaos with real processes: the session runs in a process of its own, which the system kills with SIGKILL.

The venue, its clock and the dice stay in the parent, as an exchange stays when a trader's machine dies. The session
asks it over a pipe; each question and each stage of writing a line is a moment at which the parent may kill, and so is
any moment after an answer, wherever the session is then. Nothing of the session survives but its files.
"""

from __future__ import annotations

import os
import signal
import time
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection, Pipe
from pathlib import Path
from typing import Any

from tailguard.errors import TailguardError
from tailguard.live.bar_history import LiveBar
from tailguard.live.chaos import Chaos, Crash
from tailguard.live.session import Killed
from tailguard.live.simulation import ReplayedMarket
from tailguard.live.venue import VenueError

UNANNOUNCED_S = 0.002
"""Longest time after an answer at which an unannounced kill comes."""


def errors_by_name(kind: type[BaseException]) -> dict[str, Callable[..., BaseException]]:
    """An error and all that are made from it."""
    found: dict[str, Callable[..., BaseException]] = {kind.__name__: kind}
    for each in kind.__subclasses__():
        found |= errors_by_name(each)
    return found


ERRORS = errors_by_name(VenueError) | {each.__name__: each for each in (Killed, TailguardError)}


class KilledChaos(Chaos):
    """A schedule whose crashes are kills of a process."""

    def __init__(self, seed: int, replayed: ReplayedMarket, folder: Path) -> None:
        super().__init__(seed, replayed, folder)
        self.slowest_start_s = 0.0
        """Longest wall time from a process to its first decision or the end of its start."""

    def trade_as_a_process(self, venue: Any) -> None:
        self._run(venue, lambda child: child.trade())

    def release_as_a_process(self, venue: Any) -> None:
        self._run(venue, lambda child: child.release())

    def _run(self, venue: Any, task: Callable[[_Child], None]) -> None:
        """Fork, answer the session's questions, and end as it ended: done, killed by its switch, or killed."""
        ours, theirs = Pipe()
        begun = time.monotonic()
        process = os.fork()
        if process == 0:
            ours.close()
            _Child(self, theirs).run(task)  # does not return
        theirs.close()
        try:
            while True:
                name, arguments = ours.recv()
                if name == "started":
                    self.slowest_start_s = max(self.slowest_start_s, time.monotonic() - begun)
                if name == "ended":
                    break
                ours.send((*self._answer(venue, name, arguments), self.world.clock.now()))
                if not self.is_quiet and self.draw.random() < self.crash_rate / 2:
                    time.sleep(float(self.draw.uniform(0, UNANNOUNCED_S)))
                    self.outcome.crashes += 1
                    raise Crash
        finally:
            # Also when it has ended: nothing that it would still do may matter.
            os.kill(process, signal.SIGKILL)
            os.waitpid(process, 0)
            ours.close()
        if arguments:
            raise ERRORS[arguments[0]](arguments[1])

    def _answer(self, venue: Any, name: str, arguments: tuple[Any, ...]) -> tuple[str, Any]:
        try:
            if name == "started":
                return "value", None
            if name in ("point", "strangers_trade", "given"):
                return "value", getattr(self, name)(*arguments)
            if name in ("sleep", "wait_until"):
                return "value", getattr(self.world.clock, name)(*arguments)
            return "value", getattr(venue, name)(*arguments)
        except VenueError as error:
            return "error", (type(error).__name__, str(error), *([error.seconds] if hasattr(error, "seconds") else []))


class _Child:
    """The side of the session: its own process, with the parent's world behind a pipe."""

    def __init__(self, chaos: KilledChaos, connection: Connection) -> None:
        self.chaos, self.connection = chaos, connection
        self.time_ms = chaos.world.clock.now()

    def ask(self, name: str, *arguments: Any) -> Any:
        self.connection.send((name, arguments))
        kind, content, self.time_ms = self.connection.recv()
        if kind == "error":
            raise ERRORS[content[0]](*content[1:])
        return content

    def run(self, task: Callable[[_Child], None]) -> None:
        """Do the task and wait to be killed."""
        ended: tuple[str, ...] = ()
        try:
            world = self.chaos.world
            world.crash_point = lambda name: self.ask("point", name)
            world.clock = self  # type: ignore[assignment]  # the parent's, by questions
            task(self)
        except TailguardError as error:
            ended = (type(error).__name__ if isinstance(error, Killed) else "TailguardError", str(error))
        except BaseException:
            traceback.print_exc()
            os._exit(1)  # the parent finds the pipe closed
        self.connection.send(("ended", ended))
        time.sleep(600)
        os._exit(0)

    def trade(self) -> None:
        chaos = self.chaos
        session = chaos.world.session(_AskedVenue(self))  # every call is a question
        session.start()
        self.ask("started")
        chaos.strangers_trade = lambda: self.ask("strangers_trade")  # type: ignore[method-assign]
        chaos.given = self._given  # type: ignore[method-assign]
        chaos._trade(session)

    def release(self) -> None:
        self.chaos.world.session(_AskedVenue(self)).release("chaos")

    def _given(self, bar: LiveBar) -> list[LiveBar]:
        given: list[LiveBar] = self.ask("given", bar)
        return given

    # --- the clock, which moves only while somebody waits -------------------------------------------------------------

    def now(self) -> int:
        return self.time_ms

    def sleep(self, seconds: float) -> None:
        self.ask("sleep", seconds)

    def wait_until(self, time_ms: int) -> None:
        if time_ms > self.time_ms:
            self.ask("wait_until", time_ms)


class _AskedVenue:
    """The parent's venue."""

    receive_window_ms = 5_000

    def __init__(self, child: _Child) -> None:
        self._child = child
        self._rules = child.chaos.world.venue.instruments()

    def instruments(self) -> Any:
        return self._rules

    def __getattr__(self, name: str) -> Callable[..., Any]:
        return lambda *arguments: self._child.ask(name, *arguments)
