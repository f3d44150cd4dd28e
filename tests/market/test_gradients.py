"""Gradients of what an account earns, against central differences in float64.

An account trades five bars. Its final log-equity and its final weights are functions of the five targets, and their
slopes are compared with (f(x + h) − f(x − h)) / 2h. Away from kinks the two agree to rounding; at a kink the slope
must be one of those beside it, or between them.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

from tailguard.data.panel import Panel
from tailguard.envs.episodes import GROWTH_FLOOR, TradingTask
from tailguard.envs.shield import Shield
from tailguard.market import Market, MarketConfig, MarketState, build_market, open_accounts, step

BARS, STEP = 5, 1e-6
FREE: dict[str, Any] = {
    "fee": 0.0, "half_spread": 0.0, "impact": 0.0, "participation": float("inf"), "funding_rate": 0.0,
    "maintenance_margin": 0.0, "liquidation_fee": 0.0,
}  # fmt: skip
COSTS: dict[str, dict[str, Any]] = {
    "no costs": {},
    "fee": {"fee": 0.002},
    "spread": {"half_spread": 0.003},
    "impact": {"impact": 2.0},
    "funding": {"funding_rate": 0.004},
    "borrow": {"borrow_rate": 0.9, "leverage": 3.0},
    "partial fills": {"participation": 0.05},
    "partial fills and impact": {"participation": 0.05, "impact": 2.0},
    "everything": {
        "fee": 0.002, "half_spread": 0.001, "impact": 2.0, "participation": 0.08, "funding_rate": 0.002,
        "borrow_rate": 0.5, "leverage": 3.0, "maintenance_margin": 0.005, "liquidation_fee": 0.005,
    },
}  # fmt: skip

PanelMaker = Callable[..., Panel]


def trade(market: Market, targets: torch.Tensor, start: MarketState | None = None) -> MarketState:
    """The account after its bars; targets [T, N, A]."""
    state = start or open_accounts(torch.zeros(targets.shape[1], dtype=torch.int64), market.assets, market.dtype)
    for target in targets:
        state, _ = step(market, state, target)
    return state


def assert_slopes(f: Callable[[torch.Tensor], torch.Tensor], x: torch.Tensor, rtol: float = 1e-6) -> None:
    """Compare the gradient of f, a scalar, with central differences in every coordinate."""
    x = x.clone().requires_grad_()
    (found,) = torch.autograd.grad(f(x), x)
    expected = torch.zeros_like(x)
    with torch.no_grad():
        for index in range(x.numel()):
            shift = torch.zeros_like(x)
            shift.view(-1)[index] = STEP
            expected.view(-1)[index] = (f(x + shift) - f(x - shift)) / (2 * STEP)
    assert found.isfinite().all()
    assert expected.abs().max() > 1e-4  # a function that does not move shows nothing
    torch.testing.assert_close(found, expected, rtol=rtol, atol=2e-9)


def random_targets(seed: int, accounts: int, assets: int, gross: float) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return gross / assets * (2 * torch.rand(BARS, accounts, assets, generator=generator, dtype=torch.float64) - 1)


@pytest.mark.parametrize("assets", [1, 3])
@pytest.mark.parametrize("cost", COSTS)
def test_slopes_in_the_targets_are_those_of_finite_differences(
    random_panel: PanelMaker, cost: str, assets: int
) -> None:
    config = MarketConfig(**(FREE | COSTS[cost]))
    # A million a day against a capital of 100,000: caps bind for some orders and not for others.
    panel = random_panel(3, BARS + 2, assets, volume=600.0, silent=0.0)
    market = build_market(panel, config, dtype=torch.float64)
    targets = random_targets(1, 4, assets, 0.9 * config.leverage)
    assert_slopes(lambda x: trade(market, x).equity.log().sum(), targets)
    if assets > 1 or cost != "no costs":  # of one asset without costs, the weight is the target grown by the bar
        assert_slopes(lambda x: trade(market, x).weights.pow(2).sum(), targets)


def test_partial_fills_are_in_that_comparison(random_panel: PanelMaker) -> None:
    market = build_market(
        random_panel(3, BARS + 2, 1, volume=600.0, silent=0.0),
        MarketConfig(**(FREE | COSTS["partial fills"])),
        dtype=torch.float64,
    )
    state = open_accounts(torch.zeros(4, dtype=torch.int64), 1, torch.float64)
    shares = []
    for target in random_targets(1, 4, 1, 0.9):
        state, transition = step(market, state, target)
        shares.append((transition.unfilled > 0).double().mean())
    assert 0.2 < torch.stack(shares).mean() < 0.9


@pytest.mark.parametrize("volume", [600.0, 1e9])
def test_a_limit_that_no_order_reaches_leaves_the_slopes_of_a_market_without_one(
    random_panel: PanelMaker, volume: float
) -> None:
    """Some orders reach it at the small volume, none at the large one: there the limit is not in the graph at all."""
    panel = random_panel(3, BARS + 2, 1, volume=volume, silent=0.0)
    limited, free = (
        build_market(panel, MarketConfig(**(FREE | {"fee": 0.002, "participation": share})), dtype=torch.float64)
        for share in (0.05, float("inf"))
    )
    targets = random_targets(1, 4, 1, 0.9)
    assert_slopes(lambda x: trade(limited, x).equity.log().sum(), targets)
    slopes = []
    for market in (limited, free):
        x = targets.clone().requires_grad_()
        slopes.append(torch.autograd.grad(trade(market, x).equity.log().sum(), x)[0])
    assert torch.equal(*slopes) == (volume == 1e9)


@pytest.mark.parametrize("gross", [0.9, 1.0, 1.6])
def test_actions_beyond_the_leverage_are_scaled_down_together_and_so_are_their_slopes(
    random_panel: PanelMaker, gross: float
) -> None:
    """Three times leverage, two assets; the sum of shares is below 1, exactly 1 and above it."""
    panel = random_panel(13, BARS + 2, 2, silent=0.0)
    config = MarketConfig(**(FREE | {"leverage": 3.0, "fee": 0.001}))
    task = TradingTask(
        build_market(panel, config, dtype=torch.float64), torch.zeros(panel.rows, 1), ("nothing",), episode_length=8
    )
    shares = torch.tensor([[0.25, -0.75], [0.6, 0.4]], dtype=torch.float64) * gross
    with torch.no_grad():
        expected = 3.0 * shares / max(gross, 1.0)
        torch.testing.assert_close(task.to_weights(shares), expected, rtol=1e-12, atol=0)
    x = shares.clone().requires_grad_()
    assert torch.equal(task.to_weights(x), task.to_weights(shares))
    assert_slopes(lambda y: (task.to_weights(y) * torch.tensor([1.0, 2.0])).sum(), shares if gross != 1 else 1.01 * x)


@pytest.mark.parametrize("funding", [0.004, None])
def test_slopes_with_observed_funding_keep_its_sign(random_panel: PanelMaker, funding: float | None) -> None:
    panel = random_panel(5, BARS + 12, 2, silent=0.0, funding=funding)
    market = build_market(panel, MarketConfig(**(FREE | {"funding_rate": 0.003})), dtype=torch.float64)
    assert market.signed_funding == (funding is not None)
    assert_slopes(lambda x: trade(market, x).equity.log().sum(), random_targets(2, 3, 2, 0.9))


@pytest.mark.parametrize("what", ["weights", "equity"])
def test_slopes_in_the_account_that_a_step_begins_with(random_panel: PanelMaker, what: str) -> None:
    config = MarketConfig(**(FREE | COSTS["everything"]))
    market = build_market(random_panel(7, BARS + 2, 2, volume=600.0, silent=0.0), config, dtype=torch.float64)
    targets, rows = random_targets(4, 3, 2, 0.9), torch.zeros(3, dtype=torch.int64)
    weights = torch.tensor([[0.3, -0.4], [0.1, 0.6], [-0.5, -0.2]], dtype=torch.float64)
    equity = torch.tensor([0.8, 1.0, 1.7], dtype=torch.float64)

    def final(x: torch.Tensor) -> torch.Tensor:
        begun = MarketState(rows, equity, x) if what == "weights" else MarketState(rows, x, weights)
        after = trade(market, targets, begun)
        # Impact and capacity depend on the size of the account, so the log of its growth does too.
        return (after.equity / begun.equity).log().sum() + after.weights.sum()

    assert_slopes(final, weights if what == "weights" else equity)


def test_an_order_beyond_the_capacity_moves_with_the_position_held_and_not_with_the_target(
    hand_panel: PanelMaker,
) -> None:
    # 100 shares at 10 a bar, 10 % of it: orders up to 100, which is 0.001 of the capital.
    panel = hand_panel([10.0] * 4, volume=100.0)
    market = build_market(panel, MarketConfig(**(FREE | {"participation": 0.1})), dtype=torch.float64)
    target = torch.full((1, 1), 0.5, dtype=torch.float64, requires_grad=True)
    held = torch.full((1, 1), 0.2, dtype=torch.float64, requires_grad=True)
    equity = torch.ones(1, dtype=torch.float64, requires_grad=True)
    state, _ = step(market, MarketState(torch.zeros(1, dtype=torch.int64), equity, held), target)
    assert float(state.weights.detach()) == pytest.approx(0.2 + 0.001)
    of_target, of_held, of_equity = torch.autograd.grad(state.weights.sum(), (target, held, equity))
    assert float(of_target) == 0.0
    assert float(of_held) == pytest.approx(1.0)
    assert float(of_equity) == pytest.approx(-0.001)  # the cap is a sum of money: 0.001 / equity


def test_an_order_of_exactly_nothing_has_a_slope(random_panel: PanelMaker) -> None:
    config = MarketConfig(**(FREE | {"impact": 2.0, "participation": 0.5}))
    market = build_market(random_panel(9, BARS + 2, 2, silent=0.0), config, dtype=torch.float64)
    flat = torch.zeros(BARS, 3, 2, dtype=torch.float64)
    # x·√x is smooth at 0 with slope 0: impact takes nothing from the slope there.
    x = flat.clone().requires_grad_()
    (found,) = torch.autograd.grad(trade(market, x).equity.log().sum(), x)
    move = market.table[1]
    gap = market.table[0]
    # The position of a target is held from its fill's open to the next open; the last one to the close.
    earned = move[1 : BARS + 1].clone()
    earned[:-1] += gap[2 : BARS + 1] * (1 + move[1:BARS])
    torch.testing.assert_close(found, earned.unsqueeze(1).expand_as(found), rtol=1e-9, atol=1e-12)


def test_at_a_kink_the_slope_lies_between_those_of_both_sides(hand_panel: PanelMaker) -> None:
    """Flat, with a fee of 1 %: buying and selling both cost, so the slope at 0 is between −fee and +fee."""
    panel = hand_panel([100.0] * 4)
    market = build_market(panel, MarketConfig(**(FREE | {"fee": 0.01})), dtype=torch.float64)

    def slope(target: float) -> float:
        x = torch.full((1, 1, 1), target, dtype=torch.float64, requires_grad=True)
        return float(torch.autograd.grad(trade(market, x).equity.sum(), x)[0])

    assert slope(-1e-9) == pytest.approx(0.01)
    assert slope(1e-9) == pytest.approx(-0.01)
    assert slope(0.0) == 0.0


def test_liquidation_leaves_no_slope_and_no_nan(hand_panel: PanelMaker) -> None:
    """A long at four times leverage is liquidated by a fall of 30 %; the account beside it goes on."""
    panel = hand_panel([100.0, 100.0, 100.0], close=[100.0, 70.0, 70.0])
    market = build_market(panel, MarketConfig(leverage=5.0, impact=0.0), dtype=torch.float64)
    targets = torch.tensor([[4.0], [0.5]], dtype=torch.float64, requires_grad=True)
    state, transition = step(market, open_accounts(torch.zeros(2, dtype=torch.int64), 1, torch.float64), targets)
    assert transition.liquidated.tolist() == [True, False]
    (found,) = torch.autograd.grad(torch.log1p(transition.net).sum() + state.weights.sum(), targets)
    assert float(found[0]) == 0.0
    expected = _difference(lambda x: torch.log1p(step_net(market, x)).sum(), 0.5)
    weight = _difference(lambda x: step(market, flat(market), x)[0].weights.sum(), 0.5)
    assert float(found[1]) == pytest.approx(expected + weight, rel=1e-6)


def flat(market: Market) -> MarketState:
    return open_accounts(torch.zeros(1, dtype=torch.int64), market.assets, market.dtype)


def step_net(market: Market, target: torch.Tensor) -> torch.Tensor:
    return step(market, flat(market), target)[1].net


def _difference(f: Callable[[torch.Tensor], torch.Tensor], at: float) -> float:
    up, down = (torch.full((1, 1), at + sign * STEP, dtype=torch.float64) for sign in (1, -1))
    return float(f(up) - f(down)) / (2 * STEP)


@pytest.mark.parametrize(
    ("reward", "fee", "share"),
    [("simple", 0.0, 1.026), ("simple", 0.005, 0.970), ("log", 0.0, 1.343), ("log", 0.005, 0.886)],
)
def test_what_the_gradient_leaves_out_of_liquidation_is_known(
    hand_panel: PanelMaker, reward: str, fee: float, share: float
) -> None:
    """Mean reward over falls f of 0 to 40 % at a weight w of four: the gradient has the accounts that survive, and so
    `share` of the truth.

    Margin is gone at a fall with 1 − w·f = 0.005·w·(1 − f). Whatever the rest of the fall, the forced close leaves
    (0.005 − fee)·w·(1 − f), at least the floor of 1 % where the reward is a log.
    """
    falls = torch.linspace(0.0, 0.4, 4001, dtype=torch.float64)
    closes = (100 * (1 - falls)).tolist()
    panel = hand_panel([100.0] * len(closes), close=closes, low=closes)
    config = MarketConfig(**(FREE | {"leverage": 5.0, "maintenance_margin": 0.005, "liquidation_fee": fee}))
    market = build_market(panel, config, dtype=torch.float64)
    rows = torch.arange(len(closes) - 1)

    def mean_reward(target: torch.Tensor) -> torch.Tensor:
        state = open_accounts(rows, 1, torch.float64)
        net = step(market, state, target.expand(len(rows), 1))[1].net
        return net.mean() if reward == "simple" else torch.log1p(net.clamp(min=GROWTH_FLOOR - 1)).mean()

    def edge(w: float) -> float:
        return (1 - 0.005 * w) / (0.995 * w)

    def survivors(w: float, end: float) -> float:
        left = 1 - w * end
        return -w * end**2 / 2 / 0.4 if reward == "simple" else (-(left * math.log(left) - left + 1) / w) / 0.4

    def liquidated(w: float) -> float:
        left = (0.005 - fee) * w * (1 - edge(w))
        return (1 - edge(w) / 0.4) * (left - 1 if reward == "simple" else math.log(max(left, GROWTH_FLOOR)))

    x = torch.tensor([[4.0]], dtype=torch.float64, requires_grad=True)
    (found,) = torch.autograd.grad(mean_reward(x), x)
    h = 1e-5
    of_survivors = (survivors(4 + h, edge(4.0)) - survivors(4 - h, edge(4.0))) / (2 * h)
    truth = sum(
        sign * (survivors(4 + sign * h, edge(4 + sign * h)) + liquidated(4 + sign * h)) / (2 * h) for sign in (1, -1)
    )
    assert float(found) == pytest.approx(of_survivors, rel=2e-3)
    wide = 0.05  # enough that the set of liquidated accounts changes smoothly
    up, down = (float(mean_reward(torch.tensor([[4.0 + side]], dtype=torch.float64))) for side in (wide, -wide))
    assert (up - down) / (2 * wide) == pytest.approx(truth, rel=2e-3)
    assert float(found) / truth == pytest.approx(share, abs=0.005)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("cost", [*COSTS, "lots", "forced closes", "caps out of reach"])
def test_a_step_with_a_gradient_gives_the_same_numbers_bit_by_bit(
    random_panel: PanelMaker, cost: str, dtype: torch.dtype
) -> None:
    """Costs, caps that bind and that do not, lots, and liquidations: what is asked of the graph changes no number."""
    further: dict[str, dict[str, Any]] = {
        "lots": {"fee": 0.002, "lot": 7.0, "participation": 0.08},
        "forced closes": COSTS["everything"] | {"leverage": 100.0, "participation": 1e9, "borrow_rate": 0.0},
        "caps out of reach": {"fee": 0.002, "participation": 0.08},
    }
    config = MarketConfig(**(FREE | (COSTS | further)[cost]))
    volume = 1e9 if cost == "caps out of reach" else 600.0
    market = build_market(random_panel(3, BARS + 2, 3, volume=volume, silent=0.0), config, dtype=dtype)
    targets = random_targets(1, 64, 3, 0.9 * config.leverage).to(dtype)
    hold = torch.rand(BARS, 64, 3, generator=torch.Generator().manual_seed(2)) < 0.1
    with_gradient, without = (open_accounts(torch.zeros(64, dtype=torch.int64), 3, dtype) for _ in range(2))
    liquidated = 0
    for target, held in zip(targets, hold, strict=True):
        with_gradient, traced = step(market, with_gradient, target.clone().requires_grad_(), held)
        with torch.no_grad():
            without, plain = step(market, without, target, held)
        assert with_gradient.weights.requires_grad
        numbers, expected = (vars(state) | vars(books) for state, books in
                             ((with_gradient, traced), (without, plain)))  # fmt: skip
        for name, value in (numbers.pop("costs") | numbers).items():
            assert torch.equal(value, (expected["costs"] | expected)[name]), name
        liquidated += int(plain.liquidated.sum())
        # The episode of a liquidated account ends: it begins again with its capital.
        with_gradient, without = (
            replace(state, equity=state.equity.masked_fill(plain.liquidated, 1)) for state in (with_gradient, without)
        )
    assert (liquidated > 0) == (cost == "forced closes")


@pytest.mark.parametrize("reward", ["log", "simple", "pnl"])
def test_rewards_observations_and_the_shield_have_the_right_slopes(random_panel: PanelMaker, reward: str) -> None:
    panel = random_panel(11, BARS + 2, 2, volume=600.0, silent=0.0)
    config = MarketConfig(**(FREE | COSTS["everything"]))
    task = TradingTask(
        build_market(panel, config, dtype=torch.float64),
        torch.zeros(panel.rows, 1, dtype=torch.float64),
        ("nothing",),
        episode_length=8,
        reward=reward,  # type: ignore[arg-type]
        shield=Shield(0.1, 0.2),
    )
    actions = random_targets(6, 4, 2, 2.0)  # beyond the leverage for some accounts: scaled down together

    def run(x: torch.Tensor) -> torch.Tensor:
        state = task.begin(open_accounts(torch.zeros(4, dtype=torch.int64), 2, torch.float64))
        total, held_back = x.new_zeros(()), []
        for action in x:
            target, shielded = task.decide(action, state)
            held_back.append(shielded)
            after, transition = task.advance(state, target)
            total = total + _reward_in_double(task, transition.net, state).sum()
            state = after
        run.shielded = torch.stack(held_back).double().mean()  # type: ignore[attr-defined]
        return total + task.observe(state).sum()

    assert_slopes(run, actions)
    assert 0.0 < float(run.shielded) < 1.0  # type: ignore[attr-defined]


def _reward_in_double(task: TradingTask, net: torch.Tensor, state: Any) -> torch.Tensor:
    """As `TradingTask.reward_of`, which rounds to float32: too coarse for differences."""
    if task.reward == "log":
        return torch.log1p(net)
    return net if task.reward == "simple" else net * state.market.equity / state.start_equity
