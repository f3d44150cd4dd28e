"""The risk budget: verdict, interval and probability on accounts whose tail is known."""

from __future__ import annotations

import math

import numpy as np
import pytest
from scipy import stats

import tailguard as tg
from tailguard.config import load_config
from tailguard.data.bars import Bars
from tailguard.errors import ConfigError
from tailguard.evaluate.baselines import BuyAndHold
from tailguard.evaluate.bootstrap import Resampled
from tailguard.evaluate.budget import (
    Budget,
    BudgetVerdict,
    TailEvidence,
    check_budget,
    check_limit,
    own_budget,
    tail_evidence,
)


def equity_of(deviation: float, seed: int, bars: int = 3_000) -> np.ndarray:
    returns = deviation * np.random.default_rng(seed).normal(size=bars)
    return np.concatenate([[1.0], np.cumprod(1 + returns)])


@pytest.mark.parametrize(
    ("measure", "expected"),
    [
        ("episode", Budget(-0.1, 0.2, 256, "return")),
        ("drawdown", Budget(-0.1, 0.2, 256, "drawdown")),
        ("bar", Budget(-0.1, 0.2, 1, "return")),
    ],
)
def test_the_budget_of_a_run_is_judged_in_its_own_units(measure: str, expected: Budget) -> None:
    settings = ["risk.limit=-0.1", "risk.alpha=0.2", f"risk.measure={measure}"]
    assert own_budget(load_config(overrides=settings)) == expected
    assert own_budget(load_config(overrides=["risk.penalty=0.5"])) is None


def test_a_record_with_too_few_windows_is_not_judged(bars: Bars) -> None:
    result = tg.backtest(BuyAndHold(0.5), bars)
    assert check_budget(result, Budget(-0.04, horizon="60d")) is None
    assert check_budget(result, Budget(-0.04, horizon=1)) is not None


@pytest.mark.parametrize(
    ("limit", "verdict"),
    [(-0.04, BudgetVerdict.KEPT), (-0.01, BudgetVerdict.BROKEN), (-0.0206, BudgetVerdict.UNDECIDED)],
)
def test_the_budget_is_judged_by_the_interval(limit: float, verdict: BudgetVerdict) -> None:
    """Normal returns of 1 %: the true CVaR at 5 % is −2.063 %."""
    found = check_limit(equity_of(0.01, 7), limit, np.random.default_rng(0))
    assert found.verdict == verdict
    assert found.cvar.low < -0.02063 < found.cvar.high
    assert found.tail_windows == pytest.approx(150)


def test_a_longer_horizon_is_a_larger_and_less_certain_loss() -> None:
    equity = equity_of(0.002, 8)
    bar = check_limit(equity, -0.03, np.random.default_rng(0))
    day = check_limit(equity, -0.03, np.random.default_rng(0), horizon=24)
    assert day.cvar.estimate == pytest.approx(np.sqrt(24) * bar.cvar.estimate, rel=0.2)
    assert (day.cvar.high - day.cvar.low) / -day.cvar.estimate > 2 * (bar.cvar.high - bar.cvar.low) / -bar.cvar.estimate
    assert day.cvar.block >= 24
    assert day.tail_windows == pytest.approx(0.05 * 3_000 / 24)


def test_blocks_are_never_shorter_than_the_windows() -> None:
    """Equity that jumps around a level: windows look independent of their neighbours, and still share their bars."""
    equity = 1 + 0.001 * np.random.default_rng(9).normal(size=2_000)
    assert check_limit(equity, -0.03, np.random.default_rng(0), horizon=24).cvar.block == 24


def test_an_account_that_never_moved_kept_its_budget() -> None:
    found = check_limit(np.ones(500), -0.04, np.random.default_rng(0), horizon=24)
    assert found.verdict == BudgetVerdict.KEPT
    assert found.probability > 0.999
    assert (found.cvar.low, found.cvar.high) == (0, 0)


MIDPOINTS = (np.arange(4_000) + 0.5) / 4_000
NOTHING = np.zeros(0)


def resampled_cvar(drawn: np.ndarray, acceleration: float = 0.0, freedom: float = math.inf) -> Resampled:
    """Resamples of a CVaR of −5 %."""
    return Resampled(-0.05, drawn, acceleration, freedom, block=1.0)


