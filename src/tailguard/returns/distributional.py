"""Sample-replacement targets SR(λ) for distributional critics (Nam, Kim & Park 2021, GMAC)."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

import torch
from torch import Tensor


@torch.no_grad()
def draw_continuations(
    shape: Sequence[int],
    lam: float | Tensor,
    generator: torch.Generator | None = None,
    device: torch.device | str | None = None,
) -> Tensor:
    """Random continuations of SR(λ): bool tensor of `shape`, each True with probability λ (number or 0-dim tensor)."""
    return torch.rand(tuple(shape), generator=generator, device=device) < lam


@lru_cache(maxsize=64)
def midpoint_spread(count: int) -> float:
    """Standard deviation of a standard Normal's midpoint quantiles, which miss its outer tails: 0.980 for 32."""
    levels = (torch.arange(count, dtype=torch.float64) + 0.5) / count
    return float(torch.special.ndtri(levels).std(correction=0))


def bootstrap_samples(quantiles: Tensor) -> Tensor:
    """Q equally likely samples of the return whose midpoint quantiles [..., Q] are given, [..., Q].

    With the quantiles themselves as samples, a Normal would lose 4 % of its variance per bootstrap at Q = 32. The
    quantiles are therefore spread about their mean, so that a Normal keeps mean and variance. A distribution without
    outer tails becomes wider, by 2 % per bootstrap at Q = 32.
    """
    mean = quantiles.mean(-1, keepdim=True)
    return mean + (quantiles - mean) / midpoint_spread(quantiles.shape[-1])


@torch.no_grad()
def sr_lambda_targets(
    rewards: Tensor,
    next_quantiles: Tensor,
    terminated: Tensor,
    truncated: Tensor,
    gamma: float | Tensor,
    continuations: Tensor,
) -> Tensor:
    """Q samples of the distributional λ-return for every step, carried backwards through the rollout.

    X_t^i = r_t + γ·X_{t+1}^i where sample i continues, r_t + γ·θ_i(o'_t) where it bootstraps, r_t where the episode
    terminated. Samples continue with probability λ inside an episode, never past a truncation or the rollout's end.
    The fixed point is the distribution of the return for every λ; but each bootstrap reads Q quantiles instead of a
    distribution, which loses tail mass. With λ = 1 samples bootstrap only at the end of a rollout.

    rewards:                [T, N]
    next_quantiles:         [T, N, Q], samples θ of the return of the real successor o'_t (see `gae`)
    terminated, truncated:  [T, N] bool
    gamma:                  a number or 0-dim tensor
    continuations:          [T, N, Q] bool, from `draw_continuations`
    returns:                [T, N, Q]
    """
    # A sample bootstraps at most once, at a step that does not depend on i. So sample i may always take the
    # i-th quantile: averaged over i this is the mixture Σ_k (1−λ)λ^k of k-step targets itself, with the successor's
    # quantiles drawn stratified (each once) instead of with replacement.
    targets = next_quantiles.masked_fill(terminated.unsqueeze(-1), 0.0)
    continues = continuations & ~(terminated | truncated).unsqueeze(-1)
    discount = torch.ones_like(targets[0]) * gamma
    # Starting from the last bootstrap makes both sides of the last choice equal: no sample continues past the end.
    samples = targets[-1]
    for t in reversed(range(rewards.shape[0])):
        successors = torch.where(continues[t], samples, targets[t])
        samples = torch.addcmul(rewards[t].unsqueeze(-1), discount, successors, out=targets[t])
    return targets
