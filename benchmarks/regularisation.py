"""Which regularisation earns its place? Out-of-sample growth and tail with each option, against the defaults.

    python benchmarks/regularisation.py --first 200              8 seeds × 10 settings, about 40 minutes on one core
    python benchmarks/regularisation.py --only "dropout 0.2" --seeds 2

For each seed a market of four years of hourly bars, an agent of the default settings with a limit of −4 % but with two
members instead of four, which halves the time, and the same agent with one option. Each is judged on 40 unseen years:
the tail and the growth at the exposure that was calibrated, and the growth at the exposure that hindsight would have
chosen to just keep the limit, which asks how good the agent is whatever its exposure. Differences to the default are
taken seed by seed, with 95 % intervals of their mean by a bootstrap over seeds. Cases in --out are not run again.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import time
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from promise import FACTORS, SIGNAL, best_constant_growth, judge, train_case, unseen
from rich.console import Console
from rich.table import Column, Table

LIMIT = -0.04
CHEAPER = ["training.members=2"]
DEFAULT = "default"
OPTIONS: dict[str, list[str]] = {
    DEFAULT: [],
    "observation noise 0.5": ["pathwise.observation_noise=0.5"],
    "costs ×0.5 to ×2": ["env.randomisation.costs=1"],
    "orders missed, 20 %": ["env.randomisation.delay=0.2"],
    "blocks of 96 bars": ["env.randomisation.block=96"],
    "volatility ×0.7, ×1.4": ["env.randomisation.volatility=[0.7, 1.4]"],
    "dropout 0.2": ["pathwise.dropout=0.2"],
    "weight decay 1": ["pathwise.optimizer=adamw", "pathwise.weight_decay=1"],
    "select best": ["training.select=best"],
    "without volatility scaling": ["risk.volatility_half_life=0"],
}
MEASURES = ("growth at the limit", "tail / limit", "growth", "throttled growth")
RESAMPLES = 10_000

Float = NDArray[np.float64]


def run_option(case: tuple[str, int]) -> dict[str, Any]:
    """Train and judge one agent."""
    option, seed = case
    cpu = time.process_time()
    agent, _, found = train_case("default", seed, LIMIT, "pathwise", [*CHEAPER, *OPTIONS[option]])
    judged = judge(agent, unseen("default", SIGNAL, agent), FACTORS)
    return found | {"option": option, "true": judged, "cpu": time.process_time() - cpu}


def measures(found: dict[str, Any]) -> list[float]:
    """The numbers of `MEASURES`."""
    judged = found["true"][0]
    return [
        best_constant_growth(found),
        judged["cvar"] / found["limit"],
        judged["growth"],
        judged["throttled_growth"],
    ]


def mean_interval(differences: Float) -> tuple[Float, Float]:
    """95 % interval of the mean of each column, [seeds, measures], by a bootstrap over seeds."""
    count = len(differences)
    picked = np.random.default_rng(0).integers(count, size=(RESAMPLES, count))
    low, high = np.quantile(differences[picked].mean(1), (0.025, 0.975), axis=0)
    return low, high


def table(cases: list[dict[str, Any]]) -> Table:
    by_option: dict[str, dict[int, list[float]]] = {name: {} for name in OPTIONS}
    for case in cases:
        by_option[case["option"]][case["seed"]] = measures(case)
    base = by_option[DEFAULT]
    result = Table("option", "seeds", *(Column(name, justify="right", no_wrap=True) for name in MEASURES), box=None)
    for option, own in by_option.items():
        seeds = sorted(set(own) & set(base))
        if not seeds:
            continue
        values = np.array([own[seed] for seed in seeds])
        if option == DEFAULT:
            result.add_row(option, str(len(seeds)), *(f"{value:.2f}" for value in values.mean(0)))
            continue
        differences = values - np.array([base[seed] for seed in seeds])
        low, high = mean_interval(differences)
        cells = zip(differences.mean(0), low, high, strict=True)
        result.add_row(option, str(len(seeds)), *(f"{mean:+.2f} ({a:+.2f} to {b:+.2f})" for mean, a, b in cells))
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=8, help="markets and agents for each option")
    parser.add_argument("--first", type=int, default=0, help="the first seed")
    parser.add_argument("--only", nargs="+", default=list(OPTIONS), choices=list(OPTIONS), help="options to run")
    parser.add_argument("--jobs", type=int, default=1, help="agents trained side by side, each on one thread")
    parser.add_argument("--out", type=Path, default=Path("regularisation.jsonl"), help="one line for each case")
    given = parser.parse_args()
    done = [json.loads(line) for line in given.out.read_text().splitlines()] if given.out.exists() else []
    known = {(case["option"], case["seed"]) for case in done}
    # Seed by seed, so that an interrupted benchmark has whole pairs.
    asked = [(option, seed) for seed in range(given.first, given.first + given.seeds) for option in given.only]
    console = Console(width=160)
    os.environ["OMP_NUM_THREADS"] = "1"
    # Polars does not survive a fork.
    with multiprocessing.get_context("spawn").Pool(given.jobs) as pool, given.out.open("a") as out:
        for found in pool.imap_unordered(run_option, [case for case in asked if case not in known]):
            done.append(found)
            out.write(json.dumps(found) + "\n")
            out.flush()
            words = ", ".join(f"{name} {value:.2f}" for name, value in zip(MEASURES, measures(found), strict=True))
            about = f"{found['option']}, seed {found['seed']}, {found['cpu']:.0f} s CPU"
            console.print(f"{about}: {words}", highlight=False)
    console.print(table([case for case in done if (case["option"], case["seed"]) in set(asked)]))


if __name__ == "__main__":
    main()
