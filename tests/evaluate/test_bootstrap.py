"""The stationary bootstrap: its draws, its block length, and how often its intervals hold the truth."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import pytest
from scipy import signal, stats

from tailguard.errors import ConfigError
from tailguard.evaluate import bootstrap, metrics
from tailguard.evaluate.bootstrap import Statistic, cvar_statistic, interval, paired_difference, sharpe_statistic

NORMAL_CVAR_5 = -2.06271


def autoregression(draw: np.random.Generator, count: int, rho: float) -> np.ndarray:
    """Unit variance, autocorrelation rho^k."""
    noise = draw.normal(size=count + 100) * math.sqrt(1 - rho**2)
    return np.asarray(signal.lfilter([1.0], [1.0, -rho], noise)[100:])


def clustered(draw: np.random.Generator, rows: int, count: int) -> np.ndarray:
    """GARCH(1, 1) with unit variance, α = 0.08 and β = 0.87, [rows, count]."""
    noise, variance = draw.normal(size=(count + 300, rows)), np.ones(rows)
    series = np.empty_like(noise)
    for index, shock in enumerate(noise):
        series[index] = np.sqrt(variance) * shock
        variance = 0.05 + 0.08 * series[index] ** 2 + 0.87 * variance
    return np.ascontiguousarray(series[300:].T)


def coverage(samples: list[np.ndarray], truth: float, statistic: Statistic, resamples: int, overlap: int = 1) -> float:
    draw = np.random.default_rng(0)
    found = [interval(each, statistic, draw, resamples=resamples, overlap=overlap) for each in samples]
    return float(np.mean([each.low <= truth <= each.high for each in found]))


def test_blocks_run_on_from_random_starts_and_are_geometric() -> None:
    count, block = 50, 8.0
    rows = np.concatenate(list(bootstrap.stationary_rows(count, block, 4_000, np.random.default_rng(0))))
    assert rows.shape == (4_000, count)
    # Every row is drawn equally often: 4,000 times, give or take.
    np.testing.assert_allclose(np.bincount(rows.ravel(), minlength=count), 4_000, rtol=0.12)
    follows = np.mod(rows[:, 1:] - rows[:, :-1], count) == 1
    # The next row follows unless a new block starts, and a new block starts right there once in `count` times.
    assert follows.mean() == pytest.approx(1 - 1 / block + 1 / block / count, abs=0.003)
    # Memoryless: a block that has run for three rows ends no sooner than any other.
    assert follows[:, 3:][follows[:, :-3] & follows[:, 1:-2] & follows[:, 2:-1]].mean() == pytest.approx(
        follows.mean(), abs=0.004
    )


def test_pieces_do_not_change_what_a_resample_is(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bootstrap, "CHUNK", 300)
    rows = list(bootstrap.stationary_rows(100, 5.0, 10, np.random.default_rng(0)))
    assert [len(piece) for piece in rows] == [3, 3, 3, 1]
    assert all(((piece >= 0) & (piece < 100)).all() for piece in rows)


@pytest.mark.parametrize("rho", [0.3, 0.6])
def test_block_length_is_the_closed_form_of_an_autoregression(rho: float) -> None:
    """G = 2ρ/(1 − ρ)² and g(0) = (1 + ρ)/(1 − ρ) give b = (2ρ/(1 − ρ²))^⅔ n^⅓."""
    lengths = [bootstrap.block_length(autoregression(np.random.default_rng(seed), 40_000, rho)) for seed in range(8)]
    expected = (2 * rho / (1 - rho**2)) ** (2 / 3) * 40_000 ** (1 / 3)
    assert np.median(lengths) == pytest.approx(expected, rel=0.08)


def test_block_length_of_independent_values_is_short() -> None:
    lengths = [bootstrap.block_length(np.random.default_rng(seed).normal(size=5_000)) for seed in range(9)]
    assert np.median(lengths) < 2.5
    assert bootstrap.block_length(np.zeros(100)) == 1


def test_influence_values_are_the_derivative_of_the_figure() -> None:
    """Weight on an observation up by ε, all others down: the figure moves by ε·influence. Here by repeating it."""
    returns = np.random.default_rng(2).standard_t(5, 1_000) * 0.01
    for statistic in (sharpe_statistic(252.0), cvar_statistic(0.05), bootstrap.mean_statistic(252.0)):
        influence = statistic.influence(returns)
        assert influence.mean() == pytest.approx(0, abs=1e-10)
        many = np.tile(returns, 20)
        base = float(statistic.of_rows(many))
        for index in (int(returns.argmin()), int(returns.argmax()), 17):
            moved = float(statistic.of_rows(np.append(many, returns[index])))
            assert (moved - base) * 20_001 == pytest.approx(influence[index], rel=0.02, abs=0.02 * influence.std())


@pytest.mark.parametrize("freedom", [1.0, 1.7, 4.0, 29.0, 900.0, 5_000.0])
def test_student_quantiles_equal_scipys(freedom: float) -> None:
    for probability in (0.6, 0.975, 0.9995):
        expected = stats.t.ppf(probability, freedom)
        assert bootstrap.student_quantile(probability, freedom) == pytest.approx(expected, rel=2e-3)


def test_bca_ends_equal_scipys() -> None:
    """Independent draws of a skewed mean: SciPy's BCa with its own jackknife and resamples."""
    sample = np.random.default_rng(4).exponential(size=60)
    theirs = stats.bootstrap((sample,), np.mean, method="BCa", n_resamples=20_000, rng=np.random.default_rng(0))
    drawn = sample[np.random.default_rng(1).integers(60, size=(20_000, 60))].mean(1)
    accelerated = bootstrap.acceleration(sample - sample.mean())
    ends = bootstrap.bca_ends(drawn, float(sample.mean()), accelerated, float(stats.norm.ppf(0.975)))
    assert ends == pytest.approx((theirs.confidence_interval.low, theirs.confidence_interval.high), abs=0.02)
    assert ends[1] - sample.mean() > 1.15 * (sample.mean() - ends[0])  # the long tail is above


