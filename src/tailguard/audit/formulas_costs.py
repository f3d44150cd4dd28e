"""Checks of the books: every cost follows its law, in shares of equity, and is taken from the account once."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from tailguard.audit.promises import random_panel
from tailguard.audit.registry import Measurement, at_least, at_most, register_check, within, worst
from tailguard.audit.subject import Subject
from tailguard.data.panel import Panel
from tailguard.market import MarketConfig, MarketState, Transition, build_market, open_accounts, step

BARS, ACCOUNTS, ASSETS = 40, 64, 2
ALL: Mapping[str, Any] = {
    "fee": 0.002, "half_spread": 0.001, "impact": 0.5, "participation": 0.2, "funding_rate": 0.002, "borrow_rate": 0.5,
    "leverage": 10.0, "maintenance_margin": 0.02, "liquidation_fee": 0.005,
}  # fmt: skip
FUNDING = 0.003
"""Largest observed funding rate, of either sign."""


def traded_path(seed: int, config: MarketConfig, panel: Panel) -> tuple[list[MarketState], list[Transition]]:
    """States before and after each bar of random trading, and what each bar did."""
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
    return states, transitions


@dataclass(frozen=True)
class BrokersBooks:
    """One bar as a broker books it: units held and cash, in starting capitals, [N] and [N, A]."""

    before: Tensor
    """Equity at the close before."""
    bought: Tensor
    """Value bought, below zero where sold, at the open."""
    filled: Tensor
    """Positions after the fill, at the open's prices."""
    values: Tensor
    """Positions at the close."""
    cash: Tensor
    """Before the fill."""
    left: Tensor
    """At the close."""

    @classmethod
    def of(cls, before: MarketState, after: MarketState, panel: Panel, row: int) -> BrokersBooks:
        opens, close, last = (
            torch.as_tensor(prices) for prices in (panel.open[row], panel.close[row], panel.close[row - 1])
        )
        held = before.weights * before.equity.unsqueeze(1) / last
        holds = after.weights * after.equity.unsqueeze(1) / close
        cash = before.equity - (held * last).sum(1)
        left = after.equity - (holds * close).sum(1)
        return cls(before.equity, (holds - held) * opens, holds * opens, holds * close, cash, left)


class CostLaws:
    """What each cost should be, from prices and settings alone."""

    def __init__(self, panel: Panel, config: MarketConfig) -> None:
        self.config, self.panel = config, panel
        self.volatility, self.notional = _known_before(panel, config.volatility_halflife)

    def amounts(self, books: BrokersBooks, row: int) -> dict[str, Tensor]:
        """Costs of the bar by kind, as shares of the equity before it, [N]."""
        config, panel = self.config, self.panel
        traded = books.bought.abs()
        # Almgren 2005, Tóth 2011: a price moves by Y·σ_day·√(order / daily notional).
        moved = config.impact * self.volatility[row] * (traded * config.capital / self.notional[row]).sqrt()
        order = {"fee": config.fee * traded, "spread": config.half_spread * traded, "impact": traded * moved}
        charged = {kind: cost.sum(1) for kind, cost in order.items()}
        # Funding is due where the bar's close is at or beyond a multiple of eight hours that its open is before.
        eight_hours = 8 * 3_600_000
        due = (panel.time[row] + panel.frequency_ms) // eight_hours - panel.time[row] // eight_hours
        if panel.funding is None:
            charged["funding"] = float(due) * config.funding_rate * books.values.abs().sum(1)
        else:
            charged["funding"] = float(due) * (torch.as_tensor(panel.funding[row]) * books.values).sum(1)
        equity = books.cash + (books.filled - books.bought).sum(1) - sum(charged[kind] for kind in order)
        borrowed = (books.filled.clamp(min=0).sum(1) - equity).clamp(min=0)
        short = books.filled.clamp(max=0).sum(1).neg()
        charged["borrow"] = config.borrow_rate * panel.frequency_ms / (365.25 * 86_400_000) * (short + borrowed)
        return {kind: cost / books.before for kind, cost in charged.items()}


