"""Checks of the books: every cost is finite, in shares of equity, and taken from the account once."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from tailguard.audit.promises import random_panel
from tailguard.audit.registry import Measurement, at_least, at_most, register_check, within, worst
from tailguard.audit.subject import Subject
from tailguard.market import MarketConfig, MarketState, Transition, build_market, open_accounts, step

BARS, ACCOUNTS, ASSETS = 40, 64, 2
ALL: Mapping[str, Any] = {
    "fee": 0.002, "half_spread": 0.001, "impact": 0.5, "participation": 0.2, "funding_rate": 0.002, "borrow_rate": 0.5,
    "leverage": 10.0, "maintenance_margin": 0.02, "liquidation_fee": 0.005,
}  # fmt: skip


def traded_path(seed: int, config: MarketConfig) -> tuple[list[MarketState], list[Transition], Any]:
    """States before and after each bar of random trading, what each bar did, and the bars."""
    panel = random_panel(seed, BARS + 2, ASSETS, volume=20_000.0, volatility=0.1)
    market = build_market(panel, config, dtype=torch.float64)
    draw = torch.Generator().manual_seed(seed)
    state = open_accounts(torch.zeros(ACCOUNTS, dtype=torch.int64), ASSETS, market.dtype)
    # Gross exposures up to the leverage: some accounts are liquidated on the way.
    reach = config.leverage / ASSETS
    states, transitions = [state], []
    for _ in range(BARS):
        target = reach * (2 * torch.rand(ACCOUNTS, ASSETS, generator=draw, dtype=torch.float64) - 1)
        state, done = step(market, state, target)
        states.append(state)
        transitions.append(done)
    return states, transitions, panel


@register_check(
    "F18",
    "Is every cost finite, not below zero, in shares of equity, and taken from the account exactly once?",
    why="A cost that is booked and not paid, or paid in units of the starting capital, makes a losing agent look good; "
    "one that is charged twice makes a good one stop trading.",
    remedy="See market/simulator.py (step) and the table in market/costs.py.",
    fast=True,
)
def costs_are_conserved(subject: Subject) -> Measurement:
    config = MarketConfig(**ALL)
    states, transitions, panel = traded_path(subject.seed + 11, config)
    gaps: dict[str, float] = {"cash": 0.0, "net": 0.0, "fee": 0.0, "spread": 0.0}
    lowest, finite, traded, liquidated = 0.0, True, 0.0, 0
    for row, done in enumerate(transitions):
        before, after = states[row], states[row + 1]
        opens, close, last = (torch.as_tensor(values) for values in (panel.open[row + 1], panel.close[row + 1],
                                                                    panel.close[row]))  # fmt: skip
        amounts = torch.stack(list(done.costs.values()))
        finite &= bool(amounts.isfinite().all())
        lowest = min(lowest, float(amounts.min()))
        cost = amounts.sum(0)
        gaps["net"] = max(gaps["net"], _gap(done.net, done.pnl - cost + done.shortfall))
        gaps["net"] = max(gaps["net"], _gap(after.equity, before.equity * (1 + done.net)))
        # The books of a broker: units held and cash. What is bought at the open and what is charged leaves the cash.
        held = before.weights * before.equity.unsqueeze(1) / last
        holds = after.weights * after.equity.unsqueeze(1) / close
        cash = before.equity - (held * last).sum(1)
        left = after.equity - (holds * close).sum(1)
        bought = (holds - held) * opens
        # An account without equity has no shares of it, and a liquidation trades at prices inside the bar.
        alive = ~done.liquidated & (before.equity > 1e-6)
        paid = cash - bought.sum(1) - cost * before.equity
        gaps["cash"] = max(gaps["cash"], _gap((left / before.equity)[alive], (paid / before.equity)[alive]))
        turnover = bought.abs().sum(1) / before.equity
        for kind, rate in (("fee", config.fee), ("spread", config.half_spread)):
            gaps[kind] = max(gaps[kind], _gap(done.costs[kind][alive], rate * turnover[alive]))
        traded += float(turnover[alive].sum())
        liquidated += int(done.liquidated.sum())
    found = [
        at_most("amounts of a cost that are not finite", float(not finite), 0.0),
        at_least("lowest amount of a cost", lowest, 0.0),
        at_most("gap of the cash to what was paid for units and charged, as a share of equity", gaps["cash"], 1e-9),
        at_most("gap of the net return to P&L − costs + what the exchange bore", gaps["net"], 1e-12),
        at_most("gap of fee and spread to their rates on what was traded, as a share of equity",
                max(gaps["fee"], gaps["spread"]), 1e-9),
        within("liquidations that the books went through", liquidated, 1, ACCOUNTS * BARS),
        at_least("turnover that they went through", traded, 100.0),
    ]  # fmt: skip
    return worst(found)


def _gap(one: Tensor, other: Tensor) -> float:
    return float((one - other).abs().nan_to_num(torch.inf).max()) if one.numel() else 0.0
