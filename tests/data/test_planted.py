"""The planted optimum against closed forms, an independent value iteration, Monte Carlo and rival policies."""

from __future__ import annotations

import numpy as np
import pytest

from tailguard.data.panel import Float
from tailguard.data.planted import Optimum, ReturnLaw, best_growth, follow
from tailguard.errors import ConfigError


def symmetric_law(drift: float, deviation: float, flip: float) -> ReturnLaw:
    """Two states of opposite drift and a three-point shock of this deviation (kurtosis 3)."""
    shock = deviation * np.sqrt(3) * np.array([-1.0, 0.0, 1.0])
    return ReturnLaw(
        returns=np.stack([shock - drift, shock + drift]),
        probability=np.array([1 / 6, 2 / 3, 1 / 6]),
        transition=np.array([[1 - flip, flip], [flip, 1 - flip]]),
    )


TRADING = symmetric_law(drift=0.004, deviation=0.06, flip=0.04)
COST, HOLDING = 0.006, 0.0002


def simulate(law: ReturnLaw, low: Float, high: Float, paths: int, bars: int) -> Float:
    """Mean log-growth per bar of each path for policies with these bands, [P, paths]; the same paths for all."""
    rng = np.random.default_rng(5)
    state = rng.integers(0, 2, paths)
    weight = np.clip(np.zeros((len(low), paths)), low[:, state], high[:, state])
    growth = np.zeros((len(low), paths))
    for _ in range(bars):
        traded = np.clip(weight, low[:, state], high[:, state])
        move = law.returns[state, rng.choice(len(law.probability), paths, p=law.probability)]
        grown = 1 + traded * move - HOLDING * np.abs(traded)
        growth += np.log((1 - COST * np.abs(traded - weight)) * grown)
        weight = traded * (1 + move) / grown
        state = np.where(rng.random(paths) < law.transition[state, 1], 1, 0)
    return growth / bars


@pytest.fixture(scope="module")
def optimum() -> Optimum:
    return best_growth(TRADING, cost=COST, holding=HOLDING, bars_per_year=365.0)


def test_free_trading_is_kelly() -> None:
    # ±20 % with P(up) = 0.55: Kelly's fraction is (0.55 − 0.45) / 0.2 = 0.5.
    law = ReturnLaw(np.array([[0.2, -0.2]]), np.array([0.55, 0.45]), np.array([[1.0]]))
    best = best_growth(law, cost=0.0, bars_per_year=1.0)
    assert best.low[0] == best.high[0] == 0.5
    assert best.log_growth == pytest.approx(0.55 * np.log(1.1) + 0.45 * np.log(0.9), rel=1e-7)
    assert best.mean == pytest.approx(0.5 * 0.02, rel=1e-7)
    assert best.deviation == pytest.approx(0.5 * np.sqrt(0.04 - 0.02**2), rel=1e-7)


def test_leverage_caps_kelly_in_both_states() -> None:
    law = symmetric_law(drift=0.01, deviation=0.05, flip=0.3)  # Kelly's fraction is about 4
    best = best_growth(law, cost=0.0, leverage=2.0, bars_per_year=1.0)
    np.testing.assert_array_equal(best.low, [-2.0, 2.0])
    np.testing.assert_array_equal(best.high, [-2.0, 2.0])
    long = law.probability @ np.log1p(2.0 * law.returns[1])
    short = law.probability @ np.log1p(-2.0 * law.returns[0])
    assert best.log_growth == pytest.approx((long + short) / 2, rel=1e-7)


def test_prohibitive_costs_mean_never_trading() -> None:
    best = best_growth(TRADING, cost=0.4, bars_per_year=1.0)
    assert best.log_growth == pytest.approx(0, abs=1e-12)
    assert best.turnover == pytest.approx(0, abs=1e-12)
    assert (best.low <= 0).all()
    assert (best.high >= 0).all()


