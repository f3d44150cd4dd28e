"""Does a limit hold on bars nobody has seen? Default settings, four years of bars, judged by the true tail.

    python benchmarks/promise.py                      20 seeds × 2 limits × 4 laws, about an hour on 2 cores
    python benchmarks/promise.py --seeds 3 --laws default
    python benchmarks/promise.py --bounds             of the cases in --out: what each bound on the tail is worth
    python benchmarks/promise.py --replay-check --first 140 --seeds 4 --limits -0.04 --laws default

For each seed a market of four years of hourly bars is made and cut into training, validation and test part; an agent is
trained and calibrated exactly as `tailguard train --set risk.limit=… --set env.episode_length=192` does. One test year
holds too few bad weeks to judge a method by, so that the agent is judged by its true tail: the mean of the worst 5 % of
episodes in 40 unseen years of the same law. The fourth law is a change: the agents of the default law, in years with
1.5 times the volatility and half the signal. The last columns are with the throttle on. Cases that are in --out with
the same --set are not run again.

Bounds: without the throttle, the calibration alone must keep the limit. Its bound is checked in two ways. "covers" is
how often the bound from four years cut out of an agent's unseen years contains its tail over all 40: the sampling error
alone. "inside" is the share of agents inside the limit, had their own held-out episodes been bounded so, as if losses
were proportional to exposure.

Replay check: the true tail is that of episodes that begin flat, and the throttle's is a replay of their net returns
times its factor. The same agents are backtested over the same years as a user does it, in one account that goes on, and
all windows of its equity are judged; its capital is so small that it never moves the market. Then the first year after
a change: a fresh throttle in each of the 40 years.
"""

from __future__ import annotations

import argparse
import json
import math
import multiprocessing
import os
import statistics
import tempfile
import time
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from rich.console import Console
from rich.table import Column, Table
from torch import Tensor

import tailguard as tg
from tailguard.algorithm.ensemble import Ensemble
from tailguard.config import RunConfig, load_config
from tailguard.data.bars import Bars
from tailguard.data.features import compute_features
from tailguard.data.market_law import MarketLaw
from tailguard.data.panel import FeatureTable, Panel
from tailguard.data.prepare import PreparedBars
from tailguard.data.splits import Split
from tailguard.envs.spec import task_on
from tailguard.evaluate.held_out import HeldOutEpisodes, episodes_on
from tailguard.evaluate.metrics import horizon_returns
from tailguard.experiment.build import split_market
from tailguard.risk.config import BoundKind
from tailguard.risk.cvar import cvar_from_samples
from tailguard.risk.exposure import cvar_bound
from tailguard.risk.throttle import Throttle
from tailguard.runs.folder import RunFolder
from tailguard.runs.members import Member, Members, train_members
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
"""Seed of the unseen years: no agent trains on them."""
BOUNDS: tuple[BoundKind, ...] = ("percentile", "pivotal")
SMALL = 1e-9
"""Capital of an account that is to grow for 40 years without moving the market."""
RECORD = 146
"""Episodes in the four years less a test part that an exposure is calibrated on."""
FACTORS = (1.0, 1.3)
"""Of the calibrated exposure: tail and growth between them and at none tell the best constant in hindsight."""


def settings(seed: int, limit: float, learner: str, changes: list[str]) -> RunConfig:
    """The default settings with this budget."""
    own = [f"risk.limit={limit}", f"risk.alpha={ALPHA}", f"env.episode_length={LENGTH}", f"training.seed={seed}"]
    return load_config(overrides=[*own, f"learner={learner}", *changes])


def train_case(
    law: str, seed: int, limit: float, learner: str, changes: list[str]
) -> tuple[Ensemble, Split, dict[str, Any]]:
    """Train one agent; returns it with its bars and what is known of it before it is judged."""
    torch.set_num_threads(1)
    config = settings(seed, limit, learner, changes)
    bars = tg.make_market(BARS, seed=seed, signal=SIGNAL, law=LAWS[law]).bars
    begun, cpu = time.perf_counter(), time.process_time()
    split = split_market(config, bars)
    assert isinstance(split, Split)
    members = Members.on(config, split.train, seed)
    validation = Validation(members.first, split.validation)
    with tempfile.TemporaryDirectory() as folder:
        agent = train_members(
            members,
            RunFolder(Path(folder)),
            validation,
            Console(quiet=True),
            resume=False,
            again="",
            ask=lambda _: False,
        )
    assert isinstance(agent, Ensemble)
    found: dict[str, Any] = {"law": law, "seed": seed, "limit": limit, "learner": learner, "changes": changes}
    found |= {"exposure": agent.exposure, "seconds": time.perf_counter() - begun, "cpu": time.process_time() - cpu}
    held = [
        (Member(learner, fold).held_out(), [learner])
        for learner, fold in zip(agent.members, members.folds, strict=True)
    ]
    held += [(part, list(agent.members)) for part in validation.parts]
    outcomes = [part.trade(Ensemble(learners, agent.exposure)).measured[:, 0] for part, learners in held]
    found |= {"held_out": torch.cat(outcomes).tolist(), "overlap": max(part.overlap for part, _ in held)}
    return agent, split, found


