"""CVaR and VaR against SciPy's exact integrals, closed forms and brute force."""

from __future__ import annotations

import math
from collections.abc import Callable
from itertools import pairwise
from typing import Any, get_args

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats
from scipy.integrate import quad
from scipy.special import ndtri
from torch import Tensor

from tailguard.errors import ConfigError
from tailguard.evaluate.metrics import cvar as metrics_cvar
from tailguard.models.critics import HL_GAUSS_WIDTH, CategoricalCritic, hl_gauss, midpoints, two_hot
from tailguard.risk import (
    TailMethod,
    cvar_from_atoms,
    cvar_from_quantiles,
    cvar_from_samples,
    cvar_gpd_from_samples,
    cvar_standard_error,
    tail_heaviness,
    var_from_quantiles,
    var_from_samples,
)

METHODS: tuple[TailMethod, ...] = get_args(TailMethod)
COUNTS = (21, 32, 51, 101)
ALPHAS = (0.01, 0.05, 0.1, 0.25)
QuantileFunction = Callable[[Any], Any]


def normal(tau: Any) -> Any:
    return ndtri(tau)


def student(degrees: int) -> QuantileFunction:
    return stats.t(degrees).ppf


def crash_prone(tau: Any) -> Any:
    """Minus a gamma(4): skewed to the left, skewness −1."""
    return -stats.gamma(4).isf(tau)


def short_tailed(tau: Any) -> Any:
    """A gamma(4): bounded below, skewed to the right."""
    return stats.gamma(4).ppf(tau)


def skew_normal(tau: Any) -> Any:
    return stats.skewnorm(-4).ppf(tau)


def exact_cvar(quantile_function: QuantileFunction, alpha: float) -> float:
    """(1/α) ∫₀^α F⁻¹ by SciPy's quadrature, with τ = α·exp(−s) so that the singular end is far away."""
    integral, _ = quad(lambda s: quantile_function(alpha * np.exp(-s)) * np.exp(-s), 0, 200, limit=500, epsabs=1e-11)
    return float(integral)


def quantiles_of(quantile_function: QuantileFunction, count: int) -> Tensor:
    return torch.as_tensor(quantile_function(midpoints(count, dtype=torch.float64).numpy()))


def tukey(h: float) -> QuantileFunction:
    def quantile_function(tau: Any) -> Any:
        z = ndtri(tau)
        return 0.3 + 1.7 * z * np.exp(h * z**2 / 2)

    return quantile_function


def random_quantiles(rows: int, count: int, seed: int = 0) -> Tensor:
    return torch.as_tensor(np.random.default_rng(seed).standard_t(3, size=(rows, count)))


# --- from quantiles: what is exact -----------------------------------------------------------------------------------


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("count", [2, 3, 4, 5, 21, 32, 101])
def test_every_normal_is_exact_at_every_count_and_level(count: int, method: TailMethod) -> None:
    quantiles = torch.as_tensor(ndtri((np.arange(count) + 0.5) / count))
    assert cvar_from_quantiles(quantiles, 0.05, method).item() == pytest.approx(-2.0627128075, abs=1e-9)
    assert cvar_from_quantiles(quantiles, 0.01, method).item() == pytest.approx(-2.6652142203, abs=1e-9)
    for alpha in (1e-8, 1e-3, 0.3, 0.5, 0.8, 0.999, 1.0):
        expected = 0.02 - 0.3 * math.exp(-(ndtri(alpha) ** 2) / 2) / math.sqrt(2 * math.pi) / alpha
        assert cvar_from_quantiles(0.02 + 0.3 * quantiles, alpha, method).item() == pytest.approx(expected, abs=1e-9)
        if alpha < 1.0:
            var = var_from_quantiles(0.02 + 0.3 * quantiles, alpha, method).item()
            assert var == pytest.approx(0.02 + 0.3 * ndtri(alpha), abs=1e-9)


