"""Critic losses against loops and closed forms, and value clipping of predictions."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.stats import norm
from torch import Tensor

from tailguard.errors import ConfigError
from tailguard.models.critics import (
    CategoricalCritic,
    ClipMode,
    Critic,
    CriticLoss,
    LossSettings,
    QuantileCritic,
    ScalarCritic,
    ValueClip,
    midpoints,
)
from tailguard.models.critics.categorical import clip_categorical, cross_entropy
from tailguard.models.critics.quantile import clip_quantiles, pinball_loss, quantile_huber_loss, quantile_loss

MODES: tuple[ClipMode, ...] = ("mean_only", "mean_and_variance", "per_quantile")


def f64(*values: float) -> Tensor:
    return torch.tensor(values, dtype=torch.float64)


def critic_loss(
    critic: Critic,
    output: Tensor,
    targets: Tensor,
    old_output: Tensor | None = None,
    clip: ValueClip | None = None,
    kappa: float = 0.0,
) -> CriticLoss:
    return critic.clipped_loss(output, targets, old_output, LossSettings(clip or ValueClip(), kappa))


def naive_quantile_loss(quantiles: Tensor, targets: Tensor, kappa: float) -> Tensor:
    """Every pair by itself, in QR-DQN's own scale; pinball for κ = 0."""
    count = quantiles.shape[-1]
    rows = []
    for q, y in zip(quantiles, targets, strict=True):
        terms = []
        for i in range(count):
            tau = (i + 0.5) / count
            for j in range(y.numel()):
                u = y[j] - q[i]
                size = u.abs()
                if kappa > 0:
                    size = torch.where(size <= kappa, 0.5 * u * u, kappa * (size - 0.5 * kappa))
                terms.append(abs(tau - float(u < 0)) * size)
        rows.append(torch.stack(terms).mean())
    return torch.stack(rows)


def random_case(ties: bool) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(3)
    quantiles = torch.randn(6, 5, generator=generator, dtype=torch.float64)
    targets = torch.randn(6, 9, generator=generator, dtype=torch.float64)
    if ties:
        targets[:, 4] = targets[:, 2]
        targets[:, 7] = 50.0
    return quantiles.requires_grad_(), targets.sort(-1).values


# --- quantile regression ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("ties", [False, True])
def test_pinball_equals_the_loop_over_all_pairs_in_value_and_gradient(ties: bool) -> None:
    quantiles, targets = random_case(ties)
    loss = pinball_loss(quantiles, targets, midpoints(5, dtype=torch.float64))
    expected = naive_quantile_loss(quantiles, targets, 0)
    torch.testing.assert_close(loss, expected, atol=1e-13, rtol=0)
    (gradient,) = torch.autograd.grad(loss.sum(), quantiles)
    (expected_gradient,) = torch.autograd.grad(expected.sum(), quantiles)
    torch.testing.assert_close(gradient, expected_gradient, atol=1e-14, rtol=0)


def test_pinball_of_equal_quantile_and_target_is_zero_with_a_valid_subgradient() -> None:
    quantiles = f64(1.0).requires_grad_()
    loss = pinball_loss(quantiles, f64(1.0, 1.0, 1.0), f64(0.5))
    (gradient,) = torch.autograd.grad(loss, quantiles)
    assert loss.item() == 0.0
    assert abs(gradient.item()) <= 0.5


@pytest.mark.parametrize("kappa", [0.0, 0.5])
def test_a_nan_target_shows_in_the_loss(kappa: float) -> None:
    quantiles, targets = random_case(ties=False)
    targets[2, 4] = math.nan
    loss = quantile_loss(quantiles, targets.sort(-1).values, midpoints(5, dtype=torch.float64), kappa)
    assert loss.isnan().tolist() == [False, False, True, False, False, False]


@pytest.mark.parametrize("kappa", [1.0, 0.3])
def test_quantile_huber_equals_the_loop_over_all_pairs_divided_by_kappa(kappa: float) -> None:
    quantiles, targets = random_case(ties=True)
    loss = quantile_huber_loss(quantiles, targets, midpoints(5, dtype=torch.float64), kappa)
    expected = naive_quantile_loss(quantiles, targets, kappa) / kappa
    torch.testing.assert_close(loss, expected, atol=1e-13, rtol=0)
    (gradient,) = torch.autograd.grad(loss.sum(), quantiles)
    (expected_gradient,) = torch.autograd.grad(expected.sum(), quantiles)
    torch.testing.assert_close(gradient, expected_gradient, atol=1e-14, rtol=0)


