"""Bars larger than memory: preparing in one and in two processes, training from blocks, checking files of gigabytes.

    python benchmarks/large_data.py                       all three, about ten minutes of CPU time
    python benchmarks/large_data.py --only prepare        bars per CPU-second, and exponents in symbols and in bars
    python benchmarks/large_data.py --only blocks         training from blocks beside training from memory
    python benchmarks/large_data.py --only check          `tailguard data check` on 2 GB of CSV: its largest memory

Times are CPU times of this process and its children, so that other load on the machine costs little.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import resource
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl

import tailguard as tg
from tailguard.config import load_config
from tailguard.data.synthetic import make_market
from tailguard.runs.prepare_market import prepare_market

SYMBOLS = 8
SIZES = (100_000, 200_000, 400_000)
"""Bars of each symbol."""
COUNTS, FEW = (8, 16, 32, 64), 50_000
"""Numbers of symbols, of so many bars each."""
TARGET, TARGET_SYMBOLS, CORES = 300_000_000, 500, 16
MINUTE = timedelta(minutes=1)
RESIDENT = 4
"""Times that the training bars are as many as the resident ones."""


def cpu_seconds() -> tuple[float, float]:
    """CPU time of this process and of its children that have ended."""
    mine, children = (resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    return mine.ru_utime + mine.ru_stime, children.ru_utime + children.ru_stime


@dataclass(frozen=True)
class Prepared:
    """What preparing took."""

    bars: int
    jobs: int
    parent: float
    """CPU seconds of the process that gives out the work, or does all of it."""
    workers: float

    @property
    def seconds(self) -> float:
        return self.parent + self.workers


def exponent(sizes: Sequence[float], seconds: Sequence[float]) -> float:
    """Slope of log(seconds) over log(sizes), by least squares."""
    return float(np.polyfit(np.log(sizes), np.log(seconds), 1)[0])


def scaled_seconds(one: Prepared, in_symbols: float, in_bars: float) -> float:
    """Seconds for the target on its cores: what one process does, and an equal share of what many do, each with the
    exponents in the number of symbols and in the bars of a symbol. Exponents below 1 are noise, and count as 1."""
    growth = (TARGET_SYMBOLS / SYMBOLS) ** max(in_symbols, 1.0)
    growth *= (TARGET / TARGET_SYMBOLS / (one.bars / SYMBOLS)) ** max(in_bars, 1.0)
    return (one.parent + one.workers / CORES) * growth


def write_symbols(folder: Path, bars: int, symbols: int = SYMBOLS) -> None:
    folder.mkdir()
    for number in range(symbols):
        frame = make_market(bars, frequency="1m", seed=number).bars.frame.drop("segment", "symbol")
        frame.write_parquet(folder / f"SYM{number:02d}.parquet")


def prepare_once(source: Path, out: Path, jobs: int, accounts: str) -> Prepared:
    config = load_config(overrides=[f"data.path={source}", f"env.accounts={accounts}"])
    before = cpu_seconds()
    market = prepare_market(config, out, jobs=jobs)
    after = cpu_seconds()
    shutil.rmtree(out)
    return Prepared(len(market), jobs, after[0] - before[0], after[1] - before[1])


def measure_preparing(place: Path, accounts: str) -> None:
    print(f"accounts: {accounts}")
    by_bars = []
    for bars in SIZES:
        write_symbols(place / str(bars), bars)
        by_bars.append(prepare_once(place / str(bars), place / "out", 1, accounts))
        print(f"{SYMBOLS} symbols, 1 job   {describe(by_bars[-1])}", flush=True)
    several = prepare_once(place / str(SIZES[-1]), place / "out", 2, accounts)
    print(
        f"{SYMBOLS} symbols, 2 jobs  {describe(several)}: {several.parent:.1f} s in the process that gives out the "
        f"work, {several.workers / 2:.1f} s in each of two",
        flush=True,
    )
    by_symbols = []
    for count in COUNTS:
        write_symbols(place / f"symbols{count}", FEW, count)
        by_symbols.append(prepare_once(place / f"symbols{count}", place / "out", 1, accounts))
        print(f"{count} symbols, 1 job   {describe(by_symbols[-1])}", flush=True)
    in_bars, in_symbols = (
        exponent([one.bars for one in found], [one.seconds for one in found]) for found in (by_bars, by_symbols)
    )
    print(f"exponent in the bars of a symbol: {in_bars:.2f}; in the number of symbols: {in_symbols:.2f}")
    expected = scaled_seconds(several, in_symbols, in_bars)
    print(
        f"scaled, not measured: {TARGET_SYMBOLS} symbols of {TARGET // TARGET_SYMBOLS:,} bars on {CORES} such cores "
        f"take {expected / 60:.1f} minutes"
    )


def describe(one: Prepared) -> str:
    return f"{one.bars:>9,} bars  {one.seconds:6.1f} s  {rate(one)}"


def rate(one: Prepared) -> str:
    return f"{one.bars / one.seconds:,.0f} bars per CPU-second"


def measure_blocks(place: Path, rounds: int = 8) -> None:
    """Rounds of training in turn, from memory and from blocks on disk."""
    make_market(240_000, seed=0).save(place / "bars.parquet")
    config = load_config(overrides=[f"data.path={place / 'bars.parquet'}"])
    market = prepare_market(config, place / "market")
    bars = market.train.panel.rows
    inside = tg.split_bars(tg.load_bars(place / "bars.parquet"), embargo="7d").train
    options = {"num_envs": 256, "episode_length": 128, "seed": 0}
    envs = [tg.TradingEnv(inside, **options), tg.TradingEnv(market, resident_bars=bars // RESIDENT, **options)]
    for name, agents in (
        ("PPO", [tg.DistributionalPPO(env, n_steps=64, minibatch_size=2_048, epochs=2, seed=0) for env in envs]),
        ("gradients through the market", [tg.PathwiseLearner(env, seed=0) for env in envs]),
    ):
        _compare(name, agents, envs, bars, rounds)


def _compare(name: str, agents: Sequence[Any], envs: Sequence[tg.TradingEnv], bars: int, rounds: int) -> None:
    seconds: list[list[float]] = [[], []]
    before_turns = 0 if envs[1].blocks is None else envs[1].blocks.turn
    for each in range(rounds + 1):
        for which, agent in enumerate(agents):
            before = time.process_time()
            agent.learn(4 * 64 * 256, reset_num_timesteps=False)
            if each:  # the first round warms up
                seconds[which].append(time.process_time() - before)
    steps = 4 * 64 * 256
    exchanged = 0 if envs[1].blocks is None else envs[1].blocks.turn - before_turns
    memory, from_blocks = (steps / np.median(one) for one in seconds)
    ratios = np.array(seconds[0]) / np.array(seconds[1])
    print(
        f"{name}: {bars:,} training bars, a {RESIDENT}th of them resident, {exchanged} blocks exchanged: from memory "
        f"{memory:,.0f} steps per CPU-second, from blocks {from_blocks:,.0f}: {np.median(ratios):.3f} of it "
        f"(rounds: {', '.join(f'{ratio:.2f}' for ratio in ratios)})"
    )


def write_csv(folder: Path, size: int) -> int:
    """Files of one-minute klines with a header, of this many bytes in all; returns the number of bars."""
    folder.mkdir()
    total, number, begin = 0, 0, datetime(2018, 1, 1, tzinfo=UTC)
    while sum(file.stat().st_size for file in folder.iterdir()) < size:
        frame = make_market(500_000, frequency="1m", seed=number).bars.frame.drop("segment", "symbol")
        path = folder / f"SYM{number:02d}.csv"
        for part in range(4):
            times = begin + part * 500_000 * MINUTE
            moved = frame.with_columns(
                time=pl.datetime_range(times, times + 499_999 * MINUTE, "1m", time_zone="UTC", eager=True).dt.epoch(
                    "ms"
                )
            )
            with path.open("ab") as file:
                moved.write_csv(file, include_header=part == 0, float_precision=8)
            total += frame.height
        number += 1
    return total


CHECK = """
import json, resource, sys
limit = int(sys.argv.pop(1))
resource.setrlimit(resource.RLIMIT_DATA, (limit, resource.RLIM_INFINITY))
from tailguard.cli import main
try:
    main()
