"""The dual variable, the window and the costs, against closed forms and brute force."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.stats import norm

from tailguard.errors import ConfigError
from tailguard.risk import CVaRConstraint, RiskConfig, cvar_standard_error
from tailguard.risk.constraint import Dual, OutcomeWindow, dual_step

BUDGET = RiskConfig(limit=-0.25, alpha=0.05, margin=0.0)


def number(value: float) -> torch.Tensor:
    return torch.tensor(value, dtype=torch.float64)


# --- the window ------------------------------------------------------------------------------------------------------


@settings(max_examples=60, deadline=None)
@given(st.lists(st.lists(st.tuples(st.floats(-1, 1), st.booleans()), min_size=1, max_size=12), max_size=8))
def test_the_window_holds_the_last_losses_in_their_order(rollouts: list[list[tuple[float, bool]]]) -> None:
    window, seen = OutcomeWindow(5, torch.device("cpu")), []
    for rollout in rollouts:
        losses, counted = zip(*rollout, strict=True)
        window.add(torch.tensor(losses, dtype=torch.float64), torch.tensor(counted))
        seen += [loss for loss, kept in rollout if kept]
    assert int(window.count) == len(seen)
    assert int(window.filled) == min(len(seen), 5)
    held = window.losses[:-1][window.weights.bool()].tolist()
    assert sorted(held) == pytest.approx(sorted(seen[-5:]))
    if seen:
        assert float(window.mean()) == pytest.approx(np.mean(seen[-5:]), abs=1e-12)


def test_the_tail_of_a_normal_is_that_of_the_closed_form() -> None:
    """Rockafellar and Uryasev's minimiser on N(0, 1): ν = 1.645, value 2.0627."""
    window = OutcomeWindow(200_000, torch.device("cpu"))
    grid = norm.ppf((np.arange(200_000) + 0.5) / 200_000)
    window.add(torch.tensor(grid), torch.ones(200_000, dtype=torch.bool))
    threshold, shortfall = window.tail(0.05)
    assert float(threshold) == pytest.approx(1.644854, abs=1e-3)
    assert float(shortfall) == pytest.approx(2.062713, abs=1e-3)
    objective = [nu + np.maximum(grid - nu, 0).mean() / 0.05 for nu in (1.5, 1.644854, 1.8)]
    assert objective[1] == pytest.approx(float(shortfall), abs=1e-4)
    assert objective[1] < min(objective[0], objective[2])


# --- the multiplier --------------------------------------------------------------------------------------------------


def walk(violations: list[float], config: RiskConfig = BUDGET, integral: float = 0.0) -> list[tuple[float, float]]:
    dual, seen = Dual(number(0.0), number(integral), number(violations[0])), []
    for violation in violations:
        dual = dual_step(dual, number(violation), config)
        seen.append((float(dual.multiplier), float(dual.integral)))
    return seen


def test_the_price_moves_by_the_rule() -> None:
    """Kp 0.5, Ki 0.02, worked by hand: e = 0.1 gives I = 0.002, λ = 0.052; then e = −0.05 gives 0.001 and 0."""
    assert walk([0.1, -0.05]) == [pytest.approx((0.052, 0.002)), pytest.approx((0.0, 0.001))]


def test_a_large_violation_adds_to_the_integral_only_while_it_does_not_shrink() -> None:
    """Falling by a tenth at each update, from 8 to 1.1: λ is Kp. Then it stays at 1.1 and the integral starts."""
    falling = [8.0 * 0.9**k for k in range(1, 20)]
    assert set(walk([8.0, *falling])[1:]) == {(0.52, 0.02)}  # the first one has nothing to be compared with
    stuck = walk([8.0, *falling, *[falling[-1]] * 60])
    assert stuck[-1][1] > 0.3
    assert stuck[-1][0] == pytest.approx(0.5 + stuck[-1][1])


