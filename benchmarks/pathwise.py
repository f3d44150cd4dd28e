"""Gradients through the market beside PPO and sb3-contrib: time to a target, and what equal time brings.

    python benchmarks/pathwise.py               5 seeds, about 25 minutes on 2 idle cores
    python benchmarks/pathwise.py --seeds 1     about 5 minutes

The task, the clock and the evaluation are those of target.py: the share of the planted optimum's growth that a learner
reaches, acting deterministically, on a year of another market with the same law. For equal time every learner is
trained from scratch for each duration, so that schedules of the learning rate end with it.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Iterable
from typing import Any

import torch
from rich.console import Console
from rich.table import Column, Table
from target import Contender, Task, contenders, make_task, race, result_table

PEER, PPO, PATHWISE = "sb3-contrib as people run it", "Tailguard's PPO", "Tailguard, through the market, 256"
HALF, THREE_QUARTERS = 0.5, 0.75
DURATIONS = (10.0, 30.0, 60.0)


def chosen(names: Iterable[str]) -> dict[str, Contender]:
    """Contenders whose names begin so, with the learning rates of their own defaults."""
    found = contenders(3e-4)
    return {name: found[name] for begin in names for name in found if name.startswith(begin)}


def share_after(task: Task, make: Contender, seed: int, seconds: float) -> float:
    """Train for so long from scratch, then evaluate on the other market."""
    learner: Any = make(task, seed)[0]
    begun, elapsed = time.perf_counter(), 0.0
    while elapsed < seconds:
        learner.state.progress = elapsed / seconds
        learner.iterate()
        elapsed = time.perf_counter() - begun
    return task.share(learner)


def equal_time(seeds: Iterable[int], console: Console) -> Table:
    """Shares after equal time, medians over the seeds."""
    learners = chosen((PPO, PATHWISE))
    shares: dict[str, dict[float, list[float]]] = {name: {seconds: [] for seconds in DURATIONS} for name in learners}
    for seed in seeds:
        task = make_task(seed)
        for name, make in learners.items():
            for seconds in DURATIONS:
                share = share_after(task, make, seed, seconds)
                shares[name][seconds].append(share)
                console.print(f"seed {seed}, {name}: {share:.0%} after {seconds:.0f} s", highlight=False)
    headings = [Column(f"after {seconds:.0f} s", justify="right") for seconds in DURATIONS]
    table = Table(Column("share of the planted optimum, out of sample", no_wrap=True), *headings, box=None)
    for name, by_time in shares.items():
        cells = [
            f"{statistics.median(found):.0%} ({', '.join(f'{share:.0%}' for share in found)})"
            for found in by_time.values()
        ]
        table.add_row(name, *cells)
    return table


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=5, help="markets and learners to take the median over")
    parser.add_argument("--limit", type=float, default=180.0, help="seconds of training before a run is given up")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads(), help="CPU threads of all learners")
    parser.add_argument("--only", choices=("half", "three-quarters", "equal-time"), help="one part of the three")
    given = parser.parse_args()
    torch.set_num_threads(given.threads)
    console, seeds = Console(width=160), range(given.seeds)
    console.print(f"torch {torch.__version__}, {given.threads} threads, {given.seeds} seeds", highlight=False)

    def say(line: str) -> None:
        console.print(line, soft_wrap=True, markup=False, highlight=False)

    if given.only in (None, "half"):
        console.print(result_table(HALF, race(chosen((PEER, PPO, PATHWISE)), HALF, seeds, given.limit, say)))
    if given.only in (None, "three-quarters"):
        found = race(chosen((PPO, PATHWISE)), THREE_QUARTERS, seeds, given.limit, say)
        console.print(result_table(THREE_QUARTERS, found))
    if given.only in (None, "equal-time"):
        console.print(equal_time(seeds, console))


if __name__ == "__main__":
    main()