def test_intervals_of_all_levels_are_nested() -> None:
    """Also those of a tail of few bars, whose resamples are skewed and whose Student's t is wide."""
    for seed in range(10):
        series = np.random.default_rng(seed).standard_t(3, size=100)
        found = bootstrap.resampled((series,), cvar_statistic(0.05), np.random.default_rng(0), 300)
        ends = np.array([found.ends(level) for level in np.linspace(0, 0.999, 60)])
        assert (np.diff(ends[:, 0]) <= 0).all()
        assert (np.diff(ends[:, 1]) >= 0).all()
        same = interval(series, cvar_statistic(0.05), np.random.default_rng(0), level=0.8, resamples=300)
        assert found.ends(0.8) == (same.low, same.high)


def test_a_sharpe_interval_has_the_width_theory_gives() -> None:
    """Independent normal returns: standard error √((1 + SR²/2) / n)."""
    returns = np.random.default_rng(6).normal(0.05, 1.0, 4_000)
    found = interval(returns, sharpe_statistic(1.0), np.random.default_rng(0))
    error = math.sqrt((1 + found.estimate**2 / 2) / 4_000)
    assert found.high - found.low == pytest.approx(2 * 1.96 * error, rel=0.06)
    assert found.estimate == metrics.sharpe(returns, 1.0)
    assert found.p_value == pytest.approx(stats.norm.sf(found.estimate / error), abs=0.01)


def test_pairing_removes_what_moves_both() -> None:
    draw = np.random.default_rng(7)
    market = draw.normal(size=1_000)
    agent = market + 0.1 * draw.normal(size=1_000) + 0.02
    difference = paired_difference(agent, market, bootstrap.mean_statistic(1.0), np.random.default_rng(0))
    alone = interval(agent, bootstrap.mean_statistic(1.0), np.random.default_rng(0))
    assert difference.estimate == pytest.approx((agent - market).mean())
    assert difference.high - difference.low == pytest.approx(2 * 1.96 * 0.1 / math.sqrt(1_000), rel=0.12)
    assert alone.high - alone.low > 8 * (difference.high - difference.low)
    assert difference.p_value < 0.001
    assert alone.p_value > 0.05


def test_the_same_seed_gives_the_same_interval(bars) -> None:
    returns = np.diff(np.log(bars.panel().close[:, 0]))
    first, second = (interval(returns, cvar_statistic(0.05), np.random.default_rng(3)) for _ in range(2))
    assert first == second


