"""SR(λ) learns the distribution of the return; λ-returns have the right mean and too thin a tail."""

from __future__ import annotations

import itertools
import math
from collections import defaultdict
from collections.abc import Callable

import numpy as np
import pytest
import torch
from scipy import stats
from torch import Tensor

from tailguard.returns import draw_continuations, gae, lambda_returns, sr_lambda_targets

# ---------------------------------------------------------------------------------------------------------------------
# Exact laws on a small deterministic chain, by enumerating every outcome of the coins
# ---------------------------------------------------------------------------------------------------------------------

STEPS, QUANTILES, GAMMA, LAM = 4, 2, 0.5, 0.7
REWARDS = torch.tensor([1.0, 20.0, 300.0, 4000.0], dtype=torch.float64)
NEXT_QUANTILES = torch.tensor([[-7.0, 3.0], [11.0, 13.0], [-17.0, 19.0], [23.0, 29.0]], dtype=torch.float64)
ENDINGS = [(None, None), ("truncated", 1), ("terminated", 2), ("terminated", 3), ("truncated", 0)]


def endings(kind: str | None, step: int | None, envs: int) -> tuple[Tensor, Tensor]:
    """terminated, truncated [T, N], with one episode end of this kind at this step."""
    masks = {"terminated": torch.zeros(STEPS, envs, dtype=torch.bool)}
    masks["truncated"] = masks["terminated"].clone()
    if kind is not None:
        masks[kind][step] = True
    return masks["terminated"], masks["truncated"]


def targets_of_every_outcome(kind: str | None, step: int | None) -> tuple[np.ndarray, np.ndarray]:
    """Targets [T, 2^(TQ), Q] of every outcome of the coins, one environment each, and the outcomes' probabilities."""
    outcomes = list(itertools.product([False, True], repeat=STEPS * QUANTILES))
    coins = torch.tensor(outcomes).reshape(-1, STEPS, QUANTILES).transpose(0, 1)
    probabilities = np.array([math.prod(LAM if coin else 1 - LAM for coin in outcome) for outcome in outcomes])
    envs = len(outcomes)
    targets = sr_lambda_targets(
        REWARDS[:, None].expand(STEPS, envs),
        NEXT_QUANTILES[:, None].expand(STEPS, envs, QUANTILES),
        *endings(kind, step, envs),
        GAMMA,
        coins,
    )
    return targets.numpy(), probabilities


def mixture_of_k_step_targets(start: int, kind: str | None, step: int | None) -> dict[float, float]:
    """Σ_k (1−λ)λ^k · law(r_t + … + γ^k·r_{t+k} + γ^{k+1}·θ_I(o'_{t+k})), I uniform; the last k takes what is left."""
    law: dict[float, float] = defaultdict(float)
    reached, so_far = 1.0, 0.0
    for t in range(start, STEPS):
        so_far += GAMMA ** (t - start) * REWARDS[t].item()
        ends = t == step
        if ends and kind == "terminated":
            law[round(so_far, 9)] += reached
            break
        stops = 1.0 if ends or t == STEPS - 1 else 1 - LAM
        for quantile in NEXT_QUANTILES[t].tolist():
            law[round(so_far + GAMMA ** (t - start + 1) * quantile, 9)] += reached * stops / QUANTILES
        if ends:
            break
        reached *= 1 - stops
    return law


@pytest.mark.parametrize(("kind", "step"), ENDINGS)
def test_a_sample_drawn_at_random_has_exactly_the_mixture_law(kind: str | None, step: int | None) -> None:
    targets, probabilities = targets_of_every_outcome(kind, step)
    for t in range(STEPS):
        law: dict[float, float] = defaultdict(float)
        for i in range(QUANTILES):
            for value, probability in zip(targets[t, :, i], probabilities, strict=True):
                law[round(float(value), 9)] += probability / QUANTILES
        expected = mixture_of_k_step_targets(t, kind, step)
        assert law.keys() == expected.keys()
        assert all(law[value] == pytest.approx(expected[value], abs=1e-12) for value in expected)


