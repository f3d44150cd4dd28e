"""Portfolios: what is found of a planted cross-sectional signal in a hundred assets, and what an asset costs.

    python benchmarks/portfolios.py --only signal     100 assets, 3 seeds: about 4 CPU-minutes
    python benchmarks/portfolios.py --only cost       an iteration at 1 to 100 assets: about 2 CPU-minutes

**Signal.** The universe is `tailguard.data.cross_section`: a score, seen together with a mood that all assets share,
predicts returns relative to the others'. The agent has a shared encoder, gradients through the market, and limits: 2 %
an asset, net within ± 20 %. Growth is net of all costs, on later bars of the same assets and on a hundred others, as a
share of a bound that no policy within the limits exceeds: the expected return of the best portfolio for one who sees
the planted state, before costs. Beside it stands what that trader keeps after costs. *Order*: the largest difference of
a weight when the symbols are in another order. *Permutations*: scores dealt out among the symbols at random; p is
exact, (1 + those that earn as much) / (1 + permutations).

**Cost.** CPU time of an iteration with an encoder that shares its weights over assets, five features an asset and
default settings. Sizes take turns, and times are medians.
"""

from __future__ import annotations

import argparse
import math
import statistics
import time
from collections.abc import Sequence
from typing import Any

import numpy as np
import polars as pl
import torch
from scaling import slope

import tailguard as tg
from tailguard.data.cross_section import CrossSection, make_cross_section

ASSETS, BARS, CAP = 100, 3_000, 0.02
ENVS, EPISODE = 64, 64
LIMITS = tg.Constraints(asset_max=CAP, net_min=-0.2, net_max=0.2)
FEATURES = ("return_24", "trend_24", "bollinger_20", "rsi_14", "volume_168")
SIZES = (1, 10, 25, 50, 100)


@tg.feature("score", needs=("score",), replace=True)
def score() -> pl.Expr:
    """The planted score, as it is published."""
    return pl.col("score")


def trained(bars: tg.Bars, seed: int, iterations: int) -> tg.PathwiseLearner:
    """An agent that has learned on these bars."""
    env = tg.TradingEnv(
        bars, num_envs=ENVS, episode_length=EPISODE, features=["score"], shared_scaling=True, constraints=LIMITS
    )
    agent = tg.PathwiseLearner(
        env, n_steps=8, encoder="shared", hidden=(32,), lstm_size=8, learning_rate="linear:3e-3:3e-4", seed=seed
    )
    return agent.learn(iterations * ENVS * 8)


def growth(policy: Any, bars: tg.Bars) -> tuple[float, Any]:
    """Log-growth net of all costs, and the backtest."""
    result = tg.backtest(policy, bars, warn_in_sample=False, progress_bar=False)
    return math.log(result.equity[-1]), result


def bound(universe: CrossSection, result: Any) -> float:
    """The bound on log-growth over the bars of a backtest."""
    times = universe.bars.frame["time"].unique(maintain_order=True).dt.epoch("ms").to_numpy()
    return float(universe.best_return(CAP)[np.searchsorted(times, result.time) - 1].sum())


def dealt_out(bars: tg.Bars, order: Sequence[int]) -> tg.Bars:
    """The same bars, each with the score of another symbol."""
    parts = bars.frame.partition_by("symbol", maintain_order=True)
    frame = pl.concat([part.with_columns(parts[order[number]]["score"]) for number, part in enumerate(parts)])
    return tg.load_bars(frame.drop("segment"))


def difference_in_another_order(agent: Any, bars: tg.Bars, weights: np.ndarray) -> float:
    """Largest difference of a weight when the symbols have the names of others, and so another order."""
    order = np.random.default_rng(0).permutation(len(bars.symbols))
    names = {name: bars.symbols[order[number]] for number, name in enumerate(bars.symbols)}
    frame = bars.frame.drop("segment").with_columns(pl.col("symbol").replace_strict(names))
    _, other = growth(agent, tg.load_bars(frame))
    return float(np.abs(other.weights[:, order] - weights).max())


