"""Which choices help? Optimisers, variance scaling, critics and value clips, each against the default, over seeds.

    python benchmarks/ablation.py                      all tasks, 5 seeds, about an hour on 2 cores
    python benchmarks/ablation.py --seeds 10 --tasks market --save scores.json
    python benchmarks/ablation.py --load scores.json   the tables again, from saved scores

Tasks: CartPole and Pendulum with a short budget (mean return of 20 deterministic episodes), and the synthetic market
(share of the planted optimum's log-growth that the agent reaches on a year it never saw, net of costs). One thing is
changed at a time; the learning rate is each optimiser's own, chosen on seeds that are not used here (see the docs).

A table shows the interquartile mean over the seeds with its 95 % bootstrap interval, and the mean difference to the
default, paired by seed, with Student's 95 % interval.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import statistics
from collections.abc import Iterable, Mapping
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import numpy as np
import torch

import tailguard as tg
from tailguard.optim.config import UPGDConfig, VGSConfig

DEFAULT = "adam (default)"
RATES: Mapping[str, Mapping[str, float]] = {
    "cartpole": {"upgd": 0.1},
    "pendulum": {"upgd": 0.1},
    "market": {"upgd": 0.1},
}
"""Learning rates of the optimisers that do not share Adam's."""
VARIANTS: Mapping[str, Mapping[str, Any]] = {
    DEFAULT: {},
    "adamw, decay 0.01": {"optimizer": "adamw", "weight_decay": 0.01},
    "upgd": {"optimizer": "upgd"},
    "adaptive_upgd": {"optimizer": "adaptive_upgd"},
    "adaptive_upgd, no noise": {"optimizer": "adaptive_upgd", "upgd": UPGDConfig(sigma=0.0)},
    "upgdw, decay 0.01": {"optimizer": "upgdw", "weight_decay": 0.01},
    "adam + vgs": {"vgs": VGSConfig(enabled=True)},
    "adam + vgs per tensor": {"vgs": VGSConfig(enabled=True, granularity="per_tensor")},
    "adam + vgs α 0.1": {"vgs": VGSConfig(enabled=True, alpha=0.1)},
    "scalar critic": {"critic": "scalar"},
    "categorical critic": {"critic": "categorical"},
    "twin critics, min": {"twin_critics": True, "twin_mode": "min"},
    "twin critics, mean": {"twin_critics": True, "twin_mode": "mean"},
    "value clip, mean only": {"value_clip": "mean_only"},
}

CARTPOLE: dict[str, Any] = {
    "n_steps": 32, "minibatch_size": 64, "epochs": 10, "learning_rate": 1e-3, "memory": "none", "hidden": (64, 64),
}  # fmt: skip
PENDULUM: dict[str, Any] = {
    "n_steps": 200, "minibatch_size": 200, "epochs": 10, "gamma": 0.9, "learning_rate": 1e-3, "hidden": (64, 64),
    "activation": "silu", "log_std_init": 0.3, "normalise_observations": False, "memory": "none",
}  # fmt: skip
MARKET: dict[str, Any] = {
    "n_steps": 64, "minibatch_size": 4096, "gamma": 0.95, "gae_lambda": 0.8, "learning_rate": 3e-4, "hidden": (32,),
    "lstm_size": 32, "log_std_init": 0.0,
}  # fmt: skip
FEATURES = ("return_24", "range_volatility_24", "taker_imbalance_1", "taker_imbalance_6", "taker_imbalance_24")
STEPS = {"cartpole": 10_000, "pendulum": 60_000, "market": 600_000}


def control(env_id: str, num_envs: int, settings: Mapping[str, Any], seed: int, steps: int) -> float:
    """Mean return of 20 deterministic episodes after training."""
    import gymnasium

    agent = tg.DistributionalPPO(env_id, num_envs=num_envs, seed=1000 * seed, **settings)
    agent.learn(steps)
    env, returns = gymnasium.make(env_id), []
    for episode in range(20):
        obs, _ = env.reset(seed=900_000 + 1000 * seed + episode)
        total, ended = 0.0, False
        while not ended:
            action, _ = agent.predict(obs, deterministic=True)
            obs, reward, terminated, truncated, _ = env.step(action)
            total, ended = total + float(reward), terminated or truncated
        returns.append(total)
    return statistics.mean(returns)


