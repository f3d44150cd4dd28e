"""Simulated steps per CPU-second with full costs, beside gym-anytrading in the same run, and what a market weighs.

    python benchmarks/simulator.py            about a minute

One thread and the CPU time of this process (`time.process_time`), so that other load on the machine costs little. Each
figure is the best of several repeats. A step is one bar of one environment.
"""

from __future__ import annotations

import argparse
import os
import platform
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path

import gymnasium
import numpy as np
import pandas as pd
import torch
from gym_anytrading.envs import StocksEnv
from rich.console import Console
from rich.table import Table

import tailguard as tg
from tailguard.bench.own_learner import EPISODE
from tailguard.bench.step_rates import BATCHES, Rate, cpu_seconds, environment_rate, market_rate, rate_table
from tailguard.data.panel import Panel
from tailguard.data.prepare import prepare
from tailguard.market import MarketConfig, build_market, open_accounts, step

WINDOW = 10
PEER = "gym-anytrading"


def peer_rate(panel: Panel, environments: int) -> Rate:
    """gym-anytrading's StocksEnv: all in or all out, proportional fees, a window of prices as observation."""
    frame = pd.DataFrame({"Close": panel.close[:, 0]})

    def make() -> StocksEnv:
        return StocksEnv(df=frame, window_size=WINDOW, frame_bound=(WINDOW, len(frame)))

    env: gymnasium.Env | gymnasium.vector.VectorEnv
    if environments == 1:
        env, actions = make(), np.random.default_rng(0).integers(0, 2, EPISODE)
    else:
        env = gymnasium.vector.SyncVectorEnv([make] * environments)
        actions = np.random.default_rng(0).integers(0, 2, (EPISODE, environments))

    def episode() -> None:
        env.reset(seed=0)
        for action in actions:
            env.step(action)

    name = f"{PEER} StocksEnv" if environments == 1 else f"{PEER} in SyncVectorEnv"
    return Rate(name, environments, cpu_seconds(episode))


def random_bars(rows: int) -> Panel:
    """Bars for weighing: any prices will do."""
    rng = np.random.default_rng(0)
    close = 100 * np.exp(np.cumsum(0.005 * rng.normal(size=(rows, 1)), axis=0))
    return Panel(
        time=3_600_000 * np.arange(rows, dtype=np.int64),
        open=close,
        high=close * 1.001,
        low=close * 0.999,
        close=close,
        volume=np.full_like(close, 1e5),
        segment=np.zeros(rows, dtype=np.int32),
        tradeable=np.ones(rows, dtype=np.bool_),
        symbols=("RANDOM",),
        frequency_ms=3_600_000,
    )


def resident_bytes() -> int:
    """Memory of this process that is in use now (Linux)."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def counterfactual(bars: int) -> tuple[int, int]:
    """Bytes of a market of so many bars, and the growth of the process from stepping 64 to 16,384 environments."""
    market = build_market(random_bars(bars))
    size = sum(tensor.nbytes for tensor in (market.table, market.segment, market.time))

    def run(environments: int) -> None:
        state = open_accounts(torch.zeros(environments, dtype=torch.int64), market.assets)
        target = torch.rand(environments, market.assets)
        for _ in range(20):
            state, _ = step(market, state, target)

    run(64)
    before = resident_bytes()
    run(16_384)
    return size, resident_bytes() - before


def memory_table() -> Table:
    table = Table("memory", "market", "bytes a bar", "growth from 64 to 16,384 environments", box=None, pad_edge=False)
    for bars in (10_000, 100_000, 1_000_000):
        # A process of its own: memory that earlier work has freed would hide the growth.
        with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as pool:
            size, growth = pool.submit(counterfactual, bars).result()
        table.add_row(f"{bars:,} bars", f"{size / 2**20:,.1f} MiB", f"{size / bars:,.0f}", f"{growth / 2**20:,.1f} MiB")
    return table


def main() -> None:
    argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter).parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    bars = tg.make_market(26_280).bars
    prepared = prepare(bars)
    with_borrow = build_market(prepared.panel, MarketConfig(borrow_rate=0.05))
    market = build_market(prepared.panel)
    machine = platform.processor() or platform.machine()
    print(f"torch {torch.__version__}, {machine}, one thread, float32, {market.rows:,} bars")
    print("costs: fee, half spread, square-root impact with participation cap, funding, margin and liquidation\n")
    rates = [market_rate("market with all costs", market, environments) for environments in BATCHES]
    rates.append(market_rate("market with borrow interest too", with_borrow, 2_048))
    rates += [environment_rate(prepared, environments) for environments in BATCHES]
    rates += [peer_rate(prepared.panel, environments) for environments in (1, 64)]
    console = Console()
    console.print(rate_table(rates, PEER))
    console.print()
    console.print(memory_table())


if __name__ == "__main__":
    main()
