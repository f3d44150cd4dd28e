"""Does a limit hold on bars nobody has seen? Default settings, four years of bars, judged by the true tail.

    python benchmarks/promise.py                      20 seeds × 2 limits × 4 laws, about an hour on 2 cores
    python benchmarks/promise.py --seeds 3 --laws default

For each seed a market of four years of hourly bars is made and cut into training, validation and test part; an agent is
trained and calibrated exactly as `tailguard train --set risk.limit=… --set env.episode_length=192` does. One test year
holds too few bad weeks to judge a method by, so that the agent is judged by its true tail: the mean of the worst 5 % of
episodes in 40 unseen years of the same law. The fourth law is a change: the agents of the default law, in years with
1.5 times the volatility and half the signal. Cases that are in --out already are not run again.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
from rich.console import Console
from rich.table import Column, Table

import tailguard as tg
from tailguard.algorithm.ensemble import Ensemble
from tailguard.config import RunConfig, load_config
from tailguard.data.market_law import MarketLaw
from tailguard.evaluate.held_out import HeldOutEpisodes, episodes_on
from tailguard.evaluate.trained import split_of
from tailguard.risk.cvar import cvar_from_samples
from tailguard.runs.folder import RunFolder
from tailguard.runs.members import Members, train_members
from tailguard.runs.validation import Validation

LAWS = {
    "default": MarketLaw(),
    "student-t 3": MarketLaw(tail_index=3.0),
    "regimes": MarketLaw(crisis_factor=2.5, calm_hours=1440.0, crisis_hours=480.0),
}
CHANGED, CHANGE = "changed", MarketLaw(volatility=1.5 * MarketLaw().volatility)
"""The fourth law: agents of the default one, in a market that has become another."""
LIMITS = (-0.02, -0.04)
BARS, YEAR, YEARS = 35_064, 8_766, 40
LENGTH, ALPHA, SIGNAL = 192, 0.05, 8.0
UNSEEN = 1_000_000
"""Seeds of unseen years, plus the seed of the agent: no agent trains on any of them."""
FACTORS = (1.0, 1.3)
"""Of the calibrated exposure: tail and growth between them and at none tell the best constant in hindsight."""


def settings(seed: int, limit: float, learner: str, changes: list[str]) -> RunConfig:
    """The defaults, with the issue's budget."""
    own = [f"risk.limit={limit}", f"risk.alpha={ALPHA}", f"env.episode_length={LENGTH}", f"training.seed={seed}"]
    return load_config(overrides=[*own, f"learner={learner}", *changes])


def run_case(case: tuple[str, int, float, str, list[str]]) -> dict[str, Any]:
    """Train one agent and judge it."""
    law, seed, limit, learner, changes = case
    torch.set_num_threads(1)
    config = settings(seed, limit, learner, changes)
    bars = tg.make_market(BARS, seed=seed, signal=SIGNAL, law=LAWS[law]).bars
    begun, cpu = time.perf_counter(), time.process_time()
    split = split_of(config, bars)
    members = Members(config, split.train, seed)
    with tempfile.TemporaryDirectory() as folder:
        agent = train_members(
            members,
            RunFolder(Path(folder)),
            Validation(members.first, split.validation),
            Console(quiet=True),
            resume=False,
            again="",
            ask=lambda _: False,
        )
    assert isinstance(agent, Ensemble)
    found: dict[str, Any] = {"law": law, "seed": seed, "limit": limit, "learner": learner}
    found |= {"exposure": agent.exposure, "seconds": time.perf_counter() - begun, "cpu": time.process_time() - cpu}
    (test,) = episodes_on(agent.spec, split.test)  # type: ignore[arg-type]
    found["test"] = test.trade(agent).measured[:, 0].tolist()
    found["true"] = judge(agent, unseen(agent, LAWS[law], SIGNAL, seed), FACTORS)
    if law == "default":
        found["changed"] = judge(agent, unseen(agent, CHANGE, SIGNAL / 2, seed), (1.0,))
    return found


def unseen(agent: Ensemble, law: MarketLaw, signal: float, seed: int) -> HeldOutEpisodes:
    """Episodes one after the other in years that nobody has seen."""
    years = tg.make_market(YEARS * YEAR, seed=UNSEEN + seed, signal=signal, law=law).bars
    (part,) = episodes_on(agent.spec, years)  # type: ignore[arg-type]
    first, last = int(part.starts[0]), int(part.starts[-1])
    return HeldOutEpisodes(part.task, torch.arange(first, last + 1, LENGTH), LENGTH)


