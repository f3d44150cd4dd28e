"""Update the scale of the return without changing any raw prediction (PopArt)."""

from __future__ import annotations

import torch
from torch import Tensor

from tailguard.algorithm.estimate import CriticView
from tailguard.models.policy import ActorCritic, ReturnCritic
from tailguard.optim import VarianceGradientScaler, moments_of
from tailguard.returns import MomentsChange, RunningMoments, rescale_moments

SUPPORT_DRIFT_LIMIT = 1.0
"""A support that fits the returns worse than this (see `Critic.support_drift`) is laid over them anew."""


@torch.no_grad()
def move_return_scale(
    policy: ActorCritic,
    optimizer: torch.optim.Optimizer,
    change: MomentsChange,
    scaler: VarianceGradientScaler | None = None,
) -> None:
    """Rewrite every critic head for the new return scale (PopArt).

    What optimiser and scaler remember of the heads' gradients is brought into the new units too.
    """
    ratio, powers = change.old_std / change.new_std, moments_of(optimizer)
    for critic in policy.each_critic():
        for head in critic.heads:
            head.rescale(change)
            for parameter in (parameter for layer in head.return_layers() for parameter in layer.parameters()):
                known = optimizer.state.get(parameter, {})
                rescale_moments(known, change.old_std, change.new_std, head.loss_degree, powers)
                if scaler is not None:
                    scaler.rescale(parameter, ratio ** (head.loss_degree - 1))


def return_spread(samples: Tensor, valid: Tensor, moments: RunningMoments) -> Tensor:
    """Standard deviation of the return in units of the scale, [], at least 1.

    The scale is that of λ-returns, which vary less: they replace what is far away by what the critic expects of it.

    samples: of the return, [T, N, M]; valid: [T, N] bool
    """
    weights = valid.unsqueeze(-1) / (valid.sum() * samples.shape[-1]).clamp(min=1)
    scaled = moments.normalise(samples).masked_fill(~valid.unsqueeze(-1), 0.0).double()
    mean = (weights * scaled).sum()
    return (weights * (scaled - mean).square()).sum().sqrt().clamp(min=1.0)


def support_drift(policy: ActorCritic, spread: Tensor | float = 1.0) -> Tensor | None:
    """How badly the worst support of a critic fits the returns by now, []; None where there is none."""
    each = [head.support_drift(spread) for critic in policy.each_critic() for head in critic.heads]
    drifts = [drift for drift in each if drift is not None]
    return torch.stack(drifts).max() if drifts else None


@torch.no_grad()
def reset_support(
    policy: ActorCritic,
    optimizer: torch.optim.Optimizer,
    scaler: VarianceGradientScaler | None = None,
    spread: float = 1.0,
) -> int:
    """Lay the supports that fit too badly over the returns anew, between two iterations; returns how many there were.

    What optimiser and scaler remember of these heads is forgotten. `spread`: see `return_spread`; a support is
    configured in standard deviations of the return.
    """
    moved = 0
    for head in (head for critic in policy.each_critic() for head in critic.heads):
        drift = head.support_drift(spread)
        if drift is None or float(drift) <= SUPPORT_DRIFT_LIMIT:
            continue
        for parameter in head.reset_support(spread):
            for value in optimizer.state.get(parameter, {}).values():
                value.zero_()
            if scaler is not None:
                scaler.forget(parameter)
        moved += 1
    return moved


def old_distribution(critic: ReturnCritic, view: CriticView, moments: RunningMoments) -> Tensor | None:
    """A critic's distribution output at the time of the rollout, in today's normalised units."""
    if critic.distribution is None or view.output.distribution is None:
        return None
    assert view.quantiles is not None  # every distributional critic gives them
    return critic.distribution.old_output(view.output.distribution, view.quantiles, moments)