@pytest.mark.parametrize(("kind", "step"), ENDINGS)
def test_the_mean_over_coins_and_samples_is_the_lambda_return(kind: str | None, step: int | None) -> None:
    targets, probabilities = targets_of_every_outcome(kind, step)
    mean = np.einsum("tci,c->t", targets, probabilities) / QUANTILES
    values = torch.zeros(STEPS, 1, dtype=torch.float64)
    values[1:, 0] = NEXT_QUANTILES[:-1].mean(-1)  # V(o_{t+1}) is V(o'_t) within an episode
    next_values = NEXT_QUANTILES.mean(-1, keepdim=True)
    advantages = gae(REWARDS[:, None], values, next_values, *endings(kind, step, 1), GAMMA, LAM)
    np.testing.assert_allclose(mean, lambda_returns(advantages, values)[:, 0].numpy(), rtol=1e-12)


# ---------------------------------------------------------------------------------------------------------------------
# Boundaries, coins, device
# ---------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("ending", ["terminated", "truncated"])
def test_a_reward_after_an_episode_end_changes_nothing_before_it(ending: str) -> None:
    random = torch.Generator().manual_seed(0)
    rewards, next_quantiles = torch.randn(6, 2, generator=random), torch.randn(6, 2, 3, generator=random)
    ended = torch.zeros(6, 2, dtype=torch.bool)
    ended[2, 1] = True
    never = torch.zeros_like(ended)
    masks = (ended, never) if ending == "terminated" else (never, ended)
    always = torch.ones(6, 2, 3, dtype=torch.bool)
    before = sr_lambda_targets(rewards, next_quantiles, *masks, 0.9, always)
    rewards[3, 1] += 100.0
    change = sr_lambda_targets(rewards, next_quantiles, *masks, 0.9, always) - before
    torch.testing.assert_close(change[3, 1], torch.full((3,), 100.0))
    change[3, 1] = 0.0
    assert torch.equal(change, torch.zeros_like(change))


def test_a_dead_row_of_nans_leaks_nothing_and_inputs_stay_untouched() -> None:
    random = torch.Generator().manual_seed(0)
    rewards, next_quantiles = torch.randn(6, 2, generator=random), torch.randn(6, 2, 3, generator=random)
    terminated, truncated = torch.zeros(6, 2, dtype=torch.bool), torch.zeros(6, 2, dtype=torch.bool)
    truncated[2, 0], terminated[3, 0] = True, True
    coins = draw_continuations((6, 2, 3), 0.9, random)
    clean = sr_lambda_targets(rewards, next_quantiles, terminated, truncated, 0.9, coins)
    rewards[3, 0], next_quantiles[3, 0] = math.nan, math.nan
    copies = rewards.clone(), next_quantiles.clone(), coins.clone()
    poisoned = sr_lambda_targets(rewards, next_quantiles, terminated, truncated, torch.tensor(0.9), coins)
    alive = torch.ones(6, 2, dtype=torch.bool)
    alive[3, 0] = False
    assert torch.equal(poisoned[alive], clean[alive])
    for tensor, copy in zip((rewards, next_quantiles, coins), copies, strict=True):
        torch.testing.assert_close(tensor, copy, rtol=0, atol=0, equal_nan=True)


def test_coins_fall_with_probability_lambda_and_repeat_with_the_generator() -> None:
    def draw(lam: float | Tensor) -> Tensor:
        return draw_continuations((100, 50, 20), lam, torch.Generator().manual_seed(1))

    assert draw(1.0).all()
    assert not draw(0.0).any()
    assert torch.equal(draw(0.9), draw(torch.tensor(0.9)))
    assert draw(0.9).double().mean().item() == pytest.approx(0.9, abs=4 * math.sqrt(0.09 / 100_000))


def test_no_value_is_read_on_the_host() -> None:
    """Meta tensors have no data: any branch on a value would raise."""
    flags = torch.zeros(3, 2, dtype=torch.bool, device="meta")
    coins = draw_continuations((3, 2, 4), torch.tensor(0.9, device="meta"), device="meta")
    targets = sr_lambda_targets(
        torch.zeros(3, 2, device="meta"), torch.zeros(3, 2, 4, device="meta"), flags, flags, 0.9, coins
    )
    assert targets.dtype == torch.float32


