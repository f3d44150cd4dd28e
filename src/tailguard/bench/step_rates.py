"""Simulated steps per CPU-second with full costs.

CPU time of this process and one thread, so that other load on the machine costs little; the best of several repeats.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from tailguard.bench.own_learner import EPISODE
from tailguard.envs.trading import TradingEnv
from tailguard.market import Market, open_accounts, step

if TYPE_CHECKING:
    from rich.table import Table

    from tailguard.data.prepare import PreparedBars

BATCHES = (1, 64, 2_048, 16_384)
REPEATS = 7


@dataclass(frozen=True)
class Rate:
    """CPU time of stepping."""

    name: str
    environments: int
    seconds: float
    """CPU time of one call that steps all environments."""

    @property
    def per_second(self) -> float:
        """Steps per CPU-second; a step is one bar of one environment."""
        return self.environments / self.seconds


def cpu_seconds(episode: Callable[[], None], calls: int = EPISODE, repeats: int = REPEATS) -> float:
    """CPU time of one of the calls that an episode makes, best of several."""
    best = float("inf")
    episode()
    for _ in range(repeats):
        gc.collect()
        start = time.process_time()
        episode()
        best = min(best, (time.process_time() - start) / calls)
    return best


def _random_actions(environments: int, assets: int) -> list[torch.Tensor]:
    return list(torch.rand(EPISODE, environments, assets) * 2 - 1)


def market_rate(name: str, market: Market, environments: int, repeats: int = REPEATS) -> Rate:
    """The market alone: target weights in, equity and costs out."""
    first = torch.randint(0, market.rows - EPISODE - 1, (environments,))
    targets = _random_actions(environments, market.assets)

    def episode() -> None:
        state = open_accounts(first, market.assets, market.dtype)
        for target in targets:
            state, _ = step(market, state, target)

    return Rate(name, environments, cpu_seconds(episode, repeats=repeats))


def environment_rate(prepared: PreparedBars, environments: int, repeats: int = REPEATS) -> Rate:
    """The whole environment: actions in, observations, rewards and restarts out."""
    env = TradingEnv(prepared, num_envs=environments, episode_length=EPISODE, stagger=EPISODE // 8)
    actions = _random_actions(environments, env.task.market.assets)

    def episode() -> None:
        env.reset(seed=0)
        for action in actions:
            env.step(action)

    name = f"whole TradingEnv, {env.observation_size} inputs"
    return Rate(name, environments, cpu_seconds(episode, repeats=repeats))


def rate_table(rates: Sequence[Rate], peer: str | None = None) -> Table:
    """The rates, with steps per CPU-second as ratios to the best of those whose name begins with `peer`."""
    from rich.table import Column, Table

    table = Table(Column("simulator, one thread", no_wrap=True), box=None, pad_edge=False)
    best = max((rate.per_second for rate in rates if peer and rate.name.startswith(peer)), default=None)
    for heading in ("envs", "µs a call", "steps/CPU-s", *([] if best is None else [f"× {peer}"])):
        table.add_column(heading, justify="right")
    for rate in rates:
        ratio = [] if best is None else [f"{rate.per_second / best:,.2f}"]
        cells = f"{rate.environments:,}", f"{rate.seconds * 1e6:,.1f}", f"{rate.per_second:,.0f}"
        table.add_row(rate.name, *cells, *ratio)
    return table
