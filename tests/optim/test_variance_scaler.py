"""Noise-to-signal ratios against closed forms and explicit weights; steps that shrink under every optimiser."""

from __future__ import annotations

import cmath
import copy
import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD, Adadelta, Adagrad, Adam, Adamax, AdamW, NAdam, Optimizer, RAdam, RMSprop
from torch.utils._python_dispatch import TorchDispatchMode

from tailguard.errors import ConfigError
from tailguard.optim import UPGD, UPGDW, AdaptiveUPGD, VarianceGradientScaler
from tailguard.optim.variance_scaler import squared_weight_sum

Gradients = Iterable[Sequence[Tensor | None]]

OPTIMISERS: dict[str, Callable[..., Optimizer]] = {
    "sgd": SGD,
    "momentum": lambda params, lr: SGD(params, lr, momentum=0.9),
    "nesterov": lambda params, lr: SGD(params, lr, momentum=0.9, nesterov=True),
    "upgd": lambda params, lr: UPGD(params, lr, sigma=0.0, weight_decay=0.0),
    "upgd_whole": lambda params, lr: UPGD(params, lr, sigma=0.1, weight_decay=0.1),
    "adam": Adam,
    "adam_fused": lambda params, lr: Adam(params, lr, fused=True),
    "amsgrad": lambda params, lr: Adam(params, lr, amsgrad=True),
    "adamw": lambda params, lr: AdamW(params, lr, weight_decay=0.1),
    "nadam": NAdam,
    "radam": RAdam,
    "adamax": Adamax,
    "rmsprop": RMSprop,
    "adagrad": Adagrad,
    "adadelta": Adadelta,
    "adaptive_upgd": lambda params, lr: AdaptiveUPGD(params, lr, sigma=0.1, weight_decay=0.1),
    "upgdw": lambda params, lr: UPGDW(params, lr, sigma=0.1, weight_decay=0.1),
}
PROPORTIONAL = ("sgd", "momentum", "nesterov", "upgd")


def make_parameters(*shapes: tuple[int, ...], dtype: torch.dtype = torch.float32) -> list[nn.Parameter]:
    random = torch.Generator().manual_seed(9)
    return [nn.Parameter(torch.randn(shape, generator=random, dtype=torch.float64).to(dtype)) for shape in shapes]


def give(parameters: Sequence[Tensor], gradients: Sequence[Tensor | None]) -> None:
    for parameter, gradient in zip(parameters, gradients, strict=True):
        parameter.grad = None if gradient is None else gradient.clone()


def observe(scaler: VarianceGradientScaler, gradients: Gradients) -> VarianceGradientScaler:
    """Show the scaler one set of gradients after the other."""
    for present in gradients:
        give(scaler.parameters, present)
        scaler.update_statistics()
    return scaler


def noisy(
    mean: Tensor | float, noise: float, size: int, steps: int, seed: int = 0, dtype: torch.dtype = torch.float32
) -> list[tuple[Tensor]]:
    random = torch.Generator().manual_seed(seed)
    return [
        ((mean + noise * torch.randn(size, generator=random, dtype=torch.float64)).to(dtype),) for _ in range(steps)
    ]


def nsr_of(gradients: Gradients, *shapes: tuple[int, ...], **settings: Any) -> float:
    """The ratio that these gradients lead to."""
    scaler = VarianceGradientScaler(make_parameters(*shapes), **{"warmup_steps": 1, "max_nsr": 1e9} | settings)
    return observe(scaler, gradients).get_normalized_variance().total.item()


# --- the estimate -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("beta", [0.5, 0.9, 0.99, 0.9999])
def test_the_noise_left_in_an_average_is_the_sum_of_its_squared_weights(beta: float) -> None:
    counts = np.array([1, 2, 3, 10, 500])
    found = squared_weight_sum(beta, torch.tensor(counts, dtype=torch.float64))
    for value, count in zip(found.tolist(), counts, strict=True):
        weights = beta ** np.arange(count)
        assert value == pytest.approx(((weights / weights.sum()) ** 2).sum(), rel=1e-9)
    assert found[0].item() == pytest.approx(1.0, abs=1e-12)


def by_definition(gradients: np.ndarray, beta: float) -> tuple[float, float]:
    """Σσ² and Σμ² element by element, with every weight written out. gradients: [T, N]."""
    weights = beta ** np.arange(len(gradients))[::-1]
    weights /= weights.sum()
    mean, square = weights @ gradients, weights @ gradients**2
    left = (weights**2).sum()
    variance = (square - mean**2) / (1 - left)
    return variance.sum(), (mean**2 - left * variance).sum()


@pytest.mark.parametrize("steps", [2, 3, 40, 300])
@pytest.mark.parametrize("beta", [0.8, 0.99])
def test_one_mean_a_weight_gives_what_two_averages_an_element_would(steps: int, beta: float) -> None:
    """Tensors of several shapes, with means and noise that differ by element and wander in time."""
    draw = np.random.default_rng(3)
    shapes = ((3, 5), (7,), (), (2, 2, 2))
    stream = [draw.normal(1, 3, shape) + np.cumsum(draw.normal(0, 0.3, (steps, *shape)), 0) for shape in shapes]
    parameters = make_parameters(*shapes, dtype=torch.float64)
    scaler = VarianceGradientScaler(parameters, beta=beta, warmup_steps=1, max_nsr=1e12)
    observe(scaler, ([torch.tensor(part[t]) for part in stream] for t in range(steps)))
    expected = np.array([by_definition(part.reshape(steps, -1), beta) for part in stream])
    ratio, metrics = scaler.get_normalized_variance(), scaler.metrics()
    assert metrics["vgs/noise"].item() == pytest.approx(expected[:, 0].sum(), rel=1e-9)
    assert metrics["vgs/signal"].item() == pytest.approx(expected[:, 1].sum(), rel=1e-9)
    capped = np.minimum(expected[:, 0] / np.maximum(expected[:, 1], 1e-300), 1e12)
    np.testing.assert_allclose(ratio.per_tensor.numpy(), capped, rtol=1e-7)
    assert ratio.total.item() == pytest.approx(expected[:, 0].sum() / max(expected[:, 1].sum(), 1e-300), rel=1e-9)


