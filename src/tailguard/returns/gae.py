"""Generalised advantage estimation (Schulman et al. 2016), with terminated and truncated episodes distinguished."""

from __future__ import annotations

import torch
from torch import Tensor


@torch.no_grad()
def gae(
    rewards: Tensor,
    values: Tensor,
    next_values: Tensor,
    terminated: Tensor,
    truncated: Tensor,
    gamma: float | Tensor,
    lam: float | Tensor,
) -> Tensor:
    """Advantages A_t = δ_t + γλ·A_{t+1}, with δ_t = r_t + γ·V(o'_t) − V(o_t).

    An episode that terminated has no successor to bootstrap from; one that was truncated has (the value of its final
    observation). The trace A_{t+1} belongs to the next episode in both cases and is dropped.

    rewards, values:        [T, N]
    next_values:            [T, N], value of the real successor o'_t: of the final observation where an episode ended,
                            never of the observation after the reset
    terminated, truncated:  [T, N] bool
    gamma, lam:             numbers or 0-dim tensors
    returns:                [T, N]
    """
    # Masks select instead of multiplying, so a NaN does not cross a boundary (0 · NaN is NaN).
    advantages = next_values.masked_fill(terminated, 0.0).mul_(gamma).add_(rewards).sub_(values)
    decay = torch.ones_like(values[0]) * (gamma * lam)
    nothing = torch.zeros_like(values[0])
    trace = nothing
    steps = zip(advantages.unbind(), (terminated | truncated).unbind(), strict=True)
    for advantage, ended in reversed(list(steps)):
        trace = advantage.addcmul_(decay, torch.where(ended, nothing, trace))
    return advantages


def lambda_returns(advantages: Tensor, values: Tensor) -> Tensor:
    """The λ-returns G_t = A_t + V(o_t) that a scalar critic regresses on, [T, N] from the advantages of `gae`.

    Their mean is the value; their spread is not the return's (it shrinks with λ), so no quantile or CVaR of the return
    can be learned from them: `sr_lambda_targets` is for that.
    """
    return advantages + values
