"""Costs added from outside the package: charged by formula, and seen by all that follows the table."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import tailguard as tg
from tailguard.config import load_config, to_yaml
from tailguard.data.panel import Panel
from tailguard.errors import ConfigError
from tailguard.evaluate.report.charts import activity_chart
from tailguard.evaluate.report.sections import costs_per_year
from tailguard.evaluate.stress import scaled_costs, stress_table
from tailguard.evaluate.trades import round_trips
from tailguard.market import MarketConfig, build_market, open_accounts, step
from tailguard.market.costs import COSTS, Cost, Fill, ForcedClose, Holding, cost_kinds, register_cost, unregister_cost

PanelMaker = Callable[..., Panel]


def stamp_duty(rate: Tensor, fill: Fill[Tensor, Tensor]) -> Tensor:
    """On purchases alone, [N, A]."""
    return rate * fill.order.clamp(min=0)


def plain_stamp_duty(rate: float, fill: Fill[float, list[float]]) -> float:
    return rate * sum(max(order, 0.0) for order in fill.order)


def custody(rate: Tensor, holding: Holding[Tensor, Tensor]) -> Tensor:
    """On the value held at the close, [N, A]."""
    return rate * holding.values.abs()


def plain_custody(rate: float, holding: Holding[float, list[float]]) -> float:
    return rate * sum(abs(value) for value in holding.values)


def auction(rate: Tensor, close: ForcedClose) -> Tensor:
    return rate * close.positions.abs()


DUTY = Cost("duty", stamp_duty, "order", rate=0.004)
CUSTODY = Cost("custody", custody, "close", rate=0.8, yearly=True)
AUCTION = Cost("auction", auction, "liquidation", rate=0.01)


@pytest.fixture
def register() -> Iterator[Callable[..., None]]:
    """Register costs for one test."""
    before = dict(COSTS)

    def add(*costs: Cost) -> None:
        for cost in costs:
            register_cost(cost)

    yield add
    for kind in set(COSTS) - set(before):
        unregister_cost(kind)
    assert before == COSTS


def targets_for(bars: tg.Bars, assets: int = 1) -> np.ndarray:
    """Long, short and held positions, [R, A]."""
    rows = np.arange(len(bars) // assets)
    targets = np.stack([np.where((rows + 3 * asset) % 20 < 10, 0.8, -0.4) for asset in range(assets)], axis=1) / assets
    targets[rows % 5 == 1] = np.nan
    return targets


# --- in the step -----------------------------------------------------------------------------------------------------


def test_each_moment_charges_what_the_formula_says(hand_panel: PanelMaker, register, free_market, trade) -> None:
    """Buy 0.5 at 100, rising to 110: duty 0.004·0.5 on the order, custody on 0.55; selling then pays no duty."""
    register(DUTY, CUSTODY, AUCTION)
    market = build_market(hand_panel(open=[100, 100, 110], close=[100, 110, 110]), free_market(), dtype=torch.float64)
    states, (buy, sell) = trade(market, torch.tensor([0.5, 0.0], dtype=torch.float64).reshape(2, 1, 1))
    assert list(buy.costs) == [
        "fee",
        "spread",
        "impact",
        "duty",
        "funding",
        "borrow",
        "custody",
        "liquidation",
        "auction",
    ]
    assert buy.costs["duty"].item() == pytest.approx(0.002, rel=1e-12)
    assert buy.costs["custody"].item() == pytest.approx(0.8 / 8766 * 0.55, rel=1e-12)
    assert sell.costs["duty"].item() == sell.costs["custody"].item() == 0
    assert states[-1].equity.item() == pytest.approx(1 + 0.05 - 0.002 - 0.8 / 8766 * 0.55, rel=1e-12)


def test_a_liquidation_charges_its_own_costs(hand_panel: PanelMaker, register, free_market, trade) -> None:
    """10 of equity at 100, margin 2 %: closed at 100·9/(10·0.98), where 9.18367 is left of the position."""
    register(AUCTION)
    config = free_market(maintenance_margin=0.02, liquidation_fee=0.005, leverage=10.0)
    market = build_market(hand_panel(open=[100, 100], close=[100, 80]), config, dtype=torch.float64)
    states, (bar,) = trade(market, torch.full((1, 1, 1), 10.0, dtype=torch.float64))
    notional = 10 * 9 / (10 * 0.98)
    assert bar.liquidated.item()
    assert bar.costs["auction"].item() == pytest.approx(0.01 * notional, rel=1e-9)
    assert bar.costs["liquidation"].item() == pytest.approx(0.005 * notional, rel=1e-9)
    assert states[-1].equity.item() == pytest.approx(1 + notional - 10 - 0.015 * notional, rel=1e-9)


@pytest.mark.parametrize("assets", [1, 3])
def test_equity_carries_every_registered_cost(random_panel: PanelMaker, register, trade, assets: int) -> None:
    """Also in bars with liquidations: net = pnl − Σ costs + shortfall."""
    register(DUTY, CUSTODY, AUCTION)
    config = MarketConfig(leverage=8.0, maintenance_margin=0.01, borrow_rate=0.3)
    market = build_market(random_panel(3, 40, assets, volatility=0.08), config, dtype=torch.float64)
    targets = torch.rand(39, 16, assets, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    states, transitions = trade(market, (2 * targets - 1) * 8 / assets)
    for before, after, bar in zip(states, states[1:], transitions, strict=False):
        explained = bar.pnl - sum(bar.costs.values()) + bar.shortfall
        torch.testing.assert_close(bar.net, explained, rtol=0, atol=1e-12)
        torch.testing.assert_close(after.equity, before.equity * (1 + bar.net), rtol=1e-12, atol=0)
    for kind in ("duty", "custody", "auction"):
        assert sum(float(bar.costs[kind].sum()) for bar in transitions) > 0


def test_margin_is_checked_against_a_cost_that_the_bound_does_not_know(
    hand_panel: PanelMaker, register, free_market, trade
) -> None:
    """Custody of 30 % of a position of 4 takes more than the account has, though prices stand still."""
    register(Cost("custody", custody, "close", rate=0.3))
    config = free_market(maintenance_margin=0.01, leverage=5.0)
    market = build_market(hand_panel(open=[100, 100]), config, dtype=torch.float64)
    states, (bar,) = trade(market, torch.full((1, 1, 1), 4.0, dtype=torch.float64))
    assert bar.liquidated.item()
    assert bar.costs["custody"].item() == pytest.approx(1.2)
    assert bar.shortfall.item() == pytest.approx(0.2)
    assert states[-1].equity.item() == 0


def test_its_gradient_is_that_of_central_differences(random_panel: PanelMaker, register) -> None:
    register(DUTY, replace(CUSTODY, rate=20.0))
    market = build_market(random_panel(3, 8, 2, silent=0.0), dtype=torch.float64)
    targets = 0.9 * torch.rand(5, 4, 2, generator=torch.Generator().manual_seed(1), dtype=torch.float64) - 0.45

    def growth(x: Tensor) -> Tensor:
        state = open_accounts(torch.zeros(4, dtype=torch.int64), 2, torch.float64)
        paid: Any = 0.0
        for target in x:
            state, bar = step(market, state, target)
            paid = paid + (bar.costs["duty"] + bar.costs["custody"]).sum()
        return state.equity.log().sum() + paid

    x = targets.clone().requires_grad_()
    (found,) = torch.autograd.grad(growth(x), x)
    for index in range(0, x.numel(), 3):
        shift = torch.zeros_like(targets)
        shift.view(-1)[index] = 1e-6
        expected = float(growth(targets + shift) - growth(targets - shift)) / 2e-6
        assert float(found.view(-1)[index]) == pytest.approx(expected, rel=1e-5, abs=1e-8)


# --- in all that follows the table -----------------------------------------------------------------------------------


@pytest.mark.parametrize("assets", [1, 2])
@pytest.mark.parametrize("plain", [True, False], ids=["in floats", "by the simulator"])
def test_a_backtest_books_it(register, assets: int, plain: bool) -> None:
    register(
        replace(DUTY, plain=plain_stamp_duty if plain else None),
        replace(CUSTODY, plain=plain_custody if plain else None),
    )
    bars = tg.make_market(400, assets=assets, seed=5).bars
    result = tg.backtest(targets_for(bars, assets), bars)
    assert list(result.costs) == list(cost_kinds())
    np.testing.assert_allclose(result.net, result.pnl - sum(result.costs.values()), atol=1e-12)
    values = np.abs(result.weights).sum(1) * (1 + result.net)
    np.testing.assert_allclose(result.costs["custody"], 0.8 / result.bars_per_year * values, rtol=1e-9)
    bought = result.costs["duty"] / 0.004
    assert (bought <= result.turnover + 1e-12).all()
    assert 0.4 < bought.sum() / result.turnover.sum() < 0.6  # what is bought is sold again
    assert result.metrics["cost_duty_per_year"] == pytest.approx(result.costs["duty"].mean() * result.bars_per_year)
    assert "duty" in result.frame().columns


@pytest.mark.usefixtures("register")
def test_both_ways_to_backtest_agree() -> None:
    bars = tg.make_market(400, assets=2, seed=5).bars
    results = []
    for plain in (plain_stamp_duty, None):
        register_cost(replace(DUTY, plain=plain), replace="duty" in COSTS)
        results.append(tg.backtest(targets_for(bars, 2), bars))
    unregister_cost("duty")
    np.testing.assert_allclose(results[0].equity, results[1].equity, rtol=1e-12)
    assert results[0].equity[-1] < tg.backtest(targets_for(bars, 2), bars).equity[-1]


def test_stress_multiplies_it(register) -> None:
    register(DUTY)
    bars = tg.make_market(400, seed=5).bars
    table = dict(stress_table(targets_for(bars), bars, cost_factors=(0.0, 1.0, 2.0), delays=()))
    bought = table["costs ×1"].costs["duty"] / 0.004
    assert not table["costs ×0"].costs["duty"].any()
    doubled = table["costs ×2"].costs["duty"]
    assert doubled.sum() == pytest.approx(0.008 * bought.sum(), rel=0.02)  # less equity, slightly other orders
    assert doubled[0] == pytest.approx(0.008 * bought[0], rel=1e-12)
    assert scaled_costs(MarketConfig(extra_costs={"duty": 0.001}), 3.0).extra_costs == {"duty": pytest.approx(0.003)}


def test_trades_and_report_count_it(register) -> None:
    register(DUTY, CUSTODY)
    bars = tg.make_market(400, assets=2, seed=5).bars
    result = tg.backtest(targets_for(bars, 2), bars)
    trades = round_trips(result, bars.panel("portfolio"))
    paid = sum(cost * result.equity[:-1] for cost in result.costs.values())
    assert sum(trade.costs for trade in trades) == pytest.approx(paid.sum(), rel=1e-9)
    assert sum(trade.pnl for trade in trades) == pytest.approx(result.equity[-1] - 1, rel=1e-9)
    assert {"duty", "custody"} <= {trace.name for trace in activity_chart(result).data}
    assert costs_per_year(result) == pytest.approx(sum(c.mean() for c in result.costs.values()) * result.bars_per_year)


def test_an_order_cost_goes_to_the_symbol_that_traded(register) -> None:
    """One symbol trades at every turn, the other holds: the duty is the first one's."""
    register(DUTY)
    bars = tg.make_market(100, assets=2, seed=5).bars
    targets = np.full((100, 2), np.nan)
    targets[0] = 0.0, 0.4
    targets[1::2, 0], targets[2::2, 0] = 0.4, 0.1
    free = MarketConfig(fee=0, half_spread=0, impact=0, participation=math.inf, funding_rate=0)
    result = tg.backtest(targets, bars, free)
    trades = round_trips(result, bars.panel("portfolio"))
    (held,) = [trade for trade in trades if trade.symbol == result.symbols[1]]
    assert held.costs == pytest.approx(0.004 * 0.4, rel=1e-6)


