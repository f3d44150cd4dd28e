"""Each cost by hand: constant prices, so that whatever equity loses is the cost."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields
from typing import Any

import numpy as np
import pytest
import torch

from tailguard.data.panel import Panel
from tailguard.market import MarketConfig, build_market
from tailguard.market.costs import COSTS, cost_kinds

Trade = Callable[..., Any]
EIGHT_HOURS_MS = 8 * 3_600_000


def weights(*targets: float) -> torch.Tensor:
    """One account's targets bar by bar, [T, 1, 1]."""
    return torch.tensor(targets, dtype=torch.float64).reshape(-1, 1, 1)


def test_fee_and_half_spread_are_paid_on_the_traded_notional(
    hand_panel: Callable[..., Panel], free_market: Callable[..., MarketConfig], trade: Trade
) -> None:
    """Buy 0.5 of equity: 0.5·(0.002 + 0.001). Turn to −0.5 of what is left: the order is 0.5 + 0.5·0.9985."""
    market = build_market(hand_panel(open=[100] * 3), free_market(fee=0.002, half_spread=0.001), dtype=torch.float64)
    states, (buy, turn) = trade(market, weights(0.5, -0.5))
    assert buy.costs["fee"].item() == pytest.approx(0.001)
    assert buy.costs["spread"].item() == pytest.approx(0.0005)
    assert states[1].equity.item() == pytest.approx(0.9985)
    order = 0.5 + 0.5 * 0.9985
    assert states[2].equity.item() == pytest.approx(0.9985 - order * 0.003)
    assert turn.turnover.item() == pytest.approx(order / 0.9985)


def test_orders_are_sized_on_the_equity_before_their_own_fee(
    hand_panel: Callable[..., Panel], free_market: Callable[..., MarketConfig], trade: Trade
) -> None:
    """Weight 1 on equity 1 buys for 1, and the fee of 0.01 leaves a position worth 1 on equity 0.99."""
    market = build_market(hand_panel(open=[100] * 2), free_market(fee=0.01), dtype=torch.float64)
    states, _ = trade(market, weights(1.0))
    assert states[1].weights.item() == pytest.approx(1 / 0.99)


def impact_panel(hand_panel: Callable[..., Panel], bars: int) -> Panel:
    """A day's volatility of 4 %, Parkinson's ln(H/L)² / (4 ln 2) = 0.04² / 24 an hour, and a day's notional of 50 M."""
    half_range = np.sqrt(0.04**2 / 24 * 4 * np.log(2)) / 2
    return hand_panel(
        open=[100] * bars,
        high=[100 * np.exp(half_range)] * bars,
        low=[100 * np.exp(-half_range)] * bars,
        volume=50e6 / 24 / 100,
    )


def test_impact_follows_the_square_root_law(
    hand_panel: Callable[..., Panel], free_market: Callable[..., MarketConfig], trade: Trade
) -> None:
    """An order of 0.5 M is a hundredth of the day: it moves its price by 4 %·√0.01 = 0.4 %, which costs 0.5·0.4 %."""
    config = free_market(impact=1.0, capital=1e6)
    market = build_market(impact_panel(hand_panel, 3), config, dtype=torch.float64)
    states, (half,) = trade(market, weights(0.5))
    assert half.costs["impact"].item() == pytest.approx(0.002)
    assert states[1].equity.item() == pytest.approx(0.998)
    _, (quarter,) = trade(market, weights(0.25))
    assert half.costs["impact"].item() == pytest.approx(quarter.costs["impact"].item() * 2**1.5)


def test_impact_and_capacity_grow_with_the_account(
    hand_panel: Callable[..., Panel], free_market: Callable[..., MarketConfig], trade: Trade
) -> None:
    """Prices double while fully invested, so the account of 1 becomes 2: the same weight is then twice the order."""
    config = free_market(impact=1.0, participation=1.0, capital=1e6)
    panel = hand_panel(open=[100, 100, 200], close=[100, 200, 200], high=[101, 200, 200], low=[100] * 3, volume=1e5)
    market = build_market(panel, config, dtype=torch.float64)
    states, (_, sell) = trade(market, weights(1.0, 0.0))
    equity, position = states[1].equity.item(), states[1].weights.item()
    coefficient = market.table[4, 2, 0].item()
    assert equity > 1.9
    assert sell.costs["impact"].item() == pytest.approx(coefficient * position**1.5 * equity**0.5)

    capped = build_market(hand_panel(open=[100, 100, 200], close=[100, 200, 200], volume=1e4), config)
    _, (buy, sell) = trade(capped, weights(1.0, -1.0).float())
    assert buy.turnover.item() == pytest.approx(1.0)
    assert sell.turnover.item() == pytest.approx(1e4 * 200 / 2e6)