def key(case: dict[str, Any]) -> tuple[Any, ...]:
    """What makes a case another one; a record that does not name its settings is like none that is asked for."""
    changes = case.get("changes")
    return case["law"], case["seed"], case["limit"], case["learner"], None if changes is None else tuple(changes)


def run_case(asked: tuple[tuple[str, int, float, str, list[str]], bool]) -> dict[str, Any]:
    """Train one agent and judge it, and check how it is judged where that is asked for."""
    case, check = asked
    agent, split, found = train_case(*case)
    law, limit = case[0], case[2]
    (test,) = episodes_on(agent.spec, split.test)  # type: ignore[arg-type]
    found["test"] = test.trade(agent).measured[:, 0].tolist()
    found["true"] = judge(agent, unseen(law, SIGNAL, agent), FACTORS)
    if law == "default":
        found["changed"] = judge(agent, unseen(CHANGED, SIGNAL / 2, agent), (1.0,))
    if check:
        markets = {law: SIGNAL} | ({CHANGED: SIGNAL / 2} if law == "default" else {})
        found["check"] = {name: compare_replay(agent, limit, name, signal) for name, signal in markets.items()}
    return found


@cache
def years(law: str, signal: float) -> Bars:
    """Years that no agent has seen; the same for all of them."""
    return tg.make_market(YEARS * YEAR, seed=UNSEEN, signal=signal, law=LAWS.get(law, CHANGE)).bars


@cache
def panel_and_features(law: str, signal: float) -> tuple[Panel, FeatureTable]:
    bars = years(law, signal)
    return bars.panel("portfolio"), compute_features(bars)


def unseen(law: str, signal: float, agent: Ensemble) -> HeldOutEpisodes:
    """Episodes one after the other in unseen years, with the agent's own scaling."""
    spec = agent.spec
    assert spec is not None
    panel, table = panel_and_features(law, signal)
    prepared = PreparedBars(panel, spec.scaler.transform(table), table.names, table.valid, spec.scaler)
    task = task_on(spec, prepared, None, torch.float32)
    rows = np.flatnonzero(panel.tradeable & table.valid)
    return HeldOutEpisodes(task, torch.arange(int(rows[0]), int(rows[-1]) - LENGTH, LENGTH), LENGTH)


def judge(agent: Ensemble, part: HeldOutEpisodes, factors: tuple[float, ...]) -> list[dict[str, float]]:
    """CVaR and yearly log-growth at each factor on the exposure, without and with the throttle."""
    found = []
    for factor in factors:
        nets = part.trade(Ensemble(agent.members, factor * agent.exposure), "bar").measured
        held, limits = replay(nets, agent.calibration.limit)  # type: ignore[union-attr]
        free = (nets + 1).prod(1) - 1
        found.append(
            {
                "factor": factor,
                "outcomes": free.tolist() if factor == 1 else [],
                "cvar": float(cvar_from_samples(free, ALPHA)),
                "growth": float(free.log1p().mean()) * YEAR / LENGTH,
                "throttled_cvar": float(cvar_from_samples(held, ALPHA)),
                "throttled_growth": float(held.log1p().mean()) * YEAR / LENGTH,
                "throttled": float(np.mean(np.array(limits) < 1)),
            }
        )
    return found


def replay(nets: Tensor, limit: float) -> tuple[Tensor, list[float]]:
    """Outcomes of windows [n, bars] under a fresh throttle, [n], and its factor in each."""
    throttle, outcomes, factors = Throttle(limit, ALPHA), [], []
    for window in nets:
        # Net returns are proportional to exposure but for market impact, which is small here.
        factors.append(throttle.factor)
        outcomes.append(float((1 + throttle.factor * window).prod() - 1))
        throttle.observe(outcomes[-1])
    return torch.tensor(outcomes, dtype=torch.float64), factors