def test_quantile_huber_tends_to_pinball() -> None:
    quantiles, targets = random_case(ties=False)
    tau = midpoints(5, dtype=torch.float64)
    small = quantile_loss(quantiles, targets, tau, kappa=1e-9)
    torch.testing.assert_close(small, quantile_loss(quantiles, targets, tau), atol=1e-8, rtol=0)


@pytest.mark.parametrize("kappa", [0.0, 0.5])
def test_quantile_loss_passes_gradcheck(kappa: float) -> None:
    quantiles, targets = random_case(ties=False)
    tau = midpoints(5, dtype=torch.float64)
    assert torch.autograd.gradcheck(lambda q: quantile_loss(q, targets, tau, kappa), (quantiles,))


def test_quantile_loss_is_asymmetric() -> None:
    """At τ = 0.1 a target above costs 0.1 a unit and a target below 0.9."""
    assert pinball_loss(f64(0.0), f64(2.0), f64(0.1)).item() == pytest.approx(0.2)
    assert pinball_loss(f64(0.0), f64(-2.0), f64(0.1)).item() == pytest.approx(1.8)


def fit_standard_normal(kappa: float) -> Tensor:
    """Fit 21 quantiles to a fine grid of N(0, 1) by gradient descent; each quantile's loss is convex by itself."""
    targets = torch.from_numpy(norm.ppf((np.arange(4001) + 0.5) / 4001))
    quantiles = torch.zeros(21, dtype=torch.float64, requires_grad=True)
    for step in range(400):
        (gradient,) = torch.autograd.grad(
            quantile_loss(quantiles, targets, midpoints(21, dtype=torch.float64), kappa), quantiles
        )
        quantiles.data -= 21 * 8 / (1 + step / 20) * gradient
    return quantiles.detach()


def test_pinball_fits_the_tail_of_a_normal() -> None:
    quantiles = fit_standard_normal(kappa=0.0)
    assert quantiles[0].item() == pytest.approx(-1.981, abs=0.02)
    np.testing.assert_allclose(quantiles, norm.ppf((np.arange(21) + 0.5) / 21), atol=0.02)


@pytest.mark.parametrize(("kappa", "shrinkage"), [(1.0, 0.18), (0.25, 0.057), (0.1, 0.024), (0.01, 0.002)])
def test_a_huber_threshold_of_the_order_of_the_sd_shrinks_the_tail(kappa: float, shrinkage: float) -> None:
    """CVaR at 5 % of 21 equal masses is the lowest quantile and a twentieth of the next."""
    weights = f64(1 / 21, 0.05 - 1 / 21) / 0.05
    exact = weights @ torch.from_numpy(norm.ppf([0.5 / 21, 1.5 / 21]))
    quantiles = fit_standard_normal(kappa)
    assert 1 - (weights @ quantiles[:2] / exact).item() == pytest.approx(shrinkage, abs=0.005)
    if kappa == 1.0:
        assert quantiles[0].item() == pytest.approx(-1.617, abs=0.002)


# --- categorical -----------------------------------------------------------------------------------------------------


def test_cross_entropy_is_unbounded_and_log_k_for_a_uniform_prediction() -> None:
    target = torch.zeros(51)
    target[3] = 1.0
    assert cross_entropy(torch.zeros(51).log_softmax(-1), target).item() == pytest.approx(math.log(51), rel=1e-6)
    logits = torch.zeros(51)
    logits[3] = -20.0
    assert cross_entropy(logits.log_softmax(-1), target).item() == pytest.approx(20.0 + math.log(50), rel=1e-5)


