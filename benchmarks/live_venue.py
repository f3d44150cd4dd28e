"""`tailguard live` in one process and a paper venue in another, over HTTP and ccxt: a soak, restarts, and trips.

    python benchmarks/live_venue.py --folder soak --bars 1440
    python benchmarks/live_venue.py --folder soak --restarts 5
    python benchmarks/live_venue.py --folder soak --trips 20

The first trades so many one-minute bars and prints the resident memory of both processes, and what has frozen or killed
the session. `--restarts` kills the session with SIGKILL and measures the time from a new process to its next decision.
`--trips` trips the kill switch by the command and by SIGUSR1 in turn, at random moments, and measures the time to the
last order that the venue still gets. A small agent is trained in the folder first.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from rich.console import Console

import tailguard as tg
from tailguard.config import load_config
from tailguard.experiment.layout import RunLayout
from tailguard.live.journal import read_records
from tailguard.live.opening import LiveSource
from tailguard.live.paper_exchange.open_exchange import ExchangeOptions, open_exchange
from tailguard.live.paper_exchange.process import serving
from tailguard.runs.runner import train

SMALL = (
    "data.features=[bollinger_20, trend_24]",
    "data.embargo=1h",
    "data.test=4h",
    "data.validation=0.1",
    "env.num_envs=8",
    "env.episode_length=32",
    "learner=ppo",
    "ppo.n_steps=16",
    "ppo.minibatch_size=64",
    "ppo.epochs=1",
    "ppo.network.hidden=[8]",
    "ppo.network.lstm_size=8",
    "training.total_timesteps=384",
    "training.threads=1",
)
WARM_UP = 100
"""Bars before the first decision."""
LOOSE = ("bar_age=1000", "order_notional=1e6", "hour_notional=1e6", "day_notional=1e6", "turnover=1e6", "jump=10")
"""Guards of the trips: bars that were missed are traded on, one after the other, so that orders are on the way."""
MAIN = "from tailguard.cli import main; main()"


class Process:
    """A command of tailguard."""

    def __init__(self, *arguments: object) -> None:
        command = [sys.executable, "-u", "-c", MAIN, *map(str, arguments)]
        self.begun = time.time()
        self.process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        self.said: list[str] = []
        threading.Thread(target=self._read, daemon=True).start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        self.said.extend(self.process.stdout)

    def wait_for(self, text: str) -> str:
        """The first line with the text."""
        while True:
            found = next((line for line in self.said if text in line), None)
            if found is not None:
                return found
            if self.process.poll() is not None:
                raise SystemExit("".join(self.said))
            time.sleep(0.02)

    def resident_mib(self) -> float:
        status = Path(f"/proc/{self.process.pid}/status").read_text(encoding="ascii")
        return int(status.split("VmRSS:")[1].split()[0]) / 1024

    def cpu_s(self) -> float:
        """CPU time so far, of all threads."""
        fields = Path(f"/proc/{self.process.pid}/stat").read_text(encoding="ascii").rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")

    def end(self, number: int = signal.SIGTERM) -> None:
        if self.process.poll() is None:
            self.process.send_signal(number)
        self.process.wait()


class Decisions:
    """The number of decisions in a growing journal."""

    def __init__(self, path: Path) -> None:
        self.path, self.offset, self.count = path, 0, 0

    def now(self) -> int:
        if self.path.exists():
            with self.path.open("rb") as file:
                file.seek(self.offset)
                *lines, _ = file.read().split(b"\n")
            self.offset += sum(len(line) + 1 for line in lines)
            self.count += sum(json.loads(line)["kind"] == "decision" for line in lines)
        return self.count


def prepare(folder: Path, bars: int) -> tuple[Path, Path]:
    """A small agent of one-minute bars, without a session, and the bars to replay."""
    run, data, past = folder / "run", folder / f"bars_{bars}.parquet", folder / "past.parquet"
    if not run.exists():
        folder.mkdir(parents=True, exist_ok=True)
        tg.make_market(2_000, frequency="1m", seed=5).bars.frame.drop("segment").write_parquet(past)
        train(load_config(overrides=[*SMALL, f"data.path={past}"]), run, Console(quiet=True))
    shutil.rmtree(run / "live", ignore_errors=True)
    tg.make_market(bars + WARM_UP, frequency="1m", seed=8).bars.frame.drop("segment").write_parquet(data)
    return run, data


def journal_of(run: Path) -> list[dict[str, Any]]:
    return list(read_records(RunLayout(run).journal_path("paper")))


def soak(run: Path, data: Path, bars: int, every: int) -> None:
    venue = Process("venue", run, "--data", data)
    address = venue.wait_for("http://").split()[1]
    session = Process("live", run, "--mode", "paper", "--venue", address)
    decisions, next_line = Decisions(RunLayout(run).journal_path("paper")), every
    while session.process.poll() is None:
        time.sleep(0.2)
        if decisions.now() >= next_line:
            print(
                f"{decisions.count:>6,} bars  session {session.resident_mib():>5.0f} MiB  "
                f"venue {venue.resident_mib():>5.0f} MiB  {time.time() - session.begun:>6.0f} s",
                flush=True,
            )
            next_line += every
    venue.end()
    records = journal_of(run)
    orders = [record for record in records if record["kind"] == "order" and not record["open"]]
    stopped = [record for record in records if record["kind"] in ("freeze", "kill", "alarm", "error")]
    print(f"{decisions.now():,} of {bars:,} bars, {len(orders):,} orders, exit status {session.process.returncode}")
    print(f"froze, killed, alarmed or failed: {[(each['kind'], each['message']) for each in stopped] or 'nothing'}")


def restarts(run: Path, data: Path, count: int) -> None:
    venue = Process("venue", run, "--data", data)
    address = venue.wait_for("http://").split()[1]
    decisions, taken = Decisions(RunLayout(run).journal_path("paper")), list[str]()
    for _ in range(count + 1):
        before = decisions.now()
        session = Process("live", run, "--mode", "paper", "--venue", address)
        while decisions.now() <= before:
            if session.process.poll() is not None:
                raise SystemExit("".join(session.said))
            time.sleep(0.01)
        taken.append(f"{time.time() - session.begun:.1f} s ({session.cpu_s():.1f} s of CPU time)")
        while decisions.now() <= before + 20:
            time.sleep(0.01)
        session.end(signal.SIGKILL)
    venue.end()
    print(f"first start {taken[0]}; {count} restarts: {', '.join(taken[1:])}")


@contextmanager
def served(exchange: Any) -> Iterator[str]:
    """Serve the venue from a thread of this process, where the arrival of an order can be timed."""
    ready, loop, stop = threading.Event(), asyncio.new_event_loop(), asyncio.Event()
    addresses: list[str] = []

    async def serve() -> None:
        async with serving(exchange) as address:
            addresses.append(address)
            ready.set()
            await stop.wait()

    thread = threading.Thread(target=lambda: loop.run_until_complete(serve()), daemon=True)
    thread.start()
    ready.wait()
    yield addresses[0]
    loop.call_soon_threadsafe(stop.set)
    thread.join()


def trips(run: Path, data: Path, count: int, draw: random.Random) -> None:
    exchange = open_exchange(run, LiveSource(data), ExchangeOptions(speed=120.0))
    arrived: list[float] = []
    place: Callable[[Any], Any] = exchange.venue.place

    def timed(order: Any) -> Any:
        arrived.append(time.time())
        return place(order)

    exchange.venue.place = timed  # type: ignore[method-assign]
    switch, delays, answers = RunLayout(run).kill_path, list[float](), list[str]()
    guards = [part for name in (*LOOSE, "price_difference=10", "slippage=0.5") for part in ("--guard", name)]
    with served(exchange) as address:
        for number in range(count):
            release = ["--release"] * (number > 0)
            session = Process("live", run, "--mode", "paper", "--venue", address, *guards, *release)
            sent = len(arrived)
            while len(arrived) < sent + 3 and session.process.poll() is None:
                time.sleep(0.01)
            time.sleep(draw.uniform(0, 1))
            if number % 2:
                tripped = time.time()
                session.process.send_signal(signal.SIGUSR1)
            else:
                answer = Process("kill", run)
                while not switch.exists():
                    time.sleep(0.001)
                tripped = switch.stat().st_mtime
                answer.process.wait()
                answers.append(" ".join(" ".join(answer.said).split()))
            session.process.wait()
            delays.append(max([0.0, *(each - tripped for each in arrived)]))
            if number % 2 == 0 and not arrived[sent:]:
                print("no orders before this trip", "".join(session.said))
    late = [each for each in delays if each > 0]
    print(f"{count} trips, {len(arrived):,} orders: one arrived after {len(late)}, at most {max(delays):.3f} s later")
    print(f"the command said, for example: {answers[-1]}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--bars", type=int, default=1_440)
    parser.add_argument("--every", type=int, default=240, help="bars between two lines")
    parser.add_argument("--restarts", type=int, default=0)
    parser.add_argument("--trips", type=int, default=0)
    arguments = parser.parse_args()
    run, data = prepare(arguments.folder, arguments.bars)
    if arguments.restarts:
        restarts(run, data, arguments.restarts)
    elif arguments.trips:
        trips(run, data, arguments.trips, random.Random(0))
    else:
        soak(run, data, arguments.bars, arguments.every)


if __name__ == "__main__":
    main()