def market(settings: Mapping[str, Any], seed: int, steps: int) -> float:
    """Share of the planted optimum's log-growth on the last year of a market made from the seed."""
    made = tg.make_market(26_304, seed=100 + seed, signal=8.0)
    split = tg.split_bars(made.bars, validation="30d", test="365d", embargo="7d")
    env = tg.TradingEnv(split.train, num_envs=256, episode_length=256, features=FEATURES, stagger=64, seed=seed)
    agent = tg.DistributionalPPO(env, seed=seed, **settings)
    agent.learn(steps)
    config = tg.MarketConfig()
    times = made.bars.frame["time"].unique(maintain_order=True)
    first, last = split.test.end_points
    rows = np.flatnonzero(((times >= first) & (times <= last)).to_numpy())
    weights = made.oracle_weights(config.fee + config.half_spread, config.leverage, config.funding_rate)[rows]
    mine, best = tg.backtest(agent, split.test), tg.backtest(weights, split.test, config)
    return math.log(mine.equity[-1]) / math.log(best.equity[-1])


Scores = dict[str, dict[str, list[float]]]


def score(job: tuple[str, str, int]) -> float:
    torch.set_num_threads(1)
    task, variant, seed = job
    options = dict(VARIANTS[variant])
    kind = options.get("optimizer", "adam")
    base = {"cartpole": CARTPOLE, "pendulum": PENDULUM, "market": MARKET}[task]
    settings = base | options | ({"learning_rate": RATES[task][kind]} if kind in RATES[task] else {})
    if task == "market":
        return market(settings, seed, STEPS[task])
    return control(
        *{"cartpole": ("CartPole-v1", 8), "pendulum": ("Pendulum-v1", 10)}[task], settings, seed, STEPS[task]
    )


def measure(
    tasks: Iterable[str], variants: Iterable[str], seeds: int, workers: int
) -> dict[str, dict[str, list[float]]]:
    """Scores by task and variant, a seed each."""
    jobs = [(task, variant, seed) for task in tasks for variant in variants for seed in range(seeds)]
    scores: Scores = {}
    with ProcessPoolExecutor(workers, mp_context=get_context("spawn")) as pool:
        for number, (job, found) in enumerate(zip(jobs, pool.map(score, jobs), strict=True), start=1):
            scores.setdefault(job[0], {}).setdefault(job[1], []).append(found)
            print(f"{number}/{len(jobs)} {job[0]}, {job[1]}, seed {job[2]}: {found:.3f}", flush=True)
    return scores


def show(scores: Mapping[str, Mapping[str, list[float]]]) -> None:
    """A table for each task."""
    from rich.console import Console
    from rich.table import Table
    from scipy import stats

    from tailguard.evaluate.significance import iqm_over_seeds

    console = Console()
    for task, found in scores.items():
        table = Table(f"{task}, {STEPS[task]:,} steps", "IQM [95 %]", "difference to the default", box=None)
        for variant, values in found.items():
            spread = iqm_over_seeds(np.array(values), np.random.default_rng(0))
            cell = f"{spread.iqm:.2f} [{spread.low:.2f}, {spread.high:.2f}]"
            gaps = np.subtract(values, found[DEFAULT])
            half = stats.t.ppf(0.975, len(gaps) - 1) * gaps.std(ddof=1) / math.sqrt(len(gaps))
            verdict = "" if variant == DEFAULT else f"{gaps.mean():+.2f} ± {half:.2f}"
            table.add_row(variant, cell, verdict)
        console.print(table)
        console.print()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--tasks", nargs="+", choices=list(STEPS), default=list(STEPS))
    parser.add_argument("--only", nargs="+", choices=list(VARIANTS), default=list(VARIANTS), help="besides the default")
    parser.add_argument("--workers", type=int, default=os.cpu_count())
    parser.add_argument("--save", type=Path, help="write the scores to this JSON file")
    parser.add_argument("--load", type=Path, help="show the scores of such a file instead of measuring")
    arguments = parser.parse_args()
    if arguments.load:
        scores = json.loads(arguments.load.read_text(encoding="utf-8"))
    else:
        variants = [name for name in VARIANTS if name == DEFAULT or name in arguments.only]
        scores = measure(arguments.tasks, variants, arguments.seeds, arguments.workers)
    if arguments.save:
        arguments.save.write_text(json.dumps(scores, indent=1), encoding="utf-8")
    if not arguments.save or arguments.load:
        show(scores)


if __name__ == "__main__":
    main()
