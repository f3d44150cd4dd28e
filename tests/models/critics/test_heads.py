"""Critic heads: projections, decoding, and predictions that stay put when the return scale moves."""

from __future__ import annotations

import math
from collections.abc import Callable
from itertools import pairwise
from typing import Literal

import numpy as np
import pytest
import torch
from scipy.stats import norm
from torch import Tensor

from tailguard.errors import ConfigError
from tailguard.models.critics import (
    CategoricalCritic,
    Critic,
    DistributionalCritic,
    QuantileCritic,
    ScalarCritic,
    combine_quantiles,
    combine_values,
    hl_gauss,
    midpoints,
    twin_pessimism,
    two_hot,
)
from tailguard.returns import MomentsChange

HEADS: dict[str, type[Critic]] = {
    "scalar": ScalarCritic,
    "quantile": QuantileCritic,
    "categorical": CategoricalCritic,
}

PROJECTIONS: tuple[Literal["two_hot", "hl_gauss"], ...] = ("two_hot", "hl_gauss")


def support(low: float = -10.0, high: float = 10.0, count: int = 51) -> Tensor:
    return torch.linspace(low, high, count, dtype=torch.float64)


def moments(probabilities: Tensor, atoms: Tensor) -> tuple[float, float]:
    mean = float(probabilities @ atoms)
    return mean, math.sqrt(float(probabilities @ (atoms - mean).square()))


def change(mean: Tensor, std: Tensor, new_mean: Tensor, new_std: Tensor) -> MomentsChange:
    return MomentsChange(mean, std, new_mean, new_std, (new_mean - mean).abs() / std, new_std / std)


def gaussian_critic(sd: float) -> CategoricalCritic:
    """Reads one feature h and predicts N(h, sd²): its log-density (z h − z²/2) / sd² + const is linear in h."""
    critic = CategoricalCritic(1).double()
    with torch.no_grad():
        critic.layer.weight.copy_(critic.atoms.unsqueeze(-1) / sd**2)
        critic.layer.bias.copy_(-critic.atoms.square() / (2 * sd**2))
    return critic


# --- projections -----------------------------------------------------------------------------------------------------


def test_two_hot_keeps_mean_and_mass() -> None:
    probabilities = two_hot(torch.tensor([3.3], dtype=torch.float64), support())
    mean, _ = moments(probabilities, support())
    assert mean == pytest.approx(3.3, abs=1e-12)
    assert float(probabilities.sum()) == pytest.approx(1.0, abs=1e-12)
    # 3.3 lies between the atoms 3.2 (index 33) and 3.6 (index 34), a quarter of the way.
    assert probabilities[33].item() == pytest.approx(0.75, abs=1e-12)
    assert probabilities[34].item() == pytest.approx(0.25, abs=1e-12)


@pytest.mark.parametrize("index", [0, 1, 25, 49, 50])
def test_two_hot_puts_a_sample_on_an_atom_wholly_there(index: int) -> None:
    expected = torch.zeros(51, dtype=torch.float64)
    expected[index] = 1.0
    torch.testing.assert_close(two_hot(support()[index : index + 1], support()), expected, atol=1e-12, rtol=0)


def test_two_hot_equals_a_loop_over_samples() -> None:
    generator = torch.Generator().manual_seed(0)
    samples = torch.randn(7, 5, generator=generator, dtype=torch.float64) * 6
    atoms = support(-8.0, 8.0, 21)
    expected = np.zeros((7, 21))
    for row in range(7):
        for y in samples[row].tolist():
            b = (min(max(y, -8.0), 8.0) + 8.0) / 0.8
            lower = min(int(b), 19)
            expected[row, lower] += (1 - (b - lower)) / 5
            expected[row, lower + 1] += (b - lower) / 5
    np.testing.assert_allclose(two_hot(samples, atoms).numpy(), expected, atol=1e-12)


def test_hl_gauss_is_the_binned_normal_of_the_paper() -> None:
    probabilities = hl_gauss(torch.tensor([3.3], dtype=torch.float64), support())
    edges = np.linspace(-10.2, 10.2, 52)
    cdf = norm.cdf((edges - 3.3) / 0.3)
    np.testing.assert_allclose(probabilities.numpy(), np.diff(cdf) / (cdf[-1] - cdf[0]), atol=1e-12)
    mean, sd = moments(probabilities, support())
    assert mean == pytest.approx(3.3, abs=1e-5)
    # Width ¾ · 0.4 and Sheppard's 0.4²/12 for the bins: √(0.09 + 0.01333).
    assert sd == pytest.approx(0.3215, abs=5e-5)