def test_training_records_it(register) -> None:
    register(Cost("levy", lambda rate, fill: rate * fill.turnover, "order", rate=0.001))
    env = tg.TradingEnv(
        tg.make_market(400, seed=5).bars, num_envs=4, episode_length=32, features=["return_1"], dtype=torch.float64
    )
    agent = tg.DistributionalPPO(env, n_steps=16, hidden=(8,), memory="none", seed=1).learn(64)
    assert agent.metrics["data/levy"] / agent.metrics["data/turnover"] == pytest.approx(0.001, rel=1e-5)


# --- settings and registration ---------------------------------------------------------------------------------------


def test_its_rate_is_a_setting(register, hand_panel: PanelMaker) -> None:
    register(DUTY)
    config = load_config(overrides=["market.extra_costs.duty=0.01"])
    assert "extra_costs: {duty: 0.01}" in to_yaml(config, "market")
    rates = build_market(hand_panel(open=[100, 100]), config.market, dtype=torch.float64).rates
    assert rates.costs["duty"].item() == 0.01
    assert MarketConfig().extra_costs == {"duty": 0.004}
    with pytest.raises(ConfigError, match=r"market\.extra_costs\.duty: -1 is out of range"):
        MarketConfig(extra_costs={"duty": -1.0})


def test_a_config_that_names_an_unknown_cost_is_refused() -> None:
    with pytest.raises(ConfigError, match="no cost 'duty' is registered; there are none"):
        MarketConfig(extra_costs={"duty": 0.01})