@pytest.mark.parametrize("beta", [0.9, 0.99, 0.999])
@pytest.mark.parametrize("spread", ["none", "normal", "nine decades"])
def test_a_constant_gradient_has_no_noise_however_its_elements_differ(spread: str, beta: float) -> None:
    """In float32 exactly: not a small ratio but 0, not almost 1 but 1."""
    random = torch.Generator().manual_seed(1)
    gradient = torch.randn(64, 32, generator=random)
    if spread == "none":
        gradient = torch.full_like(gradient, 0.3)
    elif spread == "nine decades":
        gradient *= 10 ** torch.empty_like(gradient).uniform_(-6, 3, generator=random)
    scaler = VarianceGradientScaler(make_parameters((64, 32)), beta=beta, warmup_steps=1, min_scale=1e-3)
    for _ in range(400):
        observe(scaler, [(gradient,)])
        assert scaler.get_normalized_variance().total.item() == 0.0
        assert scaler.get_scaling_factor().item() == 1.0


def test_a_constant_gradient_in_another_memory_layout_shows_rounding_alone() -> None:
    gradient = torch.randn(32, 64, generator=torch.Generator().manual_seed(2)).T
    parameter = nn.Parameter(torch.zeros(64, 32))
    parameter.grad = gradient
    scaler = VarianceGradientScaler([parameter], warmup_steps=1)
    for _ in range(50):
        scaler.update_statistics()
    assert scaler.get_normalized_variance().total.item() < 1e-6


@pytest.mark.parametrize(("size", "tolerance"), [(100, 0.025), (1_000, 0.01), (10_000, 0.004)])
def test_noise_as_large_as_the_mean_is_a_ratio_of_one_at_every_size(size: int, tolerance: float) -> None:
    gradients = noisy(1.0, 1.0, size, 1_500)
    assert nsr_of(gradients, (size,), beta=0.998) == pytest.approx(1.0, rel=tolerance)


def test_elements_with_different_means_count_by_their_squares() -> None:
    mean = torch.randn(10_000, generator=torch.Generator().manual_seed(4), dtype=torch.float64)
    truth = 0.25 * 10_000 / mean.square().sum().item()
    assert truth == pytest.approx(0.25, rel=0.02)
    assert nsr_of(noisy(mean, 0.5, 10_000, 1_000), (10_000,)) == pytest.approx(truth, rel=0.005)


@pytest.mark.parametrize("order", ["random", "alternating"])
def test_noise_that_cancels_across_elements_is_still_noise(order: str) -> None:
    """±2 with opposite signs in the two halves: the mean over elements is 0 at every step, each variance is 4."""
    signs = torch.ones(1_000)
    signs[500:] = -1
    coin = torch.randint(0, 2, (1_500,), generator=torch.Generator().manual_seed(5)) * 2 - 1
    if order == "alternating":
        coin = torch.tensor([1, -1]).repeat(750)
    scaler = VarianceGradientScaler(make_parameters((1_000,)), beta=0.99, min_scale=0.05, max_nsr=1e9)
    observe(scaler, ((2.0 * toss * signs,) for toss in coin))
    metrics = scaler.metrics()
    # V is 4, and alternating signs leave |M| = 2c with c = (1 − β)/(1 + β): the estimate is 4 (1 − c²)/(1 − c).
    truth, tolerance = (4 * (1 + 0.01 / 1.99), 1e-5) if order == "alternating" else (4.0, 0.01)
    assert metrics["vgs/noise"].item() / 1_000 == pytest.approx(truth, rel=tolerance)
    assert metrics["vgs/nsr"].item() > 50
    assert scaler.get_scaling_factor().item() == 0.05


@pytest.mark.parametrize("beta", [0.9, 0.99])
@pytest.mark.parametrize("period", [2_000, 200, 20, 3])
def test_a_sine_is_noise_as_far_as_it_is_faster_than_the_memory(period: int, beta: float) -> None:
    """sin(ωt + φ) with phases φ evenly spread over the elements, so that every sum over elements has a closed form.

    Σ V = N/2 and Σ M² = N/2 · |H|², with H = Σ w_k e^{iωk} the averages' response to the frequency.
    """
    size, omega = 360, 2 * math.pi / period
    phases = torch.arange(size, dtype=torch.float64) * 2 * math.pi / size
    scaler = VarianceGradientScaler(make_parameters((size,), dtype=torch.float64), beta=beta, max_nsr=1e9)
    for steps in range(1, 301):
        observe(scaler, [(torch.sin(omega * steps + phases),)])
        if steps not in (150, 300):
            continue
        turn = beta * cmath.exp(1j * omega)
        response = abs((1 - beta) / (1 - beta**steps) * (1 - turn**steps) / (1 - turn)) ** 2
        left = (1 - beta) / (1 + beta) * (1 + beta**steps) / (1 - beta**steps)
        noise = (1 - response) / (1 - left) / 2
        signal = response / 2 - left * noise
        assert scaler.metrics()["vgs/noise"].item() / size == pytest.approx(noise, rel=1e-9)
        assert scaler.metrics()["vgs/signal"].item() / size == pytest.approx(signal, rel=1e-6, abs=1e-12)
        ratio = scaler.get_normalized_variance().total.item()
        assert ratio == pytest.approx(noise / signal, rel=1e-5) if signal > 0 else ratio == 1e9
    if period == 3:
        assert noise == pytest.approx(0.5, rel=0.06)
        assert ratio == 1e9
    if period == 2_000 and beta == 0.9:
        assert ratio < 1e-3


