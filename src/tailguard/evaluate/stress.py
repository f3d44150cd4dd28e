"""Stress tests: the same policy on the same bars and market code, with one condition made worse."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from tailguard.errors import ConfigError
from tailguard.evaluate.backtest import BacktestAgent, BacktestResult, backtest
from tailguard.evaluate.baselines import Policy
from tailguard.market import MarketConfig
from tailguard.market.costs import COSTS, extra_rates

if TYPE_CHECKING:
    from tailguard.data.bars import Bars

COST_FACTORS = (0.0, 1.0, 2.0, 3.0)
NOISE_LEVELS = (0.1, 0.3)


class Scenario(NamedTuple):
    """One stress scenario."""

    name: str
    result: BacktestResult


def scaled_costs(config: MarketConfig, factor: float) -> MarketConfig:
    """All assumed costs times this factor. Funding rates observed in the bars are data and stay."""
    try:
        settings: dict[str, Any] = {
            cost.setting: factor * cost.rate_in(config) for cost in COSTS.values() if cost.setting is not None
        }
        extra = {kind: factor * COSTS[kind].rate_in(config) for kind in extra_rates()}
        rates = {*settings, "tick"}
        own = {
            symbol: {name: value * factor if name in rates else value for name, value in table.items()}
            for symbol, table in config.per_symbol.items()
        }
        return replace(config, **settings, tick=factor * config.tick, per_symbol=own, extra_costs=extra)
    except ConfigError as error:
        raise ConfigError(f"costs ×{factor:g}: {error}. Choose smaller cost factors") from error


def stress_table(
    policy: BacktestAgent | Policy | NDArray[np.float64],
    bars: Bars,
    config: MarketConfig | None = None,
    *,
    cost_factors: Sequence[float] = COST_FACTORS,
    delays: Sequence[int] = (1,),
    noise_levels: Sequence[float] = NOISE_LEVELS,
    seed: int = 0,
    before_each: Callable[[str], None] | None = None,
) -> list[Scenario]:
    """Backtests under each stress, one after the other: costs, delayed fills, noisy features.

    `config`: costs of the base case; an agent's own by default.
    `noise_levels`: for an agent only; other policies see no features.
    `before_each`: called with the name of each scenario before it runs, to show progress.
    """
    is_agent = isinstance(policy, BacktestAgent)
    if config is None:
        config = policy.spec.market if isinstance(policy, BacktestAgent) and policy.spec is not None else MarketConfig()
    # Name, costs, delay and noise; all built first, so an invalid setting fails before any work.
    planned = [(f"costs ×{factor:g}", scaled_costs(config, factor), 0, 0.0) for factor in cost_factors]
    planned += [(f"fills {delay} bar{'s' * (delay > 1)} later", config, delay, 0.0) for delay in delays]
    planned += [(f"noise {level:g} sd", config, 0, level) for level in (noise_levels if is_agent else ())]
    scenarios = []
    for name, costs, delay, noise in planned:
        if before_each is not None:
            before_each(name)
        result = backtest(policy, bars, costs, delay=delay, noise=noise, seed=seed, progress_bar=False)
        scenarios.append(Scenario(name, result))
    return scenarios