def test_an_undefined_figure_has_an_undefined_interval() -> None:
    flat = interval(np.zeros(100), sharpe_statistic(1.0), np.random.default_rng(0))
    assert math.isnan(flat.estimate)
    assert math.isnan(flat.low)
    once = np.zeros(100)
    once[50] = 0.01  # many resamples never draw the one bar that moved
    rare = interval(once, sharpe_statistic(1.0), np.random.default_rng(0))
    assert rare.estimate > 0
    assert math.isnan(rare.low)
    assert math.isnan(rare.p_value)


def test_impossible_requests_are_refused() -> None:
    draw = np.random.default_rng(0)
    with pytest.raises(ConfigError, match="level"):
        interval(np.arange(50.0), sharpe_statistic(1.0), draw, level=1.5)
    with pytest.raises(ConfigError, match="observations: 5"):
        interval(np.arange(5.0), sharpe_statistic(1.0), draw)
    with pytest.raises(ConfigError, match="50 and 40"):
        paired_difference(np.arange(50.0), np.arange(40.0), sharpe_statistic(1.0), draw)


def test_intervals_hold_the_truth_as_often_as_they_say() -> None:
    """Short: 150 samples, a deviation of 2 points."""
    draw = np.random.default_rng(8)
    correlated = [autoregression(draw, 400, 0.3) + 0.05 for _ in range(150)]
    assert 0.89 <= coverage(correlated, 0.05, sharpe_statistic(1.0), 250) <= 0.99
    independent = [draw.normal(size=500) for _ in range(150)]
    assert 0.91 <= coverage(independent, NORMAL_CVAR_5, cvar_statistic(0.05), 250) <= 0.99


SLOW_CASES: dict[str, tuple[Callable[[np.random.Generator], list[np.ndarray]], float, Statistic, float, float]] = {
    "Sharpe, AR 0.3": (
        lambda draw: [autoregression(draw, 1_000, 0.3) + 0.05 for _ in range(800)],
        0.05,
        sharpe_statistic(1.0),
        0.905,
        0.97,
    ),
    "Sharpe, GARCH": (
        lambda draw: list(clustered(draw, 600, 2_000) + 0.05),
        0.05,
        sharpe_statistic(1.0),
        0.925,
        0.97,
    ),
    "CVaR, normal": (
        lambda draw: [draw.normal(size=500) for _ in range(800)],
        NORMAL_CVAR_5,
        cvar_statistic(0.05),
        0.93,
        0.98,
    ),
    "CVaR, AR 0.3": (
        lambda draw: [autoregression(draw, 500, 0.3) for _ in range(800)],
        NORMAL_CVAR_5,
        cvar_statistic(0.05),
        0.915,
        0.98,
    ),
    "CVaR, t4": (
        lambda draw: [draw.standard_t(4, 1_000) for _ in range(600)],
        stats.t(4).expect(lambda x: x, ub=stats.t(4).ppf(0.05)) / 0.05,
        cvar_statistic(0.05),
        0.90,
        0.98,
    ),
    "CVaR, GARCH": (
        lambda draw: list(clustered(draw, 500, 2_000)),
        metrics.cvar(clustered(np.random.default_rng(99), 2_000, 1_000).ravel(), 0.05),
        cvar_statistic(0.05),
        0.91,
        0.98,
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("case", SLOW_CASES)
def test_coverage_over_many_samples(case: str) -> None:
    make, truth, statistic, low, high = SLOW_CASES[case]
    found = coverage(make(np.random.default_rng(1)), truth, statistic, 500)
    assert low <= found <= high, f"{case}: {found:.3f}"


@pytest.mark.slow
def test_coverage_of_the_cvar_of_a_years_overlapping_weeks() -> None:
    """52 weeks hold 2.6 of the worst 5 %: the hardest case, and the one a risk budget asks for."""
    draw = np.random.default_rng(2)
    hours = draw.standard_t(5, (200, 8_766)) * math.sqrt(3 / 5 / 168)
    weeks = [np.convolve(each, np.ones(168), "valid") for each in hours]
    found = coverage(weeks, -2.065, cvar_statistic(0.05), 500, overlap=168)
    assert 0.91 <= found <= 0.99, f"{found:.3f}"