def test_the_estimate_is_unbiased_from_the_second_gradient_on() -> None:
    """A million independent runs of mean 1 and standard deviation 2, as so many elements."""
    runs = 1_000_000
    scaler = VarianceGradientScaler(make_parameters((runs,)), warmup_steps=1)
    for steps, gradients in enumerate(noisy(1.0, 2.0, runs, 10), start=1):
        observe(scaler, [gradients])
        if steps >= 2:
            metrics = scaler.metrics()
            assert metrics["vgs/noise"].item() / runs == pytest.approx(4.0, rel=0.008)  # five standard errors at t = 2
            assert metrics["vgs/signal"].item() / runs == pytest.approx(1.0, abs=0.03)
    assert scaler.get_scaling_factor().item() == pytest.approx(0.2, rel=0.03)


def test_a_copy_of_a_parameter_changes_nothing() -> None:
    gradients = noisy(1.0, 1.5, 50, 60)
    once = nsr_of(gradients, (50,))
    assert once > 1.0
    assert nsr_of((parts * 2 for parts in gradients), (50,), (50,)) == once


def test_cutting_a_tensor_into_pieces_changes_nothing() -> None:
    gradients = noisy(1.0, 1.5, 90, 60)
    pieces = ((parts[0][:10], parts[0][10:], None) for parts in gradients)
    assert nsr_of(pieces, (10,), (80,), (7,)) == pytest.approx(nsr_of(gradients, (90,)), rel=1e-6)


@pytest.mark.parametrize("unit", [1e-9, 1e-3, 1e6])
def test_the_unit_of_the_loss_does_not_matter(unit: float) -> None:
    gradients = noisy(1.0, 1.5, 90, 60)
    scaled = ((unit * parts[0],) for parts in gradients)
    assert nsr_of(scaled, (90,)) == pytest.approx(nsr_of(gradients, (90,)), rel=1e-5)


def test_zero_gradients_are_neither_noise_nor_an_error() -> None:
    assert nsr_of(([torch.zeros(4)] for _ in range(5)), (4,)) == 0.0


def test_half_precision_parameters_are_averaged_in_single() -> None:
    """bfloat16 has three digits: an average kept in it would not move by a hundredth of a gradient."""
    parameters = make_parameters((5_000,), dtype=torch.bfloat16)
    scaler = observe(VarianceGradientScaler(parameters), noisy(1.0, 0.1, 5_000, 800, dtype=torch.bfloat16))
    assert scaler.get_normalized_variance().total.item() == pytest.approx(0.01, rel=0.02)
    scaler.scale_gradients()
    assert parameters[0].grad is not None
    assert parameters[0].grad.dtype == torch.bfloat16


# --- Adam's own averages ----------------------------------------------------------------------------------------


def adam_after(gradients: Gradients, betas: tuple[float, float], size: int) -> tuple[Adam, VarianceGradientScaler]:
    optimizer = Adam(make_parameters((size,)), lr=0.0, betas=betas)
    scaler = VarianceGradientScaler(optimizer, moments="optimizer", warmup_steps=1)
    for present in gradients:
        give(scaler.parameters, present)
        optimizer.step()
    scaler.update_statistics()
    return optimizer, scaler


def test_adams_averages_need_the_correction_for_the_noise_in_the_mean() -> None:
    """Mean 1, standard deviation 2: v̂ − m̂² shows 4 (1 − c) = 3.79 with c = 0.1 / 1.9; corrected it is 4."""
    size = 10_000
    optimizer, scaler = adam_after(noisy(1.0, 2.0, size, 300), (0.9, 0.999), size)
    state = optimizer.state[scaler.parameters[0]]
    mean, square = state["exp_avg"] / (1 - 0.9**300), state["exp_avg_sq"] / (1 - 0.999**300)
    assert (square - mean.square()).mean().item() == pytest.approx(4 * (1 - 0.1 / 1.9), rel=0.005)
    assert scaler.metrics()["vgs/noise"].item() / size == pytest.approx(4.0, rel=0.005)
    assert scaler.metrics()["vgs/signal"].item() / size == pytest.approx(1.0, rel=0.03)
    assert not scaler._means


@pytest.mark.parametrize("steps", [2, 5, 10])
def test_adams_averages_are_unbiased_from_the_second_gradient_on(steps: int) -> None:
    size = 400_000
    _, scaler = adam_after(noisy(1.0, 2.0, size, steps), (0.9, 0.999), size)
    assert scaler.metrics()["vgs/noise"].item() / size == pytest.approx(4.0, rel=0.012)
    assert scaler.metrics()["vgs/signal"].item() / size == pytest.approx(1.0, abs=0.05)


@pytest.mark.parametrize("make", [Adam, AdamW, NAdam, RAdam, AdaptiveUPGD, UPGDW])
def test_an_optimisers_averages_with_equal_betas_are_the_scalers_own(make: Callable[..., Optimizer]) -> None:
    gradients = [(*noisy(1.0, 2.0, 40, 1, seed=t)[0], *noisy(0.5, 0.2, 30, 1, seed=100 + t)[0]) for t in range(25)]
    optimizer = make(make_parameters((40,), (30,)), lr=0.0, betas=(0.9, 0.9))
    borrowed = VarianceGradientScaler(optimizer, moments="optimizer", warmup_steps=1)
    own = observe(VarianceGradientScaler(make_parameters((40,), (30,)), beta=0.9, warmup_steps=1), gradients)
    for present in gradients:
        give(borrowed.parameters, present)
        optimizer.step()
    borrowed.update_statistics()
    torch.testing.assert_close(borrowed.metrics(), own.metrics(), rtol=1e-4, atol=0)
    torch.testing.assert_close(
        borrowed.get_normalized_variance().per_tensor, own.get_normalized_variance().per_tensor, rtol=1e-4, atol=0
    )


