"""Ctrl-C, SIGTERM and SIGHUP: the first asks for an orderly end; a second Ctrl-C or SIGTERM ends at once."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
from types import FrameType
from typing import Any, Self

STOPPING = (signal.SIGINT, signal.SIGTERM)
"""A second one of these ends the process at once."""
HANGUP = signal.SIGHUP
"""A closed terminal. Shell and system may both send one, so a second one must not interrupt saving."""


class StopSignals:
    """While it is entered, the first signal only sets `received`; the next one has its usual effect at once.

    SIGHUP always asks for an orderly end, and is ignored where the process was told to, as nohup does.
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
            os.write(2, b"\nstopping after this iteration, with a checkpoint; once more stops at once\n")

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)