@pytest.mark.parametrize("h", [0.05, 0.2, 0.45])
@pytest.mark.parametrize("count", [4, 21, 32])
def test_every_tukey_h_distribution_is_exact(h: float, count: int) -> None:
    quantiles = quantiles_of(tukey(h), count)
    assert tail_heaviness(quantiles).item() == pytest.approx(h, abs=1e-12)
    for alpha in (0.002, 0.05, 0.4, 0.7):
        assert cvar_from_quantiles(quantiles, alpha).item() == pytest.approx(exact_cvar(tukey(h), alpha), rel=1e-8)
        assert var_from_quantiles(quantiles, alpha).item() == pytest.approx(tukey(h)(alpha), rel=1e-10)


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("count", [2, 5, 8])
@pytest.mark.parametrize("alpha", [0.01, 0.15, 0.5, 0.62, 0.97])
def test_cvar_is_the_integral_of_var(alpha: float, count: int, method: TailMethod) -> None:
    """Independent of the closed form: VaR, a plain interpolation, averaged over a fine grid of levels."""
    quantiles = torch.tensor([-5.0, -1.0, -0.8, 0.0, 0.1, 2.0, 2.5, 9.0], dtype=torch.float64)[:count]

    def at(level: float) -> float:
        return var_from_quantiles(quantiles, level, method).item()

    nodes = [alpha, *((i + 0.5) / count for i in range(count) if (i + 0.5) / count < alpha)]
    splits = [*sorted({math.log(alpha / level) for level in [*nodes, min(alpha, 0.5)]}), 8.0, 40.0, 150.0]
    pieces = [
        quad(lambda s: at(alpha * math.exp(-s)) * math.exp(-s), low, high, limit=100)[0]
        for low, high in pairwise(splits)
    ]
    assert cvar_from_quantiles(quantiles, alpha, method).item() == pytest.approx(sum(pieces), abs=1e-7)


@pytest.mark.parametrize("method", METHODS)
def test_level_one_is_the_mean_of_the_interpolated_distribution(method: TailMethod) -> None:
    """Worst share and best share make the whole; the centre if symmetric; and not the quantiles' average if skewed."""
    quantiles = random_quantiles(20, 32)
    mean = cvar_from_quantiles(quantiles, 1.0, method)
    for alpha in (0.05, 0.4, 0.5, 0.9):
        worst, best = cvar_from_quantiles(quantiles, alpha, method), -cvar_from_quantiles(-quantiles, 1 - alpha, method)
        torch.testing.assert_close(alpha * worst + (1 - alpha) * best, mean, atol=1e-12, rtol=0)

    ordered = quantiles.sort(-1).values
    symmetric = 7.0 + (ordered - ordered.flip(-1)) / 2
    assert cvar_from_quantiles(symmetric, 1.0, method).numpy() == pytest.approx(7.0, abs=1e-12)

    skewed = quantiles_of(crash_prone, 32)  # true mean −4
    assert abs(skewed.mean().item() + 4) > 0.012
    assert abs(cvar_from_quantiles(skewed, 1.0, method).item() + 4) < 0.006


@pytest.mark.parametrize("method", METHODS)
@settings(deadline=None, max_examples=50)
@given(st.data())
def test_cvar_increases_in_alpha_and_stays_below_var(method: TailMethod, data: st.DataObject) -> None:
    value = st.floats(-5, 5).map(lambda x: round(x, 2))  # ties are frequent
    quantiles = torch.tensor(data.draw(st.lists(value, min_size=2, max_size=12)), dtype=torch.float64)
    levels = [0.001, 0.02, 0.05, 0.1, 0.2, 0.3, 0.45, 0.5, 0.55, 0.8, 0.95, 0.999]
    cvars = [cvar_from_quantiles(quantiles, alpha, method).item() for alpha in levels]
    assert all(first <= second + 1e-9 for first, second in pairwise(cvars))
    for alpha, cvar in zip(levels, cvars, strict=True):
        assert cvar <= var_from_quantiles(quantiles, alpha, method).item() + 1e-9


@pytest.mark.parametrize("method", METHODS)
def test_affine_equivariant_and_blind_to_order(method: TailMethod) -> None:
    quantiles = random_quantiles(50, 21)
    for alpha in (0.01, 0.1, 0.6, 1.0):
        expected = 3.0 + 0.02 * cvar_from_quantiles(quantiles, alpha, method)
        shuffled = (3.0 + 0.02 * quantiles)[:, torch.randperm(21, generator=torch.Generator().manual_seed(1))]
        torch.testing.assert_close(cvar_from_quantiles(shuffled, alpha, method), expected, atol=1e-12, rtol=1e-12)