def test_groups_may_average_differently_and_parameters_may_wait_for_their_first_gradient() -> None:
    parameters = [*make_parameters((40,), (2,)), *make_parameters((30,), dtype=torch.float64)]
    groups = [{"params": parameters[:2], "betas": (0.9, 0.9)}, {"params": parameters[2:], "betas": (0.7, 0.7)}]
    borrowed = VarianceGradientScaler(Adam(groups, lr=0.01), moments="optimizer", warmup_steps=1)
    streams = noisy(1.0, 1.0, 40, 20), noisy(1.0, 0.5, 30, 20, seed=1, dtype=torch.float64)
    for first, second in zip(*streams, strict=True):
        give(parameters, [*first, None, *second])
        borrowed.step()
    borrowed.update_statistics()
    own = [
        nsr_of(((part[0].float(),) for part in stream), (size,), beta=beta)
        for stream, size, beta in zip(streams, (40, 30), (0.9, 0.7), strict=True)
    ]
    found = borrowed.get_normalized_variance().per_tensor.tolist()
    assert found == pytest.approx([own[0], 0.0, own[1]], rel=1e-4)


def test_adams_averages_before_its_first_step_scale_nothing() -> None:
    optimizer = Adam(make_parameters((4,), (3,)), lr=0.1)
    scaler = VarianceGradientScaler(optimizer, moments="optimizer", warmup_steps=1)
    give(scaler.parameters, [torch.ones(4), None])
    before = scaler.parameters[0].detach().clone()
    scaler.step()
    assert scaler.get_scaling_factor().item() == 1.0
    torch.testing.assert_close(before - scaler.parameters[0], torch.full((4,), 0.1))


# --- the factor -------------------------------------------------------------------------------------------------


def test_the_factor_is_the_best_step_on_a_noisy_quadratic() -> None:
    """Loss ½|x|² with gradients of mean x, |x|² = N, and σ² = 4: of all steps, 1 / (1 + 4) of Newton's gains most."""
    draw = np.random.default_rng(0)
    start = np.ones(50)
    multiples = np.linspace(0.05, 0.5, 46)
    gradients = start + 2.0 * draw.normal(size=(20_000, 50))
    losses = [0.5 * ((start - multiple * gradients) ** 2).sum(1).mean() for multiple in multiples]
    scaler = VarianceGradientScaler(make_parameters((50,)), beta=0.998)
    observe(scaler, ((torch.tensor(gradient, dtype=torch.float32),) for gradient in gradients[:1_500]))
    assert multiples[int(np.argmin(losses))] == pytest.approx(0.2, abs=0.011)
    assert scaler.get_scaling_factor().item() == pytest.approx(0.2, rel=0.05)


def test_alpha_floor_and_cap_shape_the_factor() -> None:
    gradients = noisy(1.0, 1.0, 500, 400)
    ratio = nsr_of(gradients, (500,))

    def factor(**settings: Any) -> float:
        scaler = VarianceGradientScaler(make_parameters((500,)), **{"min_scale": 0.01} | settings)
        return observe(scaler, gradients).get_scaling_factor().item()

    assert factor() == pytest.approx(1 / (1 + ratio), rel=1e-12)
    assert factor(alpha=3.0) == pytest.approx(1 / (1 + 3 * ratio), rel=1e-12)
    assert factor(alpha=0.0) == 1.0
    assert factor(alpha=3.0, min_scale=0.4) == 0.4
    assert factor(max_nsr=0.25) == 0.8


def test_the_warm_up_leaves_training_untouched_to_the_last_bit() -> None:
    gradients = noisy(0.1, 1.0, 6, 14)
    plain, scaled = make_parameters((6,)), make_parameters((6,))
    optimizer = Adam(plain, lr=0.01)
    scaler = VarianceGradientScaler(Adam(scaled, lr=0.01), warmup_steps=12)
    for steps, present in enumerate(gradients, start=1):
        give(plain, present)
        give(scaled, present)
        optimizer.step()
        scaler.step()
        assert torch.equal(plain[0], scaled[0]) == (steps <= 12)
        assert (scaler.get_scaling_factor().item() < 1) == (steps > 12)


def test_figures_are_tensors_with_the_numbers_of_the_last_update() -> None:
    parameters = make_parameters((200,), (100,), (50,))
    scaler = VarianceGradientScaler(parameters, beta=0.9, warmup_steps=1, granularity="per_tensor")
    streams = [noisy(1.0, noise, size, 30, seed=size) for noise, size in ((0.5, 200), (1.0, 100), (2.0, 50))]
    observe(scaler, ([stream[t][0] for stream in streams] for t in range(30)))
    metrics, ratio = scaler.metrics(), scaler.get_normalized_variance()
    assert all(isinstance(value, Tensor) and value.ndim == 0 for value in metrics.values())
    assert metrics["vgs/nsr"].item() == (metrics["vgs/noise"] / metrics["vgs/signal"]).item()
    assert metrics["vgs/nsr_median"].item() == ratio.per_tensor[1].item() == pytest.approx(1.0, rel=0.3)
    assert metrics["vgs/nsr_max"].item() == ratio.per_tensor[2].item() == pytest.approx(4.0, rel=0.3)
    expected = sum(1 / (1 + value) for value in ratio.per_tensor.tolist()) / 3
    assert metrics["vgs/scale"].item() == pytest.approx(expected, rel=1e-12)


