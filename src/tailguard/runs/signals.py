"""Ctrl-C and SIGTERM: the first stops in order, the second at once."""

from __future__ import annotations

import os
import signal
import threading
from types import FrameType
from typing import Any, Self

STOPPING = (signal.SIGINT, signal.SIGTERM)


class StopSignals:
    """While it is entered, the first signal only sets `received`; the next one has its usual effect at once."""

    def __init__(self) -> None:
        self.received: int | None = None
        self._before: dict[int, Any] = {}

    def __enter__(self) -> Self:
        # Python lets only the main thread handle signals; elsewhere they keep their usual effect.
        if threading.current_thread() is threading.main_thread():
            self._before = {number: signal.signal(number, self._receive) for number in STOPPING}
        return self

    def _receive(self, number: int, _: FrameType | None) -> None:
        self.received = number
        for other in STOPPING:
            signal.signal(other, signal.SIG_DFL)
        # Not print: the signal may have come in the middle of one.
        os.write(2, b"\nstopping after this iteration, with a checkpoint; once more stops at once\n")

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)