def test_at_its_cap_the_price_does_not_wind_up_and_falls_back_in_finite_time() -> None:
    config = RiskConfig(limit=-0.25, margin=0.0, kp=0.5, ki=0.02, lambda_max=2.0)
    up = walk([0.4] * 500, config)
    assert max(multiplier for multiplier, _ in up) == 2.0
    assert up[-1][1] <= 2.0 - 0.5 * 0.4 + 0.02  # stopped gathering where λ reached the cap
    down = walk([-1.0] * 100, config, integral=up[-1][1])
    first = next(index for index, (multiplier, _) in enumerate(down) if multiplier == 0)
    # λ = I − 0.5 − 0.02·k: from I ≈ 1.81 it takes 66 updates to 0, and the integral goes on to 0 after 91.
    assert first == pytest.approx((up[-1][1] - 0.5) / 0.02, abs=2)
    assert down[-1] == (0.0, 0.0)


# --- the constraint --------------------------------------------------------------------------------------------------


def observe(constraint: CVaRConstraint, losses: np.ndarray) -> None:
    constraint.observe(torch.tensor(losses), torch.ones(len(losses), dtype=torch.bool))


def test_before_the_tail_holds_enough_outcomes_the_price_stands_still() -> None:
    constraint = CVaRConstraint(replace(BUDGET, window=1_000))
    bad = np.full(399, 0.9)
    observe(constraint, bad)
    assert not bool(constraint.ready)
    assert float(constraint.multiplier) == 0
    observe(constraint, bad[:1])
    assert bool(constraint.ready)
    assert float(constraint.multiplier) == pytest.approx(0.5 + 0.02)


def test_the_mean_excess_and_the_threshold_make_the_shortfall() -> None:
    """(L − ν)₊/α in units of the limit; its mean plus ν is the ES."""
    constraint = CVaRConstraint(replace(BUDGET, window=1_000))
    losses = np.random.default_rng(0).normal(0.0, 0.2, 1_000)
    observe(constraint, losses)
    excess = constraint.excess(torch.tensor(losses)).double()
    assert (excess[torch.tensor(losses) <= constraint.threshold] == 0).all()
    shortfall = float(constraint.threshold) + 0.25 * float(excess.mean())
    assert shortfall == pytest.approx(np.sort(losses)[-50:].mean(), rel=1e-6)
    assert shortfall == pytest.approx(float(constraint.shortfall), rel=1e-6)


@pytest.mark.parametrize("loss", [-0.5, 0.1, 0.4])
def test_the_expected_excess_is_that_of_a_normal(loss: float) -> None:
    """Against SciPy's integral; with nothing to come it is the excess itself."""
    constraint = CVaRConstraint(BUDGET)
    constraint.threshold.fill_(0.2)
    rest = norm(loss + 0.05, 0.15)
    expected = rest.expect(lambda x: x - 0.2, lb=0.2) / (0.05 * 0.25)
    found = constraint.expected_excess(number(loss), number(0.05), number(0.15))
    assert float(found) == pytest.approx(expected, rel=1e-5)
    nothing = constraint.expected_excess(number(loss), number(0.0), number(0.0))
    assert float(nothing) == pytest.approx(float(constraint.excess(number(loss))), abs=1e-6)


def test_advantages_are_mixed_at_the_price() -> None:
    """λ = 0.5, limit 0.25: (1 − 0.5 · 0.25 · 2)/1.5 = 0.5."""
    constraint = CVaRConstraint(replace(BUDGET, window=400))
    constraint.multiplier.fill_(0.5)
    mixed = constraint.combine(torch.tensor([1.0]), torch.tensor([2.0]))
    assert float(mixed) == pytest.approx(0.5)
    constraint.multiplier.zero_()
    assert float(constraint.combine(torch.tensor([1.0]), torch.tensor([2.0]))) == 1.0


def test_the_margin_moves_the_target_inside_the_limit() -> None:
    """ES = 0.245 keeps a limit of 0.25, but not with a margin of 10 %: e = (0.245 − 0.225)/0.25 = 0.08."""
    losses = np.full(400, 0.245)
    prices = []
    for margin in (0.0, 0.1):
        constraint = CVaRConstraint(RiskConfig(limit=-0.25, margin=margin))
        observe(constraint, losses)
        prices.append(float(constraint.multiplier))
        assert float(constraint.metrics()["risk/violation"]) == 0
    assert prices == [0.0, pytest.approx(0.5 * 0.08 + 0.02 * 0.08)]


