"""The bar of few accounts in NumPy against the simulator's: the same numbers bit by bit, the same slopes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from tailguard.data.panel import Panel
from tailguard.envs.episodes import EpisodeState, Reward, TradingTask
from tailguard.envs.traded_bar import TradedBar, trade_bar
from tailguard.market import Market, MarketConfig, MarketState, build_market, open_accounts
from tailguard.market.costs import Cost, Fill, register_cost, unregister_cost
from tailguard.market.host_step import MOST_NUMBERS, can_step, host_step

PanelMaker = Callable[..., Panel]
BARS, ACCOUNTS = 6, 24
OPTIONS: dict[str, dict[str, Any]] = {
    "no costs": {"fee": 0.0, "half_spread": 0.0, "impact": 0.0, "funding_rate": 0.0},
    "default costs": {},
    "every cost": {"fee": 0.002, "half_spread": 0.001, "impact": 2.0, "funding_rate": 0.003, "leverage": 3.0},
    "ticks": {"tick": 0.2, "half_spread": 0.0001},
    "own rates": {"per_symbol": {"ASSET0": {"fee": 0.004, "maintenance_margin": 0.02, "half_spread": 0.002}}},
}


def make_task(
    random_panel: PanelMaker, assets: int, dtype: torch.dtype, reward: Reward = "log", **options: Any
) -> TradingTask:
    funding = options.pop("funding", None)
    panel = random_panel(3, BARS + 2, assets, volume=1e6, silent=0.0, funding=funding)
    market = build_market(panel, MarketConfig(**options), dtype=dtype)
    features = torch.randn(panel.rows, 2, generator=torch.Generator().manual_seed(0))
    return TradingTask(market, features, ("one", "two"), episode_length=8, reward=reward)


def begun(task: TradingTask, *, varied: bool = False) -> EpisodeState:
    """Accounts of different sizes, some beyond their peak's half, half of them new."""
    dtype, draw = task.market.dtype, torch.Generator().manual_seed(1)
    state = task.begin(open_accounts(torch.zeros(ACCOUNTS, dtype=torch.int64), task.market.assets, dtype))
    equity = 0.6 + torch.rand(ACCOUNTS, generator=draw).to(dtype)
    weights = 0.5 * torch.randn(ACCOUNTS, task.market.assets, generator=draw).to(dtype)
    weights[::2], equity[::2] = 0.0, 1.0
    factor = (0.5 + torch.rand(ACCOUNTS, generator=draw)).to(dtype) if varied else None
    market = MarketState(state.market.row, equity, weights)
    return replace(state, market=market, peak_equity=equity.clamp(min=1.0), cost_factor=factor)


def plain_bar(task: TradingTask, before: EpisodeState, target: Tensor, hold: Tensor | None = None) -> TradedBar:
    """The bar as the simulator and the task make it."""
    after, transition = task.advance(before, target, hold)
    gain, drawdown, _ = task.account(after)
    return TradedBar(
        after, transition, gain, drawdown, task.observe(after), task.reward_of(transition, before),
        transition.net.isfinite(), liquidates=True,
    )  # fmt: skip


def numbers(bar: TradedBar) -> dict[str, Tensor]:
    """Everything that a bar says, by name."""
    state = vars(bar.after) | vars(bar.after.market) | vars(bar.transition) | bar.transition.costs
    state |= {name: getattr(bar, name) for name in ("gain", "drawdown", "observation", "reward", "finite")}
    return {name: value for name, value in state.items() if isinstance(value, Tensor)}


def targets(task: TradingTask, leverage: float = 0.9) -> list[Tensor]:
    draw = torch.Generator().manual_seed(2)
    shape = ACCOUNTS, task.market.assets
    rows = [(leverage * (2 * torch.rand(shape, generator=draw) - 1) / shape[1]) for _ in range(BARS)]
    rows[1][::3] = 0.0
    return [row.to(task.market.dtype) for row in rows]