finally:
    usage = resource.getrusage(resource.RUSAGE_SELF)
    print(json.dumps({"peak": usage.ru_maxrss * 1024, "seconds": usage.ru_utime + usage.ru_stime}), file=sys.stderr)
"""


def measure_check(place: Path, size: int, limit: int) -> None:
    bars = write_csv(place / "csv", size)
    written = sum(file.stat().st_size for file in (place / "csv").iterdir())
    command = [sys.executable, "-c", CHECK, str(limit), "data", "check", str(place / "csv")]
    environment = {**os.environ, "POLARS_MAX_THREADS": "2", "OMP_NUM_THREADS": "1", "TMPDIR": str(place)}
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
    print("\n".join(done.stdout.splitlines()[-3:]))
    usage = json.loads(done.stderr.splitlines()[-1])
    print(
        f"{written / 1e9:.2f} GB of CSV, {bars:,} bars: exit status {done.returncode}, {usage['seconds']:.0f} CPU "
        f"seconds, {usage['peak'] / 2**20:,.0f} MiB resident at most, under a limit of {limit / 2**20:,.0f} MiB of data"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", choices=("prepare", "blocks", "check"))
    parser.add_argument("--accounts", default="per_symbol", choices=("portfolio", "per_symbol"))
    parser.add_argument("--size", type=float, default=2e9, help="bytes of CSV to check")
    parser.add_argument("--limit", type=float, default=2**30, help="bytes of data that checking may hold")
    given = parser.parse_args()
    parts = {
        "prepare": lambda place: measure_preparing(place, given.accounts),
        "blocks": measure_blocks,
        "check": lambda place: measure_check(place, math.ceil(given.size), math.ceil(given.limit)),
    }
    for name, measure in parts.items():
        if given.only in (None, name):
            with tempfile.TemporaryDirectory() as place:
                measure(Path(place))


if __name__ == "__main__":
    main()
