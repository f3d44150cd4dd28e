"""Thousands of seeded schedules of faults, crashes and kills against a paper session: what went wrong in how many?

    python benchmarks/live_chaos.py --schedules 2000 --bars 20 --processes --results chaos.jsonl
    python benchmarks/live_chaos.py --trips 500

Each schedule trades one to three symbols over some hourly bars in one of the order styles, with crashes at random
calls, waits and stages of writing. With `--processes` a crash is a SIGKILL of the session's own process, otherwise an
exception that drops everything in memory. It checks that no order was doubled, that every position is explained and
that nothing was sent after the kill switch.

`--results` keeps a line for each schedule: the same command goes on after the last one, `--seconds` at a time.
`--trips` measures the time from a trip of the switch, at any moment, to the last order that still arrives.
"""

from __future__ import annotations

import argparse
import json
import random
import shutil
import tempfile
import threading
import time
from collections import Counter
from pathlib import Path
from typing import Any

import torch

import tailguard as tg
from tailguard.live.chaos import Chaos
from tailguard.live.killed_chaos import KilledChaos
from tailguard.live.session import Killed
from tailguard.live.simulation import ReplayedMarket
from tailguard.market import MarketConfig

FIRST_ROW = 10
"""Bars before the first that a session trades."""


def run_schedule(seed: int, replayed: ReplayedMarket, processes: bool) -> dict[str, Any]:
    folder = Path(tempfile.mkdtemp())
    chaos = (KilledChaos if processes else Chaos)(seed, replayed, folder)
    try:
        outcome = chaos.run()
    finally:
        shutil.rmtree(folder)
    started = {"slowest_start_s": round(chaos.slowest_start_s, 3)} if isinstance(chaos, KilledChaos) else {}
    return {
        "seed": seed,
        "wrong": outcome.wrong,
        "crashes": outcome.crashes,
        "kills": outcome.kills,
        **started,
        "counts": dict(outcome.counts),
    }


def run_schedules(arguments: argparse.Namespace, markets: list[ReplayedMarket]) -> list[dict[str, Any]]:
    done = []
    if arguments.results is not None and arguments.results.exists():
        done = [json.loads(line) for line in arguments.results.read_text().splitlines()]
    known, end = {each["seed"] for each in done}, time.monotonic() + arguments.seconds
    for seed in range(arguments.seed, arguments.seed + arguments.schedules):
        if seed in known:
            continue
        if time.monotonic() > end:
            break
        found = run_schedule(seed, markets[seed % len(markets)], arguments.processes)
        done.append(found)
        for message in found["wrong"]:
            print(f"seed {seed}: {message}", flush=True)
        if arguments.results is not None:
            with arguments.results.open("a") as file:
                file.write(json.dumps(found) + "\n")
    return done


def summarise(done: list[dict[str, Any]]) -> None:
    counts: Counter[str] = Counter(schedules=len(done))
    wrong: Counter[str] = Counter()
    for each in done:
        counts.update({"crashes": each["crashes"], "kills": each["kills"], **each["counts"]})
        wrong.update(message.split(":")[-1] if message[:3] == "SYN" else message for message in each["wrong"])
    for name, count in sorted(counts.items()):
        print(f"{name:20} {count:>10,}")
    print(f"{'wrong':20} {sum(wrong.values()):>10,}  {dict(wrong)}")
    starts = [each["slowest_start_s"] for each in done if "slowest_start_s" in each]
    if starts:
        print(f"{'slowest start':20} {max(starts):>10.3f} s from a new process to the end of its start")


def trip(replayed: ReplayedMarket, draw: random.Random, seed: int) -> float:
    """Seconds from a trip at a random moment to the last order that reaches the venue afterwards; 0 where none does."""
    folder = Path(tempfile.mkdtemp())
    chaos = KilledChaos(seed, replayed, folder)
    chaos.calm = True
    chaos.world.faults.stop()
    venue, arrived, tripped = chaos.world.venue, [], []
    place = venue.place

    def timed(order: Any) -> Any:
        arrived.append(time.monotonic())
        return place(order)

    def trip_later() -> None:
        time.sleep(draw.uniform(0.02, 0.4))
        chaos.world.kill.trip("measured")
        tripped.append(time.monotonic())

    venue.place = timed  # type: ignore[method-assign]
    switch = threading.Timer(0.0, trip_later)
    switch.start()
    try:
        chaos.trade_as_a_process(venue)
    except Killed:
        pass
    finally:
        switch.join()
        shutil.rmtree(folder)
    return max([0.0, *(each - tripped[0] for each in arrived)])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--schedules", type=int, default=2_000)
    parser.add_argument("--bars", type=int, default=40, help="bars that each session trades")
    parser.add_argument("--seed", type=int, default=0, help="first seed")
    parser.add_argument("--processes", action="store_true", help="kill real processes with SIGKILL")
    parser.add_argument("--results", type=Path, help="file to keep results in and to go on from")
    parser.add_argument("--seconds", type=float, default=float("inf"), help="stop after this time")
    parser.add_argument("--trips", type=int, default=0, help="measure the kill switch instead, so many times")
    arguments = parser.parse_args()
    torch.set_num_threads(1)  # processes are forked
    rows = FIRST_ROW + (400 if arguments.trips else arguments.bars)
    markets = [
        ReplayedMarket.of(tg.make_market(rows, assets=assets, seed=3).bars, MarketConfig(), FIRST_ROW)
        for assets in ((2,) if arguments.trips else (1, 2, 3))
    ]
    if arguments.trips:
        draw = random.Random(arguments.seed)
        delays = [trip(markets[0], draw, seed) for seed in range(arguments.trips)]
        late = sorted(each for each in delays if each > 0)
        print(f"{len(delays):,} trips: an order arrived after {len(late)}, at most {max(delays):.4f} s later")
        return
    begun = time.monotonic()
    done = run_schedules(arguments, markets)
    summarise(done)
    print(f"{time.monotonic() - begun:.0f} s")


if __name__ == "__main__":
    main()