# --- the step ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("rate", ["number", "tensor"])
@pytest.mark.parametrize(
    ("name", "granularity"),
    # UPGD compares the utilities of all tensors, so factors that differ between tensors move its gates as well.
    [
        (name, kind)
        for name in OPTIMISERS
        for kind in ("global", "per_tensor")
        if (name, kind) != ("upgd", "per_tensor")
    ],
)
def test_the_step_shrinks_by_the_factor(name: str, rate: str, granularity: Any) -> None:
    """One step with and one without the scaler, from the same place with the same gradient and averages."""
    shapes, double = ((4, 3), (5,)), torch.float64

    def learning_rate() -> Any:
        return 0.01 if rate == "number" else torch.tensor(0.01, dtype=double)

    plain, scaled = make_parameters(*shapes, dtype=double), make_parameters(*shapes, dtype=double)
    reference = OPTIMISERS[name](plain, learning_rate())
    optimizer = OPTIMISERS[name](scaled, learning_rate())
    apply: Any = "learning_rate" if name == "upgd_whole" else "auto"
    scaler = VarianceGradientScaler(optimizer, granularity=granularity, apply=apply, warmup_steps=1)
    random = torch.Generator().manual_seed(7)

    def draw() -> list[Tensor]:
        return [
            1 + noise * torch.randn(shape, generator=random, dtype=double)
            for noise, shape in zip((1.0, 2.0), shapes, strict=True)
        ]

    for _ in range(30):
        observe(scaler, [draw()])
        if name not in PROPORTIONAL:  # a momentum that was gathered at full length would be part of the step
            give(plain, [parameter.grad for parameter in scaled])
            reference.step()
            optimizer.step()
    final = draw()
    give(plain, final)
    give(scaled, final)
    start = [parameter.detach().clone() for parameter in scaled]
    held = optimizer.param_groups[0]["lr"]
    reference.step()
    scaler.step()
    factors = scaler.get_scaling_factor().expand(2).tolist()
    assert all(0.1 < factor < 0.9 for factor in factors)
    assert (factors[0] == factors[1]) == (granularity == "global")
    for place, moved, free, factor in zip(start, scaled, plain, factors, strict=True):
        torch.testing.assert_close(moved - place, factor * (free - place), rtol=1e-9, atol=1e-14)
    assert optimizer.param_groups[0]["lr"] is held
    assert float(held) == float(learning_rate())


@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_a_lasting_factor_shrinks_the_way_that_momentum_covers(momentum: float) -> None:
    plain, scaled = make_parameters((6,), dtype=torch.float64), make_parameters((6,), dtype=torch.float64)
    start = scaled[0].detach().clone()
    gradients = noisy(0.0, 1.0, 6, 60, dtype=torch.float64)
    scaler = VarianceGradientScaler(SGD(scaled, 0.1, momentum=momentum), alpha=1e9, min_scale=0.25, warmup_steps=5)
    observe(scaler, gradients[:10])
    reference = SGD(plain, 0.1, momentum=momentum)
    for present in gradients:
        give(plain, present)
        give(scaled, present)
        reference.step()
        scaler.step()
    torch.testing.assert_close(scaled[0] - start, 0.25 * (plain[0] - start), rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("granularity", ["global", "per_tensor"])
def test_upgd_sees_the_scaled_gradients_and_shakes_and_decays_as_ever(granularity: Any) -> None:
    """The same as handing it gradients scaled beforehand: gates follow them, noise and decay stay as they are."""
    shapes = ((4, 3), (5,))
    plain, scaled = make_parameters(*shapes), make_parameters(*shapes)
    reference = UPGD(plain, 0.01)
    scaler = VarianceGradientScaler(UPGD(scaled, 0.01), granularity=granularity, warmup_steps=3)
    for t in range(12):
        gradients = [noisy(1.0, 1.0, 12, 1, t)[0][0].view(4, 3), noisy(1.0, 2.0, 5, 1, t)[0][0]]
        give(scaled, gradients)
        scaler.step()
        factors = scaler.get_scaling_factor().float().expand(2)
        give(plain, [factor * gradient for factor, gradient in zip(factors, gradients, strict=True)])
        reference.step()
    assert factors.max().item() < 0.9
    for mine, theirs in zip(scaled, plain, strict=True):
        assert torch.equal(mine, theirs)


def test_scaling_the_gradient_under_adam_would_change_nothing() -> None:
    """The reason to act on the learning rate: a tenth of every gradient moves the weights as far as the whole."""
    gradients = noisy(0.3, 1.0, 20, 60, dtype=torch.float64)
    ways = {}
    for apply in ("gradient", "learning_rate"):
        parameters = make_parameters((20,), dtype=torch.float64)
        start = parameters[0].detach().clone()
        scaler = VarianceGradientScaler(Adam(parameters, lr=0.01), apply=apply, alpha=1e9, warmup_steps=5)  # type: ignore[arg-type]
        observe(scaler, gradients[:10])
        for present in gradients:
            give(parameters, present)
            scaler.step()
        ways[apply] = parameters[0].detach() - start
    plain = make_parameters((20,), dtype=torch.float64)
    start, optimizer = plain[0].detach().clone(), Adam(plain, lr=0.01)
    for present in gradients:
        give(plain, present)
        optimizer.step()
    full = plain[0].detach() - start
    assert full.abs().max() > 0.1
    torch.testing.assert_close(ways["gradient"], full, rtol=0, atol=1e-6)
    torch.testing.assert_close(ways["learning_rate"], 0.1 * full, rtol=1e-9, atol=1e-12)


def test_scaled_gradients_are_clipped_after_scaling() -> None:
    """(3, 4) · ½ has norm 2.5 and is clipped to (0.6, 0.8); clipped first it would end as (0.3, 0.4)."""
    parameters = [nn.Parameter(torch.zeros(2))]
    scaler = VarianceGradientScaler(SGD(parameters, lr=1.0), alpha=1e9, min_scale=0.5, warmup_steps=1)
    observe(scaler, [(torch.tensor([3.0, 4.0]),), (torch.tensor([-3.0, -4.0]),)] * 3)
    give(parameters, [torch.tensor([3.0, 4.0])])
    scaler.update_statistics()
    scaler.scale_gradients()
    assert nn.utils.clip_grad_norm_(parameters, 1.0).item() == pytest.approx(2.5)
    scaler.optimizer_step()
    torch.testing.assert_close(parameters[0].detach(), torch.tensor([-0.6, -0.8]))


@pytest.mark.parametrize("name", ["sgd", "adam"])
def test_statistics_know_nothing_of_scaling_and_clipping(name: str) -> None:
    gradients = noisy(1.0, 1.0, 30, 40)
    raw = observe(VarianceGradientScaler(make_parameters((30,)), warmup_steps=5), gradients)
    scaler = VarianceGradientScaler(OPTIMISERS[name](make_parameters((30,)), 0.01), warmup_steps=5)
    for present in gradients:
        give(scaler.parameters, present)
        scaler.update_statistics()
        scaler.scale_gradients()
        nn.utils.clip_grad_norm_(scaler.parameters, 0.1)
        scaler.optimizer_step()
    assert scaler.get_scaling_factor().item() < 0.8
    torch.testing.assert_close(scaler.metrics(), raw.metrics(), rtol=0, atol=0)


@pytest.mark.parametrize("granularity", ["global", "per_tensor"])
@pytest.mark.parametrize("rate", ["number", "tensor"])
def test_learning_rate_schedules_run_as_without_the_scaler(
    rate: str, granularity: Any, recwarn: pytest.WarningsRecorder
) -> None:
    def schedule_of(scaled: bool) -> list[float]:
        parameters = make_parameters((6,), (3,))
        optimizer = AdamW(parameters, lr=0.3 if rate == "number" else torch.tensor(0.3))
        scaler = VarianceGradientScaler(optimizer, warmup_steps=2, granularity=granularity)
        scheduler = torch.optim.lr_scheduler.SequentialLR(
            optimizer,
            [
                torch.optim.lr_scheduler.LinearLR(optimizer, 0.1, 1.0, 5),
                torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9),
            ],
            [5],
        )
        seen = []
        for first, second in zip(noisy(0.1, 1.0, 6, 20), noisy(0.1, 2.0, 3, 20), strict=True):
            give(parameters, [*first, *second])
            (scaler if scaled else optimizer).step()
            seen.append(float(optimizer.param_groups[0]["lr"]))
            scheduler.step()
        assert (scaler.get_scaling_factor().max().item() < 1) == scaled
        return seen

    assert schedule_of(scaled=True) == schedule_of(scaled=False)
    assert not recwarn.list