def test_cross_entropy_gradient_is_probability_minus_target() -> None:
    critic = CategoricalCritic(2, projection="two_hot").double()
    logits = torch.randn(3, 51, generator=torch.Generator().manual_seed(0), dtype=torch.float64, requires_grad=True)
    targets = critic.encode(f64(3.3, -40.0, 0.0).unsqueeze(-1))
    (gradient,) = torch.autograd.grad(critic_loss(critic, logits, targets).loss.sum(), logits)
    torch.testing.assert_close(gradient, logits.detach().softmax(-1) - targets)


def normal_probabilities(mean: float, sd: float, atoms: Tensor) -> Tensor:
    return (-0.5 * ((atoms - mean) / sd).square()).softmax(-1)


def test_categorical_clip_moves_the_mean_to_the_old_mean_plus_the_limit() -> None:
    atoms = torch.linspace(-10, 10, 51, dtype=torch.float64)
    clipped = clip_categorical(
        normal_probabilities(3, 1, atoms), normal_probabilities(1, 1, atoms), atoms, ValueClip("mean_only", 0.2)
    )
    assert clipped.sum().item() == pytest.approx(1.0, abs=1e-12)
    assert (clipped @ atoms).item() == pytest.approx(1.2, abs=1e-6)


def test_categorical_clip_bounds_the_spread_up_to_the_projection() -> None:
    atoms = torch.linspace(-10, 10, 201, dtype=torch.float64)
    clip = ValueClip("mean_and_variance", 0.2, sd_ratio=1.5)
    clipped = clip_categorical(normal_probabilities(3, 2, atoms), normal_probabilities(1, 1, atoms), atoms, clip)
    mean = (clipped @ atoms).item()
    variance = (clipped @ (atoms - mean).square()).item()
    assert mean == pytest.approx(1.2, abs=1e-3)
    # The two-hot projection adds up to a quarter of the squared spacing, 0.1.
    assert 1.5**2 <= variance <= 1.5**2 + 0.1**2 / 4 + 1e-3


def test_categorical_clip_leaves_an_unmoved_prediction_alone() -> None:
    atoms = torch.linspace(-10, 10, 51, dtype=torch.float64)
    probabilities = normal_probabilities(0.37, 1.3, atoms)
    for mode in ("mean_only", "mean_and_variance"):
        clipped = clip_categorical(probabilities, probabilities, atoms, ValueClip(mode))
        torch.testing.assert_close(clipped, probabilities, atol=1e-12, rtol=0)


def test_categorical_clip_compares_with_the_unshifted_target() -> None:
    """Prediction N(3, 1), old N(1, 1), target certain at 3: shifted to mean 1.2 the prediction has lost the target."""
    critic = CategoricalCritic(2, projection="two_hot").double()
    atoms = critic.atoms
    logits, old = normal_probabilities(3, 1, atoms).log(), normal_probabilities(1, 1, atoms).log()
    result = critic_loss(critic, logits, critic.encode(f64(3.2)), old, ValueClip("mean_only", 0.2))
    # 3.2 is atom 33. The shift by 1.8 = 4.5 Δ puts there half of the original's atom 37 and half of its atom 38.
    original = normal_probabilities(3, 1, atoms)
    expected = -math.log(0.5 * original[37].item() + 0.5 * original[38].item())
    assert result.loss.item() == pytest.approx(expected, abs=1e-5)
    assert result.clipped.item() == 1.0


# --- clipping --------------------------------------------------------------------------------------------------------


def clipped_scalar(value: Tensor, target: Tensor, old: Tensor, limit: float) -> CriticLoss:
    return critic_loss(
        ScalarCritic(1), value.unsqueeze(-1), target.unsqueeze(-1), old.unsqueeze(-1), ValueClip("mean_only", limit)
    )


def test_scalar_clip_takes_the_mean_of_the_maxima() -> None:
    """Unclipped losses (10, 5) and clipped losses (5, 10): mean of maxima 10, maximum of means 7.5."""
    limit = 0.2
    value = f64(math.sqrt(20), math.sqrt(10))
    old = f64(math.sqrt(10) - limit, math.sqrt(20) + limit)
    result = clipped_scalar(value, f64(0.0, 0.0), old, limit)
    assert result.loss.mean().item() == pytest.approx(10.0)
    assert result.clipped.tolist() == [1.0, 1.0]