def judge(agent: Ensemble, part: HeldOutEpisodes, factors: tuple[float, ...]) -> list[tuple[float, float, float]]:
    """Factor on the exposure, CVaR and yearly log-growth of each factor."""
    found = []
    for factor in factors:
        traded = part.trade(Ensemble(agent.members, factor * agent.exposure))
        growth = float(traded.growth.mean()) * YEAR / LENGTH
        found.append((factor, float(cvar_from_samples(traded.measured[:, 0], ALPHA)), growth))
    return found


def best_constant_growth(found: dict[str, Any]) -> float:
    """Growth of the same agent at the exposure that just keeps the limit, between the factors that were tried."""
    _, cvars, growths = zip(*found["true"], strict=True)
    uses = np.array([0.0, *cvars]) / found["limit"]
    return float(np.polyval(np.polyfit(uses, [0.0, *growths], 2), 1.0))


def table(cases: list[dict[str, Any]]) -> Table:
    names = ("law", "limit", "seeds", "inside", "inside ×1.25", "true tail / limit", "growth a year", "of the best")
    names = (*names, "exposure", "test tail, pooled", "CPU s")
    result = Table(*(Column(name, justify="right", no_wrap=True) for name in names), box=None)
    for law in (*LAWS, CHANGED):
        for limit in sorted({case["limit"] for case in cases}, reverse=True):
            own = [
                case
                for case in cases
                if case["limit"] == limit and (case["law"] == law or (law == CHANGED and case["law"] == "default"))
            ]
            if own:
                result.add_row(*_row(law, limit, own))
    return result


def _row(law: str, limit: float, own: list[dict[str, Any]]) -> list[str]:
    judged = [case["changed"][0] if law == CHANGED else case["true"][0] for case in own]
    uses = [cvar / limit for _, cvar, _ in judged]
    growth = [yearly for _, _, yearly in judged]
    rest = ["", "", "", ""]
    if law != CHANGED:
        shares = [case["true"][0][2] / best_constant_growth(case) for case in own]
        pooled = torch.tensor([pnl for case in own for pnl in case["test"]], dtype=torch.float64)
        rest = [
            f"{statistics.median(shares):.0%}",
            f"{statistics.median(case['exposure'] for case in own):.2f}",
            f"{float(cvar_from_samples(pooled, ALPHA)) / limit:.2f} × limit",
            f"{statistics.median(case['cpu'] for case in own):.0f}",
        ]
    return [
        law,
        f"{limit:.0%}",
        str(len(own)),
        f"{np.mean(np.array(uses) <= 1):.0%}",
        f"{np.mean(np.array(uses) <= 1.25):.0%}",
        f"{statistics.median(uses):.2f} ({min(uses):.2f} to {max(uses):.2f})",
        f"{statistics.median(growth):+.2f} ({min(growth):+.2f} to {max(growth):+.2f})",
        *rest,
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=20, help="markets and agents for each law and limit")
    parser.add_argument("--first", type=int, default=0, help="the first seed")
    parser.add_argument("--laws", nargs="+", default=list(LAWS), choices=list(LAWS), help="laws to train on")
    parser.add_argument("--limits", nargs="+", type=float, default=list(LIMITS))
    parser.add_argument("--learner", default="pathwise", choices=("pathwise", "ppo"))
    parser.add_argument("--set", dest="changes", action="append", default=[], help="settings, as of tailguard train")
    parser.add_argument("--jobs", type=int, default=2, help="agents trained side by side, each on one thread")
    parser.add_argument("--out", type=Path, default=Path("promise.jsonl"), help="one line for each case")
    given = parser.parse_args()
    done = [json.loads(line) for line in given.out.read_text().splitlines()] if given.out.exists() else []
    known = {(case["law"], case["seed"], case["limit"], case["learner"]) for case in done}
    seeds = range(given.first, given.first + given.seeds)
    asked = [(law, seed, limit, given.learner) for law in given.laws for seed in seeds for limit in given.limits]
    console = Console(width=200)
    os.environ["OMP_NUM_THREADS"] = "1"
    # Polars does not survive a fork.
    with multiprocessing.get_context("spawn").Pool(given.jobs) as pool, given.out.open("a") as out:
        left = [(*case, given.changes) for case in asked if case not in known]
        for found in pool.imap_unordered(run_case, left):
            done.append(found)
            out.write(json.dumps(found) + "\n")
            out.flush()
            use = found["true"][0][1] / found["limit"]
            words = f"tail {use:.2f} × limit, growth {found['true'][0][2]:+.2f} a year, {found['cpu']:.0f} s CPU"
            console.print(f"{found['law']}, seed {found['seed']}, {found['limit']:.0%}: {words}", highlight=False)
    mine = [case for case in done if (case["law"], case["seed"], case["limit"], case["learner"]) in set(asked)]
    console.print(table(mine))


if __name__ == "__main__":
    main()
