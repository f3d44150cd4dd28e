"""Stops every session of a run, and reads from their journals what has become of their orders and positions."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, get_args

from tailguard.experiment.layout import RunLayout
from tailguard.live.kill import KillSwitch
from tailguard.live.opening import Mode
from tailguard.places import lock

PATIENCE_S = 2.0
"""Longest wait for the sessions' answer."""
PAUSE_S = 0.05


@dataclass
class _Running:
    """A session of another process, and what its journal says since the switch was tripped."""

    mode: str
    path: Path
    offset: int
    has_heard: bool = False
    outcome: dict[str, Any] | None = None

    def read(self) -> None:
        with self.path.open("rb") as file:
            file.seek(self.offset)
            *lines, _ = file.read().split(b"\n")
        for line in lines:
            self.offset += len(line) + 1
            record = json.loads(line)
            self.has_heard |= record["kind"] in ("kill", "settled")
            self.outcome = record if record["kind"] == "settled" else self.outcome


def stop_run(run: Path, message: str, *, flatten: bool = False) -> list[str]:
    """Trip the switch of all modes; returns what each running session has answered, a line for each."""
    layout = RunLayout(run)
    running = list(_running(layout))
    # Also a switch that only one mode has tripped stops all now.
    KillSwitch(layout.kill_path).trip(message, flatten=flatten)
    end = time.monotonic() + PATIENCE_S
    while any(each.outcome is None for each in running) and time.monotonic() < end:
        time.sleep(PAUSE_S)
        for each in running:
            each.read()
    if running:
        return [_answer(run, each) for each in running]
    later = "; positions are closed when one is started again, which then ends" if flatten else ""
    return [f"no session answered, as none is running{later}. To go on: tailguard live {run} --release"]


def _running(layout: RunLayout) -> Iterator[_Running]:
    for mode in get_args(Mode):
        path = layout.journal_path(mode)
        if path.is_file() and _is_locked(path):
            yield _Running(mode, path, path.stat().st_size)


def _is_locked(path: Path) -> bool:
    """Whether a process is writing the journal."""
    with path.open("rb") as file:
        return not lock(file.fileno())


def _answer(run: Path, session: _Running) -> str:
    go_on = f"To go on: tailguard live {run} --mode {session.mode} --release"
    found = session.outcome
    if found is None and not session.has_heard:
        return (
            f"{session.mode}: no answer within {PATIENCE_S:g} s. It sends nothing more, but for an order that is on "
            f"its way already. {go_on}"
        )
    if found is None:
        return f"{session.mode}: stopping; it asks for the outcome of its last orders and then ends. {go_on}"
    held = ", ".join(f"{symbol} {size}" for symbol, size in found["positions"].items())
    if found["simulated"]:
        return f"{session.mode}: no orders, as the account is simulated. {go_on}"
    left = f"position left at {held} (flatten with --flatten, and start it once more)" if held else "no position left"
    return f"{session.mode}: {found['cancelled']} orders cancelled, {found['in_flight']} in flight, {left}. {go_on}"