def test_hl_gauss_is_pulled_in_at_the_end_of_the_support() -> None:
    mean, _ = moments(hl_gauss(torch.tensor([9.8], dtype=torch.float64), support()), support())
    assert mean - 9.8 == pytest.approx(-0.062, abs=1e-3)


@pytest.mark.parametrize("project", [two_hot, hl_gauss])
def test_projection_clamps_to_the_support_and_nowhere_else(project: Callable[[Tensor, Tensor], Tensor]) -> None:
    outside = project(torch.tensor([[-1e6], [1e6]], dtype=torch.float64), support())
    ends = project(torch.tensor([[-10.0], [10.0]], dtype=torch.float64), support())
    torch.testing.assert_close(outside, ends)
    torch.testing.assert_close(outside.sum(-1), torch.ones(2, dtype=torch.float64))


@pytest.mark.parametrize("project", [two_hot, hl_gauss])
def test_projection_of_many_samples_is_the_mean_of_their_projections(
    project: Callable[[Tensor, Tensor], Tensor],
) -> None:
    samples = torch.tensor([-3.0, 0.1, 4.4, 9.0], dtype=torch.float64)
    singly = torch.stack([project(sample.view(1), support()) for sample in samples]).mean(0)
    torch.testing.assert_close(project(samples, support()), singly, atol=1e-14, rtol=0)


# --- decoding --------------------------------------------------------------------------------------------------------


def test_targets_are_sorted_row_by_row_and_a_nan_stays_visible() -> None:
    generator = torch.Generator().manual_seed(0)
    samples = torch.randn(5, 7, 3, generator=generator).permute(1, 2, 0)
    samples[2, 1, 0] = torch.nan
    found = QuantileCritic(4, 6).encode(samples)
    assert found[2, 1, -1].isnan()
    for row, given in zip(found.flatten(0, 1), samples.flatten(0, 1), strict=True):
        assert row[row.isfinite()].tolist() == sorted(value for value in given.tolist() if value == value)


def test_quantile_critic_has_midpoint_levels_and_its_own_quantiles() -> None:
    critic = QuantileCritic(4, 5)
    torch.testing.assert_close(critic.tau, torch.tensor([0.1, 0.3, 0.5, 0.7, 0.9]))
    output = torch.tensor([[3.0, 1.0, 2.0, 5.0, 4.0]])
    assert critic.quantiles(output, 5) is output
    assert critic.mean(output).item() == 3.0


@pytest.mark.parametrize("count", [1, 3, 8, 40])
def test_quantile_critic_interpolates_other_levels_linearly(count: int) -> None:
    critic = QuantileCritic(4, 7)
    output = torch.tensor([4.0, -1.0, 0.0, 3.0, 9.0, 1.0, 2.0])
    levels = (np.arange(count) + 0.5) / count
    expected = np.interp(levels, (np.arange(7) + 0.5) / 7, np.sort(output.numpy()))
    np.testing.assert_allclose(critic.quantiles(output, count).numpy(), expected, atol=1e-5)


@pytest.mark.parametrize("projection", PROJECTIONS)
def test_categorical_quantiles_recover_the_samples_distribution(projection: Literal["two_hot", "hl_gauss"]) -> None:
    levels = (np.arange(2000) + 0.5) / 2000
    samples = torch.from_numpy(norm.ppf(levels)) * 1.3 + 0.77
    critic = CategoricalCritic(1, projection=projection).double()
    encoded = critic.encode(samples)
    quantiles = critic.quantiles(encoded.clamp(min=1e-30).log(), 32).numpy()
    expected = 0.77 + 1.3 * norm.ppf((np.arange(32) + 0.5) / 32)
    np.testing.assert_allclose(quantiles, expected, atol=0.02)
    # As encoded, the distribution is wider by the projection's variance, which quantiles() takes out.
    added = {"two_hot": 0.16 / 6, "hl_gauss": 0.09 + 0.16 / 12}[projection]
    _, encoded_sd = moments(encoded, critic.atoms)
    assert encoded_sd == pytest.approx(math.sqrt(float(samples.var(correction=0)) + added), rel=1e-3)


