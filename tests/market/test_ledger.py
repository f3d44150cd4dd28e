"""The simulator against a broker: one account in cash and units, in plain Python, written from the definitions."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tailguard.data.panel import Panel
from tailguard.market import MarketConfig, build_market

HOUR_MS = 3_600_000
COSTS = ("fee", "spread", "impact", "funding", "borrow", "liquidation")


@dataclass
class Ledger:
    """One account in quote currency."""

    panel: Panel
    config: MarketConfig
    cash: float
    units: list[float]
    costs: dict[str, float] = field(default_factory=dict)
    shortfall: float = 0.0
    unfilled: float = 0.0
    liquidated: str = ""
    """When the account was closed by force: at the open, inside the bar or at the close."""

    def equity(self, prices: list[float]) -> float:
        return self.cash + sum(units * price for units, price in zip(self.units, prices, strict=True))

    def gross(self, prices: list[float]) -> float:
        return sum(abs(units) * price for units, price in zip(self.units, prices, strict=True))

    def excess(self, prices: list[float]) -> float:
        return self.equity(prices) - self.config.maintenance_margin * self.gross(prices)

    def pay(self, kind: str, amount: float) -> None:
        self.cash -= amount
        self.costs[kind] += amount

    def trade_bar(self, bar: int, target: list[float]) -> float:
        """Trade at the open of `bar`, carry the account to its close and return the equity there."""
        self.costs = dict.fromkeys(COSTS, 0.0)
        self.shortfall, self.unfilled, self.liquidated = 0.0, 0.0, ""
        opens, closes = self.panel.open[bar].tolist(), self.panel.close[bar].tolist()
        if self.excess(opens) <= 0:
            return self.close_by_force("open", opens)
        self.fill(bar, target, opens)
        notional, equity = [u * p for u, p in zip(self.units, opens, strict=True)], self.equity(opens)

        lows, highs = self.panel.low[bar].tolist(), self.panel.high[bar].tolist()
        worst = [low if units > 0 else high for units, low, high in zip(self.units, lows, highs, strict=True)]
        if self.excess(worst) <= 0:
            return self.close_by_force("inside", self.prices_where_margin_ends(opens, worst))

        years = self.panel.frequency_ms / (365.25 * 24 * HOUR_MS)
        shorts, longs = -sum(min(value, 0) for value in notional), sum(max(value, 0) for value in notional)
        self.pay("borrow", self.config.borrow_rate * years * (shorts + max(longs - equity, 0)))
        for asset, (units, close) in enumerate(zip(self.units, closes, strict=True)):
            for _ in range(self.stamps(bar)):
                if self.panel.funding is not None and self.config.observed_funding:
                    self.pay("funding", units * close * float(self.panel.funding[bar, asset]))
                else:
                    self.pay("funding", abs(units) * close * self.config.funding_rate)
        if self.excess(closes) <= 0:
            return self.close_by_force("close", closes)
        return self.equity(closes)

    def fill(self, bar: int, target: list[float], opens: list[float]) -> None:
        equity = self.equity(opens)
        for asset, (weight, price) in enumerate(zip(target, opens, strict=True)):
            order = weight * equity / price - self.units[asset]
            volatility, daily_notional = self.trailing_day(bar, asset)
            capacity = math.inf
            if math.isfinite(self.config.participation):
                capacity = self.config.participation * self.panel.volume[bar, asset]
            if self.config.impact > 0 and daily_notional == 0:
                capacity = 0.0
            filled = math.copysign(min(abs(order), capacity), order)
            notional = abs(filled) * price
            self.unfilled += abs(order - filled) * price
            self.units[asset] += filled
            self.cash -= filled * price
            self.pay("fee", self.config.fee * notional)
            self.pay("spread", self.config.half_spread * notional)
            if notional > 0 and self.config.impact > 0:
                root = math.sqrt(notional / daily_notional)
                self.pay("impact", notional * self.config.impact * volatility * root)

    def trailing_day(self, bar: int, asset: int) -> tuple[float, float]:
        """Daily volatility and notional from the bars before this one, the older the lighter."""
        hours = self.panel.frequency_ms / HOUR_MS
        weights = [0.5 ** ((bar - 1 - past) * hours / self.config.volatility_halflife) for past in range(bar)]
        ranges = [math.log(self.panel.high[past, asset] / self.panel.low[past, asset]) for past in range(bar)]
        notionals = [self.panel.volume[past, asset] * self.panel.close[past, asset] for past in range(bar)]
        variance = sum(w * r * r / (4 * math.log(2)) for w, r in zip(weights, ranges, strict=True)) / sum(weights)
        notional = sum(w * n for w, n in zip(weights, notionals, strict=True)) / sum(weights)
        return math.sqrt(variance * 24 / hours), notional * 24 / hours

    def stamps(self, bar: int) -> int:
        """How many of 00, 08 and 16 UTC lie after this bar's open, up to and including its close."""
        opened = int(self.panel.time[bar])
        minutes = range(60_000, self.panel.frequency_ms + 1, 60_000)
        return sum((opened + after) % (8 * HOUR_MS) == 0 for after in minutes)

    def prices_where_margin_ends(self, opens: list[float], worst: list[float]) -> list[float]:
        """All prices move from open to worst at once; the moment the margin is gone, by bisection."""
        before, after = 0.0, 1.0
        if self.excess(opens) <= 0:
            return opens
        for _ in range(100):
            middle = (before + after) / 2
            prices = [o + middle * (w - o) for o, w in zip(opens, worst, strict=True)]
            before, after = (middle, after) if self.excess(prices) > 0 else (before, middle)
        return [o + after * (w - o) for o, w in zip(opens, worst, strict=True)]

    def close_by_force(self, moment: str, prices: list[float]) -> float:
        self.pay("liquidation", self.config.liquidation_fee * self.gross(prices))
        left = self.equity(prices)
        self.units = [0.0] * len(self.units)
        self.cash, self.shortfall, self.liquidated = max(left, 0.0), max(-left, 0.0), moment
        return self.cash