def test_each_critic_clips_around_its_own_old_value() -> None:
    """V = 1, target 1.5: its own old value 1 leaves the gradient −1 of (V − 1.5)², the twins' minimum 0 kills it."""
    value = f64(1.0).requires_grad_()
    (own,) = torch.autograd.grad(2 * clipped_scalar(value, f64(1.5), f64(1.0), 0.2).loss.sum(), value)
    (shared,) = torch.autograd.grad(2 * clipped_scalar(value, f64(1.5), f64(0.0), 0.2).loss.sum(), value)
    assert own.item() == pytest.approx(-1.0)
    assert shared.item() == 0.0


def quantile_gradient(mode: ClipMode, target: float) -> list[float]:
    critic = QuantileCritic(1, 3).double()
    output = f64(3.0, 4.0, 5.0).requires_grad_()
    result = critic_loss(critic, output, f64(target), f64(0.0, 1.0, 2.0), ValueClip(mode, 0.2))
    (gradient,) = torch.autograd.grad(result.loss, output)
    return [round(value, 4) for value in gradient.tolist()]


def test_which_gradient_survives_each_clip() -> None:
    """Moved up by 3 already, target still above: clipped quantiles stop; the free shape of mean_only goes on learning.

    The pinball slopes are −τ/3 = −(1/18, 1/6, 5/18); mean_only removes their mean 1/6.
    """
    assert quantile_gradient("per_quantile", 10.0) == [0.0, 0.0, 0.0]
    assert quantile_gradient("mean_only", 10.0) == [0.1111, 0.0, -0.1111]
    # Back towards the old values the plain loss is the larger one: slopes (1 − τ)/3.
    for mode in MODES:
        assert quantile_gradient(mode, -10.0) == [0.2778, 0.1667, 0.0556]


finite = st.floats(-5, 5, allow_nan=False, width=32)
samples = st.lists(finite, min_size=7, max_size=7)


@settings(max_examples=60, deadline=None)
@given(samples, samples, st.floats(0.01, 2), st.floats(1, 3))
def test_clipped_quantiles_keep_their_bounds(new: list[float], past: list[float], limit: float, ratio: float) -> None:
    quantiles, old = f64(*sorted(new)), f64(*sorted(past))
    for mode in ("mean_only", "mean_and_variance"):
        clipped = clip_quantiles(quantiles, old, ValueClip(mode, limit, ratio))
        assert abs((clipped.mean() - old.mean()).item()) <= limit + 1e-9
        if mode == "mean_only":
            torch.testing.assert_close(clipped - clipped.mean(), quantiles - quantiles.mean())
        elif quantiles.std(correction=0) > 1e-6 and old.std(correction=0) > 1e-6:
            change = (clipped.std(correction=0) / old.std(correction=0)).item()
            assert 1 / ratio - 1e-6 <= change <= ratio + 1e-6
    each = clip_quantiles(quantiles, old, ValueClip("per_quantile", limit))
    assert (each - old).abs().max().item() <= limit + 1e-12
    assert bool((each.diff() >= -1e-12).all())


def test_mean_only_is_no_trust_region_for_the_spread() -> None:
    old, new = f64(-1.0, 0.0, 1.0), f64(-4.3, 0.0, 4.3)
    spread = {mode: clip_quantiles(new, old, ValueClip(mode, 0.2, 1.5)).std().item() for mode in MODES}
    assert spread["mean_only"] == pytest.approx(4.3)
    assert spread["mean_and_variance"] == pytest.approx(1.5)
    assert spread["per_quantile"] == pytest.approx(1.2)


@pytest.mark.parametrize("mode", MODES)
def test_an_unmoved_prediction_has_the_plain_loss_and_gradient_and_counts_as_unclipped(mode: ClipMode) -> None:
    critic = QuantileCritic(1, 5).double()
    generator = torch.Generator().manual_seed(0)
    output = torch.randn(4, 5, generator=generator, dtype=torch.float64)
    output[0] = 1.0  # no spread at all
    output.requires_grad_()
    targets = critic.encode(torch.randn(4, 6, generator=generator, dtype=torch.float64))
    plain = critic_loss(critic, output, targets)
    clipped = critic_loss(critic, output, targets, output.detach().clone(), ValueClip(mode))
    torch.testing.assert_close(clipped.loss, plain.loss)
    torch.testing.assert_close(
        torch.autograd.grad(clipped.loss.sum(), output)[0], torch.autograd.grad(plain.loss.sum(), output)[0]
    )
    assert clipped.clipped.sum().item() == 0.0


