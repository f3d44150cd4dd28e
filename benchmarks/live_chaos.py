"""Thousands of seeded schedules of faults, crashes and kills against a paper session: what went wrong in how many?

    python benchmarks/live_chaos.py --schedules 2000 --bars 40

Each schedule trades two symbols over some hourly bars, with crashes at random calls, waits and stages of writing. It
checks that no order was doubled, that every position is explained and that nothing was sent after the kill switch.
"""

from __future__ import annotations

import argparse
import shutil
import tempfile
import time
from collections import Counter
from pathlib import Path

import tailguard as tg
from tailguard.live.chaos import Chaos
from tailguard.live.simulation import ReplayedMarket
from tailguard.market import MarketConfig


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--schedules", type=int, default=2_000)
    parser.add_argument("--bars", type=int, default=40)
    parser.add_argument("--seed", type=int, default=0, help="first seed")
    arguments = parser.parse_args()
    bars = tg.make_market(arguments.bars + 20, assets=2, seed=3).bars
    replayed = ReplayedMarket.of(bars, MarketConfig(), 10)
    counts: Counter[str] = Counter()
    wrong: Counter[str] = Counter()
    begun = time.process_time()
    for seed in range(arguments.seed, arguments.seed + arguments.schedules):
        folder = Path(tempfile.mkdtemp())
        try:
            outcome = Chaos(seed, replayed, folder).run()
        finally:
            shutil.rmtree(folder)
        counts.update({"schedules": 1, "crashes": outcome.crashes, "kills": outcome.kills, **outcome.counts})
        for message in outcome.wrong:
            wrong[message.split(":")[-1] if message[:3] == "SYN" else message] += 1
            print(f"seed {seed}: {message}", flush=True)
    took = time.process_time() - begun
    for name, count in sorted(counts.items()):
        print(f"{name:20} {count:>10,}")
    print(f"wrong                {sum(wrong.values()):>10,}  {dict(wrong)}")
    print(f"{took:.0f} s of CPU time, {1_000 * took / arguments.schedules:.0f} ms a schedule")


if __name__ == "__main__":
    main()
