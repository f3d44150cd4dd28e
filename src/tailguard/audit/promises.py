"""Checks of what is promised: budgets, gradients through the market, verdicts, calendars."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from tailguard.audit.registry import Measurement, at_most, register_check, worst
from tailguard.audit.subject import Subject
from tailguard.data.panel import Panel
from tailguard.envs.constraints import Constraints, limits_of
from tailguard.envs.episodes import TradingTask
from tailguard.market import Market, MarketConfig, MarketState, build_market, open_accounts, step

FREE: Mapping[str, Any] = {
    "fee": 0.0, "half_spread": 0.0, "impact": 0.0, "participation": float("inf"), "funding_rate": 0.0,
    "maintenance_margin": 0.0, "liquidation_fee": 0.0,
}  # fmt: skip
COSTS: Mapping[str, Mapping[str, Any]] = {
    "fee": {"fee": 0.002},
    "spread": {"half_spread": 0.003},
    "impact": {"impact": 2.0},
    "funding": {"funding_rate": 0.004},
    "borrow": {"borrow_rate": 0.9, "leverage": 3.0},
    "partial fills": {"participation": 0.05, "impact": 2.0},
    "everything": {
        "fee": 0.002, "half_spread": 0.001, "impact": 2.0, "participation": 0.08, "funding_rate": 0.002,
        "borrow_rate": 0.5, "leverage": 3.0, "maintenance_margin": 0.005, "liquidation_fee": 0.005,
    },
}  # fmt: skip
BARS = 5


def random_panel(seed: int, rows: int, assets: int = 1, *, volume: float = 600.0, volatility: float = 0.01) -> Panel:
    """Hourly bars of a random walk; `volume` decides whether orders reach the participation cap."""
    draw = np.random.default_rng(seed)
    close = 100 * np.exp(np.cumsum(volatility * draw.normal(size=(rows, assets)), axis=0))
    before = np.vstack([close[:1], close[:-1]])
    opens = before * np.exp(0.2 * volatility * draw.normal(size=(rows, assets)))
    spread = 1 + 0.3 * volatility * np.abs(draw.normal(size=(rows, assets)))
    return Panel(
        time=1_577_836_800_000 + 3_600_000 * np.arange(rows),
        open=opens,
        high=np.maximum(opens, close) * spread,
        low=np.minimum(opens, close) / spread,
        close=close,
        volume=volume * np.exp(0.5 * draw.normal(size=(rows, assets))),
        segment=np.zeros(rows, np.int32),
        tradeable=np.ones(rows, bool),
        symbols=tuple(f"S{number}" for number in range(assets)),
        frequency_ms=3_600_000,
    )


def traded(market: Market, targets: Tensor) -> MarketState:
    """The accounts after trading these targets, [T, N, A]."""
    state = open_accounts(torch.zeros(targets.shape[1], dtype=torch.int64), market.assets, market.dtype)
    for target in targets:
        state, _ = step(market, state, target)
    return state


LIMITS: Mapping[str, Constraints] = {
    "leverage": Constraints(),
    "limits on assets and groups": Constraints(asset_max=0.4, groups={"two": ("S0", "S1")}, group_max=0.5),
    "limits on gross and net": Constraints(gross_max=0.9, net_min=-0.1, net_max=0.2),
    "limits on cash and turnover": Constraints(cash_min=0.5, turnover_max=0.6),
}
"""Limits that many random decisions reach."""


def growth(market: Market, targets: Tensor) -> Tensor:
    """Log-growth of all accounts together, after trading these targets, [T, N, A]."""
    return traded(market, targets).equity.log().sum()


def decided_growth(task: TradingTask, actions: Tensor) -> Tensor:
    """The same after these actions, [T, N, A], within the task's limits."""
    state = task.begin(open_accounts(torch.zeros(actions.shape[1], dtype=torch.int64), 3, task.market.dtype))
    for action in actions:
        state, _ = task.advance(state, task.decide(action, state)[0])
    return state.market.equity.log().sum()


def slope_gap(value: Callable[[Tensor], Tensor], at: Tensor) -> float:
    """Largest relative gap of the gradient to central differences."""
    x = at.clone().requires_grad_()
    (slope,) = torch.autograd.grad(value(x), x)
    expected = torch.zeros_like(at)
    with torch.no_grad():
        for index in range(at.numel()):
            shift = torch.zeros_like(at)
            shift.view(-1)[index] = 1e-6
            expected.view(-1)[index] = (value(at + shift) - value(at - shift)) / 2e-6
    gaps = (slope - expected).abs() / expected.abs().clamp(min=1e-3)
    return float(gaps.nan_to_num(torch.inf).max())


@register_check(
    "P5",
    "Are gradients through the market those of central differences, for every cost, cap and limit?",
    why="The pathwise learner follows these slopes. A cost that is missing in the gradient is a cost the agent does "
    "not know, although the books charge it.",
    remedy="Write costs as differentiable functions of the order (market/costs.py), x**1.5 so that 0 has slope 0; caps "
    "and limits scale weights, and the scale has a slope (envs/projection.py).",
    fast=True,
    reads_run=True,
)
def market_gradients(subject: Subject) -> Measurement:
    found = []
    draw = torch.Generator().manual_seed(subject.seed + 1)
    chosen = dict(COSTS)
    if subject.run is not None:
        own = subject.config.market
        chosen["this run's costs"] = {name: getattr(own, name) for name in COSTS["everything"]}
    for name, costs in chosen.items():
        config = MarketConfig(**(dict(FREE) | dict(costs)))
        market = build_market(random_panel(subject.seed + 3, BARS + 2), config, dtype=torch.float64)
        reach = 0.9 * config.leverage
        targets = reach * (2 * torch.rand(BARS, 3, 1, generator=draw, dtype=torch.float64) - 1)
        gap = slope_gap(partial(growth, market), targets)
        found.append(at_most(f"relative gap of the gradient to central differences, {name}", gap, 1e-6))
    # Decisions: what is beyond the leverage or a limit is scaled down, and the scale has a slope, too.
    config = MarketConfig(**(dict(FREE) | {"fee": 0.002, "leverage": 2.0}))
    market = build_market(random_panel(subject.seed + 4, BARS + 2, assets=3), config, dtype=torch.float64)
    limits = dict(LIMITS)
    if subject.run is not None and subject.config.env.constraints != Constraints():
        asked = subject.config.env.constraints
        # Names of assets and of their groups are those of the run's bars.
        limits["this run's limits"] = replace(asked, asset_caps={}, groups={}, group_max=None, group_caps={})
    for name, constraints in limits.items():
        task = TradingTask(market, torch.zeros(BARS + 2, 0), (), BARS, limits=limits_of(constraints, market))
        actions = 2 * torch.rand(BARS, 3, 3, generator=draw, dtype=torch.float64) - 1
        gap = slope_gap(partial(decided_growth, task), actions)
        found.append(at_most(f"relative gap of the gradient through decisions, {name}", gap, 1e-6))
    # An order of exactly nothing sits on the kink of |order| and at the root of its impact.
    config = MarketConfig(**(dict(FREE) | dict(COSTS["everything"])))
    market = build_market(random_panel(subject.seed + 3, BARS + 2), config, dtype=torch.float64)
    idle = torch.zeros(BARS, 2, 1, dtype=torch.float64, requires_grad=True)
    (slope,) = torch.autograd.grad(traded(market, idle).equity.log().sum(), idle)
    found.append(at_most("slopes of orders of 0 that are not finite", float((~slope.isfinite()).sum()), 0.0))
    return worst(found)