def test_nothing_planted_earns_nothing() -> None:
    best = best_growth(symmetric_law(0.0, 0.03, 0.1), cost=0.001, bars_per_year=1.0)
    assert best.log_growth == pytest.approx(0, abs=1e-12)


def test_growth_equals_an_independent_value_iteration(optimum: Optimum) -> None:
    grid = np.linspace(-1.6, 1.6, 257)
    targets = grid[np.abs(grid) <= 1]
    price = np.log(1 - COST * np.abs(targets[None, :] - grid[:, None]))
    value = np.zeros((2, len(grid)))
    for _ in range(600):
        fresh = np.empty_like(value)
        for state in (0, 1):
            ahead = np.zeros(len(targets))
            for move, probability in zip(TRADING.returns[state], TRADING.probability, strict=True):
                grown = 1 + targets * move - HOLDING * np.abs(targets)
                drifted = targets * (1 + move) / grown
                later = TRADING.transition[state] @ [np.interp(drifted, grid, row) for row in value]
                ahead += probability * (np.log(grown) + later)
            fresh[state] = (price + ahead).max(1)
        gained, value = fresh - value, fresh
    assert np.ptp(gained) < 1e-9
    assert optimum.log_growth == pytest.approx(gained.mean(), rel=1e-4)


def test_growth_equals_monte_carlo_of_the_policy(optimum: Optimum) -> None:
    paths = simulate(TRADING, optimum.low[None], optimum.high[None], paths=20_000, bars=500)[0]
    error = paths.std() / np.sqrt(len(paths))
    assert abs(paths.mean() - optimum.log_growth) < 3 * error
    assert error < 0.012 * optimum.log_growth


def test_no_band_on_a_grid_beats_the_optimum(optimum: Optimum) -> None:
    ends = [(low, high) for low in (0.0, 0.3, 0.6, 0.8, 0.9, 1.0) for high in (0.3, 0.6, 0.8, 0.9, 1.0) if low <= high]
    low = np.array([optimum.low, *([-high, low] for low, high in ends)])
    high = np.array([optimum.high, *([-low, high] for low, high in ends)])
    growth = simulate(TRADING, low, high, paths=400, bars=2_000)
    best, *rivals = growth.mean(1)
    lead = (growth[0] - growth[1:]).std(1) / np.sqrt(400)
    assert (best > np.array(rivals) - 2 * lead).all()
    # And the band matters: always at full size, or at one size without a band, is clearly worse.
    for rival in ((1.0, 1.0), (0.6, 0.6)):
        index = ends.index(rival)
        assert best > rivals[index] + 4 * lead[index]


def test_costs_never_help_and_leverage_never_hurts() -> None:
    by_cost = [best_growth(TRADING, cost=cost, bars_per_year=1.0).log_growth for cost in (0, 0.002, 0.006, 0.02)]
    assert by_cost == sorted(by_cost, reverse=True)
    by_leverage = [
        best_growth(TRADING, cost=0.006, leverage=leverage, bars_per_year=1.0).log_growth for leverage in (0.5, 1, 2)
    ]
    assert by_leverage == sorted(by_leverage)
    by_holding = [
        best_growth(TRADING, cost=0.006, holding=rate, bars_per_year=1.0).log_growth for rate in (0, 0.0005, 0.002)
    ]
    assert by_holding == sorted(by_holding, reverse=True)


def test_ruinous_weights_are_never_held() -> None:
    law = ReturnLaw(np.array([[0.5, -0.5]]), np.array([0.9, 0.1]), np.array([[1.0]]))
    best = best_growth(law, cost=0.0, leverage=4.0, bars_per_year=1.0)
    assert best.high[0] < 2  # at 2 a fall of one half takes everything
    # Kelly: (0.9 − 0.1) / 0.5 = 1.6
    assert best.low[0] == pytest.approx(1.6)


