"""Is the budget kept when the feed lies? Agents that were trained with a perfect feed, and agents trained for faults.

    python benchmarks/feed.py --first 200 --seeds 8      about 2 minutes of one core for each seed and kind of agent

For each seed a market of four years of hourly bars is made and cut into training, validation and test part; an agent is
trained and calibrated exactly as `tailguard train --set risk.limit=-0.04 --set env.episode_length=192` does, once as it
is and once with `--set robust.feed=[…]`: one feed of every kind but the fee, which all episodes of a market share. The
agent is judged by its true tail under every feed: the mean of the worst 5 % of episodes in unseen years of the same
law, the same years for all, without and with the throttle. Cases that are in --out already are not run again.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import tempfile
import time
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from rich.console import Console
from rich.table import Column, Table

import tailguard as tg
from tailguard.algorithm.ensemble import Ensemble
from tailguard.config import load_config
from tailguard.data.features import compute_features
from tailguard.data.panel import FeatureTable, Panel
from tailguard.data.prepare import PreparedBars
from tailguard.envs.spec import task_on
from tailguard.evaluate.held_out import HeldOutEpisodes
from tailguard.evaluate.robustness import EVERY_FAULT
from tailguard.experiment.build import split_market
from tailguard.experiment.faulty_feed import market_config, market_panel, seen_bars
from tailguard.risk.cvar import cvar_from_samples
from tailguard.risk.throttle import Throttle
from tailguard.robust.feed import parse_feed
from tailguard.runs.folder import RunFolder
from tailguard.runs.members import Members, train_members
from tailguard.runs.validation import Validation

BARS, YEAR = 35_064, 8_766
LENGTH, ALPHA, LIMIT, SIGNAL = 192, 0.05, -0.04, 8.0
UNSEEN = 1_000_000
"""Seed of the unseen years: no agent trains on them."""
CLEAN = "clean"
TRAINED_FOR = tuple(text for text in EVERY_FAULT if text not in ("late:1", "late:3", "fee"))


def train_agent(seed: int, feeds: tuple[str, ...]) -> tuple[Ensemble, float]:
    """The agent of a default run, and the CPU seconds that it took."""
    own = [f"risk.limit={LIMIT}", f"risk.alpha={ALPHA}", f"env.episode_length={LENGTH}", f"training.seed={seed}"]
    config = load_config(overrides=[*own, f"robust.feed=[{', '.join(feeds)}]"])
    begun = time.process_time()
    split = split_market(config, tg.make_market(BARS, seed=seed, signal=SIGNAL).bars)
    members = Members.on(config, split.train, seed)
    validation = Validation(members.first, split.validation)
    with tempfile.TemporaryDirectory() as folder:
        place, quiet = RunFolder(Path(folder)), Console(quiet=True)
        agent = train_members(members, place, validation, quiet, resume=False, again="", ask=lambda _: False)
    assert isinstance(agent, Ensemble)
    return agent, time.process_time() - begun


@cache
def years(count: int, text: str) -> tuple[Panel, np.ndarray, FeatureTable]:
    """Unseen years under a feed: the bars that are traded, the closes that are seen, and their features."""
    bars = tg.make_market(count * YEAR, seed=UNSEEN, signal=SIGNAL).bars
    if text == CLEAN:
        panel = bars.panel("portfolio")
        return panel, panel.close, compute_features(bars)
    feed = parse_feed(text)
    seen = seen_bars(bars, feed)
    traded = market_panel(bars, feed, tg.MarketConfig(), "portfolio")
    return traded, seen.panel("portfolio").close, compute_features(seen)


def judge(agent: Ensemble, count: int, text: str) -> dict[str, float]:
    """Tail and yearly log-growth in unseen years under a feed, without and with the throttle."""
    spec = agent.spec
    assert spec is not None
    assert agent.calibration is not None
    panel, close, table = years(count, text)
    features = spec.scaler.transform(table)
    prepared = PreparedBars(panel, features, table.names, table.valid, spec.scaler, seen_close=close)
    config = spec.market if text == CLEAN else market_config(parse_feed(text), spec.market)
    rows = np.flatnonzero(panel.tradeable & table.valid)
    starts = torch.arange(int(rows[0]), int(rows[-1]) - LENGTH, LENGTH)
    part = HeldOutEpisodes(task_on(spec, prepared, config, torch.float32), starts, LENGTH)
    nets = part.trade(Ensemble(agent.members, agent.exposure), "bar").measured
    throttle, outcomes = Throttle(agent.calibration.limit, ALPHA), []
    for window in nets:
        # Net returns are proportional to exposure but for market impact, which is small here.
        outcomes.append(float((1 + throttle.factor * window).prod() - 1))
        throttle.observe(outcomes[-1])
    free, held = (nets + 1).prod(1) - 1, torch.tensor(outcomes, dtype=torch.float64)
    return {
        "cvar": float(cvar_from_samples(free, ALPHA)),
        "growth": float(free.log1p().mean()) * YEAR / LENGTH,
        "throttled_cvar": float(cvar_from_samples(held, ALPHA)),
        "throttled_growth": float(held.log1p().mean()) * YEAR / LENGTH,
    }


def run_case(seed: int, kind: str, count: int) -> dict[str, Any]:
    agent, cpu = train_agent(seed, TRAINED_FOR if kind == "trained" else ())
    found = {text: judge(agent, count, text) for text in (CLEAN, *EVERY_FAULT)}
    return {"seed": seed, "kind": kind, "years": count, "exposure": agent.exposure, "cpu": cpu, "feeds": found}


def table(cases: list[dict[str, Any]]) -> Table:
    """One row for each feed and kind of agent."""
    names = ("feed", "agent", "seeds", "inside", "tail / limit", "growth a year", "throttled: inside", "tail / limit")
    result = Table(*(Column(name, justify="right", no_wrap=True) for name in (*names, "growth")), box=None)
    for text in (CLEAN, *EVERY_FAULT):
        for kind in ("plain", "trained"):
            judged = [case["feeds"][text] for case in cases if case["kind"] == kind]
            if judged:
                uses, held = ([each[name] / LIMIT for each in judged] for name in ("cvar", "throttled_cvar"))
                result.add_row(
                    text if text == CLEAN else str(parse_feed(text)),
                    kind,
                    str(len(judged)),
                    f"{np.mean(np.array(uses) <= 1):.0%}",
                    f"{statistics.median(uses):.2f} ({min(uses):.2f}–{max(uses):.2f})",
                    f"{statistics.median(each['growth'] for each in judged):+.2f}",
                    f"{np.mean(np.array(held) <= 1):.0%}",
                    f"{statistics.median(held):.2f} ({min(held):.2f}–{max(held):.2f})",
                    f"{statistics.median(each['throttled_growth'] for each in judged):+.2f}",
                )
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=8, help="markets and agents of each kind")
    parser.add_argument("--first", type=int, default=200, help="the first seed")
    parser.add_argument("--years", type=int, default=20, help="unseen years to judge by")
    parser.add_argument("--kinds", nargs="+", default=["plain", "trained"], choices=["plain", "trained"])
    parser.add_argument("--out", type=Path, default=Path("feed.jsonl"), help="one line for each case")
    given = parser.parse_args()
    os.environ["OMP_NUM_THREADS"] = "1"
    torch.set_num_threads(1)
    console = Console(width=160)
    done = [json.loads(line) for line in given.out.read_text().splitlines()] if given.out.exists() else []
    known = {(case["seed"], case["kind"]) for case in done}
    with given.out.open("a") as out:
        for seed in range(given.first, given.first + given.seeds):
            for kind in given.kinds:
                if (seed, kind) in known:
                    continue
                done.append(run_case(seed, kind, given.years))
                out.write(json.dumps(done[-1]) + "\n")
                out.flush()
                worst = min(done[-1]["feeds"].values(), key=lambda each: each["throttled_cvar"])
                words = (
                    f"exposure ×{done[-1]['exposure']:.2f}, worst tail {worst['throttled_cvar'] / LIMIT:.2f} × limit"
                )
                console.print(f"seed {seed}, {kind}: {words}, {done[-1]['cpu']:.0f} s of CPU", highlight=False)
    console.print(table(done))


if __name__ == "__main__":
    main()