def test_an_order_beyond_the_bars_capacity_is_filled_in_part_and_goes_on_at_the_next_bar(
    hand_panel: Callable[..., Panel], free_market: Callable[..., MarketConfig], trade: Trade
) -> None:
    """A tenth of 1,000 units at 100 is 10,000 of an account of 100,000."""
    config = free_market(participation=0.1, capital=1e5)
    market = build_market(hand_panel(open=[100] * 5, volume=1e3), config, dtype=torch.float64)
    states, transitions = trade(market, weights(0.25, 0.25, 0.25, -1.0))
    assert [state.weights.item() for state in states] == pytest.approx([0, 0.1, 0.2, 0.25, 0.15])
    assert [transition.unfilled.item() for transition in transitions] == pytest.approx([0.15, 0.05, 0, 1.15])
    assert [transition.turnover.item() for transition in transitions] == pytest.approx([0.1, 0.1, 0.05, 0.1])


@pytest.mark.parametrize("position", [0.8, -0.8])
def test_an_assumed_funding_rate_is_a_cost_to_longs_and_shorts(
    hand_panel: Callable[..., Panel], free_market: Callable[..., MarketConfig], trade: Trade, position: float
) -> None:
    """On the notional at the bar's close: 0.8 bought at 100 is 0.88 at 110."""
    panel = hand_panel(open=[100, 100], close=[100, 110], frequency_ms=EIGHT_HOURS_MS)
    market = build_market(panel, free_market(funding_rate=0.01), dtype=torch.float64)
    states, (bar,) = trade(market, weights(position))
    assert bar.costs["funding"].item() == pytest.approx(0.01 * 0.88)
    assert states[1].equity.item() == pytest.approx(1 + 0.1 * position - 0.0088)


@pytest.mark.parametrize("position", [0.8, -0.8])
def test_observed_funding_passes_from_longs_to_shorts(
    hand_panel: Callable[..., Panel], free_market: Callable[..., MarketConfig], trade: Trade, position: float
) -> None:
    panel = hand_panel(open=[100] * 3, funding=[0.0, 0.01, -0.02], frequency_ms=EIGHT_HOURS_MS)
    market = build_market(panel, free_market(funding_rate=0.005), dtype=torch.float64)
    _, (paid, received) = trade(market, weights(position, position))
    assert paid.costs["funding"].item() == pytest.approx(0.01 * position)
    assert received.costs["funding"].item() == pytest.approx(-0.02 * position)


def test_only_the_position_held_into_the_stamp_pays_funding(
    hand_panel: Callable[..., Panel], free_market: Callable[..., MarketConfig], trade: Trade
) -> None:
    """Hourly bars from 05:00: the one that opens at 07:00 ends in the stamp, the next one only begins in it."""
    panel = hand_panel(open=[100] * 5, start_ms=1_609_459_200_000 + 5 * 3_600_000)
    market = build_market(panel, free_market(funding_rate=0.01), dtype=torch.float64)
    for held_bar, due in ((1, 0.0), (2, 0.01), (3, 0.0), (4, 0.0)):
        targets = [0.0] * 4
        targets[held_bar - 1] = 1.0
        states, _ = trade(market, weights(*targets))
        assert states[-1].equity.item() == pytest.approx(1 - due), held_bar


def test_shorts_and_borrowed_cash_pay_interest_by_the_bar(
    hand_panel: Callable[..., Panel], free_market: Callable[..., MarketConfig], trade: Trade
) -> None:
    """A year has 8,766 hours. Long 3 borrows 2, short 1.5 borrows 1.5, long 0.9 borrows nothing."""
    config = free_market(borrow_rate=0.08766, leverage=3.0)
    market = build_market(hand_panel(open=[100] * 2), config, dtype=torch.float64)
    for position, borrowed in ((3.0, 2.0), (-1.5, 1.5), (0.9, 0.0)):
        _, (bar,) = trade(market, weights(position))
        assert bar.costs["borrow"].item() == pytest.approx(borrowed * 1e-5)


def test_short_proceeds_do_not_pay_for_longs(
    random_panel: Callable[..., Panel], free_market: Callable[..., MarketConfig], trade: Trade
) -> None:
    """Long 1.5 and short 0.7 of equity: 0.7 of units and 0.5 of cash are borrowed."""
    market = build_market(random_panel(0, 2, 2), free_market(borrow_rate=0.08766, leverage=3.0), dtype=torch.float64)
    _, (bar,) = trade(market, torch.tensor([[[1.5, -0.7]]], dtype=torch.float64))
    assert bar.costs["borrow"].item() == pytest.approx(1.2e-5)


# --- one table of costs ----------------------------------------------------------------------------------------------

NO_COSTS = {
    "preset",
    "lot",
    "tick",  # a lower bound of the spread
    "per_symbol",
    "capital",
    "participation",
    "observed_funding",
    "leverage",
    "allow_short",
    "maintenance_margin",
    "volatility_halflife",
    "extra_costs",
}
"""Settings of the market that are not the size of a cost: stress tests leave them alone."""


def test_the_table_names_every_cost_of_the_market() -> None:
    """A setting that is new must be put on one side or the other."""
    assert {field.name for field in fields(MarketConfig)} - NO_COSTS == {cost.setting for cost in COSTS.values()}
    assert cost_kinds() == ("fee", "spread", "impact", "funding", "borrow", "liquidation")