def test_a_learning_rate_shared_by_groups_is_scaled_once() -> None:
    shared = torch.tensor(0.01, dtype=torch.float64)
    parameters = make_parameters((5,), (5,), dtype=torch.float64)
    optimizer = Adam([{"params": parameters[:1]}, {"params": parameters[1:]}], lr=shared)
    assert optimizer.param_groups[0]["lr"] is optimizer.param_groups[1]["lr"] is shared
    scaler = VarianceGradientScaler(optimizer, warmup_steps=2)
    observe(scaler, (parts * 2 for parts in noisy(1.0, 1.0, 5, 9, dtype=torch.float64)))
    before = [parameter.detach().clone() for parameter in parameters]
    scaler.optimizer_step()
    # Adam's first step is lr · sign(g).
    for place, parameter in zip(before, parameters, strict=True):
        expected = 0.01 * scaler.get_scaling_factor().item()
        torch.testing.assert_close((parameter - place).abs(), torch.full_like(place, expected), rtol=1e-6, atol=0)
    assert shared.item() == 0.01


def test_a_step_that_fails_leaves_the_learning_rate_as_it_was() -> None:
    class Failing(Adam):
        def step(self, closure: Any = None) -> Any:  # noqa: ARG002
            raise RuntimeError("no step")

    rate = torch.tensor(0.01)
    scaler = VarianceGradientScaler(Failing(make_parameters((5,)), lr=rate), warmup_steps=2)
    observe(scaler, noisy(1.0, 1.0, 5, 9))
    with pytest.raises(RuntimeError, match="no step"):
        scaler.optimizer_step()
    assert torch.equal(rate, torch.tensor(0.01))


def test_without_an_optimiser_the_gradients_are_scaled_and_nothing_moves() -> None:
    parameters = make_parameters((5,))
    before = parameters[0].detach().clone()
    scaler = observe(VarianceGradientScaler(parameters, warmup_steps=2), noisy(1.0, 1.0, 5, 9))
    give(parameters, [torch.ones(5)])
    scaler.step()
    assert parameters[0].grad is not None
    torch.testing.assert_close(parameters[0].grad, scaler.get_scaling_factor().float().expand(5), rtol=0, atol=0)
    assert scaler.get_scaling_factor().item() < 0.8
    assert torch.equal(parameters[0], before)


# --- missing gradients ------------------------------------------------------------------------------------------


