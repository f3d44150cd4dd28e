"""Compute advantages, value targets and distribution targets from a rollout."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, Protocol

import torch
from torch import Tensor

from tailguard.algorithm.rollout import Rollout
from tailguard.models.critics import TwinMode, combine_quantiles, combine_values, twin_pessimism
from tailguard.models.policy import ActorCritic, CriticOutput, PolicyState, ReturnCritic
from tailguard.returns import (
    RunningMoments,
    bootstrap_samples,
    draw_continuations,
    gae,
    lambda_returns,
    sr_lambda_targets,
)

Baseline = Literal["scalar", "distribution"]
DistributionTarget = Literal["sr_lambda", "lambda_return"]


@dataclass(frozen=True)
class EstimateConfig:
    """How returns are estimated."""

    gamma: float
    lam: float
    distribution_lam: float
    baseline: Baseline
    twin_mode: TwinMode
    distribution_target: DistributionTarget
    quantiles: int


@dataclass(frozen=True)
class CriticView:
    """One critic's predictions for a rollout, in raw return units."""

    output: CriticOutput
    """Outputs of the heads, in the normalised units at the time of the rollout, [T, N, ...]."""
    value: Tensor
    """Scalar head, [T, N]."""
    baseline: Tensor
    """Value used for GAE, [T, N]."""
    next_baseline: Tensor
    """The same of the true successors, [T, N]."""
    final_baseline: Tensor
    """The same of the rollout's `final_obs`, [K, N], with a gradient if one was requested."""
    quantiles: Tensor | None
    """Midpoint quantiles of the return, [T, N, Q]."""
    next_quantiles: Tensor | None
    final_features: Tensor
    """Input of the critic's heads for the true successor of the last row, [N, H]."""


@dataclass(frozen=True)
class Estimates:
    """All in raw return units."""

    views: tuple[CriticView, ...]
    """One for each critic; empty for a learner without critics."""
    advantages: Tensor
    """[T, N]"""
    value_targets: Tensor
    """λ-returns, [T, N]."""
    distribution_targets: Tensor | None
    """Samples of the return, [T, N, M]."""
    values: Tensor
    """The baseline that GAE used, [T, N]."""
    pessimism: Tensor
    """Mean of twin critics minus their minimum, [T, N]; zeros with one critic."""


class AdvantageSource(Protocol):
    """What the policy is told about its actions."""

    def advantages(self, rollout: Rollout, estimates: Estimates) -> tuple[Tensor, dict[str, Tensor]]:
        """Advantages [T, N] in raw units, before they are normalised, and metrics."""
        ...


class GAEAdvantages:
    """The advantages of the reward alone, by GAE; a `RiskBudget` is the source that counts the cost of the tail too."""

    def advantages(self, rollout: Rollout, estimates: Estimates) -> tuple[Tensor, dict[str, Tensor]]:  # noqa: ARG002
        return estimates.advantages, {}


@torch.no_grad()
def evaluate_critics(
    policy: ActorCritic,
    rollout: Rollout,
    scale: RunningMoments,
    config: EstimateConfig,
    final_obs: Tensor | None = None,
) -> tuple[tuple[CriticView, ...], PolicyState]:
    """Evaluate every critic on the rollout; returns their views and the trunks' recurrent states after the last row.

    `final_obs`: the scaled successors, [K, N, O], to be given where their values need a gradient.
    """
    rows = list(rollout.final_rows)
    final_obs = rollout.scale(rollout.final_obs) if final_obs is None else final_obs
    outputs, successors, after = policy.evaluate(
        rollout.scaled_obs, final_obs, rows, rollout.start_state, rollout.episode_start
    )
    views = []
    for critic, output, following in zip(policy.each_critic(), outputs, successors, strict=True):
        value, baseline, quantiles = _read(critic, output, scale, config)
        with torch.set_grad_enabled(final_obs.requires_grad):
            _, final_baseline, final_quantiles = _read(critic, following, scale, config)
        next_quantiles = None
        if quantiles is not None and final_quantiles is not None:
            next_quantiles = _next(quantiles, final_quantiles.detach(), rows)
        views.append(
            CriticView(
                output,
                value,
                baseline,
                _next(baseline, final_baseline.detach(), rows),
                final_baseline,
                quantiles,
                next_quantiles,
                following.features[-1].detach(),
            )
        )
    return tuple(views), after