def test_wrong_entries_are_refused(register) -> None:
    register(DUTY)
    with pytest.raises(ConfigError, match="'duty' is registered already"):
        register_cost(DUTY)
    with pytest.raises(ConfigError, match="setting 'duty_rate' is not one of MarketConfig"):
        register_cost(Cost("other", stamp_duty, "order", setting="duty_rate"))
    with pytest.raises(ConfigError, match="only costs that were registered can be removed: duty"):
        unregister_cost("fee")
    for name in ("pnl", "Big fee"):
        with pytest.raises(ConfigError, match="names that the books hold already"):
            Cost(name, stamp_duty, "order")
    with pytest.raises(ConfigError, match="charged"):
        Cost("other", stamp_duty, "open")  # type: ignore[arg-type]  # a wrong moment on purpose


def test_a_market_keeps_the_costs_that_it_was_built_with(hand_panel: PanelMaker, trade) -> None:
    register_cost(DUTY)
    market = build_market(hand_panel(open=[100, 100]), dtype=torch.float64)
    unregister_cost("duty")
    target = torch.full((1, 1, 1), 0.5, dtype=torch.float64)
    assert "duty" in trade(market, target)[1][0].costs
    assert "duty" not in trade(build_market(hand_panel(open=[100, 100]), dtype=torch.float64), target)[1][0].costs
