"""What holds for every step: timing, conservation, and the same numbers in any batch, precision and runtime."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields, replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from tailguard.data.panel import Panel
from tailguard.market import MarketConfig, MarketState, Transition, build_market, open_accounts, step

Trade = Callable[..., Any]
COSTLY = MarketConfig(
    fee=0.001,
    half_spread=0.0005,
    impact=1.0,
    funding_rate=0.001,
    borrow_rate=0.3,
    leverage=8.0,
    maintenance_margin=0.01,
)


def amounts(transition: Transition) -> dict[str, torch.Tensor]:
    """Every amount of a transition by name, costs among them."""
    named = {field.name: getattr(transition, field.name) for field in fields(transition)}
    return named.pop("costs") | named


def random_targets(seed: int, bars: int, accounts: int, assets: int, leverage: float) -> torch.Tensor:
    """Targets with gross weight up to the leverage, [T, N, A] float64; some are zero."""
    rng = np.random.default_rng(seed)
    shape = (bars, accounts, assets)
    targets = rng.uniform(-1, 1, shape) * (rng.random(shape) < 0.8)
    return torch.tensor(targets * leverage / np.maximum(np.abs(targets).sum(axis=2, keepdims=True), 1))


@pytest.mark.parametrize(
    ("jump", "earned"),
    [
        ("move of t", 0.0),
        ("gap into t+1", 0.0),
        ("move of t+1", 0.1),
        ("gap into t+2", 0.1),
        ("move of t+2", 0.0),
    ],
)
def test_an_action_earns_from_the_next_open_to_the_open_after_it(
    hand_panel: Callable[..., Panel],
    free_market: Callable[..., MarketConfig],
    trade: Trade,
    jump: str,
    earned: float,
) -> None:
    """Prices stand still but for one jump of 10 %; the account is told to be long at the close of t = 1, flat after."""
    moments = ("open of t", "move of t", "gap into t+1", "move of t+1", "gap into t+2", "move of t+2")
    prices = [100.0 if moment < moments.index(jump) else 110.0 for moment in range(len(moments))]
    panel = hand_panel(open=[100.0, *prices[0::2]], close=[100.0, *prices[1::2]])
    market = build_market(panel, free_market(), dtype=torch.float64)
    states, _ = trade(market, torch.tensor([0.0, 1.0, 0.0], dtype=torch.float64).reshape(3, 1, 1))
    assert states[-1].equity.item() == pytest.approx(1 + earned, abs=1e-12)


@settings(max_examples=20, deadline=None)
@given(
    seed=st.integers(0, 2**32 - 1),
    assets=st.integers(1, 3),
    volatility=st.sampled_from([0.003, 0.02, 0.06]),
    funding=st.sampled_from([None, 0.01]),
    dtype=st.sampled_from([torch.float32, torch.float64]),
)
def test_growth_is_price_gain_less_every_cost(
    random_panel: Callable[..., Panel],
    trade: Trade,
    seed: int,
    assets: int,
    volatility: float,
    funding: float | None,
    dtype: torch.dtype,
) -> None:
    panel = random_panel(seed, 40, assets, volatility=volatility, funding=funding, gap_volatility=volatility / 2)
    targets = random_targets(seed, 39, 16, assets, COSTLY.leverage).to(dtype)
    states, transitions = trade(build_market(panel, COSTLY, dtype=dtype), targets)
    rounding = 200 * torch.finfo(dtype).eps
    for before, after, bar in zip(states, states[1:], transitions, strict=False):
        costs = bar.costs
        assert all(amount.isfinite().all() for amount in amounts(bar).values())
        assert all((cost >= 0).all() for kind, cost in costs.items() if kind != "funding" or funding is None)
        assert (bar.turnover >= 0).all()
        assert (bar.unfilled >= 0).all()
        assert (bar.shortfall >= 0).all()

        explained = bar.pnl - sum(costs.values()) + bar.shortfall
        scale = 1 + bar.pnl.abs() + sum(cost.abs() for cost in costs.values())
        assert ((bar.net - explained).abs() <= rounding * scale).all()

        assert ((after.equity - before.equity * (1 + bar.net)).abs() <= rounding * before.equity).all()
        assert (after.equity >= 0).all()
        assert (after.weights[bar.liquidated] == 0).all()
        assert (after.equity[bar.shortfall > 0] == 0).all()
        assert bar.liquidated[bar.costs["liquidation"] > 0].all()
        assert after.row.eq(before.row + 1).all()


def test_weights_are_position_values_over_equity(random_panel: Callable[..., Panel], trade: Trade) -> None:
    """Positions that are left alone keep their units, so w·equity / close stays what it was."""
    panel = random_panel(5, 30, 3, silent=0.0)
    targets = torch.tensor([0.3, -0.5, 0.1], dtype=torch.float64).expand(29, 1, 3)
    hold = torch.ones(29, 1, 3, dtype=torch.bool)
    hold[0] = False
    states, transitions = trade(build_market(panel, dtype=torch.float64), targets, hold=hold)
    units = [
        (state.weights * state.equity / torch.tensor(panel.close[row])).squeeze(0) for row, state in enumerate(states)
    ]
    for held, bar in zip(units[2:], transitions[1:], strict=True):
        torch.testing.assert_close(held, units[1], rtol=1e-12, atol=0)
        assert bar.turnover.item() == bar.costs["fee"].item() == bar.costs["impact"].item() == bar.unfilled.item() == 0


def test_hold_leaves_alone_what_it_marks_and_nothing_else(random_panel: Callable[..., Panel]) -> None:
    market = build_market(random_panel(6, 5, 2, silent=0.0, volume=1e9), dtype=torch.float64)
    opened = open_accounts(torch.tensor([0]), 2, torch.float64)
    held, _ = step(market, opened, torch.tensor([[0.4, 0.4]], dtype=torch.float64))
    hold = torch.tensor([[True, False]])
    target = torch.tensor([[-0.4, -0.4]], dtype=torch.float64)
    _, only_second = step(market, held, target, hold)
    gap = market.table[0, 2]
    equity = 1 + (held.weights * gap).sum()
    order = (-0.4 * equity - held.weights[0, 1] * (1 + gap[1])).abs()
    assert only_second.turnover.item() == pytest.approx(order.item())


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_flat_account_without_orders_does_not_change_by_a_bit(
    random_panel: Callable[..., Panel], trade: Trade, dtype: torch.dtype
) -> None:
    market = build_market(random_panel(7, 200, 2, volatility=0.1, funding=0.01), COSTLY, dtype=dtype)
    states, transitions = trade(market, torch.zeros(199, 3, 2, dtype=dtype))
    for state, bar in zip(states[1:], transitions, strict=True):
        assert torch.equal(state.equity, torch.ones(3, dtype=dtype))
        assert torch.equal(state.weights, torch.zeros(3, 2, dtype=dtype))
        assert all((amount == 0).all() for amount in amounts(bar).values())


def test_a_step_leaves_its_inputs_as_they_were(random_panel: Callable[..., Panel]) -> None:
    market = build_market(random_panel(8, 20, 2, volatility=0.1), COSTLY)
    state = open_accounts(torch.arange(8), 2)
    target = random_targets(8, 1, 8, 2, 8.0)[0].float()
    for _ in range(3):
        copies = [tensor.clone() for tensor in (state.row, state.equity, state.weights, target, market.table)]
        after, _ = step(market, state, target)
        for tensor, copy in zip((state.row, state.equity, state.weights, target, market.table), copies, strict=True):
            assert torch.equal(tensor, copy)
        state = after


@settings(max_examples=25, deadline=None)
@given(seed=st.integers(0, 2**32 - 1), assets=st.integers(1, 3), impact=st.sampled_from([0.0, 1.0]))
def test_doubling_the_fee_never_helps(
    random_panel: Callable[..., Panel], trade: Trade, seed: int, assets: int, impact: float
) -> None:
    """With no forced close and no partial fill: either can get an account out of a position that goes on to lose."""
    panel = random_panel(seed, 60, assets, silent=0.0)
    targets = random_targets(seed, 59, 8, assets, 2.0)
    config = replace(COSTLY, leverage=2.0, impact=impact, participation=np.inf)
    cheap, cheap_bars = trade(build_market(panel, config, dtype=torch.float64), targets)
    dear, dear_bars = trade(build_market(panel, replace(config, fee=2 * config.fee), dtype=torch.float64), targets)
    assume(not any(bar.liquidated.any() for bar in (*cheap_bars, *dear_bars)))
    for less, more in zip(dear[1:], cheap[1:], strict=True):
        assert (less.equity <= more.equity).all()
    assert (dear[-1].equity < cheap[-1].equity).all()


def accounts_of(state: MarketState, account: slice) -> MarketState:
    return MarketState(state.row[account], state.equity[account], state.weights[account])


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize(("assets", "bars", "volatility"), [(1, 200, 0.03), (3, 100, 0.03), (7, 20, 0.1)])
def test_a_batch_equals_its_accounts_one_by_one_bit_for_bit(
    random_panel: Callable[..., Panel], assets: int, bars: int, volatility: float, dtype: torch.dtype
) -> None:
    """34 accounts fill whole vector registers and leave a remainder; in some bars some of them are liquidated."""
    accounts = 34
    panel = random_panel(9, bars + accounts + 1, assets, volatility=volatility, funding=0.001, volume=1e5)
    market = build_market(panel, COSTLY, dtype=dtype)
    targets = random_targets(9, bars, accounts, assets, COSTLY.leverage).to(dtype)
    batch = open_accounts(torch.arange(accounts), assets, dtype)
    singles = [accounts_of(batch, slice(account, account + 1)) for account in range(accounts)]
    mixed_bars = 0
    for target in targets:
        batch, together = step(market, batch, target)
        stepped = [step(market, single, target[account : account + 1]) for account, single in enumerate(singles)]
        singles = [state for state, _ in stepped]
        for name in ("row", "equity", "weights"):
            assert torch.equal(getattr(batch, name), torch.cat([getattr(single, name) for single in singles])), name
        for name, amount in amounts(together).items():
            assert torch.equal(amount, torch.cat([amounts(one)[name] for _, one in stepped])), name
        mixed_bars += 0 < int(together.liquidated.sum()) < accounts
    assert mixed_bars > 0


def test_float32_stays_within_one_in_ten_thousand_of_float64_over_ten_thousand_bars(
    random_panel: Callable[..., Panel],
) -> None:
    bars, accounts = 10_000, 8
    panel = random_panel(10, bars + 1, volatility=0.004, gap_volatility=0.0005, volume=1e5)
    targets = random_targets(10, bars, accounts, 1, 1.0)
    markets = [build_market(panel, dtype=dtype) for dtype in (torch.float32, torch.float64)]
    states = [open_accounts(torch.zeros(accounts, dtype=torch.int64), 1, market.dtype) for market in markets]
    # A new target every eighth bar: trading every bar for 10,000 bars would leave nothing to compare.
    for bar, target in enumerate(targets):
        hold = torch.full((accounts, 1), bar % 8 != 0)
        states = [
            step(market, state, target.to(market.dtype), hold)[0] for market, state in zip(markets, states, strict=True)
        ]
    single, double = states
    assert (double.equity > 0.01).all()
    assert (single.equity.double() / double.equity - 1).abs().max() < 1e-4


@pytest.mark.slow
def test_a_compiled_step_equals_the_eager_one(random_panel: Callable[..., Panel]) -> None:
    compiled = torch.compile(step, fullgraph=True)
    market = build_market(random_panel(11, 120, 2, volatility=0.05, volume=1e5), COSTLY)
    state = open_accounts(torch.arange(64), 2)
    liquidated = 0
    for target in random_targets(11, 50, 64, 2, COSTLY.leverage).float():
        fused_state, fused = compiled(market, state, target)
        state, eager = step(market, state, target)
        pairs = [(getattr(fused_state, name), getattr(state, name)) for name in ("row", "equity", "weights")]
        pairs += [(amount, amounts(eager)[name]) for name, amount in amounts(fused).items()]
        for actual, expected in pairs:
            torch.testing.assert_close(actual, expected, rtol=1e-6, atol=1e-6)
        liquidated += int(eager.liquidated.sum())
    assert liquidated > 0
