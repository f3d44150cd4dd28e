"""When a UTC day has ended, another process writes its report: trading does not wait for a backtest."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass

from tailguard.live.alerts import KEPT_ENVIRONMENT
from tailguard.live.journal import Record
from tailguard.live.session_state import DAY_MS

PROGRAM = ("nice", "-n", "10", sys.executable, "-c", "from tailguard.cli import main; main()")
WITHOUT_KEYS = (*KEPT_ENVIRONMENT, "PYTHONPATH", "VIRTUAL_ENV", "OMP_NUM_THREADS", "TMPDIR")


@dataclass
class DayEnd:
    """Starts the report when the first decision of a new UTC day is on disk; one report at a time."""

    arguments: Sequence[str]
    """Of the command `tailguard`."""
    _day: int | None = None
    _is_due: bool = False
    _running: subprocess.Popen[bytes] | None = None

    def hear(self, record: Record) -> None:
        """A listener of the ledger."""
        if record["kind"] == "decision":
            before, self._day = self._day, record["bar"] // DAY_MS
            self._is_due |= before is not None and before != self._day

    def beat(self) -> None:
        """Start the report if one is due: while the session waits for its next bar, after its orders."""
        if not self._is_due or (self._running is not None and self._running.poll() is None):
            return
        self._is_due = False
        quiet = subprocess.DEVNULL
        environment = {name: os.environ[name] for name in WITHOUT_KEYS if name in os.environ}
        # Where no process can be started, the next day's report has this day, too.
        with contextlib.suppress(OSError):
            self._running = subprocess.Popen(
                (*PROGRAM, *self.arguments),
                stdin=quiet,
                stdout=quiet,
                stderr=quiet,
                env=environment,
                start_new_session=True,
            )
