"""Limits on portfolios: kept for all weights, exact where they are kept already, with the slopes of differences."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from scipy.optimize import linprog

from tailguard.envs.constraints import Constraints
from tailguard.envs.projection import Limits, constrain, project
from tailguard.errors import ConfigError

SYMBOLS = ("A", "B", "C", "D", "E")
GROUPS = {"left": ("A", "B"), "right": ("C", "D")}
EXACT = 1e-12


def limits_of(leverage: float = 1.0, **settings: Any) -> Limits:
    limits = Constraints(**settings).limits(SYMBOLS, len(SYMBOLS), leverage)
    assert limits is not None
    return limits


def row(*weights: float) -> torch.Tensor:
    return torch.tensor([weights], dtype=torch.float64)


def maybe(low: float, high: float) -> st.SearchStrategy[float | None]:
    return st.none() | st.floats(low, high)


SETTINGS = st.fixed_dictionaries(
    {
        "long_only": st.booleans(),
        "asset_max": maybe(0.05, 1.5),
        "asset_caps": st.dictionaries(st.sampled_from(SYMBOLS), st.floats(0, 1), max_size=2),
        "group_max": maybe(0.05, 1.5),
        "group_caps": st.dictionaries(st.sampled_from(list(GROUPS)), st.floats(0, 1), max_size=2),
        "gross_max": maybe(0.05, 2.5),
        "net_min": maybe(-1, 1),
        "net_max": maybe(0, 1.5),
        "cash_min": maybe(0, 1),
        "turnover_max": maybe(0.01, 3),
    }
)
WEIGHTS = st.lists(st.floats(-2, 2), min_size=5, max_size=5)


def violations(weights: torch.Tensor, given: Constraints, present: torch.Tensor, leverage: float) -> dict[str, float]:
    """By how much each limit is exceeded, written down from its definition."""
    values = dict(zip(SYMBOLS, weights[0].tolist(), strict=True))
    gross, net = sum(abs(value) for value in values.values()), sum(values.values())
    over = (
        {"absent": max(abs(values[s]) for s, there in zip(SYMBOLS, present[0].tolist(), strict=True) if not there)}
        if (not present.all())
        else {}
    )
    if given.long_only:
        over["long only"] = -min(values.values())
    for symbol, value in values.items():
        cap = given.asset_caps.get(symbol, given.asset_max)
        if cap is not None:
            over[symbol] = abs(value) - cap
    for name, members in given.groups.items():
        cap = given.group_caps.get(name, given.group_max)
        if cap is not None:
            over[name] = sum(abs(values[symbol]) for symbol in members) - cap
    if given.gross_max is not None:
        over["gross"] = gross - min(given.gross_max, leverage)
    if given.net_max is not None:
        over["net"] = net - given.net_max
    if given.cash_min is not None:
        over["cash"] = given.cash_min - (1 - net)
    if given.net_min is not None:
        over["net from below"] = min(given.net_min, most_invested(given, present, leverage)) - net
    return over


def most_invested(given: Constraints, present: torch.Tensor, leverage: float) -> float:
    """The largest sum of weights that the other limits allow, by a linear programme; 0 at least."""
    tops = [given.asset_caps.get(symbol, given.asset_max) for symbol in SYMBOLS]
    caps = [(leverage if top is None else top) * there for top, there in zip(tops, present[0].tolist(), strict=True)]
    rows, bounds = [[1.0] * 5], [leverage]
    for cap in (given.gross_max, given.net_max, None if given.cash_min is None else 1 - given.cash_min):
        if cap is not None:
            rows.append([1.0] * 5)
            bounds.append(cap)
    for name, members in given.groups.items():
        cap = given.group_caps.get(name, given.group_max)
        if cap is not None:
            rows.append([float(symbol in members) for symbol in SYMBOLS])
            bounds.append(cap)
    return -linprog([-1.0] * 5, A_ub=rows, b_ub=bounds, bounds=[(0, cap) for cap in caps]).fun


@settings(max_examples=300)
@given(settings=SETTINGS, wanted=WEIGHTS, held=WEIGHTS, there=st.lists(st.booleans(), min_size=5, max_size=5))
def test_no_limit_is_ever_exceeded(
    settings: dict[str, Any], wanted: list[float], held: list[float], there: list[bool]
) -> None:
    """Any limits, wishes, held weights and listed assets: each limit to rounding, and the turnover cap, but for what
    the other limits ask to sell."""
    leverage = 2.0
    try:
        chosen = Constraints(groups=GROUPS, **settings)
        limits = chosen.limits(SYMBOLS, 5, leverage)
    except ConfigError:
        assume(False)
    assume(limits is not None)
    assert limits is not None
    present = torch.tensor([there])
    now = row(*held)
    found = constrain(row(*wanted), now, limits, present)
    assert found.isfinite().all()
    for name, excess in violations(found, chosen, present, leverage).items():
        assert excess <= EXACT, (name, excess)
    if chosen.turnover_max is not None:
        forced = float((project(now, limits, present) - now).abs().sum())
        assert float((found - now).abs().sum()) <= max(chosen.turnover_max, forced) + EXACT
    again = project(found, limits, present)
    torch.testing.assert_close(again, found, rtol=0, atol=4 * EXACT)
    # In the precision of training, to its rounding.
    narrow = limits.to(torch.float32, torch.device("cpu"))
    found = constrain(row(*wanted).float(), now.float(), narrow, present).double()
    for name, excess in violations(found, chosen, present, leverage).items():
        assert excess <= 2e-6, (name, excess)


@settings(max_examples=100)
@given(wanted=st.lists(st.floats(-0.15, 0.15), min_size=5, max_size=5))
def test_weights_within_all_limits_are_returned_bit_for_bit(wanted: list[float]) -> None:
    limits = limits_of(
        asset_max=0.2, groups=GROUPS, group_max=0.3, gross_max=0.8, net_min=-0.75, net_max=0.75, turnover_max=2.0
    )
    assert torch.equal(constrain(row(*wanted), row(0, 0, 0, 0, 0), limits), row(*wanted))


@pytest.mark.parametrize(
    ("settings", "wanted", "expected"),
    [
        ({"long_only": True}, (0.5, -0.3, 0, 0.1, 0), (0.5, 0, 0, 0.1, 0)),
        ({"asset_max": 0.2, "asset_caps": {"B": 0.4, "E": 0.0}}, (0.5, -0.5, 0.1, 0, 1), (0.2, -0.4, 0.1, 0, 0)),
        # 0.6 + 0.2 of the left group to 0.4 together; the others are as they were.
        ({"groups": GROUPS, "group_caps": {"left": 0.4}}, (0.6, -0.2, 0.5, 0.1, 0.3), (0.3, -0.1, 0.5, 0.1, 0.3)),
        ({"gross_max": 0.5}, (0.4, -0.4, 0.2, 0, 0), (0.2, -0.2, 0.1, 0, 0)),
        # Net 0.5 to 0.2: longs from 0.8 to 0.5, shorts as they were.
        ({"net_max": 0.2}, (0.6, 0.2, -0.3, 0, 0), (0.375, 0.125, -0.3, 0, 0)),
        ({"net_min": 0.0}, (0.3, -0.2, -0.4, 0, 0), (0.3, -0.1, -0.2, 0, 0)),
        ({"cash_min": 0.4}, (0.4, 0.4, 0, 0, 0), (0.3, 0.3, 0, 0, 0)),
        # Fullest: 0.4 each, scaled to a gross of 1. From 0 to 0.8 is four fifths of the way to 0.2 each.
        ({"net_min": 0.8, "asset_max": 0.4}, (0, 0, 0, 0, 0), (0.16,) * 5),
        ({"turnover_max": 0.5}, (0.6, -0.4, 0, 0, 0), (0.3, -0.2, 0, 0, 0)),
    ],
)
def test_each_limit_by_hand(settings: dict[str, Any], wanted: tuple[float, ...], expected: tuple[float, ...]) -> None:
    found = constrain(row(*wanted), row(0, 0, 0, 0, 0), limits_of(**settings))
    torch.testing.assert_close(found, row(*expected), rtol=0, atol=EXACT)


def test_what_limits_force_to_sell_comes_before_the_turnover_cap() -> None:
    """Held 0.5 against a cap of 0.3: 0.2 is sold at once, and the rest of the cap of 0.25 goes towards the wish."""
    limits = limits_of(asset_max=0.3, turnover_max=0.25)
    held = row(0.5, 0, 0, 0, 0)
    found = constrain(row(0, 0.3, 0, 0, 0), held, limits)
    torch.testing.assert_close(found, row(0.275, 0.025, 0, 0, 0), rtol=0, atol=EXACT)
    sold = constrain(row(0, 0.3, 0, 0, 0), held, limits_of(asset_max=0.3, turnover_max=0.1))
    torch.testing.assert_close(sold, row(0.3, 0, 0, 0, 0), rtol=0, atol=EXACT)
    gone = constrain(row(0.3, 0.3, 0, 0, 0), held, limits, torch.tensor([[False, True, True, True, True]]))
    torch.testing.assert_close(gone, row(0, 0, 0, 0, 0), rtol=0, atol=EXACT)


EVERYTHING: dict[str, dict[str, Any]] = {
    "assets": {"asset_max": 0.3},
    "groups": {"groups": GROUPS, "group_max": 0.4},
    "gross": {"gross_max": 0.7},
    "net": {"net_min": -0.1, "net_max": 0.2},
    "invested": {"net_min": 0.7, "asset_max": 0.4},
    "long only": {"long_only": True, "cash_min": 0.3},
    "turnover": {"turnover_max": 0.4},
    "all": {
        "asset_max": 0.35, "groups": GROUPS, "group_max": 0.5, "gross_max": 0.9, "net_min": 0.1, "net_max": 0.3,
        "turnover_max": 0.6,
    },
}  # fmt: skip


@pytest.mark.parametrize("name", EVERYTHING)
def test_slopes_in_wanted_and_held_weights_are_those_of_differences(name: str) -> None:
    """At random points, where no limit is just reached, to 1e-7 in float64."""
    limits = limits_of(**EVERYTHING[name])
    generator = torch.Generator().manual_seed(3)
    wanted, held = (torch.rand(20, 5, generator=generator, dtype=torch.float64) * 1.6 - 0.8 for _ in range(2))
    weights = torch.randn(20, 5, generator=generator, dtype=torch.float64)
    both = torch.stack((wanted, 0.3 * held)).requires_grad_()

    def value(x: torch.Tensor) -> torch.Tensor:
        return (weights * constrain(x[0], x[1], limits)).sum()

    (found,) = torch.autograd.grad(value(both), both)
    step = 1e-6
    with torch.no_grad():
        for index in range(both.numel()):
            shift = torch.zeros_like(both)
            shift.view(-1)[index] = step
            expected = float(value(both + shift) - value(both - shift)) / (2 * step)
            assert float(found.view(-1)[index]) == pytest.approx(expected, abs=1e-7)
    assert (found[0] != 0).any()
    assert bool((found[1] != 0).any()) == (limits.turnover is not None)


def test_a_portfolio_of_nothing_has_finite_slopes() -> None:
    """Weights of 0, held and wanted, where every ratio is 0 / 0."""
    for chosen in EVERYTHING.values():
        wanted, held = (torch.zeros(1, 5, dtype=torch.float64, requires_grad=True) for _ in range(2))
        found = constrain(wanted, held, limits_of(**chosen)).sum()
        slopes = torch.autograd.grad(found, (wanted, held), allow_unused=True)
        assert all(slope is None or slope.isfinite().all() for slope in slopes)


def test_members_of_a_population_are_limited_as_each_alone() -> None:
    """Under `torch.vmap`, as members run."""
    limits = limits_of(**EVERYTHING["all"])
    wanted, held = (torch.from_numpy(np.random.default_rng(seed).normal(0, 0.4, (3, 7, 5))) for seed in (0, 1))
    together = torch.vmap(lambda w, h: constrain(w, h, limits))(wanted, held)
    for member in range(3):
        torch.testing.assert_close(together[member], constrain(wanted[member], held[member], limits), rtol=0, atol=0)
