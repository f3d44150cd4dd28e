"""The real command, killed by the system while it trades at a venue of another process, and started again."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import time
from collections import Counter
from decimal import Decimal
from pathlib import Path

import pytest

import tailguard as tg
from tailguard.data.storage import write_frame
from tailguard.live.books import BookStore
from tailguard.live.journal import read_records

from .test_opening import MAIN, run, trained_folder  # noqa: F401 (fixtures)
from .test_venue_process import Start, start  # noqa: F401 (a fixture)

ROUNDS = 5


def decisions_in(path: Path) -> int:
    """Decisions in a journal that another process writes."""
    return path.read_bytes().count(b'{"kind":"decision"') if path.exists() else 0


def cpu_s(process: subprocess.Popen[str]) -> float:
    """CPU time of a process so far, of all threads."""
    fields = Path(f"/proc/{process.pid}/stat").read_text(encoding="ascii").rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def live(run: Path, address: str) -> subprocess.Popen[str]:  # noqa: F811
    command = [sys.executable, "-c", MAIN, "live", str(run), "--mode", "paper", "--venue", address]
    return subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)


@pytest.mark.slow
def test_the_command_decides_again_within_ten_seconds_of_its_death(run: Path, start: Start, tmp_path: Path) -> None:  # noqa: F811
    """SIGKILL five times at random moments of trading. Each new process decides within 10 s of CPU time, a second one
    beside it is refused, no order is doubled and books are the venue's."""
    write_frame(tg.make_market(900, seed=9).bars.frame.drop("segment"), tmp_path / "bars.parquet")
    faults = ("--fault", "reply_lost=0.05", "--fault", "partial_fill=0.2", "--fault", "request_late=0.05")
    _, address = start(run, "--data", tmp_path / "bars.parquet", *faults)
    journal, draw = run / "live" / "paper" / "journal.jsonl", random.Random(0)
    took = []
    for number in range(ROUNDS + 1):
        begun, before = time.monotonic(), decisions_in(journal)
        process = live(run, address)
        while decisions_in(journal) == before:
            assert process.poll() is None, process.stderr.read()
            time.sleep(0.02)
        took.append((cpu_s(process), time.monotonic() - begun))
        if number == 1:
            second = live(run, address)
            assert second.wait(120) == 2
            assert "another process is trading with this journal" in second.stderr.read()
        if number < ROUNDS:
            time.sleep(draw.uniform(0, 2))
            assert process.poll() is None
            os.kill(process.pid, signal.SIGKILL)
            process.wait()
    assert process.wait(600) == 0
    print(json.dumps({"cpu_s": [round(each, 2) for each, _ in took], "wall_s": [round(each, 1) for _, each in took]}))
    assert max(cpu for cpu, _ in took) < 10
    records = list(read_records(journal))
    decided = [record["bar"] for record in records if record["kind"] == "decision"]
    assert len(set(decided)) == len(decided) > 500
    intents = {record["id"]: record for record in records if record["kind"] == "intent"}
    filled = {record["id"]: Decimal(record["filled"]) for record in records if record["kind"] == "order"}
    books = BookStore(run / "live" / "exchange.sqlite").read()
    assert set(books.orders) <= set(intents)
    assert max(Counter(intents[name]["bar"] for name in books.orders).values()) == 1
    assert all(Decimal(order["filled"]) == filled[name] for name, order in books.orders.items())
    assert books.positions["SYN01"] == sum(filled[name] for name in books.orders) != 0
    assert not [record for record in records if record["kind"] in ("adopt", "freeze", "kill")]