def by_numpy(task: TradingTask, before: EpisodeState, target: Tensor, hold: Tensor | None = None) -> bool:
    market = task.market
    row = before.market.row + 1
    return can_step(market, target) and (
        host_step(market, before.market, row, target, hold, before.cost_factor) is not None
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("assets", [1, 3])
@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_the_numbers_are_those_of_the_simulator_bit_by_bit(
    random_panel: PanelMaker, options: dict[str, Any], assets: int, dtype: torch.dtype
) -> None:
    task = make_task(random_panel, assets, dtype, **options)
    mine = theirs = begun(task, varied=True)
    for number, target in enumerate(targets(task)):
        hold = torch.rand(target.shape, generator=torch.Generator().manual_seed(number)) < 0.2
        assert by_numpy(task, mine, target, hold)
        bar, expected = trade_bar(task, mine, target, hold), plain_bar(task, theirs, target, hold)
        found, wanted = numbers(bar), numbers(expected)
        assert found.keys() == wanted.keys()
        for name, value in wanted.items():
            assert torch.equal(found[name], value), name
            assert found[name].dtype == value.dtype, name
        mine, theirs = bar.after, expected.after
    assert float(mine.market.weights.abs().max()) > 0.1


@pytest.mark.parametrize("funding", [0.004, None])
@pytest.mark.parametrize("reward", ["log", "simple", "pnl"])
@pytest.mark.parametrize("assets", [1, 3])
@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_the_slopes_are_those_of_automatic_differentiation(
    random_panel: PanelMaker, options: dict[str, Any], assets: int, reward: Reward, funding: float | None
) -> None:
    """Of a random sum of everything that a bar says, in its target, weights, equity and peak, in float64."""
    task = make_task(random_panel, assets, torch.float64, reward, funding=funding, **options)
    begin, target = begun(task, varied=True), targets(task)[0]
    hold = torch.rand(target.shape, generator=torch.Generator().manual_seed(5)) < 0.2

    def slopes(trade: Callable[..., TradedBar], names: set[str]) -> list[Tensor]:
        given = target, begin.market.weights, begin.market.equity, begin.peak_equity
        inputs = [value.clone().requires_grad_() for value in given]
        market = replace(begin.market, weights=inputs[1], equity=inputs[2])
        said = numbers(trade(task, replace(begin, market=market, peak_equity=inputs[3]), inputs[0], hold))
        draw = torch.Generator().manual_seed(6)
        total = torch.zeros((), dtype=torch.float64)
        for name in sorted(said):
            weight = torch.randn(said[name].shape, generator=draw, dtype=torch.float64)
            if name in names:
                total = total + (weight * said[name]).sum()
        return [one.detach() for one in torch.autograd.grad(total, inputs, materialize_grads=True)]

    everything = {"equity", "weights", "peak_equity", "observation", "reward", "net", "gain", "drawdown", "turnover"}
    kinds = {cost.kind for moment in ("order", "close") for cost in task.market.costs[moment]}
    for names in (everything | kinds, {"reward"}, {"observation"}, {"weights", "drawdown"}, kinds - {"borrow"}):
        if names == kinds - {"borrow"} and options.get("fee") == 0.0:
            continue  # nothing costs anything
        found, expected = slopes(trade_bar, names), slopes(plain_bar, names)
        for mine, theirs in zip(found, expected, strict=True):
            # Rewards and observations are float32, which slopes pass through in either case.
            torch.testing.assert_close(mine, theirs, rtol=1e-6, atol=1e-9)
        assert float(expected[0].abs().max()) > 1e-4


def test_what_numpy_does_not_do_is_left_to_the_simulator(random_panel: PanelMaker) -> None:
    """Orders beyond their caps, liquidations, lots, interest, many accounts: the same slopes by the other way."""
    panel = random_panel(3, BARS + 2, 1, volume=1e6, silent=0.0)

    def market(of: Panel = panel, **options: Any) -> Market:
        return build_market(of, MarketConfig(**options), dtype=torch.float64)

    state = open_accounts(torch.zeros(4, dtype=torch.int64), 1, torch.float64)
    target = torch.tensor([[0.5], [-0.5], [0.2], [0.0]], dtype=torch.float64)
    row = state.row + 1
    assert host_step(market(), state, row, target, None, None) is not None
    thin = market(random_panel(3, BARS + 2, 1, volume=60.0, silent=0.0))
    assert can_step(thin, target)
    assert host_step(thin, state, row, target, None, None) is None
    high = market(leverage=100.0, participation=1e9)
    assert host_step(high, state, row, 100 * target, None, None) is None
    assert not can_step(market(lot=7.0), target)
    assert not can_step(market(borrow_rate=0.1), target)
    assert not can_step(market(), torch.zeros(MOST_NUMBERS + 1, 1))
    assert can_step(market(), torch.zeros(MOST_NUMBERS, 1))


def test_a_cost_of_ones_own_is_left_to_the_simulator(random_panel: PanelMaker) -> None:
    def stamp_duty(rate: Tensor, fill: Fill[Tensor, Tensor]) -> Tensor:
        return rate * fill.order.clamp(min=0)

    register_cost(Cost("stamp_duty", stamp_duty, charged="order", rate=0.005))
    try:
        task = make_task(random_panel, 1, torch.float64)
    finally:
        unregister_cost("stamp_duty")
    target = targets(task)[0]
    assert not can_step(task.market, target)
    bar = trade_bar(task, begun(task), target)
    assert float(bar.transition.costs["stamp_duty"].sum()) > 0


def test_without_a_gradient_there_is_no_graph(random_panel: PanelMaker) -> None:
    task = make_task(random_panel, 1, torch.float32)
    target = targets(task)[0].requires_grad_()
    bar = trade_bar(task, begun(task), target)
    assert type(bar.reward.grad_fn).__name__ == "_BarBackward"
    with torch.no_grad():
        bar = trade_bar(task, begun(task), target)
    assert not any(value.requires_grad for value in numbers(bar).values())