def test_hl_gauss_of_a_standard_normal_is_too_wide_until_decoded() -> None:
    samples = torch.from_numpy(norm.ppf((np.arange(20_000) + 0.5) / 20_000))
    critic = CategoricalCritic(1, projection="hl_gauss").double()
    encoded = critic.encode(samples)
    _, sd = moments(encoded, critic.atoms)
    assert sd == pytest.approx(1.0505, abs=2e-4)
    quantiles = critic.quantiles(encoded.clamp(min=1e-30).log(), 2000)
    # CVaR of N(0, 1) at 5 % is −2.0627.
    assert quantiles[:100].mean().item() == pytest.approx(-2.0627, abs=0.01)


@pytest.mark.parametrize("projection", PROJECTIONS)
def test_a_certain_return_has_no_spread(projection: Literal["two_hot", "hl_gauss"]) -> None:
    critic = CategoricalCritic(1, projection=projection).double()
    logits = critic.encode(torch.tensor([2.0], dtype=torch.float64)).clamp(min=1e-30).log()
    torch.testing.assert_close(
        critic.quantiles(logits, 9), torch.full((9,), 2.0, dtype=torch.float64), atol=0.02, rtol=0
    )


def test_scalar_critic_knows_no_distribution() -> None:
    critic = ScalarCritic(4)
    assert not isinstance(critic, DistributionalCritic)
    torch.testing.assert_close(critic.encode(torch.tensor([[1.0, 3.0]])), torch.tensor([[2.0]]))


# --- the return scale moves ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["scalar", "quantile", "categorical"])
def test_raw_predictions_survive_a_scale_update(kind: Literal["scalar", "quantile", "categorical"]) -> None:
    torch.manual_seed(1)
    critic = HEADS[kind](8).double()
    features = torch.randn(16, 8, dtype=torch.float64) * 3

    def raw(critic: Critic, mean: Tensor, std: Tensor) -> Tensor:
        output = critic(features)
        predictions = [critic.mean(output).unsqueeze(-1)]
        if isinstance(critic, DistributionalCritic):
            predictions.append(critic.quantiles(output, 32))
        return mean + std * torch.cat(predictions, -1)

    mean, std = torch.tensor(0.0, dtype=torch.float64), torch.tensor(1.0, dtype=torch.float64)
    before = raw(critic, mean, std)
    generator = torch.Generator().manual_seed(2)
    for _ in range(200):
        new_mean = mean + 0.1 * torch.randn((), generator=generator, dtype=torch.float64)
        new_std = std * torch.exp(0.1 * torch.randn((), generator=generator, dtype=torch.float64))
        critic.rescale(change(mean, std, new_mean, new_std))
        mean, std = new_mean, new_std
    assert abs(float(mean)) > 0.1
    assert abs(float(std) - 1) > 0.1
    torch.testing.assert_close(raw(critic, mean, std), before, atol=1e-9, rtol=0)


def test_the_support_survives_ten_thousand_updates_of_a_float32_head() -> None:
    critic = CategoricalCritic(4, gain=3.0)
    features = torch.randn(32, 4, generator=torch.Generator().manual_seed(0))
    before = critic.mean(critic(features))
    scales = torch.exp(torch.linspace(0, 1, 10_001).sin())
    for old, new in pairwise(scales):
        critic.rescale(change(torch.tensor(0.0), old, torch.tensor(0.0), new))
    after = critic.mean(critic(features)) * scales[-1] / scales[0]
    assert before.abs().max().item() > 1.0
    torch.testing.assert_close(after, before, atol=1e-6, rtol=1e-6)
    expected = torch.tensor([-10.0, 10.0], dtype=torch.float64) * (scales[0].double() / scales[-1].double())
    torch.testing.assert_close(critic.support, expected, atol=1e-9, rtol=0)


@pytest.mark.parametrize("new", [(-20.0, 20.0), (-8.0, 12.0), (-5.0, 5.0), (-13.7, 9.1)])
@pytest.mark.parametrize(("sd", "tolerance"), [(1.0, 2e-3), (0.4, 0.05)])
def test_moving_the_support_keeps_what_the_head_predicts(new: tuple[float, float], sd: float, tolerance: float) -> None:
    critic = gaussian_critic(sd)
    features = torch.linspace(-1.5, 1.5, 7, dtype=torch.float64).unsqueeze(-1)
    critic.set_support(*new)
    assert (critic.atoms[0].item(), critic.atoms[-1].item()) == pytest.approx(new)
    output = critic(features)
    torch.testing.assert_close(critic.mean(output), features.squeeze(-1), atol=tolerance, rtol=0)
    variance = (output.softmax(-1) * (critic.atoms - features).square()).sum(-1)
    torch.testing.assert_close(variance, torch.full_like(variance, sd**2), atol=5 * tolerance, rtol=0)