@pytest.mark.parametrize("method", METHODS)
def test_batches_equal_row_by_row_and_dtype_is_kept(method: TailMethod) -> None:
    quantiles = random_quantiles(12, 32).reshape(3, 4, 32)
    batched = cvar_from_quantiles(quantiles, 0.03, method)
    assert batched.shape == (3, 4)
    for i in range(3):
        for j in range(4):
            assert batched[i, j].item() == pytest.approx(cvar_from_quantiles(quantiles[i, j], 0.03, method).item())
    for dtype, tolerance in ((torch.float32, 1e-5), (torch.bfloat16, 0.02)):
        rounded = cvar_from_quantiles(quantiles.to(dtype), 0.03, method)
        assert rounded.dtype == dtype
        torch.testing.assert_close(rounded.double(), batched, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("alpha", [0.004, 0.05, 0.3, 0.7, 1.0])
def test_gradients_equal_finite_differences(alpha: float, method: TailMethod) -> None:
    quantiles = random_quantiles(4, 9).requires_grad_()
    assert torch.autograd.gradcheck(lambda q: cvar_from_quantiles(q, alpha, method), (quantiles,))
    if alpha < 1.0:
        assert torch.autograd.gradcheck(lambda q: var_from_quantiles(q, alpha, method), (quantiles,))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_gradients_sum_to_one_where_quantiles_are_tied(dtype: torch.dtype) -> None:
    """Shift equivariance as a gradient; tied, half tied and constant quantiles must not make it NaN."""
    rows = torch.zeros(3, 16, dtype=dtype)
    rows[0, 0], rows[1, :8], rows[1, 8:] = -1.0, -2.0, 1.0
    for alpha in (0.01, 0.2, 1.0):
        quantiles = rows.clone().requires_grad_()
        cvar_from_quantiles(quantiles, alpha).sum().backward()  # type: ignore[no-untyped-call]
        assert quantiles.grad is not None
        assert quantiles.grad.sum(-1).numpy() == pytest.approx(1.0, abs=1e-5 if dtype == torch.float32 else 1e-9)
    assert cvar_from_quantiles(rows[2] + 5.0, 0.01).item() == 5.0


def test_a_grid_made_in_inference_mode_serves_training() -> None:
    quantiles = random_quantiles(2, 27)
    with torch.inference_mode():
        cvar_from_quantiles(quantiles, 0.0123)
    cvar_from_quantiles(quantiles.requires_grad_(), 0.0123).sum().backward()  # type: ignore[no-untyped-call]
    assert quantiles.grad is not None


# --- from quantiles: what is not exact -------------------------------------------------------------------------------

# Error in % of |CVaR|, positive where the risk is understated; levels .01, .05, .1, .25. Rows of N = 21, 32, 51, 101.
ACCURACY: dict[tuple[str, TailMethod], list[list[float]]] = {
    ("t5", "probit"): [
        [15.31, 4.86, 2.86, 1.64],
        [11.69, 3.27, 1.98, 1.15],
        [8.17, 2.16, 1.33, 0.78],
        [4.30, 1.21, 0.75, 0.44],
    ],
    ("t5", "tukey"): [
        [2.26, 0.72, 0.44, 0.26],
        [1.78, 0.53, 0.33, 0.20],
        [1.31, 0.38, 0.24, 0.14],
        [0.77, 0.23, 0.14, 0.08],
    ],
    ("t3", "probit"): [
        [29.52, 10.99, 6.96, 4.30],
        [23.69, 7.93, 5.15, 3.21],
        [17.65, 5.66, 3.72, 2.33],
        [10.39, 3.50, 2.32, 1.46],
    ],
    ("t3", "tukey"): [
        [6.18, 2.30, 1.51, 0.95],
        [4.92, 1.73, 1.15, 0.73],
        [3.69, 1.27, 0.84, 0.53],
        [2.27, 0.80, 0.53, 0.34],
    ],
    ("crash_prone", "probit"): [
        [3.24, 0.82, 0.40, 0.17],
        [2.14, 0.45, 0.23, 0.10],
        [1.27, 0.24, 0.13, 0.06],
        [0.51, 0.10, 0.06, 0.03],
    ],
    ("crash_prone", "tukey"): [
        [-4.68, -1.20, -0.64, -0.31],
        [-3.02, -0.69, -0.38, -0.18],
        [-1.80, -0.39, -0.22, -0.10],
        [-0.77, -0.18, -0.10, -0.05],
    ],
    ("skew_normal", "probit"): [
        [0.84, 0.21, 0.10, 0.03],
        [0.49, 0.10, 0.04, 0.02],
        [0.25, 0.04, 0.02, 0.01],
        [0.08, 0.01, 0.01, 0.00],
    ],
    ("skew_normal", "tukey"): [
        [-4.04, -1.03, -0.55, -0.27],
        [-2.49, -0.56, -0.30, -0.15],
        [-1.40, -0.29, -0.16, -0.08],
        [-0.55, -0.12, -0.07, -0.03],
    ],
    ("short_tailed", "probit"): [
        [-30.12, -3.76, -1.28, -0.31],
        [-18.81, -1.91, -0.67, -0.17],
        [-10.40, -0.94, -0.34, -0.09],
        [-3.67, -0.35, -0.13, -0.04],
    ],
    ("short_tailed", "tukey"): [
        [-30.12, -3.76, -1.28, -0.31],
        [-18.81, -1.91, -0.67, -0.17],
        [-10.40, -0.94, -0.34, -0.09],
        [-3.67, -0.35, -0.13, -0.04],
    ],
}
DISTRIBUTIONS: dict[str, QuantileFunction] = {
    "t5": student(5),
    "t3": student(3),
    "crash_prone": crash_prone,
    "skew_normal": skew_normal,
    "short_tailed": short_tailed,
}


@pytest.mark.parametrize("name", DISTRIBUTIONS)
def test_accuracy_table(name: str) -> None:
    exact = [exact_cvar(DISTRIBUTIONS[name], alpha) for alpha in ALPHAS]
    for method in METHODS:
        for count, expected in zip(COUNTS, ACCURACY[name, method], strict=True):
            quantiles = quantiles_of(DISTRIBUTIONS[name], count)
            found = [cvar_from_quantiles(quantiles, alpha, method).item() for alpha in ALPHAS]
            errors = [100 * (value - truth) / abs(truth) for value, truth in zip(found, exact, strict=True)]
            assert errors == pytest.approx(expected, abs=0.006), (name, method, count)


def test_adapting_to_the_tail_divides_the_error_of_student_t_by_four() -> None:
    for degrees in (3, 5):
        for alpha in ALPHAS:
            exact = exact_cvar(student(degrees), alpha)
            for count in COUNTS:
                quantiles = quantiles_of(student(degrees), count)
                plain = cvar_from_quantiles(quantiles, alpha, "probit").item() - exact
                adapted = cvar_from_quantiles(quantiles, alpha, "tukey").item() - exact
                assert 0 < 4 * adapted < plain


def test_noise_on_the_quantiles_costs_less_than_adapting_gains() -> None:
    """Errors of 2 % of the standard deviation on each of 32 quantiles; root mean square error of CVaR.05."""
    draw = np.random.default_rng(3)

    def rms(quantile_function: QuantileFunction, sd: float, method: TailMethod) -> float:
        noisy = quantiles_of(quantile_function, 32) + 0.02 * sd * torch.as_tensor(draw.normal(size=(2000, 32)))
        exact = exact_cvar(quantile_function, 0.05)
        return float((cvar_from_quantiles(noisy, 0.05, method) / exact - 1).square().mean().sqrt())

    assert rms(student(3), math.sqrt(3), "tukey") < 0.025 < 0.07 < rms(student(3), math.sqrt(3), "probit")
    assert rms(student(5), math.sqrt(5 / 3), "tukey") < 0.013 < 0.03 < rms(student(5), math.sqrt(5 / 3), "probit")
    assert rms(normal, 1.0, "tukey") < 1.12 * rms(normal, 1.0, "probit")


@pytest.mark.parametrize("method", METHODS)
def test_a_crash_rarer_than_the_outermost_level_is_invisible(method: TailMethod) -> None:
    """1 % chance of −50, else N(.5, 1): no reading of 32 quantiles can find it; samples can."""

    def quantile_function(tau: Any) -> Any:
        return np.where(tau < 0.01, -50.0, 0.5 + ndtri(np.clip((tau - 0.01) / 0.99, 1e-12, None)))

    assert cvar_from_quantiles(quantiles_of(quantile_function, 32), 0.05, method).item() > -2.5
    samples = torch.as_tensor(quantile_function(midpoints(100_000, dtype=torch.float64).numpy()))
    # The worst 5 %: the crash, and the worst .04/.99 of the Normal.
    calm = 0.5 - stats.norm.pdf(ndtri(0.04 / 0.99)) / (0.04 / 0.99)
    assert cvar_from_samples(samples, 0.05).item() == pytest.approx((0.01 * -50 + 0.04 * calm) / 0.05, abs=1e-3)


def test_heaviness_is_zero_for_light_tails_and_bounded_for_wild_ones() -> None:
    assert tail_heaviness(quantiles_of(short_tailed, 32)).item() == 0.0
    assert tail_heaviness(torch.linspace(-1, 1, 32)).item() == 0.0
    assert tail_heaviness(quantiles_of(stats.cauchy.ppf, 32)).item() == pytest.approx(0.5)
    assert tail_heaviness(torch.full((32,), 3.0)).item() == 0.0


# --- from samples ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("n", [1, 7, 100])
@pytest.mark.parametrize("alpha", [0.001, 0.05, 0.07, 0.29, 0.5, 0.999, 1.0])
def test_samples_agree_with_the_evaluation_metric(n: int, alpha: float) -> None:
    samples = np.random.default_rng(n).normal(size=(5, n))
    found = cvar_from_samples(torch.as_tensor(samples), alpha)
    assert found.numpy() == pytest.approx([metrics_cvar(row, alpha) for row in samples], abs=1e-12)
    expected = np.quantile(samples, alpha, axis=-1, method="inverted_cdf")
    assert var_from_samples(torch.as_tensor(samples), alpha).numpy() == pytest.approx(expected, abs=0)


@settings(deadline=None, max_examples=50)
@given(
    st.lists(st.tuples(st.floats(-5, 5), st.integers(0, 4)), min_size=1, max_size=12).filter(
        lambda pairs: sum(count for _, count in pairs) > 0
    ),
    st.floats(0.01, 1.0),
)
def test_whole_weights_are_repetitions(pairs: list[tuple[float, int]], alpha: float) -> None:
    samples = torch.tensor([value for value, _ in pairs], dtype=torch.float64)
    weights = torch.tensor([count for _, count in pairs])
    repeated = samples.repeat_interleave(weights)
    weighted = cvar_from_samples(samples, alpha, 0.3 * weights)
    assert weighted.item() == pytest.approx(cvar_from_samples(repeated, alpha).item(), abs=1e-9)
    level = alpha * len(repeated)
    if abs(level - round(level)) > 1e-6:  # on a step of the distribution function rounding decides
        assert var_from_samples(samples, alpha, 0.3 * weights).item() == var_from_samples(repeated, alpha).item()


def test_weighted_var_at_level_one_is_the_best_sample_in_spite_of_rounding() -> None:
    assert var_from_samples(torch.arange(10.0), 1.0, torch.full((10,), 0.1)).item() == 9.0


@pytest.mark.parametrize("weighted", [False, True])
def test_rockafellar_uryasev(weighted: bool) -> None:
    """CVaR = max over ν of ν − E[(ν − R)₊]/α, attained at VaR; the maximum is at a sample, so all are tried."""
    samples = random_quantiles(1, 60, seed=5)[0]
    weights = torch.rand(60, dtype=torch.float64, generator=torch.Generator().manual_seed(0)) if weighted else None
    share = torch.full((60,), 1 / 60, dtype=torch.float64) if weights is None else weights / weights.sum()
    for alpha in (0.01, 0.13, 0.5, 1.0):
        bound = samples - ((samples[:, None] - samples).clamp_min(0) * share).sum(-1) / alpha
        assert cvar_from_samples(samples, alpha, weights).item() == pytest.approx(bound.max().item(), abs=1e-12)
        var = var_from_samples(samples, alpha, weights)
        assert bound[samples == var].item() == pytest.approx(bound.max().item(), abs=1e-12)


def test_sample_gradients_are_tail_membership_and_importance_weights_have_theirs() -> None:
    samples = torch.tensor([0.3, -2.0, 1.0, -1.0], dtype=torch.float64, requires_grad=True)
    cvar_from_samples(samples, 0.375).backward()  # type: ignore[no-untyped-call]
    assert samples.grad is not None
    # 1.5 samples: −2 wholly, −1 by half.
    assert samples.grad.tolist() == pytest.approx([0, 1 / 1.5, 0, 0.5 / 1.5])
    weights = torch.tensor([0.2, 0.3, 0.4, 0.35], dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda x, w: cvar_from_samples(x, 0.4, w), (samples, weights))


@pytest.mark.parametrize(("name", "tolerance"), [("normal", 0.05), ("t5", 0.08)])
def test_standard_error_is_the_spread_over_repetitions(name: str, tolerance: float) -> None:
    draw = np.random.default_rng(0)
    shape = (1500, 2000)
    samples = torch.as_tensor(draw.normal(size=shape) if name == "normal" else draw.standard_t(5, size=shape))
    spread = cvar_from_samples(samples, 0.05).std().item()
    predicted = cvar_standard_error(samples, 0.05).mean().item()
    assert predicted == pytest.approx(spread, rel=tolerance)
    if name == "normal":  # the formula with SciPy's moments of the truncated Normal: 3.8 % at n = 1,000
        variance, z = stats.truncnorm(-np.inf, ndtri(0.05)).var(), ndtri(0.05)
        expected = math.sqrt((variance + 0.95 * (2.0627128 + z) ** 2) / (2000 * 0.05))
        assert predicted == pytest.approx(expected, rel=0.02)


def test_standard_error_at_level_one_is_that_of_the_mean() -> None:
    samples = random_quantiles(3, 40)
    expected = samples.std(-1, correction=0) / math.sqrt(40)
    torch.testing.assert_close(cvar_standard_error(samples, 1.0), expected)


# --- generalised Pareto tail -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("shape", [-0.3, 0.0, 0.25])
def test_pareto_tail_recovers_scipys_generalised_pareto(shape: float) -> None:
    """Losses that are generalised Pareto have Pareto excesses over every threshold; quantiles as noise-free samples."""
    law = stats.genpareto(shape, scale=2.0)
    losses = law.ppf(midpoints(200_000, dtype=torch.float64).numpy())
    for alpha in (0.05, 0.001, 1e-5):
        exact = -exact_cvar(lambda tau: -law.isf(tau), alpha)
        found = -cvar_gpd_from_samples(torch.as_tensor(-losses), alpha).item()
        assert found == pytest.approx(exact, rel=0.003 if alpha > 1e-4 else 0.02)


def test_pareto_tail_at_its_own_threshold_is_the_empirical_cvar() -> None:
    samples = random_quantiles(10, 500)
    torch.testing.assert_close(cvar_gpd_from_samples(samples, 0.1), cvar_from_samples(samples, 0.1))


def test_pareto_tail_beats_the_empirical_cvar_beyond_the_samples() -> None:
    """t4, 1,000 samples, α = 0.001: one sample is in the tail. Ratios to the truth over 2,000 repetitions."""
    samples = torch.as_tensor(np.random.default_rng(1).standard_t(4, size=(2000, 1000)))
    exact = exact_cvar(student(4), 0.001)
    fitted, empirical = cvar_gpd_from_samples(samples, 0.001) / exact, cvar_from_samples(samples, 0.001) / exact
    assert 0.94 < fitted.mean().item() < 1.0
    assert empirical.mean().item() < 0.93
    assert (fitted - 1).square().mean() < 0.65 * (empirical - 1).square().mean()


def test_pareto_tail_of_shape_zero_is_exponential() -> None:
    """Excesses 18 and sixteen times 1: E[Y] = 2 and E[Y (1 − F)] = ½, hence exactly ξ = 0, σ = 2."""
    samples = torch.zeros(170, dtype=torch.float64)
    samples[0], samples[1:17] = -18.0, -1.0
    samples.requires_grad_()
    found = cvar_gpd_from_samples(samples, 0.01)
    assert found.item() == pytest.approx(-2.0 * (math.log(10) + 1))
    found.backward()  # type: ignore[no-untyped-call]
    assert samples.grad is not None
    assert samples.grad.isfinite().all()


def test_pareto_tail_of_equal_excesses_is_that_point() -> None:
    samples = torch.zeros(2, 100, dtype=torch.float64)
    samples[1, :10] = -3.0
    samples = samples.requires_grad_()
    found = cvar_gpd_from_samples(samples, 0.02)
    assert found.detach().numpy() == pytest.approx([0.0, -3.0], abs=0.02)
    found.sum().backward()  # type: ignore[no-untyped-call]
    assert samples.grad is not None
    assert samples.grad.isfinite().all()


# --- from atoms ------------------------------------------------------------------------------------------------------


def test_atoms_without_smoothing_are_weighted_samples() -> None:
    atoms = torch.linspace(-2, 2, 21, dtype=torch.float64)
    probabilities = torch.rand(4, 21, dtype=torch.float64, generator=torch.Generator().manual_seed(0)).softmax(-1)
    for alpha in (0.003, 0.2, 1.0):
        expected = cvar_from_samples(atoms.expand(4, 21), alpha, probabilities)
        torch.testing.assert_close(cvar_from_atoms(probabilities, atoms, alpha), expected)


@pytest.mark.parametrize("targets", ["hl_gauss", "two_hot"])
def test_smoothing_of_the_targets_is_removed(targets: str) -> None:
    """N(0, 1) on atoms .4 apart: CVaR.05 is −2.0627; HL-Gauss (sd .3) teaches the critic one of about −2.16."""
    samples = torch.as_tensor(ndtri((np.arange(20_000) + 0.5) / 20_000))
    atoms = torch.linspace(-10, 10, 51, dtype=torch.float64)
    if targets == "hl_gauss":
        probabilities, smoothing = hl_gauss(samples, atoms), HL_GAUSS_WIDTH * 0.4
        assert cvar_from_atoms(probabilities, atoms, 0.05).item() < -2.14
    else:
        probabilities, smoothing = two_hot(samples, atoms), 0.4 / math.sqrt(12)
    assert cvar_from_atoms(probabilities, atoms, 0.05, smoothing).item() == pytest.approx(-2.0627, rel=0.005)
    extreme = cvar_from_atoms(probabilities, atoms, 0.01, torch.tensor(smoothing))
    assert extreme.item() == pytest.approx(-2.6652, rel=0.01)
    assert cvar_from_atoms(probabilities, atoms, 1.0, smoothing).item() == pytest.approx(0.0, abs=1e-9)


def test_atoms_agree_with_the_categorical_critics_quantiles() -> None:
    """The mean of the worst 5 % of 20,000 quantiles the critic itself reads from its output."""
    critic = CategoricalCritic(1, atoms=41, v_min=-4.0, v_max=4.0).double()
    logits = -(critic.atoms.expand(3, 41) - torch.tensor([[-1.0], [0.0], [0.7]])).abs() * 1.3
    expected = critic.quantiles(logits, 20_000)[:, :1000].mean(-1)
    found = cvar_from_atoms(logits.softmax(-1), critic.atoms, 0.05, HL_GAUSS_WIDTH * 0.2)
    torch.testing.assert_close(found, expected, atol=5e-6, rtol=0)


def test_atom_gradients_equal_finite_differences_and_survive_a_point_mass() -> None:
    atoms = torch.linspace(-2, 2, 9, dtype=torch.float64)
    logits = torch.randn(3, 9, dtype=torch.float64, generator=torch.Generator().manual_seed(0)).requires_grad_()
    for smoothing in (0.0, 0.3):
        assert torch.autograd.gradcheck(lambda x, s=smoothing: cvar_from_atoms(x.softmax(-1), atoms, 0.1, s), (logits,))
    point = torch.zeros(9, dtype=torch.float64)
    point[3] = 1.0
    point.requires_grad_()
    found = cvar_from_atoms(point, atoms, 0.1, 0.3)
    found.backward()  # type: ignore[no-untyped-call]
    assert found.item() == -0.5
    assert point.grad is not None
    assert point.grad.isfinite().all()


# --- bad input -------------------------------------------------------------------------------------------------------

VALUES = torch.arange(40, dtype=torch.float64)
OF_VALUES: dict[str, Callable[[Tensor, float], Tensor]] = {
    "cvar_from_quantiles": cvar_from_quantiles,
    "var_from_quantiles": var_from_quantiles,
    "cvar_from_samples": cvar_from_samples,
    "var_from_samples": var_from_samples,
    "weighted cvar": lambda x, alpha: cvar_from_samples(x, alpha, torch.ones(40)),
    "weighted var": lambda x, alpha: var_from_samples(x, alpha, torch.ones(40)),
    "cvar_standard_error": cvar_standard_error,
    "cvar_gpd_from_samples": lambda x, alpha: cvar_gpd_from_samples(x, alpha, 0.5),
    "cvar_from_atoms": lambda x, alpha: cvar_from_atoms(x, VALUES, alpha),
}


@pytest.mark.parametrize("name", OF_VALUES)
def test_nothing_waits_for_the_device(name: str) -> None:
    """Tensors without data, like those still being computed, cannot be read by the host."""
    fixed = {"cvar_from_atoms": lambda x, alpha: cvar_from_atoms(x, x[0], alpha, x.sum())}
    fixed |= {"weighted cvar": lambda x, alpha: cvar_from_samples(x, alpha, x)}
    fixed |= {"weighted var": lambda x, alpha: var_from_samples(x, alpha, x)}
    found = fixed.get(name, OF_VALUES[name])(torch.empty(3, 40, device="meta"), 0.05)
    assert found.shape == (3,)
    assert found.device.type == "meta"


@pytest.mark.parametrize("name", OF_VALUES)
@pytest.mark.parametrize("alpha", [0.0, -0.1, 1.1, math.nan])
def test_alpha_out_of_range_is_refused(name: str, alpha: float) -> None:
    with pytest.raises(ConfigError, match="alpha"):
        OF_VALUES[name](VALUES / VALUES.sum(), alpha)


@pytest.mark.parametrize("name", OF_VALUES)
@pytest.mark.parametrize("position", [0, 20, 39])
def test_nan_is_never_dropped(name: str, position: int) -> None:
    rows = (VALUES / VALUES.sum()).repeat(2, 1)
    rows[0, position] = math.nan
    found = OF_VALUES[name](rows, 0.05)
    assert found.isnan().tolist() == [True, False]


def test_wrong_shapes_types_and_choices_name_what_is_wrong() -> None:
    with pytest.raises(ConfigError, match=r"quantiles: shape \(3, 1\).* 2 or more"):
        cvar_from_quantiles(torch.zeros(3, 1), 0.05)
    with pytest.raises(ConfigError, match=r"samples: dtype torch\.int64"):
        cvar_from_samples(torch.zeros(3, dtype=torch.int64), 0.05)
    with pytest.raises(ConfigError, match="method: 'linear' is not one of tukey, probit"):
        cvar_from_quantiles(torch.zeros(8), 0.05, "linear")  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="alpha: 1 is out of range"):
        var_from_quantiles(torch.zeros(8), 1.0)
    with pytest.raises(ConfigError, match=r"weights: shape \(4,\) does not fit samples of shape \(2, 5\)"):
        cvar_from_samples(torch.zeros(2, 5), 0.05, torch.ones(4))
    with pytest.raises(ConfigError, match=r"atoms: shape \(4,\).*each of the 5"):
        cvar_from_atoms(torch.full((2, 5), 0.2), torch.zeros(4), 0.05)
    with pytest.raises(ConfigError, match="smoothing_sd: -1"):
        cvar_from_atoms(torch.full((2, 5), 0.2), torch.arange(5.0), 0.05, -1.0)
    with pytest.raises(ConfigError, match=r"worst 0\.1 of 50: 5 is out of range; it must be at least 10"):
        cvar_gpd_from_samples(torch.zeros(50), 0.05)
    with pytest.raises(ConfigError, match=r"alpha: 0\.2 is out of range"):
        cvar_gpd_from_samples(torch.zeros(500), 0.2)


def test_impossible_weights_give_nan() -> None:
    samples = torch.arange(3.0)
    for weights in ([1.0, -1.0, 1.0], [0.0, 0.0, 0.0]):
        assert cvar_from_samples(samples, 0.1, torch.tensor(weights)).isnan()
        assert var_from_samples(samples, 0.1, torch.tensor(weights)).isnan()