def test_figures_are_returns_in_the_users_units() -> None:
    constraint = CVaRConstraint(replace(BUDGET, window=400))
    losses = np.concatenate((np.full(380, -0.01), np.full(20, 0.3)))
    observe(constraint, losses)
    metrics = {name: float(value) for name, value in constraint.metrics().items()}
    assert metrics["risk/cvar_realised"] == pytest.approx(-0.3)
    assert metrics["risk/mean_realised"] == pytest.approx(-losses.mean())
    assert metrics["risk/limit"] == -0.25
    assert metrics["risk/violation"] == pytest.approx(0.2)


def test_a_penalty_is_a_price_that_stays() -> None:
    constraint = CVaRConstraint(RiskConfig(penalty=0.7))
    observe(constraint, np.full(400, 0.9))
    assert float(constraint.multiplier) == 0.7
    assert "risk/limit" not in constraint.metrics()
    assert float(constraint.combine(torch.tensor([1.0]), torch.tensor([0.5]))) == pytest.approx((1 - 0.35) / 1.7)


def test_the_state_goes_on() -> None:
    first, second = (CVaRConstraint(replace(BUDGET, window=500)) for _ in range(2))
    draw = np.random.default_rng(0)
    observe(first, draw.normal(0.1, 0.2, 450))
    first.limit.fill_(-0.2)
    second.load_state_dict(first.state_dict())
    more = draw.normal(0.1, 0.2, 100)
    for constraint in (first, second):
        observe(constraint, more)
    assert float(second.limit) == -0.2
    for name, value in first.state_dict().items():
        assert torch.equal(value, second.state_dict()[name]), name


# --- settings --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"limit": 0.04}, "asks the worst outcomes to gain, which not even cash does"),
        ({"limit": 0.0}, "not even cash"),
        ({"limit": -1.5}, "risk.limit: -1.5 is out of range"),
        ({"alpha": 0.0}, "risk.alpha"),
        ({"alpha": 0.7}, "risk.alpha"),
        ({"measure": "month"}, "risk.measure: 'month' is not one of episode, drawdown, bar"),
        ({"limit": -0.1, "penalty": 1.0}, "give one of the two"),
        ({"kp": -1.0}, "risk.kp"),
    ],
)
def test_settings_that_make_no_sense_are_refused(options: dict[str, float], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        RiskConfig(**options)  # type: ignore[arg-type]


def test_too_small_a_window_is_an_error_that_says_how_many_it_needs() -> None:
    with pytest.raises(ConfigError) as error:
        RiskConfig(limit=-0.04, window=128)
    assert str(error.value) == (
        "risk: a 5 % tail over a window of 128 outcomes has 6 in it; at least 20 are needed.\n"
        "Raise risk.window to 400, or risk.alpha to 0.16."
    )
    assert RiskConfig(limit=-0.04, window=400).needed == 400
    assert RiskConfig(limit=-0.04, window=128, alpha=0.16).needed == 125
    assert math.ceil(20 / 0.16) == 125


@pytest.mark.parametrize("count", [110, 128, 190])
def test_the_window_knows_its_sampling_error(count: int) -> None:
    """As `cvar_standard_error` of the same samples, whose α·n need not be whole, whether the window is full or not."""
    losses = torch.randn(count, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    window = OutcomeWindow(200, torch.device("cpu"))
    window.add(losses, torch.ones(count, dtype=torch.bool))
    assert float(window.tail_error(0.05)) == pytest.approx(float(cvar_standard_error(-losses, 0.05)), rel=1e-6)


def test_a_large_violation_does_not_stand_while_the_price_creeps() -> None:
    """At PPO's gains, five times the limit drives λ from 0 to its cap in 41 updates; with noise, in less than 150."""
    config, dual, updates = RiskConfig(limit=-0.02), Dual(number(0.0), number(0.0), number(4.0)), 0
    while dual.multiplier < 10:
        dual = dual_step(dual, number(4.0), config)
        updates += 1
    # I grows as 0.02·(1.1ⁿ − 1)/0.1; the proportional part adds 0.5 at once.
    assert updates == math.ceil(math.log1p(9.5 * 0.1 / 0.02) / math.log(1.1))
    draw, dual, updates = np.random.default_rng(0), Dual(number(0.0), number(0.0), number(4.0)), 0
    while dual.multiplier < 10:
        dual = dual_step(dual, number(4 * math.exp(0.3 * draw.standard_normal())), config)
        updates += 1
    assert 41 < updates < 150