def test_a_tensor_without_a_gradient_keeps_its_own_clock_and_has_no_part_in_the_factor() -> None:
    """The second tensor's gradients come at every third step only."""
    first, second = noisy(1.0, 1.0, 40, 60), noisy(1.0, 3.0, 40, 20, seed=1)
    scaler = VarianceGradientScaler(make_parameters((40,), (40,), (3,)), beta=0.95, warmup_steps=10)
    alone = VarianceGradientScaler(make_parameters((40,)), beta=0.95, warmup_steps=10)
    other = VarianceGradientScaler(make_parameters((40,)), beta=0.95, warmup_steps=10)
    for step, present in enumerate(first):
        comes = step % 3 == 0
        observe(alone, [present])
        if comes:
            observe(other, [second[step // 3]])
        observe(scaler, [(*present, second[step // 3][0] if comes else None, None)])
        ratio = scaler.get_normalized_variance()
        expected = [part.get_normalized_variance().total.item() for part in (alone, other)]
        assert ratio.per_tensor.tolist() == [*expected, 0.0]
        if not comes or step // 3 < 10:  # a tensor in its warm-up has no part in it either
            assert ratio.total.item() == expected[0]
        else:
            noise, signal = ([part.metrics()[f"vgs/{name}"] for part in (alone, other)] for name in ("noise", "signal"))
            assert ratio.total.item() == pytest.approx((sum(noise) / sum(signal)).item(), rel=1e-12)
    assert expected[1] > 5 * expected[0]


@pytest.mark.parametrize("granularity", ["global", "per_tensor"])
@pytest.mark.parametrize("name", ["sgd", "adam", "upgdw"])
def test_steps_without_any_gradient_move_nothing(name: str, granularity: Any) -> None:
    parameters = make_parameters((5,), (2,))
    scaler = VarianceGradientScaler(OPTIMISERS[name](parameters, 0.1), warmup_steps=1, granularity=granularity)
    before = [parameter.detach().clone() for parameter in parameters]
    scaler.step()
    assert all(torch.equal(a, b) for a, b in zip(before, parameters, strict=True))
    observe(scaler, ((*parts, None) for parts in noisy(1.0, 1.0, 5, 5)))
    scaler.scale_gradients()
    scaler.optimizer_step()
    assert not torch.equal(before[0], parameters[0])
    assert torch.equal(before[1], parameters[1])


# --- state ------------------------------------------------------------------------------------------------------


class Training:
    """A small network on noisy data, trained through the scaler."""

    def __init__(self, optimiser: str, seed: int = 0, **settings: Any) -> None:
        torch.manual_seed(seed)
        self.model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))
        self.optimizer = OPTIMISERS[optimiser](self.model.parameters(), torch.tensor(0.01))
        self.scaler = VarianceGradientScaler(self.optimizer, **{"warmup_steps": 5, "beta": 0.9} | settings)

    def run(self, first: int, last: int) -> list[Tensor]:
        for step in range(first, last):
            random = torch.Generator().manual_seed(step)
            inputs, noise = torch.randn(16, 4, generator=random), torch.randn(16, 1, generator=random)
            self.optimizer.zero_grad(set_to_none=True)
            (self.model(inputs) - inputs[:, :1] - noise).square().mean().backward()
            self.scaler.step()
        return [parameter.detach().clone() for parameter in self.model.parameters()]


@pytest.mark.parametrize("granularity", ["global", "per_tensor"])
@pytest.mark.parametrize(
    ("name", "moments"), [("sgd", "own"), ("adam", "own"), ("adam", "optimizer"), ("upgdw", "own")]
)
def test_a_restored_run_goes_on_bit_for_bit(name: str, moments: str, granularity: str) -> None:
    whole = Training(name, moments=moments, granularity=granularity)
    middle = whole.run(0, 20)
    saved = {
        "model": copy.deepcopy(whole.model.state_dict()),
        "optimizer": copy.deepcopy(whole.optimizer.state_dict()),
        "scaler": whole.scaler.state_dict(),
    }
    factor = whole.scaler.get_scaling_factor()
    end = whole.run(20, 40)
    again = Training(name, seed=1, moments=moments, granularity=granularity)
    again.model.load_state_dict(saved["model"])
    again.optimizer.load_state_dict(saved["optimizer"])
    again.scaler.load_state_dict(saved["scaler"])
    assert torch.equal(again.scaler.get_scaling_factor(), factor)
    assert not any(torch.equal(a, b) for a, b in zip(middle, end, strict=True))
    for mine, theirs in zip(again.run(20, 40), end, strict=True):
        assert torch.equal(mine, theirs)
    torch.testing.assert_close(again.scaler.metrics(), whole.scaler.metrics(), rtol=0, atol=0)


def test_a_saved_state_is_a_copy_of_plain_tensors() -> None:
    training = Training("adam")
    training.run(0, 10)
    saved = training.scaler.state_dict()
    before = {name: value.clone() for name, value in saved.items()}
    training.run(10, 12)
    assert all(isinstance(value, Tensor) and value.is_contiguous() for value in saved.values())
    assert all(torch.equal(saved[name], before[name]) for name in saved)
    other = Training("adam")
    other.scaler.load_state_dict(saved)
    other.run(0, 2)
    assert all(torch.equal(saved[name], before[name]) for name in saved)


def test_a_deep_copy_trains_on_by_itself_and_alike() -> None:
    original = Training("adam")
    original.run(0, 12)
    twin = copy.deepcopy(original)
    mine = {tensor.data_ptr() for tensor in (*original.scaler._state().values(), *original.scaler.parameters)}
    assert not mine & {tensor.data_ptr() for tensor in (*twin.scaler._state().values(), *twin.scaler.parameters)}
    ends = original.run(12, 24), twin.run(12, 24)
    assert all(torch.equal(a, b) for a, b in zip(*ends, strict=True))
    assert twin.scaler.parameters[0] is next(twin.model.parameters())


def test_a_state_of_other_parameters_is_refused() -> None:
    state = VarianceGradientScaler(make_parameters((4,))).state_dict()
    with pytest.raises(ConfigError, match=r"saved mean\.0 has shape \(4,\), this one needs \(5,\)"):
        VarianceGradientScaler(make_parameters((5,))).load_state_dict(state)
    with pytest.raises(ConfigError, match=r"differs from this one's in mean\.1; .* \(2 here\)"):
        VarianceGradientScaler(make_parameters((4,), (4,))).load_state_dict(state)
    with pytest.raises(ConfigError, match=r"in mean\.0; .* the same moments \('optimizer' here\)"):
        VarianceGradientScaler(Adam(make_parameters((4,))), moments="optimizer").load_state_dict(state)


# --- running on a device ----------------------------------------------------------------------------------------


class NoReading(TorchDispatchMode):
    """Fails where a value would be brought to the host."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.name()
        assert name not in ("aten::_local_scalar_dense", "aten::item", "aten::nonzero", "aten::equal"), name
        return func(*args, **kwargs or {})


@pytest.mark.parametrize("granularity", ["global", "per_tensor"])
@pytest.mark.parametrize(("name", "moments"), [("sgd", "own"), ("adam_fused", "own"), ("adam_fused", "optimizer")])
def test_a_step_reads_no_value_from_the_device(name: str, moments: Any, granularity: Any) -> None:
    parameters = make_parameters((4, 3), (5,), (2,))
    optimizer = OPTIMISERS[name](parameters, 0.01 if name == "sgd" else torch.tensor(0.01))
    scaler = VarianceGradientScaler(optimizer, granularity=granularity, moments=moments, warmup_steps=1)
    with NoReading():
        for _ in range(3):
            give(parameters, [torch.randn(4, 3), torch.randn(5), None])
            scaler.step()
            scaler.metrics()
    with pytest.raises(AssertionError, match="_local_scalar_dense"), NoReading():
        scaler.get_scaling_factor().sum().item()


@pytest.mark.parametrize("granularity", ["global", "per_tensor"])
def test_statistics_and_scaling_compile_into_one_graph(granularity: Any) -> None:
    """`fullgraph` fails where Python would have to look at a value; the counters must advance inside the graph."""
    eager, compiled = (
        VarianceGradientScaler(make_parameters((4, 3), (5,)), granularity=granularity, warmup_steps=2) for _ in range(2)
    )
    step = torch.compile(compiled.step, backend="eager", fullgraph=True)
    for t in range(6):
        present = [noisy(1.0, 1.0, 12, 1, t)[0][0].view(4, 3), noisy(1.0, 2.0, 5, 1, t)[0][0]]
        for scaler, act in ((eager, eager.step), (compiled, step)):
            give(scaler.parameters, present)
            act()
        torch.testing.assert_close(compiled.metrics(), eager.metrics())
        assert all(
            torch.allclose(a.grad, b.grad)  # type: ignore[arg-type]
            for a, b in zip(eager.parameters, compiled.parameters, strict=True)
        )
    assert eager.get_scaling_factor().max().item() < 1


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("granularity", ["global", "per_tensor"])
@pytest.mark.parametrize("name", ["sgd", "adam_fused"])
def test_a_recorded_cuda_graph_steps_like_eager(name: str, granularity: Any) -> None:
    def make() -> VarianceGradientScaler:
        parameters = [nn.Parameter(parameter.detach().cuda()) for parameter in make_parameters((64, 32), (32,))]
        if name == "sgd":
            optimizer: Optimizer = SGD(parameters, lr=0.01)  # torch's SGD reads a learning rate that is a tensor
        else:
            optimizer = Adam(parameters, torch.tensor(0.01, device="cuda"), fused=True, capturable=True)
        for parameter in parameters:
            parameter.grad = torch.zeros_like(parameter)
        return VarianceGradientScaler(optimizer, granularity=granularity, warmup_steps=3)

    def fill(scaler: VarianceGradientScaler, step: int) -> None:
        for index, parameter in enumerate(scaler.parameters):
            random = torch.Generator().manual_seed(100 * step + index)
            assert parameter.grad is not None
            parameter.grad.copy_(1 + (index + 1) * torch.randn(parameter.shape, generator=random))

    eager, recorded = make(), make()
    for step in range(3):
        fill(eager, step)
        eager.step()
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        for step in range(3):
            fill(recorded, step)
            torch.cuda.synchronize()
            torch.cuda.set_sync_debug_mode("error")
            try:
                recorded.step()
            finally:
                torch.cuda.set_sync_debug_mode("default")
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        recorded.step()
    for step in range(3, 20):
        fill(eager, step)
        eager.step()
        fill(recorded, step)
        graph.replay()
    torch.testing.assert_close(recorded.metrics(), eager.metrics())
    assert eager.get_scaling_factor().max().item() < 1
    for mine, theirs in zip(recorded.parameters, eager.parameters, strict=True):
        torch.testing.assert_close(mine, theirs)


# --- wrong use --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"alpha": -1.0}, "alpha: -1 is out of range"),
        ({"beta": 1.0}, "beta: 1 is out of range"),
        ({"beta": 0.0}, "beta: 0 is out of range"),
        ({"min_scale": 0.0}, "min_scale: 0 is out of range"),
        ({"min_scale": 1.5}, "min_scale: 1.5 is out of range"),
        ({"max_nsr": math.nan}, "max_nsr: nan is out of range"),
        ({"warmup_steps": 0}, "warmup_steps: 0 is out of range"),
        ({"granularity": "layer"}, "granularity: 'layer' is not one of global, per_tensor"),
        ({"apply": "lr"}, "apply: 'lr' is not one of"),
        ({"moments": "adam"}, "moments: 'adam' is not one of"),
        ({"apply": "learning_rate"}, "apply: 'learning_rate' needs the optimiser"),
        ({"moments": "optimizer"}, "moments: parameters alone cannot give 'optimizer' moments"),
    ],
)
def test_wrong_settings_are_named(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        VarianceGradientScaler(make_parameters((3,)), **settings)


def test_wrong_parameters_are_named() -> None:
    parameters = make_parameters((3,))
    with pytest.raises(ConfigError, match="no parameters"):
        VarianceGradientScaler([])
    with pytest.raises(ConfigError, match="given twice"):
        VarianceGradientScaler(parameters * 2)
    with pytest.raises(ConfigError, match=r"parameter 1 is torch\.complex64"):
        VarianceGradientScaler([*parameters, torch.zeros(2, dtype=torch.complex64)])
    with pytest.raises(ConfigError, match="parameter 0 is dict"):
        VarianceGradientScaler([{"params": parameters}])  # type: ignore[list-item]
    with pytest.raises(ConfigError, match="parameters on cpu and meta"):
        VarianceGradientScaler([*parameters, torch.zeros(2, device="meta")])
    with pytest.raises(ConfigError, match="built from parameters"):
        VarianceGradientScaler(parameters).optimizer_step()


def test_optimisers_that_do_not_fit_are_named() -> None:
    parameters = make_parameters((3,))
    with pytest.raises(ConfigError, match="'auto' does not know LBFGS; say 'gradient'"):
        VarianceGradientScaler(torch.optim.LBFGS(parameters))
    with pytest.raises(ConfigError, match="Adamax cannot give 'optimizer' moments"):
        VarianceGradientScaler(Adamax(parameters), moments="optimizer")
    with pytest.raises(ConfigError, match=r"betas\[0\] of the optimiser: 0 is out of range"):
        VarianceGradientScaler(Adam(parameters, betas=(0.0, 0.9)), moments="optimizer")
    optimizer = SGD(parameters)
    scaler = VarianceGradientScaler(optimizer)
    optimizer.add_param_group({"params": make_parameters((2,))})
    with pytest.raises(ConfigError, match="the optimiser has 2 parameters, 1 when the scaler was built"):
        scaler.step()


def test_a_sparse_gradient_is_refused() -> None:
    table = nn.Embedding(10, 3, sparse=True)
    table(torch.tensor([1, 2])).sum().backward()
    with pytest.raises(ConfigError, match=r"parameter 0 of shape \(10, 3\) has a sparse gradient"):
        VarianceGradientScaler(table.parameters()).update_statistics()