@pytest.mark.parametrize("freedom", [math.inf, 2.2])
@pytest.mark.parametrize("limit", [-0.062, -0.055, -0.05, -0.047, -0.04])
def test_the_probability_of_symmetric_resamples_is_students(limit: float, freedom: float) -> None:
    """Resamples N(−5 %, ½ %): P(true ≥ limit) = F((−5 % − limit) / ½ %), F normal or Student's."""
    found = TailEvidence(resampled_cvar(stats.norm.ppf(MIDPOINTS, -0.05, 0.005), freedom=freedom), NOTHING)
    expected = stats.t.cdf((-0.05 - limit) / 0.005, freedom)
    assert found.probability(limit, 0.95) == pytest.approx(expected, abs=2e-3)


@pytest.mark.parametrize("limit", [-0.075, -0.06, -0.053, -0.045, -0.035])
def test_the_probability_inverts_the_bca_interval(limit: float) -> None:
    """Efron (1987): the share G of resamples below the limit has Φ⁻¹(G) = z₀ + (z₀ + z) / (1 − a (z₀ + z)).

    Resamples are skewed: −5 % − 1 % (E − 1) with E exponential.
    """
    found = TailEvidence(resampled_cvar(np.sort(-0.04 - stats.expon.ppf(MIDPOINTS, scale=0.01)), -0.1), NOTHING)
    bias = stats.norm.ppf(stats.expon.sf(1))
    apart = stats.norm.ppf(stats.expon.sf((-0.04 - limit) / 0.01)) - bias if limit < -0.04 else math.inf
    moved = apart / (1 - 0.1 * apart) if limit < -0.04 else math.inf
    # No resample is at or above −3.5 %: as certain as one draw in 4,000 allows.
    expected = stats.norm.sf(moved - bias) if limit < -0.04 else 1 / 4_001
    assert found.probability(limit, 0.95) == pytest.approx(expected, abs=2e-3)


def test_of_two_probabilities_the_one_that_claims_less_is_taken() -> None:
    """Bootstrap N(−5 %, ½ %); simulation: log(estimate / truth) is N(−0.1, 0.2), so most truths are worse than −5 %.

    Both sides of ½ are met, and the limits between the two medians, −5 % and −5 % · exp(0.1) = −5.53 %.
    """
    levels = (np.arange(1_000) + 0.5) / 1_000
    bootstrap = resampled_cvar(stats.norm.ppf(MIDPOINTS, -0.05, 0.005))
    found = TailEvidence(bootstrap, stats.norm.ppf(levels, -0.1, 0.2))
    for limit in (-0.09, -0.08, -0.062, -0.058, -0.054, -0.052, -0.049, -0.046, -0.04):
        first = stats.norm.cdf((-0.05 - limit) / 0.005)
        second = stats.norm.cdf((math.log(limit / -0.05) - 0.1) / 0.2)
        expected = min(first, second) if min(first, second) > 0.5 else max(first, second)
        if min(first, second) <= 0.5 <= max(first, second):
            expected = 0.5
        assert found.probability(limit, 0.95) == pytest.approx(expected, abs=2e-3)


def test_an_undefined_statistic_has_no_probability() -> None:
    found = TailEvidence(resampled_cvar(np.full(100, math.nan)), NOTHING)
    assert math.isnan(found.probability(-0.04, 0.95))


@pytest.mark.parametrize(("horizon", "level"), [(1, 0.95), (24, 0.95), (24, 0.8)])
def test_the_probability_falls_with_the_limit_and_agrees_with_the_verdict(horizon: int, level: float) -> None:
    equity = equity_of(0.004, 8, 1_500)
    evidence = tail_evidence(equity, np.random.default_rng(0), horizon=horizon, resamples=300)
    low, high = evidence.ends(level)
    limits = [-1.0, *np.linspace(1.3 * low, 0, 16), low, np.nextafter(low, 0), high, np.nextafter(high, 0)]
    found = []
    for limit in np.sort(limits):
        draw = np.random.default_rng(0)
        budget = check_limit(equity, float(limit), draw, horizon=horizon, level=level, resamples=300)
        assert (budget.verdict == BudgetVerdict.KEPT) == (budget.probability >= (1 + level) / 2)
        assert (budget.verdict == BudgetVerdict.BROKEN) == (budget.probability <= (1 - level) / 2)
        found.append(budget.probability)
    assert (np.diff(found) <= 0).all()
    assert found[0] > 0.99
    assert found[-1] < 0.01


def test_the_limit_at_the_estimate_is_an_even_chance() -> None:
    equity = equity_of(0.01, 7)
    estimate = check_limit(equity, -0.02, np.random.default_rng(0)).cvar.estimate
    assert check_limit(equity, estimate, np.random.default_rng(0)).probability == pytest.approx(0.5, abs=0.05)