def compare_replay(agent: Ensemble, limit: float, name: str, signal: float) -> dict[str, Any]:
    """What `judge` says of an agent beside backtests over the same years, and the first year after a change."""
    nets = unseen(name, signal, agent).trade(agent, "bar").measured
    held, _ = replay(nets, limit)
    free = (nets + 1).prod(1) - 1
    assert agent.spec is not None
    small = replace(agent.spec.market, capital=SMALL)
    real = [
        tg.backtest(agent, years(name, signal), small, throttle=on, warn_in_sample=False, progress_bar=False)
        for on in (False, True)
    ]
    tails = [float(cvar_from_samples(each, ALPHA)) for each in (free, held)]
    windows = [torch.as_tensor(horizon_returns(result.equity, LENGTH)) for result in real]
    each_year = YEAR // LENGTH
    first = nets[: len(nets) // each_year * each_year].unflatten(0, (-1, each_year))
    return {
        "replay": [*tails, float(held.log1p().mean()) * YEAR / LENGTH],
        "backtest": [
            *(float(cvar_from_samples(each, ALPHA)) for each in windows),
            math.log(real[1].equity[-1]) * YEAR / len(real[1].net),
        ],
        "first_years": {
            "off": ((first + 1).prod(2) - 1).tolist(),
            "on": [replay(year, limit)[0].tolist() for year in first],
        },
    }


def replay_tables(cases: list[dict[str, Any]]) -> tuple[Table, Table]:
    """Replay against backtest for each agent, and the tail by quarters of the first year."""
    names = ("law", "limit", "seed", "free: replay", "backtest", "throttled: replay", "backtest", "growth", "backtest")
    agents = Table(*(Column(name, justify="right", no_wrap=True) for name in names), box=None)
    years_of: dict[tuple[str, float], list[dict[str, Any]]] = {}
    for case in sorted(cases, key=key):
        limit = case["limit"]
        for law, compared in case["check"].items():
            free, held, growth = zip(compared["replay"], compared["backtest"], strict=True)
            cells = [*(f"{tail / limit:.2f}" for tail in (*free, *held)), *(f"{each:+.2f}" for each in growth)]
            agents.add_row(law, f"{limit:.0%}", str(case["seed"]), *cells)
            years_of.setdefault((law, limit), []).append(compared["first_years"])
    quarters = Table("law", "limit", "throttle", "years", "1st quarter", "2nd", "3rd", "4th", "year", box=None)
    for (law, limit), found in years_of.items():
        for name in ("off", "on"):
            outcomes = torch.tensor([year for each in found for year in each[name]], dtype=torch.float64)
            parts = [*outcomes.tensor_split(4, dim=1), outcomes]
            tails = [f"{float(cvar_from_samples(part.flatten(), ALPHA)) / limit:.2f}" for part in parts]
            quarters.add_row(law, f"{limit:.0%}", name, str(len(outcomes)), *tails)
    return agents, quarters


def best_constant_growth(found: dict[str, Any]) -> float:
    """Growth of the same agent at the exposure that just keeps the limit, between the factors that were tried."""
    uses = [0.0, *(each["cvar"] / found["limit"] for each in found["true"])]
    return float(np.polyval(np.polyfit(uses, [0.0, *(each["growth"] for each in found["true"])], 2), 1.0))


def table(cases: list[dict[str, Any]]) -> Table:
    names = ("law", "limit", "seeds", "inside", "in ×1.25", "tail / limit", "growth a year", "of best", "test", "CPU s")
    names = (*names, "throttled: inside", "tail / limit", "growth", "of best")
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


def bounds_table(cases: list[dict[str, Any]]) -> Table:
    """What each bound on the tail is worth without the throttle."""
    names = (
        "law",
        "limit",
        "seeds",
        "bound",
        "covers",
        "bound / tail",
        "inside",
        "in ×1.25",
        "tail / limit",
        "exposure",
    )
    result = Table(*(Column(name, justify="right", no_wrap=True) for name in names), box=None)
    for law, limit in sorted({(case["law"], case["limit"]) for case in cases}):
        own = [case for case in cases if (case["law"], case["limit"]) == (law, limit)]
        for kind in BOUNDS:
            bounds, uses, factors = [], [], []
            for case in own:
                judged = case["true"][0]
                years = torch.tensor(judged["outcomes"], dtype=torch.float64)
                for record in years[: len(years) // RECORD * RECORD].split(RECORD):
                    bounds.append(cvar_bound(record, ALPHA, 0.9, block=2, kind=kind, resamples=200) / judged["cvar"])
                held_out = torch.tensor(case["held_out"], dtype=torch.float64)
                bound = cvar_bound(held_out, ALPHA, 0.9, block=2 * case["overlap"], kind=kind)
                factors.append(limit / bound)
                uses.append(factors[-1] * judged["cvar"] / limit)
            result.add_row(
                law,
                f"{limit:.0%}",
                str(len(own)),
                kind,
                f"{np.mean(np.array(bounds) >= 1):.0%}",
                f"{statistics.median(bounds):.2f}",
                f"{np.mean(np.array(uses) <= 1):.0%}",
                f"{np.mean(np.array(uses) <= 1.25):.0%}",
                f"{statistics.median(uses):.2f} ({min(uses):.2f}–{max(uses):.2f})",
                f"×{statistics.median(factors):.2f}",
            )
    return result


def _row(law: str, limit: float, own: list[dict[str, Any]]) -> list[str]:
    judged = [case["changed" if law == CHANGED else "true"][0] for case in own]
    uses, held = (np.array([each[name] / limit for each in judged]) for name in ("cvar", "throttled_cvar"))
    growth, rest, share = [each["growth"] for each in judged], [""] * 3, ""
    if law != CHANGED:
        best = [best_constant_growth(case) for case in own]
        shares = [each["growth"] / most for each, most in zip(judged, best, strict=True)]
        kept = [each["throttled_growth"] / most for each, most in zip(judged, best, strict=True)]
        share = f"{statistics.median(kept):.0%}"
        pooled = torch.tensor([pnl for case in own for pnl in case["test"]], dtype=torch.float64)
        rest = [
            f"{statistics.median(shares):.0%}",
            f"{float(cvar_from_samples(pooled, ALPHA)) / limit:.2f}",
            f"{statistics.median(case['cpu'] for case in own):.0f}",
        ]
    return [
        law,
        f"{limit:.0%}",
        str(len(own)),
        f"{np.mean(uses <= 1):.0%}",
        f"{np.mean(uses <= 1.25):.0%}",
        f"{statistics.median(uses):.2f} ({min(uses):.2f}–{max(uses):.2f})",
        f"{statistics.median(growth):+.2f} ({min(growth):+.2f}–{max(growth):+.2f})",
        *rest,
        f"{np.mean(held <= 1):.0%}",
        f"{statistics.median(held):.2f} ({min(held):.2f}–{max(held):.2f})",
        f"{statistics.median(each['throttled_growth'] for each in judged):+.2f}",
        share,
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
    parser.add_argument("--bounds", action="store_true", help="train nothing; judge the bounds by the cases in --out")
    parser.add_argument("--replay-check", action="store_true", help="compare the judgement with backtests")
    parser.add_argument("--out", type=Path, default=Path("promise.jsonl"), help="one line for each case")
    given = parser.parse_args()
    done = [json.loads(line) for line in given.out.read_text().splitlines()] if given.out.exists() else []
    if given.replay_check:
        done = [case for case in done if "check" in case]
    if given.bounds:
        own = [case for case in done if key(case)[3:] == (given.learner, tuple(given.changes))]
        Console(width=200).print(bounds_table(own))
        return
    known, changes = {key(case) for case in done}, tuple(given.changes)
    seeds = range(given.first, given.first + given.seeds)
    asked = [
        (law, seed, limit, given.learner, changes) for law in given.laws for seed in seeds for limit in given.limits
    ]
    console = Console(width=200)
    os.environ["OMP_NUM_THREADS"] = "1"
    # Polars does not survive a fork.
    with multiprocessing.get_context("spawn").Pool(given.jobs) as pool, given.out.open("a") as out:
        left = [((*case[:-1], given.changes), given.replay_check) for case in asked if case not in known]
        for found in pool.imap_unordered(run_case, left):
            done.append(found)
            out.write(json.dumps(found) + "\n")
            out.flush()
            judged = found["true"][0]
            use, held = (judged[name] / found["limit"] for name in ("cvar", "throttled_cvar"))
            words = f"tail {use:.2f} × limit, {held:.2f} throttled, growth {judged['growth']:+.2f} a year"
            console.print(f"{found['law']}, seed {found['seed']}, {found['limit']:.0%}: {words}", highlight=False)
    mine = [case for case in done if key(case) in set(asked)]
    for each in (table(mine), *(replay_tables(mine) if given.replay_check else ())):
        console.print(each)


if __name__ == "__main__":
    main()
