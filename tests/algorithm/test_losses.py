"""Policy losses against hand-worked values, sampled expectations and the whole-batch gradient."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor, nn

from tailguard.algorithm.losses import (
    awr_weights,
    bc_loss,
    clipped_surrogate,
    entropy_loss,
    guard_log_ratio,
    kl_k1,
    kl_k3,
    masked_mean,
)


def f64(*values: float) -> Tensor:
    return torch.tensor(values, dtype=torch.float64)


# --- clipped surrogate -----------------------------------------------------------------------------------------------


def test_clipped_surrogate_by_hand() -> None:
    """−min(r A, clip(r) A) with ε = 0.2 for every side of the clip and both signs of the advantage."""
    ratio = f64(1.0, 1.5, 1.5, 0.5, 0.5, 1.1)
    advantage = f64(2.0, 2.0, -2.0, 2.0, -2.0, -1.0)
    result = clipped_surrogate(ratio.log(), advantage, 0.2)
    torch.testing.assert_close(result.loss, f64(-2.0, -2.4, 3.0, -1.0, 1.6, 1.1))
    assert result.clipped.tolist() == [0.0, 1.0, 1.0, 1.0, 1.0, 0.0]
    torch.testing.assert_close(result.ratio, ratio)


def test_clipped_surrogate_gradient_raises_good_actions_and_stops_at_the_clip() -> None:
    """d/d log r of −r A is −r A where unclipped; zero where the clip binds."""
    log_ratio = f64(1.0, 1.5, 1.5, 0.5, 0.5).log().requires_grad_()
    loss = clipped_surrogate(log_ratio, f64(2.0, 2.0, -2.0, 2.0, -2.0), torch.tensor(0.2)).loss
    (gradient,) = torch.autograd.grad(loss.sum(), log_ratio)
    torch.testing.assert_close(gradient, f64(-2.0, 0.0, 3.0, -1.0, 0.0))


def test_clipped_surrogate_passes_gradcheck() -> None:
    log_ratio = f64(-0.5, -0.1, 0.05, 0.3, 0.7).requires_grad_()
    advantages = f64(1.0, -2.0, 0.5, -1.0, 3.0)
    assert torch.autograd.gradcheck(lambda value: clipped_surrogate(value, advantages, 0.2).loss, (log_ratio,))


# --- the log-ratio guard ---------------------------------------------------------------------------------------------


def test_guard_clamps_and_counts() -> None:
    guarded = guard_log_ratio(f64(0.1, -30.0, 25.0, 19.9))
    torch.testing.assert_close(guarded.log_ratio, f64(0.1, -20.0, 20.0, 19.9))
    assert guarded.clamped_share.item() == 0.5
    assert bool(guarded.finite)


def test_guard_catches_a_nan_that_leaves_all_gradients_finite() -> None:
    new_log_prob = f64(-1.0, -1.2, -0.8).requires_grad_()
    old_log_prob = f64(-1.1, math.nan, -0.9)
    guarded = guard_log_ratio(new_log_prob - old_log_prob)
    loss = clipped_surrogate(guarded.log_ratio, f64(1.0, 1.0, -1.0), 0.2).loss.mean()
    (gradient,) = torch.autograd.grad(loss, new_log_prob)
    assert math.isnan(loss.item())
    assert bool(gradient.isfinite().all())
    assert not bool(guarded.finite)


@pytest.mark.parametrize("poison", [math.nan, math.inf, -math.inf])
def test_guard_flags_every_non_finite_value_but_not_in_rows_that_do_not_count(poison: float) -> None:
    log_ratio = f64(0.0, poison, 30.0, 0.5)
    assert not bool(guard_log_ratio(log_ratio).finite)
    masked = guard_log_ratio(log_ratio, weights=f64(1.0, 0.0, 1.0, 1.0))
    assert bool(masked.finite)
    assert masked.clamped_share.item() == pytest.approx(1 / 3)


# --- KL --------------------------------------------------------------------------------------------------------------


def sample_log_ratio(count: int = 400_000) -> tuple[Tensor, float, float]:
    """Actions of old = N(0, 1) under new = N(0.4, 1.3²), with KL(old‖new) and KL(new‖old) in closed form."""
    action = torch.randn(count, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    old, new = torch.distributions.Normal(f64(0.0), f64(1.0)), torch.distributions.Normal(f64(0.4), f64(1.3))
    forward = math.log(1.3) + (1 + 0.4**2) / (2 * 1.3**2) - 0.5
    backward = -math.log(1.3) + (1.3**2 + 0.4**2) / 2 - 0.5
    return new.log_prob(action) - old.log_prob(action), forward, backward


def test_kl_estimators_agree_with_kl_of_old_from_new() -> None:
    log_ratio, forward, backward = sample_log_ratio()
    assert abs(forward - backward) > 0.04
    assert kl_k1(log_ratio).mean().item() == pytest.approx(forward, abs=2e-3)
    assert kl_k3(log_ratio).mean().item() == pytest.approx(forward, abs=2e-3)


@pytest.mark.parametrize(("shift", "k1_noise", "k3_noise"), [(0.1, 20.0, 1.42), (1.0, 2.0, 1.70)])
def test_k3_is_never_negative_and_varies_less_than_k1(shift: float, k1_noise: float, k3_noise: float) -> None:
    """Old N(0, 1), new N(shift, 1): KL = shift²/2; the noise is the standard deviation over the KL (Schulman 2020)."""
    action = torch.randn(1_000_000, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    log_ratio = shift * action - shift**2 / 2
    kl = shift**2 / 2
    assert kl_k3(log_ratio).min().item() >= 0.0
    assert kl_k1(log_ratio).std().item() / kl == pytest.approx(k1_noise, rel=0.02)
    assert kl_k3(log_ratio).std().item() / kl == pytest.approx(k3_noise, rel=0.03)
    # No cancellation near zero: x²/2 to leading order.
    assert kl_k3(f64(1e-6)).item() == pytest.approx(0.5e-12, rel=1e-3)


# --- entropy, BC, AWR ------------------------------------------------------------------------------------------------


def test_minimising_the_entropy_loss_raises_the_entropy() -> None:
    log_sd = f64(0.0, 0.5).requires_grad_()
    entropy = 0.5 * math.log(2 * math.pi * math.e) + log_sd
    (gradient,) = torch.autograd.grad(entropy_loss(entropy, torch.zeros_like(entropy)).sum(), log_sd)
    assert gradient.tolist() == [-1.0, -1.0]


def test_entropy_loss_refuses_more_than_one_entropy_a_sample() -> None:
    with pytest.raises(ValueError, match=r"shape \(8, 3\), log-probability \(8,\)"):
        entropy_loss(torch.zeros(8, 3), torch.zeros(8))


def test_awr_weights_by_hand() -> None:
    weights = awr_weights(f64(0.0, 1.0, math.log(20), 1e6, -1e6) * 2, beta=2.0)
    torch.testing.assert_close(weights, f64(1.0, math.e, 20.0, 20.0, 0.0))


def test_awr_weight_of_an_enormous_advantage_is_the_cap_without_any_gradient() -> None:
    """exp before the clamp would give the same weight and a NaN gradient."""
    advantages = torch.tensor([1e6, 1.0], requires_grad=True)
    weights = awr_weights(advantages, beta=1.0)
    assert weights.tolist() == pytest.approx([20.0, math.e])
    assert not weights.requires_grad
    naive = (advantages / 1.0).exp().clamp(max=20.0)
    (gradient,) = torch.autograd.grad(naive.sum(), advantages)
    assert math.isnan(gradient[0].item())


def test_bc_loss_pulls_towards_the_given_actions_in_proportion_to_the_weights() -> None:
    log_prob = f64(-1.0, -2.0).requires_grad_()
    loss = bc_loss(log_prob, f64(3.0, 0.5))
    torch.testing.assert_close(loss, f64(3.0, 1.0))
    (gradient,) = torch.autograd.grad(loss.sum(), log_prob)
    assert gradient.tolist() == [-3.0, -0.5]
    torch.testing.assert_close(bc_loss(log_prob), f64(1.0, 2.0))


# --- weighted means and microbatches ---------------------------------------------------------------------------------


def test_masked_mean_ignores_rows_without_weight_even_if_not_finite() -> None:
    values = f64(1.0, math.nan, 3.0, math.inf).requires_grad_()
    mean = masked_mean(values, f64(1.0, 0.0, 1.0, 0.0))
    (gradient,) = torch.autograd.grad(mean, values)
    assert mean.item() == 2.0
    assert gradient.tolist() == [0.5, 0.0, 0.5, 0.0]


def test_masked_mean_of_nothing_is_zero() -> None:
    assert masked_mean(f64(5.0, 7.0), f64(0.0, 0.0)).item() == 0.0


def test_masked_mean_without_weights_is_the_mean() -> None:
    assert masked_mean(f64(1.0, 2.0, 6.0)).item() == 3.0
    assert masked_mean(f64(1.0, 2.0, 6.0), total=9.0).item() == 1.0


@pytest.mark.parametrize("split", [[60], [10, 25, 25], [1] * 60, [59, 1]])
def test_any_split_into_microbatches_gives_the_whole_batchs_gradient(split: list[int]) -> None:
    torch.manual_seed(0)
    network = nn.Sequential(nn.Linear(5, 8), nn.Tanh(), nn.Linear(8, 1)).double()
    inputs, advantages = torch.randn(60, 5).double(), torch.randn(60).double()
    weights = (torch.rand(60) > 0.3).double()

    def gradient(parts: list[int]) -> Tensor:
        network.zero_grad()
        for x, a, w in zip(inputs.split(parts), advantages.split(parts), weights.split(parts), strict=True):
            loss = clipped_surrogate(0.3 * network(x).squeeze(-1), a, 0.2).loss
            masked_mean(loss, w, total=weights.sum()).backward()
        return torch.cat([parameter.grad.flatten() for parameter in network.parameters() if parameter.grad is not None])

    network.zero_grad()
    loss = clipped_surrogate(0.3 * network(inputs).squeeze(-1), advantages, 0.2).loss
    loss[weights == 1].mean().backward()
    whole = torch.cat([parameter.grad.flatten() for parameter in network.parameters() if parameter.grad is not None])
    assert whole.abs().max().item() > 1e-3
    torch.testing.assert_close(gradient(split), whole, atol=1e-12, rtol=0)


def test_policy_losses_trace_to_one_graph_without_host_sync() -> None:
    def loss(log_ratio: Tensor, advantages: Tensor, weights: Tensor, clip_range: Tensor) -> Tensor:
        guarded = guard_log_ratio(log_ratio, weights=weights)
        surrogate = clipped_surrogate(guarded.log_ratio, advantages, clip_range)
        cloning = bc_loss(log_ratio, awr_weights(advantages, 0.5))
        total = masked_mean(surrogate.loss + 0.1 * cloning + kl_k3(guarded.log_ratio), weights)
        return torch.where(guarded.finite, total, torch.zeros_like(total))

    arguments = (torch.randn(6), torch.randn(6), torch.ones(6), torch.tensor(0.2))
    compiled = torch.compile(loss, backend="eager", fullgraph=True)
    torch.testing.assert_close(compiled(*arguments), loss(*arguments))