def assert_equal_to_broker(panel: Panel, config: MarketConfig, seed: int, trade: Callable[..., Any]) -> list[str]:
    """Trade random targets with the simulator and the broker; the moments of the broker's forced closes."""
    rng = np.random.default_rng(seed)
    shape = (panel.rows - 1, panel.assets)
    targets = rng.uniform(-1, 1, shape) * (rng.random(shape) < 0.8)
    targets *= config.leverage / np.maximum(np.abs(targets).sum(axis=1, keepdims=True), 1)
    states, transitions = trade(build_market(panel, config, dtype=torch.float64), torch.tensor(targets).unsqueeze(1))

    ledger = Ledger(panel, config, config.capital, [0.0] * panel.assets)
    forced = []
    for bar, (target, transition) in enumerate(zip(targets.tolist(), transitions, strict=True), start=1):
        before = ledger.equity(panel.close[bar - 1].tolist()) / config.capital
        equity = ledger.trade_bar(bar, target) / config.capital
        assert states[bar].equity.item() == pytest.approx(equity, rel=1e-10, abs=1e-13)
        kinds = {**transition.costs, "shortfall": transition.shortfall, "unfilled": transition.unfilled}
        theirs = {**ledger.costs, "shortfall": ledger.shortfall, "unfilled": ledger.unfilled}
        for kind, amount in kinds.items():
            booked = amount.item() * before
            assert booked == pytest.approx(theirs[kind] / config.capital, rel=1e-8, abs=1e-12), kind
        assert transition.liquidated.item() == bool(ledger.liquidated)
        forced.append(ledger.liquidated)
        if equity == 0:
            break
    return forced


@settings(max_examples=80, deadline=None)
@given(
    config=st.builds(
        MarketConfig,
        capital=st.sampled_from([1e3, 1e5, 1e6]),
        fee=st.floats(0, 0.005),
        half_spread=st.floats(0, 0.002),
        impact=st.sampled_from([0.0, 0.5, 1.5]),
        participation=st.sampled_from([0.01, 0.1, math.inf]),
        funding_rate=st.floats(0, 0.01),
        observed_funding=st.booleans(),
        borrow_rate=st.sampled_from([0.0, 0.2, 1.0]),
        leverage=st.sampled_from([1.0, 3.0, 10.0]),
        maintenance_margin=st.floats(0, 0.05),
        liquidation_fee=st.floats(0, 0.02),
        volatility_halflife=st.sampled_from([2.0, 24.0]),
    ),
    seed=st.integers(0, 2**32 - 1),
    assets=st.integers(1, 3),
    volatility=st.sampled_from([0.002, 0.02, 0.05]),
    funding=st.sampled_from([None, 0.001]),
    hours=st.sampled_from([0.25, 1, 4, 24]),
)
def test_equity_and_every_cost_equal_a_scalar_broker(
    random_panel: Callable[..., Panel],
    trade: Callable[..., Any],
    config: MarketConfig,
    seed: int,
    assets: int,
    volatility: float,
    funding: float | None,
    hours: float,
) -> None:
    panel = random_panel(seed, 30, assets, volatility=volatility, funding=funding, frequency_ms=int(hours * HOUR_MS))
    assert_equal_to_broker(panel, config, seed, trade)


@pytest.mark.parametrize("assets", [1, 3])
@pytest.mark.parametrize(
    ("moment", "bars"),
    [
        ("open", {"volatility": 0.001, "gap_volatility": 0.1}),
        ("inside", {"volatility": 0.05, "gap_volatility": 0.001}),
        ("close", {"volatility": 0.001, "gap_volatility": 0.001, "funding": 0.1, "frequency_ms": 24 * HOUR_MS}),
    ],
)
def test_forced_closes_equal_a_scalar_broker_at_every_moment_of_a_bar(
    random_panel: Callable[..., Panel], trade: Callable[..., Any], moment: str, bars: dict[str, Any], assets: int
) -> None:
    config = MarketConfig(leverage=10.0, maintenance_margin=0.02, liquidation_fee=0.01, borrow_rate=0.1)
    forced = [
        closed
        for seed in range(20)
        for closed in assert_equal_to_broker(random_panel(seed, 20, assets, volume=1e6, **bars), config, seed, trade)
    ]
    assert forced.count(moment) >= 10