def test_yearly_figures() -> None:
    best = Optimum(0.001, 0.002, 0.01, 0.1, np.array([0.0]), np.array([0.0]), bars_per_year=365.0)
    assert best.log_growth_per_year == pytest.approx(0.365)
    assert best.growth_per_year == pytest.approx(np.exp(0.365) - 1)
    assert best.sharpe == pytest.approx(0.2 * np.sqrt(365))


def test_orders_follow_the_band_by_hand() -> None:
    band = Optimum(0, 0, 1, 0, low=np.array([-1.0, 0.8]), high=np.array([-0.8, 1.0]), bars_per_year=1)
    state = np.array([[1], [1], [0], [0]])
    gap = np.array([[0.5], [0.0], [0.1], [0.0]])  # the first gap comes before any order
    move = np.array([[9.0], [0.5], [-0.1], [0.0]])
    orders = follow(band, state, gap, move, cost=0.0, holding=0.0)
    # Row 0: buy to 0.8. Over bar 1 it grows to 0.8·1.5 / 1.4 = 0.857, inside the band: hold in row 1.
    # Over bar 2 it ends inside too, but the state turned at its close: sell to −0.8 in row 2.
    np.testing.assert_array_equal(orders[:, 0], [0.8, np.nan, -0.8, np.nan])


def test_costs_paid_move_the_weight() -> None:
    band = Optimum(0, 0, 1, 0, low=np.array([0.5]), high=np.array([0.51]), bars_per_year=1)
    flat = np.zeros((3, 1))
    # A trade of 0.5 at 10 % leaves equity 0.95, and the weight 0.5 / 0.95 = 0.526 is beyond the band.
    orders = follow(band, np.zeros((3, 1), dtype=int), flat, flat, cost=0.1, holding=0.0)
    np.testing.assert_array_equal(orders[:2, 0], [0.5, 0.51])


@pytest.mark.parametrize(("setting", "value"), [("cost", -0.1), ("cost", 0.6), ("leverage", 0.0), ("holding", 0.5)])
def test_settings_out_of_range_are_refused(setting: str, value: float) -> None:
    with pytest.raises(ConfigError, match=setting):
        best_growth(TRADING, **({"cost": 0.001, "bars_per_year": 1.0} | {setting: value}))


def test_a_long_only_optimum_holds_cash_in_the_falling_state() -> None:
    law = symmetric_law(drift=0.01, deviation=0.05, flip=0.3)  # Kelly's fraction is about 4
    best = best_growth(law, cost=0.0, leverage=2.0, allow_short=False, bars_per_year=1.0)
    np.testing.assert_array_equal(best.low, [0.0, 2.0])
    np.testing.assert_array_equal(best.high, [0.0, 2.0])
    assert best.log_growth == pytest.approx(law.probability @ np.log1p(2.0 * law.returns[1]) / 2, rel=1e-7)


def test_leverage_beyond_ruin_adds_nothing() -> None:
    # ±20 % with P(up) = 0.55: Kelly's fraction is 0.5 however much is allowed, and 5 would be ruin.
    law = ReturnLaw(np.array([[0.2, -0.2]]), np.array([0.55, 0.45]), np.array([[1.0]]))
    for leverage in (20.0, 125.0):
        best = best_growth(law, cost=0.0, leverage=leverage, bars_per_year=1.0)
        assert best.low[0] == best.high[0] == pytest.approx(0.5)
        assert best.log_growth == pytest.approx(0.55 * np.log(1.1) + 0.45 * np.log(0.9), rel=1e-7)


def test_a_ruined_account_gives_no_further_orders() -> None:
    band = Optimum(0, 0, 1, 0, low=np.array([2.0]), high=np.array([2.0]), bars_per_year=1)
    move = np.array([[0.0], [-0.6], [0.1], [0.1]])
    orders = follow(band, np.zeros((4, 1), dtype=int), np.zeros((4, 1)), move, cost=0.0, holding=0.0)
    # A fall of 60 % at a weight of 2 takes 120 % of the equity.
    np.testing.assert_array_equal(orders[:, 0], [2.0, np.nan, np.nan, np.nan])