def test_a_wider_support_gets_a_thin_tail_even_from_a_full_edge() -> None:
    critic = CategoricalCritic(1).double()
    torch.nn.init.zeros_(critic.layer.weight)
    critic.set_support(-20.0, 20.0)
    probabilities = critic(torch.zeros(1, dtype=torch.float64)).softmax(-1)
    # A uniform prediction on [−10, 10]: 25 of the new atoms lie inside with one unit of mass each; the first one
    # outside, at 10.4, is half a spacing beyond the edge, and the mass falls by e from atom to atom.
    tail = 2 * math.exp(-0.5) / (1 - math.exp(-1))
    outside = probabilities[critic.atoms.abs() > 10.0].sum().item()
    assert outside == pytest.approx(tail / (25 + tail), rel=1e-5)


def test_support_drift_measures_stretch_and_shift() -> None:
    critic = CategoricalCritic(1)
    assert critic.support_drift().item() == 0.0
    zero, one = torch.tensor(0.0), torch.tensor(1.0)
    critic.rescale(change(zero, one, zero, torch.tensor(0.5)))
    assert critic.support_drift().item() == pytest.approx(1.0)
    critic.set_support(critic.v_min, critic.v_max)
    assert critic.support_drift().item() == 0.0
    critic.rescale(change(zero, one, torch.tensor(-10.0), one))
    assert critic.support_drift().item() == pytest.approx(1.0)


def test_the_support_is_part_of_the_saved_state() -> None:
    critic = CategoricalCritic(3)
    critic.set_support(-4.0, 6.0)
    restored = CategoricalCritic(3)
    restored.load_state_dict(critic.state_dict())
    torch.testing.assert_close(restored.atoms, critic.atoms)


# --- twins, construction ---------------------------------------------------------------------------------------------


def test_twin_min_is_pessimistic_by_s_over_root_pi_and_mean_is_not() -> None:
    generator = torch.Generator().manual_seed(0)
    first, second = torch.randn(2, 400_000, generator=generator, dtype=torch.float64) * 2.0
    assert combine_values(first, second, "min").mean().item() == pytest.approx(-2.0 / math.sqrt(math.pi), abs=0.01)
    assert combine_values(first, second, "mean").mean().item() == pytest.approx(0.0, abs=0.01)
    gap = combine_values(first, second, "mean") - combine_values(first, second, "min")
    torch.testing.assert_close(twin_pessimism(first, second), gap)


def test_combined_quantiles_average_and_stay_above_the_element_wise_minimum() -> None:
    first, second = torch.tensor([-1.0, 1.0]), torch.tensor([0.0, 0.0])
    assert combine_quantiles(first, second).mean().item() == 0.0
    assert torch.minimum(first, second).mean().item() == -0.5


@pytest.mark.parametrize("kind", ["scalar", "quantile", "categorical"])
def test_heads_start_near_zero_and_twins_differ(kind: Literal["scalar", "quantile", "categorical"]) -> None:
    torch.manual_seed(0)
    features = torch.randn(64, 32)
    first, second = HEADS[kind](32), HEADS[kind](32)
    values = first.mean(first(features)), second.mean(second(features))
    assert values[0].abs().max().item() < 0.3
    assert (values[0] - values[1]).abs().max().item() > 1e-4


def test_wrong_settings_are_refused() -> None:
    with pytest.raises(ConfigError, match="0 quantiles"):
        QuantileCritic(4, 0)
    with pytest.raises(ConfigError, match="1 atoms"):
        CategoricalCritic(4, atoms=1)
    with pytest.raises(ConfigError, match="projection 'one_hot'"):
        CategoricalCritic(4, projection="one_hot")  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="is empty"):
        CategoricalCritic(4).set_support(1.0, 1.0)
    with pytest.raises(ConfigError, match="mode 'max'"):
        combine_values(torch.zeros(1), torch.zeros(1), "max")  # type: ignore[arg-type]


def test_midpoints_are_the_centres_of_equal_shares() -> None:
    torch.testing.assert_close(midpoints(4), torch.tensor([0.125, 0.375, 0.625, 0.875]))
