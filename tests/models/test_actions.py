from __future__ import annotations

import math

import numpy as np
import pytest
import torch
import torch.distributions as D
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import integrate, stats
from torch import Tensor

from tailguard.envs.protocol import Box, Discrete
from tailguard.errors import ConfigError
from tailguard.models.actions import (
    BOUND_MARGIN,
    ActionHead,
    CategoricalHead,
    GaussianHead,
    bounded_log_std,
    gaussian_kl,
    make_action_head,
    squashed_gaussian_entropy,
)

FEATURES = 6


def _box(low: list[float], high: list[float]) -> Box:
    return Box(torch.tensor(low, dtype=torch.float64), torch.tensor(high, dtype=torch.float64))


BOX = _box([-1.0, 0.0, -3.0], [1.0, 5.0, -1.0])
UNBOUNDED = _box([-math.inf] * 3, [math.inf] * 3)


def _gaussian(squash: bool = True, **options: object) -> GaussianHead:
    torch.manual_seed(0)
    return GaussianHead(FEATURES, BOX, squash=squash, **options).double()  # type: ignore[arg-type]


def _gaussian_parameters(seed: int, *shape: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    mean = torch.randn(*shape, 3, generator=generator, dtype=torch.float64)
    log_std = torch.rand(*shape, 3, generator=generator, dtype=torch.float64) * 2.0 - 1.7
    return torch.cat((mean, log_std), dim=-1)


def _torch_gaussian(parameters: Tensor, squash: bool) -> D.Distribution:
    """The distribution of the environment's action, by torch.distributions."""
    mean, log_std = parameters.chunk(2, dim=-1)
    base = D.Independent(D.Normal(mean, log_std.exp()), 1)
    if not squash:
        return base
    centre, half_width = (BOX.high + BOX.low) / 2, (BOX.high - BOX.low) / 2
    tanh, affine = D.TanhTransform(cache_size=1), D.AffineTransform(centre, half_width, event_dim=1)
    return D.TransformedDistribution(base, [tanh, affine])


def _torch_categoricals(parameters: Tensor, sizes: tuple[int, ...]) -> list[D.Categorical]:
    return [D.Categorical(logits=logits) for logits in torch.split(parameters, list(sizes), dim=-1)]


# Gaussian


def test_actions_at_their_bounds_are_those_without_a_slope() -> None:
    """A squashed one within 1 % of the half-width, where the slope is below 2 % of its largest; a clipped one beyond
    the box. Actions that nothing bounds never are."""
    raw = torch.linspace(-8.0, 8.0, 1601, dtype=torch.float64).unsqueeze(1).expand(-1, 3)
    squashed = _gaussian().at_bounds(raw)
    assert torch.equal(squashed, raw.tanh().abs() >= 0.99)
    slope = 1 - raw.tanh() ** 2
    assert bool((squashed == (slope <= 1 - 0.99**2)).all())
    clipped = _gaussian(squash=False).at_bounds(raw)
    assert torch.equal(clipped, (raw <= BOX.low) | (raw >= BOX.high))
    assert not GaussianHead(FEATURES, UNBOUNDED, squash=False).at_bounds(raw).any()


@pytest.mark.parametrize("squash", [True, False])
def test_gaussian_log_prob_is_the_density_of_the_raw_action(squash: bool) -> None:
    head, parameters = _gaussian(squash), _gaussian_parameters(1, 4, 5)
    raw = torch.randn(4, 5, 3, dtype=torch.float64) * 2
    mean, log_std = (part.numpy() for part in parameters.chunk(2, dim=-1))
    expected = stats.norm.logpdf(raw.numpy(), mean, np.exp(log_std)).sum(-1)
    np.testing.assert_allclose(head.log_prob(parameters, raw).numpy(), expected, rtol=0, atol=1e-12)


@pytest.mark.parametrize("squash", [True, False])
def test_gaussian_log_prob_env_is_the_density_of_the_environments_action(squash: bool) -> None:
    head, parameters = _gaussian(squash), _gaussian_parameters(2, 50)
    raw = head.sample(parameters, torch.Generator().manual_seed(0))
    action = head.to_env(raw) if squash else raw
    expected = _torch_gaussian(parameters, squash).log_prob(action)
    torch.testing.assert_close(head.log_prob_env(parameters, raw), expected, rtol=0, atol=1e-8)


def test_density_of_the_squashed_action_integrates_to_one() -> None:
    head = GaussianHead(FEATURES, _box([-2.0], [7.0])).double()
    parameters = torch.tensor([0.4, -0.3], dtype=torch.float64)

    def density(action: float) -> float:
        raw = torch.atanh(torch.tensor([(action - 2.5) / 4.5], dtype=torch.float64))
        return head.log_prob_env(parameters, raw).exp().item()

    total, _ = integrate.quad(density, -2.0, 7.0)
    assert total == pytest.approx(1.0, abs=1e-8)


@pytest.mark.parametrize(("mean", "std", "entropy"), [(0.0, 1.0, 0.66980), (1.0, 0.5, -0.25339), (2.0, 1.0, -1.36666)])
def test_squashed_entropy_known_values(mean: float, std: float, entropy: float) -> None:
    tensor = torch.tensor([mean, math.log(std)], dtype=torch.float64)
    assert squashed_gaussian_entropy(tensor[0], tensor[1]).item() == pytest.approx(entropy, abs=6e-6)
    assert squashed_gaussian_entropy(*tensor.float()).item() == pytest.approx(entropy, abs=1e-5)


@pytest.mark.parametrize(("std", "tolerance"), [(0.01, 1e-10), (0.3, 3e-8), (1.0, 2e-7), (1.6, 3e-7), (math.e, 3e-5)])
@pytest.mark.parametrize("mean", [-3.0, 0.0, 0.7, 5.0])
def test_squashed_entropy_equals_adaptive_quadrature(mean: float, std: float, tolerance: float) -> None:
    def integrand(z: float) -> float:
        u = mean + std * z
        log_cosh = abs(u) + math.log1p(math.exp(-2 * abs(u))) - math.log(2)
        return stats.norm.pdf(z) * -2 * log_cosh

    kink = -mean / std
    points = [kink] if abs(kink) < 12 else None
    slope, _ = integrate.quad(integrand, -12, 12, points=points, epsabs=1e-12, epsrel=1e-12, limit=400)
    expected = stats.norm.entropy(mean, std) + slope
    result = squashed_gaussian_entropy(*torch.tensor([mean, math.log(std)], dtype=torch.float64))
    assert result.item() == pytest.approx(expected, abs=tolerance)


def test_squashed_entropy_peaks_below_log_2_at_a_finite_std() -> None:
    """A Gaussian's entropy grows without bound in σ; this one is largest at σ = 0.8744 (SciPy's minimiser)."""
    log_std = torch.linspace(-3, 1, 40_001, dtype=torch.float64)
    entropy = squashed_gaussian_entropy(torch.zeros_like(log_std), log_std)
    assert entropy.max().item() == pytest.approx(0.683636, abs=1e-6)
    assert log_std[entropy.argmax()].exp().item() == pytest.approx(0.8744, abs=2e-4)


@pytest.mark.parametrize("squash", [True, False])
def test_gaussian_entropy_equals_monte_carlo(squash: bool) -> None:
    head, parameters = _gaussian(squash), _gaussian_parameters(3, 2)
    draws = 200_000
    many = parameters.unsqueeze(1).expand(-1, draws, -1)
    surprise = -head.log_prob_env(many, head.sample(many, torch.Generator().manual_seed(0)))
    error = surprise.std(dim=1) / math.sqrt(draws)
    assert ((head.entropy(parameters) - surprise.mean(dim=1)).abs() < 4 * error).all()


def test_gaussian_entropy_gradient_equals_finite_difference() -> None:
    head, parameters = _gaussian(), _gaussian_parameters(4, 3).requires_grad_()
    assert torch.autograd.gradcheck(head.entropy, (parameters,))


@pytest.mark.parametrize("squash", [True, False])
def test_gaussian_kl_equals_torch_distributions(squash: bool) -> None:
    head, old, new = _gaussian(squash), _gaussian_parameters(5, 20), _gaussian_parameters(6, 20)
    expected = D.kl_divergence(_torch_gaussian(old, False), _torch_gaussian(new, False))
    torch.testing.assert_close(head.kl(old, new), expected, rtol=1e-12, atol=1e-12)
    assert (head.kl(old, new) - head.kl(new, old)).abs().min() > 1e-3
    assert not head.kl(old, old).any()


def test_kl_between_squashed_policies_equals_monte_carlo_on_the_environments_actions() -> None:
    old = torch.tensor([0.3, -0.4], dtype=torch.float64)
    new = torch.tensor([0.0, 0.1], dtype=torch.float64)
    head = GaussianHead(FEATURES, _box([0.0], [4.0])).double()
    draws = 400_000
    raw = head.sample(old.expand(draws, -1), torch.Generator().manual_seed(0))
    log_ratio = head.log_prob_env(old, raw) - head.log_prob_env(new, raw)
    error = (log_ratio.std() / math.sqrt(draws)).item()
    assert head.kl(old, new).item() == pytest.approx(log_ratio.mean().item(), abs=4 * error)


def test_kl_of_nearly_equal_policies_keeps_its_digits_in_float32() -> None:
    # For a small change e of log σ the divergence is e² - 2e³/3 + ...; the plain formula returns ±6e-8 here.
    old, new = torch.tensor(-1.0), torch.tensor(-1.0 + 2.0**-13)
    kl = gaussian_kl(torch.tensor(0.0), old, torch.tensor(0.0), new).item()
    assert kl == pytest.approx(2.0**-26, rel=1e-3)


def test_gaussian_samples_follow_the_distribution_and_the_generator() -> None:
    head = _gaussian()
    parameters = _gaussian_parameters(7, 1).expand(20_000, -1)
    raw = head.sample(parameters, torch.Generator().manual_seed(1))
    assert torch.equal(raw, head.sample(parameters, torch.Generator().manual_seed(1)))
    assert not torch.equal(raw, head.sample(parameters, torch.Generator().manual_seed(2)))
    mean, log_std = (part[0].numpy() for part in parameters.chunk(2, dim=-1))
    for i in range(3):
        assert stats.kstest(raw[:, i].numpy(), "norm", (mean[i], np.exp(log_std[i]))).pvalue > 1e-3
    assert np.abs(np.corrcoef(raw.numpy().T) - np.eye(3)).max() < 4 / math.sqrt(20_000)


def test_squashed_actions_fill_the_box_and_never_leave_it() -> None:
    # Scaled without care, some of these pass their bound by one unit in the last place.
    generator = torch.Generator().manual_seed(0)
    low = torch.rand(1000, generator=generator) - 0.5
    high = low + torch.rand(1000, generator=generator) + 0.01
    head = GaussianHead(FEATURES, Box(low, high))
    bottom, middle, top = head.to_env(torch.tensor([[-20.0], [0.0], [20.0]]).expand(-1, 1000))
    assert (bottom >= low).all()
    assert (top <= high).all()
    torch.testing.assert_close(torch.stack((bottom, middle, top)), torch.stack((low, (low + high) / 2, high)))


@settings(max_examples=60, deadline=None)
@given(raw=st.lists(st.floats(-3.7, 3.7), min_size=3, max_size=3))
def test_from_env_undoes_to_env(raw: list[float]) -> None:
    head, tensor = _gaussian(), torch.tensor(raw, dtype=torch.float64)
    torch.testing.assert_close(head.from_env(head.to_env(tensor)), tensor, rtol=0, atol=1e-9)


def test_from_env_keeps_actions_on_a_bound_finite() -> None:
    head = _gaussian()
    limit = math.atanh(1 - BOUND_MARGIN)
    for bound, sign in ((BOX.low, -1), (BOX.high, 1)):
        raw = head.from_env(bound)
        torch.testing.assert_close(raw, torch.full((3,), sign * limit, dtype=torch.float64))
        half_width = (BOX.high - BOX.low) / 2
        assert ((head.to_env(raw) - bound).abs() <= 1.0001 * BOUND_MARGIN * half_width).all()


def test_unsquashed_actions_are_clipped_to_the_box_and_need_no_bounds() -> None:
    head = _gaussian(squash=False)
    raw = torch.tensor([2.0, 3.0, -5.0], dtype=torch.float64)
    assert head.to_env(raw).tolist() == [1.0, 3.0, -3.0]
    assert torch.equal(head.from_env(raw), raw)
    free = GaussianHead(FEATURES, UNBOUNDED, squash=False)
    assert torch.equal(free.to_env(torch.full((3,), 1e6)), torch.full((3,), 1e6))


@pytest.mark.parametrize("squash", [True, False])
@pytest.mark.parametrize("log_std", [-5.0, 1.0])
@pytest.mark.parametrize("mean", [-50.0, 50.0])
def test_values_and_gradients_stay_finite_at_extremes_in_float32(mean: float, log_std: float, squash: bool) -> None:
    head = _gaussian(squash).float()
    parameters = torch.tensor([mean] * 3 + [log_std] * 3, requires_grad=True)
    old = torch.tensor([mean + 1.0] * 3 + [-log_std - 4.0] * 3)
    raw = parameters.detach()[:3] + 3 * math.exp(log_std)
    for value in (
        head.log_prob(parameters, raw),
        head.log_prob_env(parameters, raw),
        head.entropy(parameters),
        head.kl(old, parameters),
    ):
        (gradient,) = torch.autograd.grad(value, parameters)
        assert torch.isfinite(value)
        assert torch.isfinite(gradient).all()


@pytest.mark.parametrize("raw", [-20.0, -9.0, 9.0, 20.0])
def test_float32_densities_keep_their_digits_far_out(raw: float) -> None:
    """log(1 - tanh²(20)) is -38.6, while 1 - tanh(9)² is already rounding noise in float32."""
    head = _gaussian()
    parameters, value = torch.tensor([raw - 0.5] * 3 + [0.3] * 3), torch.full((3,), raw)
    exact = head.log_prob_env(parameters.double(), value.double()).item()
    result = head.float().log_prob_env(parameters, value).item()
    assert result == pytest.approx(exact, rel=1e-6)
    # 1 - tanh² -> 4 exp(-2|u|): three dimensions of half-widths 1, 2.5 and 1, at half a σ-unit from the mean.
    by_hand = 3 * (stats.norm.logpdf(raw, raw - 0.5, math.exp(0.3)) - math.log(4) + 2 * abs(raw)) - math.log(2.5)
    assert exact == pytest.approx(by_hand, rel=1e-6)


@settings(max_examples=100, deadline=None)
@given(free=st.floats(-1e4, 1e4), init=st.floats(-4.9, 0.9))
def test_log_std_stays_inside_its_bounds_and_keeps_its_gradient(free: float, init: float) -> None:
    tensor = torch.tensor(free, dtype=torch.float32, requires_grad=True)
    log_std = bounded_log_std(tensor, init, -5.0, 1.0)
    (gradient,) = torch.autograd.grad(log_std, tensor)
    assert -5.0 <= log_std.item() <= 1.0 + 1e-6
    assert gradient.item() > 0
    assert abs(log_std.item() - init) <= abs(free) + 1e-5


def test_log_std_starts_at_init_with_slope_one() -> None:
    free = torch.tensor([-1e-4, 0.0, 1e-4], dtype=torch.float64, requires_grad=True)
    log_std = bounded_log_std(free, -0.5, -5.0, 1.0)
    (slope,) = torch.autograd.grad(log_std.sum(), free)
    torch.testing.assert_close(log_std, -0.5 + free, rtol=0, atol=1e-11)
    torch.testing.assert_close(slope, torch.ones_like(slope), rtol=0, atol=1e-7)


def test_global_std_is_one_learned_number_and_state_std_follows_the_features() -> None:
    features = torch.randn(5, FEATURES, dtype=torch.float64)
    for std, varies in (("global", False), ("state", True)):
        head = _gaussian(std=std, log_std_init=-1.0)
        with torch.no_grad():
            head.linear.weight.mul_(100)
        log_std = head(features)[:, 3:]
        assert (log_std.std(dim=0).max() > 1e-2) == varies
        assert (log_std == -1.0).all() != varies
        gradients = torch.autograd.grad(head.entropy(head(features)).sum(), list(head.parameters()))
        assert all(gradient.abs().max() > 0 for gradient in gradients)


def test_gaussian_parameters_are_the_means_then_the_log_stds() -> None:
    head, features = _gaussian(log_std_init=-0.7), torch.randn(4, 2, FEATURES, dtype=torch.float64)
    mean = features @ head.linear.weight.T + head.linear.bias
    assert head.dist_params_size == 6
    torch.testing.assert_close(head(features), torch.cat((mean, torch.full_like(mean, -0.7)), dim=-1))
    assert torch.equal(head.mode(head(features)), head(features)[..., :3])


# Categorical


SIZES = (3, 2, 5)


def _categorical_parameters(seed: int, *shape: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return 2 * torch.randn(*shape, sum(SIZES), generator=generator, dtype=torch.float64)


def test_multi_discrete_is_the_product_of_independent_choices() -> None:
    head = CategoricalHead(FEATURES, Discrete(SIZES)).double()
    old, new = _categorical_parameters(0, 4, 5), _categorical_parameters(1, 4, 5)
    raw = head.sample(old, torch.Generator().manual_seed(0))
    olds, news = _torch_categoricals(old, SIZES), _torch_categoricals(new, SIZES)
    log_prob = sum(part.log_prob(raw[..., k]) for k, part in enumerate(olds))
    kl = sum(D.kl_divergence(p, q) for p, q in zip(olds, news, strict=True))
    torch.testing.assert_close(head.log_prob(old, raw), log_prob)
    torch.testing.assert_close(head.log_prob_env(old, raw), log_prob)
    torch.testing.assert_close(head.entropy(old), sum(part.entropy() for part in olds))
    torch.testing.assert_close(head.kl(old, new), kl)
    torch.testing.assert_close(head.mode(old), torch.stack([part.probs.argmax(-1) for part in olds], dim=-1))


def test_probabilities_of_all_joint_choices_sum_to_one() -> None:
    head = CategoricalHead(FEATURES, Discrete(SIZES)).double()
    every = torch.cartesian_prod(*(torch.arange(size) for size in SIZES))
    parameters = _categorical_parameters(2).expand(len(every), -1)
    probabilities = head.log_prob(parameters, every).exp()
    assert probabilities.sum().item() == pytest.approx(1.0, abs=1e-12)
    entropy = -(probabilities * probabilities.log()).sum().item()
    assert head.entropy(parameters[0]).item() == pytest.approx(entropy, abs=1e-12)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_categories_are_drawn_as_often_as_their_probabilities_say(dtype: torch.dtype) -> None:
    head = CategoricalHead(FEATURES, Discrete(SIZES))
    draws = 60_000
    parameters = _categorical_parameters(3).to(dtype).expand(draws, -1)
    raw = head.sample(parameters, torch.Generator().manual_seed(0))
    assert raw.dtype == torch.int64
    assert torch.equal(raw, head.sample(parameters, torch.Generator().manual_seed(0)))
    for k, part in enumerate(_torch_categoricals(parameters[0].double(), SIZES)):
        counts = torch.bincount(raw[:, k], minlength=SIZES[k]).numpy()
        assert stats.chisquare(counts, draws * part.probs.numpy()).pvalue > 1e-3
    # Independent of each other: the joint table of the first and last choice is the product of its margins.
    table = stats.contingency.crosstab(raw[:, 0].numpy(), raw[:, 2].numpy()).count
    assert stats.chi2_contingency(table).pvalue > 1e-3


def test_an_impossible_category_is_never_drawn_and_extreme_logits_stay_finite() -> None:
    head = CategoricalHead(FEATURES, Discrete((3,)))
    logits = torch.tensor([0.0, -math.inf, 0.0]).expand(20_000, -1)
    assert not (head.sample(logits, torch.Generator().manual_seed(0)) == 1).any()
    extreme = torch.tensor([[1e4, 0.0, -1e4]], requires_grad=True)
    other = torch.tensor([[0.0, 1e4, -1e4]])
    for value in (head.log_prob(extreme, torch.tensor([[2]])), head.entropy(extreme), head.kl(extreme, other)):
        (gradient,) = torch.autograd.grad(value.sum(), extreme)
        assert torch.isfinite(value).all()
        assert torch.isfinite(gradient).all()


def test_a_choice_outside_its_own_range_is_an_error_not_its_neighbours_probability() -> None:
    head = CategoricalHead(FEATURES, Discrete((3, 2)))
    with pytest.raises(RuntimeError, match="out of bounds"):
        head.log_prob(torch.zeros(1, 5), torch.tensor([[3, 0]]))


def test_discrete_actions_pass_to_the_environment_unchanged() -> None:
    head = CategoricalHead(FEATURES, Discrete(SIZES))
    raw = torch.tensor([[2, 1, 4]])
    assert torch.equal(head.to_env(raw), raw)
    assert torch.equal(head.from_env(raw.to(torch.int32)), raw)


# Both


@pytest.mark.parametrize("space", [BOX, Discrete(SIZES)])
def test_the_first_policy_is_nearly_the_same_in_every_state(space: Box | Discrete) -> None:
    torch.manual_seed(0)
    head = make_action_head(64, space)
    parameters = head(torch.randn(256, 64))
    neutral = head(torch.zeros(256, 64))
    assert 0 < head.kl(neutral, parameters).max() < 0.02
    if isinstance(space, Discrete):
        assert not neutral.any()


def _leading_shapes(head: ActionHead, features: Tensor) -> list[torch.Size]:
    parameters = head(features)
    raw = head.sample(parameters)
    assert raw.shape == (*features.shape[:-1], head.raw_size)
    assert parameters.shape == (*features.shape[:-1], head.dist_params_size)
    values = (head.log_prob(parameters, raw), head.log_prob_env(parameters, raw), head.entropy(parameters))
    return [value.shape for value in (*values, head.kl(parameters, parameters))]


@pytest.mark.parametrize("space", [BOX, Discrete(SIZES)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_one_number_per_sample(space: Box | Discrete, dtype: torch.dtype) -> None:
    """A [T, N] batch must give [T, N] entropies: anything wider counts the entropy several times in the loss."""
    head = make_action_head(FEATURES, space).to(dtype)
    assert set(_leading_shapes(head, torch.randn(7, 4, FEATURES, dtype=dtype))) == {torch.Size((7, 4))}
    assert set(_leading_shapes(head, torch.randn(FEATURES, dtype=dtype))) == {torch.Size(())}


@pytest.mark.parametrize("space", [BOX, Discrete(SIZES)])
def test_log_prob_gradient_equals_finite_difference(space: Box | Discrete) -> None:
    torch.manual_seed(0)
    head = make_action_head(FEATURES, space).double()
    parameters = torch.randn(3, head.dist_params_size, dtype=torch.float64, requires_grad=True)
    old = torch.randn(3, head.dist_params_size, dtype=torch.float64)
    raw = head.sample(parameters.detach())
    assert torch.autograd.gradcheck(lambda p: head.log_prob(p, raw), (parameters,))
    assert torch.autograd.gradcheck(lambda p: head.kl(old, p), (parameters,))


@pytest.mark.parametrize("space", [BOX, Discrete(SIZES)])
def test_autocast_does_not_narrow_the_distribution(space: Box | Discrete) -> None:
    torch.manual_seed(0)
    head = make_action_head(FEATURES, space)
    features = torch.randn(32, FEATURES)
    parameters = head(features)
    raw = head.sample(parameters)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert torch.equal(head(features), parameters)
        log_prob, entropy = head.log_prob(parameters, raw), head.entropy(parameters)
    torch.testing.assert_close(log_prob, head.log_prob(parameters, raw), rtol=0, atol=1e-6)
    torch.testing.assert_close(entropy, head.entropy(parameters), rtol=0, atol=1e-6)


@pytest.mark.parametrize("space", [BOX, Discrete(SIZES)])
def test_acting_and_learning_are_traced_as_one_graph(space: Box | Discrete) -> None:
    torch.manual_seed(0)
    head = make_action_head(FEATURES, space)
    features = torch.randn(4, FEATURES)
    raw = head.sample(head(features))

    def everything(features: Tensor, raw: Tensor) -> tuple[Tensor, ...]:
        old = head(features)
        new = old + 0.1 * old.square()
        draw = head.to_env(head.sample(old))
        return head.log_prob(new, raw), head.log_prob_env(new, raw), head.entropy(new), head.kl(old, new), draw

    traced = torch.compile(everything, backend="eager", fullgraph=True)
    for value, expected in zip(traced(features, raw)[:-1], everything(features, raw)[:-1], strict=True):
        torch.testing.assert_close(value, expected)


def test_settings_that_cannot_work_are_refused_with_the_way_out() -> None:
    with pytest.raises(ConfigError, match=r"action 0: bounds \[-inf, inf\].*squash to false"):
        GaussianHead(FEATURES, UNBOUNDED)
    with pytest.raises(ConfigError, match=r"action 1: low 2.0 is not below high 2.0"):
        GaussianHead(FEATURES, _box([0.0, 2.0], [1.0, 2.0]))
    with pytest.raises(ConfigError, match=r"'beta'.*global or state"):
        GaussianHead(FEATURES, BOX, std="beta")  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match=r"log_std_init 1.0.*\(-5.0, 1.0\)"):
        GaussianHead(FEATURES, BOX, log_std_init=1.0)
    with pytest.raises(ConfigError, match="remove squash, std"):
        make_action_head(FEATURES, Discrete((2,)), std="global", squash=True)
    with pytest.raises(ConfigError, match=r"\(3, 0\)"):
        CategoricalHead(FEATURES, Discrete((3, 0)))


@pytest.mark.parametrize("low", [-1.0, -0.25])
def test_the_squashed_action_has_the_slope_of_its_formula(low: float) -> None:
    """c + h·tanh(u), clipped to the box, and its slope h·(1 − tanh²(u)), also where tanh is 1 in all digits."""
    head = GaussianHead(FEATURES, _box([low, -2.0], [1.0, 7.0])).double()
    raw = torch.linspace(-25, 25, 41, dtype=torch.float64).reshape(-1, 1).repeat(1, 2).requires_grad_()
    action = head.to_env(raw)
    with torch.no_grad():
        assert torch.equal(action, head.to_env(raw))
    weights = torch.linspace(0.5, 2.0, 82, dtype=torch.float64).reshape(41, 2)
    (found,) = torch.autograd.grad((weights * action).sum(), raw)
    half_width = torch.tensor([0.5 * (1.0 - low), 4.5], dtype=torch.float64)
    expected = weights * half_width / raw.detach().cosh().square()
    torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-15)