def _known_before(panel: Panel, half_life: float) -> tuple[Tensor, Tensor]:
    """Daily volatility (Parkinson 1980) and daily notional known before each bar, exponentially averaged, [R, A]."""
    day = 86_400_000 / panel.frequency_ms
    decay = 0.5 ** (panel.frequency_ms / 3_600_000 / half_life)
    variance = np.log(panel.high / panel.low) ** 2 / (4 * np.log(2))
    sums, weight = np.zeros((2, panel.assets)), 0.0
    known = [np.full((2, panel.assets), np.nan)]
    for row in range(panel.rows - 1):
        sums = decay * sums + np.stack([variance[row], panel.volume[row] * panel.close[row]])
        weight = decay * weight + 1
        known.append(sums / weight)
    averages = torch.as_tensor(np.stack(known))
    return (averages[:, 0] * day).sqrt(), averages[:, 1] * day


@register_check(
    "F18",
    "Does every cost follow its law, and is it taken from the account exactly once, in shares of equity?",
    why="A cost that is booked and not paid, or paid in units of the starting capital, makes a losing agent look good; "
    "one that is charged twice makes a good one stop trading. Funding of the wrong sign pays where it should cost.",
    remedy="See market/simulator.py (step) and the table in market/costs.py.",
    fast=True,
)
def costs_are_conserved(subject: Subject) -> Measurement:
    panel = random_panel(subject.seed + 11, BARS + 2, ASSETS, volume=20_000.0, volatility=0.1)
    rates = np.random.default_rng(subject.seed).uniform(-FUNDING, FUNDING, panel.open.shape)
    found = []
    for each in (panel, replace(panel, funding=rates)):
        found += _books_of(each, MarketConfig(**ALL), subject.seed + 11)
    return worst(found)


def _books_of(panel: Panel, config: MarketConfig, seed: int) -> list[Measurement]:
    """The books of random accounts on these bars, beside those of a broker."""
    states, transitions = traded_path(seed, config, panel)
    laws = CostLaws(panel, config)
    gaps = dict.fromkeys(("cash", "net", "fee", "spread", "impact", "funding", "borrow"), 0.0)
    lowest, finite, traded, liquidated, spared = 0.0, True, 0.0, 0, 0
    for row, done in enumerate(transitions, start=1):
        before, after = states[row - 1], states[row]
        cost = torch.stack(list(done.costs.values())).sum(0)
        finite &= all(bool(amount.isfinite().all()) for amount in done.costs.values())
        # Observed funding is an income to one side.
        lowest = min([lowest, *(float(amount.min()) for kind, amount in done.costs.items()
                                if kind != "funding" or panel.funding is None)])  # fmt: skip
        gaps["net"] = max(gaps["net"], _gap(done.net, done.pnl - cost + done.shortfall))
        gaps["net"] = max(gaps["net"], _gap(after.equity, before.equity * (1 + done.net)))
        books = BrokersBooks.of(before, after, panel, row)
        # An account without equity has no shares of it, and a liquidation trades at prices inside the bar.
        alive = ~done.liquidated & (before.equity > 1e-6)
        paid = books.cash - books.bought.sum(1) - cost * before.equity
        gaps["cash"] = max(gaps["cash"], _gap((books.left / before.equity)[alive], (paid / before.equity)[alive]))
        for kind, wanted in laws.amounts(books, row).items():
            gaps[kind] = max(gaps[kind], _gap(done.costs[kind][alive], wanted[alive]))
        traded += float((books.bought.abs().sum(1) / before.equity)[alive].sum())
        liquidated += int(done.liquidated.sum())
        margin = after.equity - config.maintenance_margin * (after.weights.abs().sum(1) * after.equity)
        spared += int((alive & (margin < 0)).sum())
    kind = max(("fee", "spread", "impact", "funding", "borrow"), key=lambda name: gaps[name])
    funding = "assumed" if panel.funding is None else "observed"
    return [
        at_most("amounts of a cost that are not finite", float(not finite), 0.0),
        at_least("lowest amount of a cost", lowest, 0.0),
        at_most("gap of the cash to what was paid for units and charged, as a share of equity", gaps["cash"], 1e-9),
        at_most("gap of the net return to P&L − costs + what the exchange bore", gaps["net"], 1e-12),
        at_most(f"largest gap of a cost to its law, in shares of equity, {funding} funding", gaps[kind], 1e-9, kind),
        within("liquidations that the books went through", liquidated, 1, ACCOUNTS * BARS),
        at_most("accounts that trade on below their maintenance margin", spared, 0.0),
        at_least("turnover that they went through", traded, 100.0),
    ]  # fmt: skip


def _gap(one: Tensor, other: Tensor) -> float:
    return float((one - other).abs().nan_to_num(torch.inf).max()) if one.numel() else 0.0
