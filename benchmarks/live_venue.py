"""`tailguard live` in one process and a paper venue in another, over HTTP and ccxt: a soak, restarts, and trips.

    python benchmarks/live_venue.py --folder soak --bars 1440 --faults
    python benchmarks/live_venue.py --folder soak --bars 1440 --restarts 5 --after 1200
    python benchmarks/live_venue.py --folder soak --trips 20

The first trades so many one-minute bars, with faults of the venue or without, and prints memory and CPU time of both
processes, what has frozen or killed the session, and whether its books are the venue's. `--restarts` kills the session
with SIGKILL, for the first time after so many bars, and measures the time from a new process to its next decision.
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
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from decimal import Decimal
from pathlib import Path
from typing import Any

import torch
from rich.console import Console

import tailguard as tg
from tailguard.config import load_config
from tailguard.experiment.layout import RunLayout
from tailguard.experiment.trained_run import load_run_agent
from tailguard.live.books import BookStore
from tailguard.live.journal import read_records
from tailguard.live.opening import LiveSource
from tailguard.live.paper_client import PaperAddress
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
FAULTS = {
    "reply_lost": 0.02, "request_lost": 0.02, "request_late": 0.02, "unavailable": 0.02, "rate_limited": 0.02,
    "rejected": 0.02, "partial_fill": 0.2, "read_fails": 0.005, "late_events": 0.1, "repeated_events": 0.1,
    "disconnect": 0.0005, "clock_jump": 0.0005, "stale_account": 0.2, "bar_gap": 0.0,
}  # fmt: skip
"""Of the soak, for each call. No missing bars: features would warm up again for an hour after each of them."""
WARM_UP = 100
"""Bars before the first decision."""
LOOSE = ("bar_age=1000", "order_notional=1e6", "hour_notional=1e6", "day_notional=1e6", "turnover=1e6", "jump=10")
"""Guards of the trips: bars that were missed are traded on, one after the other, so that orders are on the way."""
LOOSE_DAY = ("hour_notional=1e6", "day_notional=1e6", "turnover=1e6", "drawdown=0.99")
"""Guards of the soak: it trades far more in a day than they allow, and pays for it."""
LOOSE_FAULTS = ("errors_per_hour=1000", "bar_age=0.5")
"""With faults, too: the venue's clock is up to ten seconds wrong, and a bar of a minute is else fresh for six."""
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
        try:
            fields = Path(f"/proc/{self.process.pid}/stat").read_text(encoding="ascii").rpartition(")")[2].split()
        except OSError:
            return float("nan")
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
        make_bold(run)
    shutil.rmtree(run / "live", ignore_errors=True)
    tg.make_market(bars + WARM_UP, frequency="1m", seed=8).bars.frame.drop("segment").write_parquet(data)
    return run, data


def make_bold(run: Path) -> None:
    """An agent that has hardly learned holds next to nothing: larger outputs make it trade at every bar."""
    agent = load_run_agent(run)
    assert isinstance(agent, tg.DistributionalPPO)
    with torch.no_grad():
        agent.policy.action_head.linear.weight.mul_(100)
    agent.save(RunLayout(run).agent_path)


def journal_of(run: Path) -> list[dict[str, Any]]:
    return list(read_records(RunLayout(run).journal_path("paper")))


def soak(run: Path, data: Path, bars: int, every: int, faults: bool) -> None:
    chances = [part for name, rate in FAULTS.items() if faults for part in ("--fault", f"{name}={rate}")]
    venue = Process("venue", run, "--data", data, "--seed", 1, *chances)
    address = venue.wait_for("http://").split()[1]
    loose = (*LOOSE_DAY, *(LOOSE_FAULTS if faults else ()))
    guards = [part for name in loose for part in ("--guard", name)]
    session = Process("live", run, "--mode", "paper", "--venue", address, *guards)
    decisions, next_line, spent, count = Decisions(RunLayout(run).journal_path("paper")), 1, (0.0, 0.0), 0
    while session.process.poll() is None:
        time.sleep(0.1)
        if decisions.now() >= next_line:
            before, spent = spent, (session.cpu_s(), venue.cpu_s())
            cost = [1000 * (now - then) / (decisions.count - count) for now, then in zip(spent, before, strict=True)]
            # The time of the first bars is that of a start, too.
            a_bar = f"  CPU time a bar {cost[0]:.0f} and {cost[1]:.0f} ms" if count else ""
            print(
                f"{decisions.count:>6,} bars  session {session.resident_mib():>5.0f} MiB  "
                f"venue {venue.resident_mib():>5.0f} MiB  {time.time() - session.begun:>6.0f} s{a_bar}",
                flush=True,
            )
            count, next_line = decisions.count, (decisions.count // every + 1) * every
    status = PaperAddress.parse(address).status()
    venue.end()
    print(f"faults of the venue: {sum(status['faults'].values()):,}  {status['faults']}")
    tell_soak(run, bars, session.process.returncode)


def tell_soak(run: Path, bars: int, status: int) -> None:
    """Count what the journal holds, and compare it with the venue's own books."""
    records, books = journal_of(run), BookStore(RunLayout(run).exchange_books_path).read()
    kinds = Counter(record["kind"] for record in records)
    intents = {record["id"]: record for record in records if record["kind"] == "intent"}
    filled = {record["id"]: Decimal(record["filled"]) for record in records if record["kind"] == "order"}
    assert books is not None
    taken = Counter((intents[name]["bar"], intents[name]["symbol"]) for name in books.orders)
    wrong = sum(Decimal(order["filled"]) != filled[name] for name, order in books.orders.items())
    traded = sum(abs(float(order["filled"])) * order["price"] for order in books.orders.values())
    left = {symbol: size - sum(filled[name] for name in books.orders) for symbol, size in books.positions.items()}
    print(f"{kinds['decision']:,} of {bars:,} bars, exit status {status}")
    print(f"{len(intents):,} orders sent, {len(books.orders):,} taken, {traded:,.0f} traded")
    print(f"most orders taken of one bar {max(taken.values())}; fills that books and venue see differently: {wrong}")
    print(f"position at the venue that fills do not explain: {left}")
    for kind in ("freeze", "kill", "alarm", "error"):
        told = Counter(str(record["message"]).split(":")[0] for record in records if record["kind"] == kind)
        print(f"{kind:<7} {kinds[kind]:>5,}  {dict(told.most_common(8))}")


def restarts(run: Path, data: Path, count: int, after: int) -> None:
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
        print(f"a decision after {decisions.count:,}: {taken[-1]}", flush=True)
        while decisions.now() <= max(before + 20, after):
            time.sleep(0.01)
        session.end(signal.SIGKILL)
    venue.end()


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
    parser.add_argument("--faults", action="store_true", help="the venue fails now and then")
    parser.add_argument("--restarts", type=int, default=0)
    parser.add_argument("--after", type=int, default=0, help="bars before the first of the restarts")
    parser.add_argument("--trips", type=int, default=0)
    arguments = parser.parse_args()
    run, data = prepare(arguments.folder, arguments.bars)
    if arguments.restarts:
        restarts(run, data, arguments.restarts, arguments.after)
    elif arguments.trips:
        trips(run, data, arguments.trips, random.Random(0))
    else:
        soak(run, data, arguments.bars, arguments.every, arguments.faults)


if __name__ == "__main__":
    main()
