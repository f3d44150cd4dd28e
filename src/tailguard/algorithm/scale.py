"""Update the scale of the return without changing any raw prediction (PopArt)."""

from __future__ import annotations

import torch
from torch import Tensor

from tailguard.algorithm.estimate import CriticView
from tailguard.models.critics import CategoricalCritic, Critic, ScalarCritic
from tailguard.models.policy import ActorCritic, ReturnCritic
from tailguard.optim import VarianceGradientScaler
from tailguard.returns import MomentsChange, RunningMoments, popart_rescale, rescale_moments

SUPPORT_DRIFT_LIMIT = 1.0
"""A categorical support that fits the returns worse than this (see `support_drift`) is laid over them anew."""


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
    ratio = change.old_std / change.new_std
    for critic in policy.each_critic():
        heads: list[Critic] = [critic.value]
        if critic.distribution is not None:
            heads.append(critic.distribution)
        for head in heads:
            degree = 2 if isinstance(head, ScalarCritic) else 1
            for layer in head.return_layers():
                popart_rescale(
                    layer.weight, layer.bias, change.old_mean, change.old_std, change.new_mean, change.new_std
                )
                for parameter in (layer.weight, layer.bias):
                    rescale_moments(optimizer.state[parameter], change.old_std, change.new_std, degree)
                    if scaler is not None:
                        scaler.rescale(parameter, ratio ** (degree - 1))
            head.rescale_support(change.old_mean, change.old_std, change.new_mean, change.new_std)


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
    """How badly the worst categorical support fits the returns by now, []; None where there is none."""
    heads = [critic.distribution for critic in policy.each_critic()]
    drifts = [head.support_drift(spread) for head in heads if isinstance(head, CategoricalCritic)]
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
    for critic in policy.each_critic():
        head = critic.distribution
        if isinstance(head, CategoricalCritic) and float(head.support_drift(spread)) > SUPPORT_DRIFT_LIMIT:
            head.set_support(spread * head.v_min, spread * head.v_max)
            for parameter in (head.layer.weight, head.layer.bias):
                for value in optimizer.state[parameter].values():
                    value.zero_()
                if scaler is not None:
                    scaler.forget(parameter)
            moved += 1
    return moved


def old_distribution(critic: ReturnCritic, view: CriticView, moments: RunningMoments) -> Tensor | None:
    """A critic's distribution output at the time of the rollout, in today's normalised units."""
    if critic.distribution is None or view.output.distribution is None:
        return None
    if isinstance(critic.distribution, CategoricalCritic):
        return view.output.distribution  # logits have no unit
    assert view.quantiles is not None
    return moments.normalise(view.quantiles)
