"""A shadow session over many replayed bars, beside a backtest of them: equality, memory, and the time of a restart.

    python benchmarks/live_replay.py --bars 8766 --frequency 1h --folder year
    python benchmarks/live_replay.py --bars 1440 --frequency 1m --folder soak

The session goes on where its journal ends: the same command again is a restart, which replays the memory and is timed.
`--seconds` ends a slice. When all bars are there, decisions are compared with the backtest's, bit for bit.
"""

from __future__ import annotations

import argparse
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import polars as pl
import torch

import tailguard as tg
from tailguard.algorithm.ensemble import Ensemble
from tailguard.data.bars import Bars
from tailguard.envs.shield import Shield
from tailguard.live.bar_history import BarHistory, ReplaySource
from tailguard.live.decide import LiveDecider
from tailguard.live.guards import GuardConfig
from tailguard.live.journal import Journal, read_records
from tailguard.live.kill import KillSwitch
from tailguard.live.orders import OrderConfig
from tailguard.live.session import Session, SessionConfig
from tailguard.live.shadow import SimulatedAccount
from tailguard.live.venue import SimulatedClock
from tailguard.risk.exposure import Exposure

LEAD_IN = 750
FEW = ("return_24", "rsi_14", "macd", "bollinger_20", "trend_24", "volume_168")
LOOSE = GuardConfig(drawdown=0.99, jump=10)


def make_agent(frequency: str, features: tuple[str, ...] | None) -> Ensemble:
    """Two members with exposure, throttle, shield and volatility scaling, and positions that are not tiny."""
    env = tg.TradingEnv(
        tg.make_market(1_600, frequency=frequency, seed=5).bars,
        num_envs=4,
        episode_length=32,
        accounts="portfolio",
        shield=Shield(shock=0.2, budget=0.1),
        volatility_half_life=24,
        features=features,
    )
    members = []
    for seed in (1, 2):
        member = tg.DistributionalPPO(env, n_steps=16, hidden=(16,), lstm_size=16, seed=seed).learn(128)
        with torch.no_grad():
            member.policy.action_head.linear.weight.mul_(100)
        members.append(member)
    return Ensemble(members, Exposure(0.8, -0.005, 0.05, 0.9, -0.01, -0.004, -0.0049, 5.0), throttled=True)


def open_session(agent: Ensemble, bars: Bars, first_ms: int, folder: Path) -> Session:
    decider = LiveDecider(agent, BarHistory(bars, first_ms))
    assert agent.spec is not None
    config = SessionConfig(
        run="replay",
        mode="shadow",
        symbols=bars.symbols,
        capital=1.0,
        leverage=agent.spec.market.leverage,
        bar_ms=round(bars.frequency.total_seconds() * 1000),
        window=agent.spec.episode_length,
        guards=LOOSE,
        orders=OrderConfig(),
    )
    journal = Journal(folder / "journal.jsonl")
    last = journal.records[-1]["time"] if journal.records else first_ms
    clock = SimulatedClock(int(last))
    return Session(config, decider, journal, clock, KillSwitch(folder / "KILL"), shadow=SimulatedAccount(decider))


def resident_mib() -> float:
    """Resident memory of this process."""
    status = Path("/proc/self/status").read_text(encoding="ascii")
    return int(status.split("VmRSS:")[1].split()[0]) / 1024


def compare(agent: Ensemble, bars: Bars, first_ms: int, folder: Path) -> None:
    first = pl.Series([first_ms]).cast(pl.Datetime("ms", "UTC"))[0]
    expected = tg.backtest(agent, replace(bars, first=first), progress_bar=False)
    made = [record for record in read_records(folder / "journal.jsonl") if record["kind"] == "decision"][:-1]
    same = {
        "targets": [each["target"] for each in made],
        "throttle": [each["throttle"] for each in made],
        "shielded": [each["shielded"] for each in made],
    }
    for name, values in same.items():
        differ = int((np.asarray(values) != getattr(expected, name)).sum())
        print(f"{name:10} {len(values):>8,} decisions, {differ} differ from the backtest's")
    equity = np.array([each["equity"] for each in made])
    print(f"equity     largest relative difference {np.abs(equity / expected.equity[:-1] - 1).max():.1e}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--bars", type=int, default=8_766)
    parser.add_argument("--frequency", default="1h")
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--all-features", action="store_true", help="all built-in features instead of six")
    parser.add_argument("--seconds", type=float, default=float("inf"), help="stop after this time")
    parser.add_argument("--every", type=int, default=240, help="bars between two lines")
    arguments = parser.parse_args()
    agent = make_agent(arguments.frequency, None if arguments.all_features else FEW)
    bars = tg.make_market(LEAD_IN + arguments.bars, frequency=arguments.frequency, seed=8).bars
    first_ms = int(bars.frame["time"].dt.epoch("ms")[LEAD_IN])
    begun, cpu = time.monotonic(), time.process_time()
    session = open_session(agent, bars, first_ms, arguments.folder)
    session.start()
    known = [record["bar"] for record in read_records(arguments.folder / "journal.jsonl") if record["kind"] == "bar"]
    print(
        f"start      after {len(known):,} bars: {time.monotonic() - begun:.2f} s, of them "
        f"{time.process_time() - cpu:.2f} s of CPU time",
        flush=True,
    )
    source = ReplaySource(bars, known[-1] if known else first_ms - 1, session.clock)
    begun, cpu, count = time.monotonic(), time.process_time(), 0
    while time.monotonic() - begun < arguments.seconds and (bar := source.next_bar()) is not None:
        session.on_bar(bar)
        count += 1
        bars_so_far = len(known) + count
        if bars_so_far % arguments.every == 0:
            spent = 1000 * (time.process_time() - cpu) / count
            print(f"{bars_so_far:>8,} bars  {resident_mib():>6.0f} MiB  {spent:.1f} ms of CPU time a bar", flush=True)
    session.ledger.journal.close()
    if len(known) + count == arguments.bars:
        compare(agent, bars, first_ms, arguments.folder)


if __name__ == "__main__":
    main()
