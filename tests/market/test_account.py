"""Forced closes at the prices that algebra gives, and what they leave."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from tailguard.data.panel import Panel
from tailguard.market import MarketConfig, build_market

Trade = Callable[..., Any]
MARGIN, FEE = 0.02, 0.005
ENTRY = 100.0


def one_bar(position: float) -> torch.Tensor:
    return torch.tensor([[[position]]], dtype=torch.float64)


def liquidation_price(position: float) -> float:
    """Where 1 + v·(p/P − 1) = m·|v|·p/P for a position v, as a multiple of equity, entered at P without costs."""
    return ENTRY * (position - 1) / (position - MARGIN * abs(position))


@pytest.fixture(scope="module")
def margin_config(free_market: Callable[..., MarketConfig]) -> MarketConfig:
    return free_market(maintenance_margin=MARGIN, liquidation_fee=FEE, leverage=10.0)


@pytest.mark.parametrize("position", [5.0, 10.0, -5.0, -10.0])
def test_a_bar_that_touches_the_liquidation_price_closes_the_account_there(
    hand_panel: Callable[..., Panel], margin_config: MarketConfig, trade: Trade, position: float
) -> None:
    """At 5×, m = 2 %: a long ends at 100·4/4.9 = 81.63, a short at 100·6/5.1 = 117.65; left is (m − fee)·notional.

    The price then recovers and closes at the entry: an account that was closed is not there to see it.
    """
    price = liquidation_price(position)
    assert price == pytest.approx({5.0: 81.632653, 10.0: 91.836735, -5.0: 117.647059, -10.0: 107.843137}[position])
    notional = abs(position) * price / ENTRY
    for beyond, touched in ((-1e-6, False), (1e-6, True), (0.03, True)):
        extreme = price * (1 - beyond if position > 0 else 1 + beyond)
        panel = hand_panel(open=[ENTRY] * 2, high=[ENTRY, max(extreme, ENTRY)], low=[ENTRY, min(extreme, ENTRY)])
        states, (bar,) = trade(build_market(panel, margin_config, dtype=torch.float64), one_bar(position))
        assert bar.liquidated.item() is touched
        assert states[1].equity.item() == pytest.approx((MARGIN - FEE) * notional if touched else 1.0, rel=1e-9)
        assert bar.costs["liquidation"].item() == pytest.approx(FEE * notional if touched else 0.0, rel=1e-9)
        assert states[1].weights.item() == (0.0 if touched else pytest.approx(position))
        assert bar.shortfall.item() == 0


@pytest.mark.parametrize("position", [10.0, -10.0])
def test_a_gap_past_the_liquidation_price_takes_the_whole_equity_and_books_the_debt(
    hand_panel: Callable[..., Panel], margin_config: MarketConfig, trade: Trade, position: float
) -> None:
    """10× and a gap of 15 % against it is −1.5 of equity: a debt of 0.5 and the fee on the notional there."""
    opened = ENTRY * (0.85 if position > 0 else 1.15)
    panel = hand_panel(
        open=[ENTRY, ENTRY, opened], close=[ENTRY, ENTRY, ENTRY], high=[115, ENTRY, 115], low=[85, ENTRY, 85]
    )
    market = build_market(panel, margin_config, dtype=torch.float64)
    states, (_, bar) = trade(market, torch.cat((one_bar(position), one_bar(-position))))
    fee = FEE * 10 * opened / ENTRY
    assert states[2].equity.item() == 0.0
    assert bar.net.item() == -1.0
    assert bar.pnl.item() == pytest.approx(-1.5)
    assert bar.costs["liquidation"].item() == pytest.approx(fee)
    assert bar.shortfall.item() == pytest.approx(0.5 + fee)
    assert bar.turnover.item() == 0.0
    assert states[2].weights.item() == 0.0


@pytest.mark.parametrize("wanted", [10.0, 0.0, -10.0])
def test_a_gap_that_leaves_something_closes_at_the_open_before_any_order(
    hand_panel: Callable[..., Panel], margin_config: MarketConfig, trade: Trade, wanted: float
) -> None:
    """10× long and a gap of −9 %: equity 0.1 on a notional of 9.1, below the margin of 0.182."""
    panel = hand_panel(open=[100, 100, 91], close=[100, 100, 120], high=[100, 100, 120], low=[100, 100, 50])
    market = build_market(panel, margin_config, dtype=torch.float64)
    states, (_, bar) = trade(market, torch.cat((one_bar(10.0), one_bar(wanted))))
    assert bar.liquidated.item()
    assert states[2].equity.item() == pytest.approx(0.1 - FEE * 9.1)
    assert bar.shortfall.item() == bar.turnover.item() == 0.0


def test_funding_that_eats_the_margin_closes_the_account_at_the_close(
    hand_panel: Callable[..., Panel], margin_config: MarketConfig, trade: Trade
) -> None:
    """10× long at a close of 95: equity 0.5 on 9.5. Funding of 4 % takes 0.38; 0.12 is below the margin of 0.19."""
    panel = hand_panel(
        open=[100] * 3, close=[100, 100, 95], low=[100, 100, 94], funding=[0, 0, 0.04], frequency_ms=8 * 3_600_000
    )
    market = build_market(panel, margin_config, dtype=torch.float64)
    states, (entered, bar) = trade(market, one_bar(10.0).expand(2, 1, 1))
    assert not entered.liquidated.item()
    assert bar.liquidated.item()
    assert bar.costs["funding"].item() == pytest.approx(0.38)
    assert bar.pnl.item() == pytest.approx(-0.5)
    assert states[2].equity.item() == pytest.approx(0.12 - FEE * 9.5)


def test_interest_beyond_the_equity_closes_the_account_at_the_close(
    hand_panel: Callable[..., Panel], free_market: Callable[..., MarketConfig], trade: Trade
) -> None:
    """100× long for a week at 100 % a year owes 99·7/365.25 of its equity."""
    config = free_market(borrow_rate=1.0, leverage=100.0, maintenance_margin=0.001)
    panel = hand_panel(open=[100, 100], frequency_ms=7 * 24 * 3_600_000)
    states, (bar,) = trade(build_market(panel, config, dtype=torch.float64), one_bar(100.0))
    assert bar.liquidated.item()
    assert bar.costs["borrow"].item() == pytest.approx(99 * 7 / 365.25)
    assert bar.shortfall.item() == pytest.approx(99 * 7 / 365.25 - 1)
    assert states[1].equity.item() == 0.0


def test_an_account_closed_inside_the_bar_never_comes_to_its_funding(
    hand_panel: Callable[..., Panel], margin_config: MarketConfig, trade: Trade
) -> None:
    panel = hand_panel(open=[100, 100], low=[100, 80], funding=[0, 0.01], frequency_ms=8 * 3_600_000)
    _, (bar,) = trade(build_market(panel, margin_config, dtype=torch.float64), one_bar(10.0))
    assert bar.liquidated.item()
    assert bar.costs["funding"].item() == 0.0


def test_the_cost_of_the_fill_counts_against_the_margin(
    hand_panel: Callable[..., Panel], free_market: Callable[..., MarketConfig], trade: Trade
) -> None:
    """10× at a fee of 5 % costs half the equity; 0.5 is below a margin of 6 % of 10: closed at the fill, fee paid."""
    config = free_market(fee=0.05, maintenance_margin=0.06, leverage=10.0, liquidation_fee=0.01)
    panel = hand_panel(open=[100, 100], close=[100, 130])
    states, (bar,) = trade(build_market(panel, config, dtype=torch.float64), one_bar(10.0))
    assert bar.liquidated.item()
    assert bar.costs["fee"].item() == pytest.approx(0.5)
    assert bar.pnl.item() == pytest.approx(0.0, abs=1e-12)
    assert states[1].equity.item() == pytest.approx(0.4)


def test_two_assets_are_closed_together_where_their_common_margin_ends(
    free_market: Callable[..., MarketConfig], hand_panel: Callable[..., Panel], trade: Trade
) -> None:
    """Long 4 of an asset that falls 20 %, short 2 of one that rises 20 %, m = 5 %.

    Equity 1 − s·(0.8 + 0.4) meets m·(4 − 0.8·s + 2 + 0.4·s) at s = 0.7/1.18 of the way.
    """
    falls = hand_panel(open=[100, 100], low=[100, 80])
    both = replace(
        falls,
        **{name: np.tile(getattr(falls, name), (1, 2)) for name in ("open", "close", "volume")},
        low=np.array([[100.0, 100.0], [80.0, 100.0]]),
        high=np.array([[100.0, 100.0], [100.0, 120.0]]),
        symbols=("FALLS", "RISES"),
    )
    config = free_market(maintenance_margin=0.05, leverage=6.0)
    states, (bar,) = trade(
        build_market(both, config, dtype=torch.float64), torch.tensor([[[4.0, -2.0]]], dtype=torch.float64)
    )
    assert bar.liquidated.item()
    assert states[1].equity.item() == pytest.approx(1 - 1.2 * 0.7 / 1.18)


def test_a_closed_account_can_trade_what_is_left(
    hand_panel: Callable[..., Panel], margin_config: MarketConfig, trade: Trade
) -> None:
    panel = hand_panel(open=[100] * 3, close=[100, 100, 110], low=[100, 80, 100], high=[100, 100, 110])
    states, _ = trade(build_market(panel, margin_config, dtype=torch.float64), one_bar(10.0).expand(2, 1, 1))
    assert states[2].equity.item() == pytest.approx(2 * states[1].equity.item())


def test_a_ruined_account_stays_at_zero_and_finite(
    hand_panel: Callable[..., Panel], margin_config: MarketConfig, trade: Trade
) -> None:
    panel = hand_panel(open=[100, 100, 50, 50, 60], close=[100, 100, 50, 55, 60])
    states, transitions = trade(build_market(panel, margin_config), one_bar(10.0).float().expand(4, 1, 1))
    assert [state.equity.item() for state in states] == [1, 1, 0, 0, 0]
    assert all(cost.isfinite().all() for transition in transitions for cost in transition.costs.values())