@pytest.mark.parametrize("seed", [1, 2, 3])
def test_a_loss_of_five_times_the_limit_is_not_left_open(seed: int) -> None:
    """A year of hours and windows of eight days: 2.25 of the worst 5 %."""
    equity = equity_of(0.004, seed, 8_640)
    found = check_limit(equity, -0.02, np.random.default_rng(0), horizon=192, resamples=500)
    assert found.cvar.estimate < -0.08
    assert found.tail_windows == 2.25
    beyond = check_limit(equity, found.cvar.estimate / 5, np.random.default_rng(0), horizon=192, resamples=500)
    assert beyond.probability < 0.01
    assert beyond.verdict == BudgetVerdict.BROKEN


def test_a_single_crash_leaves_open_whether_the_limit_holds() -> None:
    """One crash of 25 % in a quiet year: six times the limit, but a rate of crashes known from one of them.

    The limit holds if less than a fifth of years have one; one year with one or more is then at most
    1 − exp(−1/5) = 18 % likely.
    """
    returns = np.random.default_rng(0).normal(0, 0.0005, 8_640)
    returns[4_000] -= 0.25
    equity = np.concatenate([[1.0], np.cumprod(1 + returns)])
    found = check_limit(equity, -0.02, np.random.default_rng(0), horizon=192, resamples=500)
    assert found.cvar.estimate < -0.1
    assert found.verdict == BudgetVerdict.UNDECIDED
    assert 0.05 < found.probability < 0.4


def test_a_tail_is_at_most_the_whole_account() -> None:
    """Student's t of one degree of freedom reaches 12.7 deviations: −5 % − 12.7 · 10 % without the bound."""
    drawn = stats.norm.ppf(MIDPOINTS, -0.05, 0.1)
    found = TailEvidence(Resampled(-0.05, drawn, 0.0, freedom=1.0, block=1.0, low_beyond=True), NOTHING)
    assert found.bootstrap.ends(0.95)[0] == pytest.approx(-0.05 - 1.27, rel=0.01)
    assert found.ends(0.95)[0] == -1
    assert found.probability(-1.0, 0.95) > 0.999


def test_impossible_budgets_are_refused() -> None:
    with pytest.raises(ConfigError, match="limit"):
        check_limit(np.ones(100), 0.04, np.random.default_rng(0))
    with pytest.raises(ConfigError, match="horizon: 168"):
        check_limit(np.ones(100), -0.04, np.random.default_rng(0), horizon=168)


def true_fall(deviation: float, horizon: int, alpha: float) -> float:
    """CVaR of the deepest fall within windows of a driftless walk, by simulation."""
    steps = np.random.default_rng(0).normal(0, deviation, (100_000, horizon))
    equity = np.cumprod(np.hstack([np.ones((len(steps), 1)), 1 + steps]), axis=1)
    falls = (equity / np.maximum.accumulate(equity, axis=1)).min(1) - 1
    return float(np.sort(falls)[: round(alpha * len(falls))].mean())


def test_falls_are_judged_by_the_deepest_one_in_each_window() -> None:
    equity = equity_of(0.002, 8)
    truth = true_fall(0.002, 24, 0.05)
    kept, broken = (
        check_limit(equity, limit, np.random.default_rng(0), horizon=24, outcome="drawdown")
        for limit in (1.4 * truth, 0.7 * truth)
    )
    assert kept.verdict == BudgetVerdict.KEPT
    assert broken.verdict == BudgetVerdict.BROKEN
    assert kept.cvar.estimate == pytest.approx(truth, rel=0.1)
    assert kept.cvar.low < truth < kept.cvar.high
    # A window's deepest fall is at least as deep as its loss.
    assert kept.cvar.estimate < check_limit(equity, -0.03, np.random.default_rng(0), horizon=24).cvar.estimate
    with pytest.raises(ConfigError, match="outcome"):
        check_limit(equity, -0.03, np.random.default_rng(0), outcome="loss")


@pytest.mark.slow
def test_the_interval_of_falls_covers_the_truth_at_least_as_often_as_it_says() -> None:
    """At least: the interval is the wider one of a bootstrap and of a simulation with persistent volatility."""
    truth, inside = true_fall(0.01, 24, 0.05), 0
    for seed in range(200):
        steps = np.random.default_rng(1_000 + seed).normal(0, 0.01, 3_000)
        equity = np.cumprod(np.concatenate([[1.0], 1 + steps]))
        draw = np.random.default_rng(seed)
        found = check_limit(equity, -0.04, draw, horizon=24, outcome="drawdown", resamples=500).cvar
        inside += found.low <= truth <= found.high
    assert inside / 200 >= 0.93
