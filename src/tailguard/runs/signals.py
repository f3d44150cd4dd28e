"""Ctrl-C, SIGTERM and SIGHUP: the first requests a clean stop; a second Ctrl-C or SIGTERM stops at once.

`StopSignals` lets the work under way end first; `interrupting` gives it up, where what is stored is worth keeping and
the rest is soon done again.
"""

from __future__ import annotations

import contextlib
import os
import signal
import threading
from collections.abc import Iterator
from types import FrameType
from typing import Any, Self

STOPPING = (signal.SIGINT, signal.SIGTERM)
"""A second one of these terminates the process at once."""
HANGUP = signal.SIGHUP
"""Sent when the terminal closes, possibly twice (shell and system), so a second one must not interrupt saving."""


class StopSignals:
    """Context manager: the first signal only sets `received`; the next one has its default effect.

    SIGHUP always requests a clean stop; it is ignored if the process ignores it already, as under nohup.
    """

    def __init__(self) -> None:
        self.received: int | None = None
        self._before: dict[int, Any] = {}

    def __enter__(self) -> Self:
        self._before = {number: signal.signal(number, self._receive) for number in _watched()}
        return self

    def _receive(self, number: int, _: FrameType | None) -> None:
        if self.received is None:
            self.received = number
        _announce("stopping after this iteration with a checkpoint")

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)


class Interrupted(KeyboardInterrupt):
    """A signal that ends the work under way; `number` is the signal's."""

    def __init__(self, number: int) -> None:
        super().__init__()
        self.number = number


@contextlib.contextmanager
def interrupting(kept: str) -> Iterator[None]:
    """While it is entered, the first signal raises `Interrupted`; the next one has its default effect.

    `kept`: what is not lost, for the message. SIGHUP as for `StopSignals`.
    """
    received = False

    def receive(number: int, _: FrameType | None) -> None:
        nonlocal received
        _announce(f"stopping; {kept}")
        if not received:
            received = True
            raise Interrupted(number)

    before = {number: signal.signal(number, receive) for number in _watched()}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _watched() -> tuple[int, ...]:
    """The signals to handle."""
    if threading.current_thread() is not threading.main_thread():
        return ()  # Python lets only the main thread handle signals; elsewhere they keep their usual effect
    return STOPPING if signal.getsignal(HANGUP) is signal.SIG_IGN else (*STOPPING, HANGUP)


def _announce(what: str) -> None:
    """Tell the user, and let the next Ctrl-C or SIGTERM stop at once."""
    for number in STOPPING:
        signal.signal(number, signal.SIG_DFL)
    # Not print: the signal may interrupt a print call. A closed terminal takes no message.
    with contextlib.suppress(OSError):
        os.write(2, f"\n{what}; a second Ctrl-C stops at once\n".encode())