def signal(seeds: Sequence[int], iterations: int, permutations: int) -> None:
    """A line for each seed."""
    print(f"{ASSETS} assets, {iterations} iterations of {ENVS} × 8 bars; shares of the bound on log-growth")
    print("seed   CPU s   test   after costs   others   after costs   order     permutations (best, p)")
    for seed in seeds:
        universe = make_cross_section(BARS, assets=ASSETS, seed=seed)
        other = make_cross_section(1_000, assets=ASSETS, seed=1_000 + seed, prefix="NEW")
        split = tg.split_bars(universe.bars, validation=0.02, test=0.25)
        begun = time.process_time()
        agent = trained(split.train, seed, iterations)
        seconds = time.process_time() - begun
        cells = []
        for bars, market in ((split.test, universe), (other.bars, other)):
            own, result = growth(agent, bars)
            best = bound(market, result)
            rows = np.isin(market.bars.panel("portfolio").time, bars.panel("portfolio").time)
            kept, _ = growth(market.best_weights(CAP)[rows], bars)
            cells += [own / best, kept / best]
        own, result = growth(agent, other.bars)
        draw = np.random.default_rng(seed)
        others = [growth(agent, dealt_out(other.bars, draw.permutation(ASSETS)))[0] for _ in range(permutations)]
        p = (1 + sum(each >= own for each in others)) / (1 + permutations)
        moved = difference_in_another_order(agent, other.bars, result.weights)
        shares = "   ".join(f"{cell:6.1%}" for cell in cells)
        best_other = max(others) / bound(other, result)
        print(f"{seed:4d}  {seconds:6.1f}  {shares}   {moved:.1e}   {best_other:6.1%}, {p:.3f}", flush=True)


def cost(rounds: int, envs: int) -> None:
    """CPU time of an iteration by the number of assets, for both learners, without and with limits."""
    bars = make_cross_section(1_200, assets=max(SIZES), seed=0).bars
    limits = tg.Constraints(asset_max=0.5, gross_max=0.9, net_max=0.5, turnover_max=0.5)
    print(f"CPU ms of an iteration, {envs} environments × 16 bars, 1 thread")
    print("learner         " + "".join(f"{size:>8d}" for size in SIZES) + "    100 to 1   exponent   last two")
    for name, kind, encoder, chosen in (
        ("pathwise", tg.PathwiseLearner, "shared", None),
        ("pathwise, limits", tg.PathwiseLearner, "shared", limits),
        ("pathwise, attn", tg.PathwiseLearner, "attention", None),
        ("ppo", tg.DistributionalPPO, "shared", None),
        ("ppo, attn", tg.DistributionalPPO, "attention", None),
    ):
        learners = []
        for size in SIZES:
            part = bars.select(*bars.symbols[:size])
            env = tg.TradingEnv(
                part, num_envs=envs, episode_length=64, features=FEATURES, shared_scaling=True, constraints=chosen
            )
            learners.append(kind(env, encoder=encoder, n_steps=16, seed=0).learn(2 * envs * 16))
        times = [[_seconds(learner) for learner in learners] for _ in range(rounds)]
        medians = [statistics.median(column) for column in zip(*times, strict=True)]
        cells = "".join(f"{1e3 * each:8.1f}" for each in medians)
        ratio = medians[-1] / medians[0]
        exponents = slope(SIZES, medians), slope(SIZES[-2:], medians[-2:])
        print(f"{name:16s}{cells}    {ratio:7.1f}x   {exponents[0]:8.2f}   {exponents[1]:8.2f}", flush=True)


def _seconds(learner: Any) -> float:
    """CPU time of one iteration."""
    begun = time.process_time()
    learner.iterate()
    return time.process_time() - begun


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", choices=("signal", "cost"))
    parser.add_argument("--seeds", type=int, nargs="*", default=[0, 1, 2])
    parser.add_argument("--iterations", type=int, default=1_200)
    parser.add_argument("--permutations", type=int, default=19)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--envs", type=int, default=256)
    given = parser.parse_args()
    torch.set_num_threads(1)
    if given.only != "cost":
        signal(given.seeds, given.iterations, given.permutations)
    if given.only != "signal":
        cost(given.rounds, given.envs)


if __name__ == "__main__":
    main()