# ---------------------------------------------------------------------------------------------------------------------
# The tail that is learned
# ---------------------------------------------------------------------------------------------------------------------
# A chain of 20 steps whose rewards are iid with mean 0.02 and unit variance, γ = 1. With Normal rewards the return is
# N(0.4, 20): CVaR.05 = 0.4 − 2.062713·√20 = −8.825. The λ-return with exact values is N(0.4, Σ_{k<20} λ^{2k}), so its
# CVaR.05 is −5.767 at λ = 0.95: 34.6 % too mild.

HORIZON, DRIFT, ALPHA = 20, 0.02, 0.05
NORMAL_CVAR = HORIZON * DRIFT - stats.norm.pdf(stats.norm.ppf(ALPHA)) / ALPHA * math.sqrt(HORIZON)

Noise = Callable[[np.random.Generator, tuple[int, int]], np.ndarray]


def normal_noise(random: np.random.Generator, shape: tuple[int, int]) -> np.ndarray:
    return random.standard_normal(shape)


def student_noise(random: np.random.Generator, shape: tuple[int, int]) -> np.ndarray:
    """Student t with 4 degrees of freedom, whose variance is 2, scaled to unit variance."""
    return random.standard_t(4, shape) / math.sqrt(2)


def student_cvar() -> float:
    """CVaR of the sum of 20 such rewards: the density's 20-fold convolution, on a grid wide enough for its tail."""
    half_width, points = 400.0, 2**18
    grid = (np.arange(points) - points // 2) * (2 * half_width / points)
    mass = stats.t.pdf(grid * math.sqrt(2), 4)
    transform = np.fft.fft(np.fft.ifftshift(mass / mass.sum()))
    mass = np.fft.fftshift(np.fft.ifft(transform**HORIZON).real)
    cumulative = np.cumsum(mass)
    edge = int(np.searchsorted(cumulative, ALPHA))
    tail = (mass[:edge] * grid[:edge]).sum() + (ALPHA - cumulative[edge - 1]) * grid[edge]
    return HORIZON * DRIFT + tail / ALPHA


def probit_linear_cvar(quantiles: np.ndarray, alpha: float) -> float:
    """CVaR of the quantile function that is linear in z = Φ⁻¹(τ) between the midpoint quantiles and beyond them."""
    quantiles = np.sort(quantiles)
    z = stats.norm.ppf((np.arange(len(quantiles)) + 0.5) / len(quantiles))
    slopes = np.diff(quantiles) / np.diff(z)
    slopes = np.concatenate([slopes[:1], slopes, slopes[-1:]])
    offsets = np.concatenate([quantiles[:1], quantiles]) - slopes * np.concatenate([z[:1], z])
    edges = np.minimum(np.concatenate([[-np.inf], z, [np.inf]]), stats.norm.ppf(alpha))
    return float((offsets * np.diff(stats.norm.cdf(edges)) - slopes * np.diff(stats.norm.pdf(edges))).sum() / alpha)


def pinball_minimisers(samples: Tensor, count: int) -> Tensor:
    """For each row of samples [T, S] the values [T, count] that minimise the pinball loss at the midpoints τ_i."""
    ordered = samples.sort(dim=1).values
    ranks = ((torch.arange(count) + 0.5) * (samples.shape[1] / count)).long()
    return (ordered[:, ranks - 1] + ordered[:, ranks]) / 2


def chain_rollout(noise: Noise, random: np.random.Generator, envs: int) -> tuple[Tensor, Tensor, Tensor]:
    """rewards, terminated, truncated [20, N] of whole episodes."""
    rewards = torch.as_tensor(DRIFT + noise(random, (HORIZON, envs)), dtype=torch.float32)
    terminated = torch.zeros(HORIZON, envs, dtype=torch.bool)
    terminated[-1] = True
    return rewards, terminated, torch.zeros_like(terminated)


def learn_start_quantiles(noise: Noise, lam: float, count: int, final_sweeps: int, seed: int = 0) -> np.ndarray:
    """Quantiles of the return at the start: a table [T, Q] fitted again and again to targets made from itself.

    The first 20 sweeps bring all states to the fixed point; then fits to larger batches are averaged. Each episode
    carries one sample, environment n the one of quantile n mod Q: Q samples that share their rewards would tell little
    more about the tail than one does.
    """
    random, coin_generator = np.random.default_rng(seed), torch.Generator().manual_seed(seed)
    table = torch.zeros(HORIZON + 1, count)
    fits: list[Tensor] = []
    for sweep in range(HORIZON + final_sweeps):
        envs = count * (256 if sweep < HORIZON else 4096)
        rewards, terminated, truncated = chain_rollout(noise, random, envs)
        next_quantiles = table[1:, torch.arange(envs) % count].unsqueeze(-1)
        coins = draw_continuations(next_quantiles.shape, lam, coin_generator)
        targets = sr_lambda_targets(rewards, next_quantiles, terminated, truncated, 1.0, coins)
        fit = pinball_minimisers(targets.squeeze(-1), count)
        fits = [fit] if sweep <= HORIZON else [*fits, fit]
        table[:-1] = torch.stack(fits).mean(0)
    return table[0].numpy()


def learn_start_quantiles_from_lambda_returns(noise: Noise, lam: float, count: int) -> np.ndarray:
    """The same from λ-returns with exact values, which is the best case for them."""
    rewards, terminated, truncated = chain_rollout(noise, np.random.default_rng(0), 4096 * count)
    exact = DRIFT * torch.arange(HORIZON, -1, -1, dtype=torch.float32)[:, None].expand(-1, rewards.shape[1])
    advantages = gae(rewards, exact[:-1], exact[1:], terminated, truncated, 1.0, lam)
    return pinball_minimisers(lambda_returns(advantages, exact[:-1])[:1], count)[0].numpy()


def test_the_oracle_is_exact_for_normal_quantiles() -> None:
    for count in (7, 32, 51):
        quantiles = stats.norm.ppf((np.arange(count) + 0.5) / count)
        assert probit_linear_cvar(quantiles, 0.05) == pytest.approx(-2.0627128, abs=1e-6)
        assert probit_linear_cvar(quantiles, 0.01) == pytest.approx(-2.6652142, abs=1e-6)


def test_sr_lambda_learns_the_cvar_of_normal_returns() -> None:
    quantiles = learn_start_quantiles(normal_noise, 0.95, count=32, final_sweeps=3)
    assert probit_linear_cvar(quantiles, ALPHA) == pytest.approx(NORMAL_CVAR, rel=0.03)


def test_sr_lambda_learns_the_cvar_of_fat_tailed_returns() -> None:
    quantiles = learn_start_quantiles(student_noise, 0.95, count=51, final_sweeps=3)
    assert probit_linear_cvar(quantiles, ALPHA) == pytest.approx(student_cvar(), rel=0.03)


@pytest.mark.parametrize("noise", [normal_noise, student_noise])
def test_regression_on_lambda_returns_makes_the_tail_a_third_too_mild(noise: Noise) -> None:
    truth = NORMAL_CVAR if noise is normal_noise else student_cvar()
    learned = probit_linear_cvar(learn_start_quantiles_from_lambda_returns(noise, 0.95, count=32), ALPHA)
    assert 1 - learned / truth > 0.25
    if noise is normal_noise:
        assert learned == pytest.approx(-5.7669, rel=0.02)


@pytest.mark.slow
@pytest.mark.parametrize(("lam", "loss"), [(0.95, 0.010), (0.8, 0.041), (0.5, 0.079), (0.0, 0.129)])
def test_repeated_projection_costs_tail_mass_the_more_the_smaller_lambda(lam: float, loss: float) -> None:
    quantiles = learn_start_quantiles(normal_noise, lam, count=32, final_sweeps=8)
    assert 1 - probit_linear_cvar(quantiles, ALPHA) / NORMAL_CVAR == pytest.approx(loss, abs=0.012)
