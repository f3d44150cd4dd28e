"""Ctrl-C, SIGTERM and SIGHUP: the first requests a clean stop; a second Ctrl-C or SIGTERM stops at once."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
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
        # Python lets only the main thread handle signals; elsewhere they keep their usual effect.
        if threading.current_thread() is threading.main_thread():
            ignored = signal.getsignal(HANGUP) is signal.SIG_IGN
            watched = STOPPING if ignored else (*STOPPING, HANGUP)
            self._before = {number: signal.signal(number, self._receive) for number in watched}
        return self

    def _receive(self, number: int, _: FrameType | None) -> None:
        if self.received is None:
            self.received = number
        for other in STOPPING:
            signal.signal(other, signal.SIG_DFL)
        # Not print: the signal may interrupt a print call. A closed terminal takes no message.
        with contextlib.suppress(OSError):
            os.write(2, b"\nstopping after this iteration with a checkpoint; a second Ctrl-C stops at once\n")

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)