@pytest.mark.parametrize(
    "critic", [ScalarCritic(8), QuantileCritic(8), CategoricalCritic(8)], ids=lambda c: type(c).__name__
)
def test_rounding_within_the_limit_is_not_counted_as_a_clip(critic: Critic) -> None:
    generator = torch.Generator().manual_seed(0)
    output = critic(torch.randn(256, 8, generator=generator)).detach() * 300
    old = output + 1e-3 * torch.randn(output.shape, generator=generator)
    targets = critic.encode(torch.randn(256, 4, generator=generator))
    for mode in ("mean_only", "mean_and_variance"):
        assert critic_loss(critic, output, targets, old, ValueClip(mode)).clipped.sum().item() == 0.0


def make_cases() -> list[tuple[str, Critic, ClipMode, float]]:
    cases: list[tuple[str, Critic, ClipMode, float]] = [("scalar", ScalarCritic(1), "mean_only", 0.0)]
    for mode in ("off", *MODES):
        cases.append(("quantile", QuantileCritic(1, 5), mode, 0.0))
        cases.append(("huber", QuantileCritic(1, 5), mode, 0.2))
    for mode in ("off", "mean_only", "mean_and_variance"):
        cases.append(("two_hot", CategoricalCritic(1, 11, -3, 3, "two_hot"), mode, 0.0))
        cases.append(("hl_gauss", CategoricalCritic(1, 11, -3, 3, "hl_gauss"), mode, 0.0))
    return cases


@pytest.mark.parametrize(("name", "critic", "mode", "kappa"), make_cases(), ids=lambda value: str(value)[:17])
def test_every_critic_and_clip_passes_gradcheck(name: str, critic: Critic, mode: ClipMode, kappa: float) -> None:
    critic = critic.double()
    generator = torch.Generator().manual_seed(len(name))
    size = critic.layer.out_features
    output = torch.randn(5, size, generator=generator, dtype=torch.float64, requires_grad=True)
    old = output.detach() + 0.4 * torch.randn(5, size, generator=generator, dtype=torch.float64)
    targets = critic.encode(torch.randn(5, 6, generator=generator, dtype=torch.float64))
    clip = ValueClip(mode, 0.1, 1.2)

    def loss(value: Tensor) -> Tensor:
        return critic_loss(critic, value, targets, old, clip, kappa).loss

    if mode != "off":
        assert critic_loss(critic, output, targets, old, clip, kappa).clipped.sum().item() > 0
    assert torch.autograd.gradcheck(loss, (output,))


@pytest.mark.parametrize("make", [ScalarCritic, QuantileCritic, CategoricalCritic])
def test_losses_trace_to_one_graph_without_host_sync(make: Callable[[int], Critic]) -> None:
    """A data-dependent branch or a .item() would break the graph."""
    critic = make(4)
    features, limit = torch.randn(6, 4), torch.tensor(0.2)
    targets = critic.encode(torch.randn(6, 8))
    old = critic(features).detach() + 0.5

    def loss(features: Tensor, limit: Tensor) -> Tensor:
        return critic_loss(critic, critic(features), targets, old, ValueClip("mean_and_variance", limit)).loss.mean()

    compiled = torch.compile(loss, backend="eager", fullgraph=True)
    torch.testing.assert_close(compiled(features, limit), loss(features, limit))


def test_wrong_requests_are_refused() -> None:
    with pytest.raises(ConfigError, match="value clip 'both'"):
        ValueClip("both")  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="old output is missing"):
        critic_loss(ScalarCritic(1), torch.zeros(1, 1), torch.zeros(1, 1), clip=ValueClip("mean_only"))
    critic = CategoricalCritic(1)
    with pytest.raises(ConfigError, match="needs a quantile critic"):
        critic_loss(critic, torch.zeros(51), torch.zeros(51), torch.zeros(51), ValueClip("per_quantile"))