def _read(
    critic: ReturnCritic, output: CriticOutput, scale: RunningMoments, config: EstimateConfig
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Value, baseline and quantiles in raw units."""
    value = scale.denormalise(critic.value.mean(output.value))
    head = critic.distribution
    if head is None or output.distribution is None:
        return value, value, None
    quantiles = scale.denormalise(head.quantiles(output.distribution, config.quantiles))
    if config.baseline == "scalar":
        return value, value, quantiles
    return value, scale.denormalise(head.mean(output.distribution)), quantiles


def _next(rows: Tensor, final: Tensor, final_rows: list[int]) -> Tensor:
    """What follows each row, [T, ...]: the row after it, and `final` [K, ...] where an episode may have ended."""
    if len(final_rows) == len(rows):
        return final
    following = torch.cat((rows[1:], rows[-1:]))
    following[final_rows] = final
    return following


@torch.no_grad()
def estimate(
    views: tuple[CriticView, ...], rollout: Rollout, config: EstimateConfig, generator: torch.Generator
) -> Estimates:
    """Advantages by GAE, λ-returns for the scalar heads, SR(λ) samples for the distributions.

    Without critics (no `views`) every value is 0.
    """
    nothing = torch.zeros_like(rollout.rewards)
    values, next_values, next_quantiles, pessimism = nothing, nothing, None, nothing
    if views:
        values, next_values, next_quantiles = views[0].baseline, views[0].next_baseline, views[0].next_quantiles
    if len(views) == 2:
        pessimism = twin_pessimism(values, views[1].baseline)
        values = combine_values(values, views[1].baseline, config.twin_mode)
        next_values = combine_values(next_values, views[1].next_baseline, config.twin_mode)
        if next_quantiles is not None and views[1].next_quantiles is not None:
            next_quantiles = combine_quantiles(next_quantiles, views[1].next_quantiles)
    advantages = gae(
        rollout.rewards, values, next_values, rollout.terminated, rollout.truncated, config.gamma, config.lam
    )
    targets = lambda_returns(advantages, values)
    samples = None
    if next_quantiles is not None:
        if config.distribution_target == "lambda_return":
            samples = targets.unsqueeze(-1)
        else:
            # Where all samples must bootstrap at once they keep the spread; a few at a time, by λ, hardly need it, and
            # with many of them the spread of distributions without tails would grow without bound.
            forced = rollout.truncated.clone()
            forced[-1].fill_(True)
            next_quantiles = torch.where(forced.unsqueeze(-1), bootstrap_samples(next_quantiles), next_quantiles)
            coins = draw_continuations(next_quantiles.shape, config.distribution_lam, generator, next_quantiles.device)
            samples = sr_lambda_targets(
                rollout.rewards, next_quantiles, rollout.terminated, rollout.truncated, config.gamma, coins
            )
    return Estimates(views, advantages, targets, samples, values, pessimism)


def final_values(views: tuple[CriticView, ...], twin_mode: TwinMode) -> Tensor:
    """The value of the rollout's `final_obs` to GAE, [K, N], with its gradient where that was asked for."""
    value = views[0].final_baseline
    return value if len(views) == 1 else combine_values(value, views[1].final_baseline, twin_mode)


@torch.no_grad()
def first_returns(rollout: Rollout, gamma: float) -> Tensor:
    """Discounted rewards to the end of the rollout or of the episode, [T, N]: the scale before any critic learned."""
    nothing = torch.zeros_like(rollout.rewards)
    return gae(rollout.rewards, nothing, nothing, rollout.terminated, rollout.truncated, gamma, 1.0)
