"""One minibatch: the terms of the loss and their metrics."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from tailguard.algorithm.config import LearnerConfig, PPOConfig
from tailguard.algorithm.estimate import Estimates
from tailguard.algorithm.loss_terms import LossTerm, split_term
from tailguard.algorithm.losses import (
    clipped_surrogate,
    entropy_loss,
    guard_log_ratio,
    kl_k1,
    kl_k3,
    masked_mean,
)
from tailguard.algorithm.rollout import Rollout
from tailguard.algorithm.scale import old_distribution
from tailguard.models.critics import CriticLoss
from tailguard.models.policy import ActorCritic, CriticOutput, PolicyState
from tailguard.returns import RunningMoments


@dataclass(frozen=True)
class Batch:
    """Sequences of a rollout, ready for the losses. `L` rows of `B` sequences; without memory `L` is 1."""

    obs: Tensor
    """Scaled, [L, B, O]."""
    episode_start: Tensor
    """[L, B] bool"""
    actions: Tensor
    """Raw, [L, B, R]."""
    dist_params: Tensor
    """Of the policy that acted, [L, B, P]."""
    log_probs: Tensor
    """Under it, [L, B]."""
    advantages: Tensor
    """Normalised, [L, B]."""
    weights: Tensor
    """1 where a row counts, 0 where nothing happened, [L, B]."""
    value_targets: Tensor
    """λ-returns in normalised units, [L, B, 1]."""
    old_values: tuple[Tensor, ...]
    """Each critic's scalar output when the rollout was taken, in today's normalised units, [L, B, 1]."""
    distribution_targets: Tensor | None
    """In the form the critics' loss reads, [L, B, ...]."""
    old_distributions: tuple[Tensor | None, ...]
    """Each critic's distribution output, likewise."""
    state: PolicyState
    """Memory before the first row, [layers, B, H] each."""
    extra: dict[str, Tensor]
    """What extensions asked to keep, [L, B, ...] each."""

    def select(self, index: Tensor) -> Batch:
        """The sequences with these numbers."""

        def pick(rows: Tensor) -> Tensor:
            return rows.index_select(1, index)

        return self._map(pick, tuple(tuple(pick(part) for part in trunk) for trunk in self.state))

    def rows_as_sequences(self) -> Batch:
        """[L, B] as [1, L·B]: without memory every row stands for itself, and minibatches may mix rows freely."""

        def flatten(rows: Tensor) -> Tensor:
            return rows.flatten(0, 1).unsqueeze(0)

        return self._map(flatten, self.state)

    def _map(self, change: Callable[[Tensor], Tensor], state: PolicyState) -> Batch:
        return Batch(
            obs=change(self.obs),
            episode_start=change(self.episode_start),
            actions=change(self.actions),
            dist_params=change(self.dist_params),
            log_probs=change(self.log_probs),
            advantages=change(self.advantages),
            weights=change(self.weights),
            value_targets=change(self.value_targets),
            old_values=tuple(change(rows) for rows in self.old_values),
            distribution_targets=None if self.distribution_targets is None else change(self.distribution_targets),
            old_distributions=tuple(None if rows is None else change(rows) for rows in self.old_distributions),
            state=state,
            extra={name: change(rows) for name, rows in self.extra.items()},
        )


def make_batch(
    policy: ActorCritic, rollout: Rollout, estimates: Estimates, advantages: Tensor, moments: RunningMoments
) -> Batch:
    """All sequences of a rollout, with targets and old outputs in the units of `moments`."""
    samples = None
    head = policy.each_critic()[0].distribution
    if estimates.distribution_targets is not None and head is not None:
        samples = head.encode(moments.normalise(estimates.distribution_targets))
    critics = policy.each_critic()[: len(estimates.views)]  # a learner may have no use for them
    return Batch(
        obs=rollout.scaled_obs,
        episode_start=rollout.episode_start,
        actions=rollout.actions,
        dist_params=rollout.dist_params,
        log_probs=rollout.log_probs,
        advantages=advantages,
        weights=rollout.valid.to(advantages.dtype),
        value_targets=moments.normalise(estimates.value_targets).unsqueeze(-1),
        old_values=tuple(moments.normalise(view.value).unsqueeze(-1) for view in estimates.views),
        distribution_targets=samples,
        old_distributions=tuple(
            old_distribution(critic, view, moments) for critic, view in zip(critics, estimates.views, strict=True)
        ),
        state=rollout.start_state,
        extra={},
    )


@dataclass(frozen=True)
class Hyper:
    """Hyper-parameters that move during training, as 0-dim tensors."""

    learning_rate: Tensor
    clip_range: Tensor
    entropy_coef: Tensor
    kl_coef: Tensor


@dataclass(frozen=True)
class MinibatchLoss:
    """The loss of a minibatch, or of one microbatch's share in it."""

    total: Tensor
    terms: dict[str, Tensor]
    """Weighted terms that add up to the total, with their gradients."""
    metrics: dict[str, Tensor]
    """What to log, without gradient; shares add up over microbatches."""
    finite: Tensor
    """Whether every log-ratio that counts was finite before it was clamped."""
    log_ratio: Tensor
    """[L, B], 0 where a row does not count."""


def minibatch_loss(
    policy: ActorCritic,
    batch: Batch,
    hyper: Hyper,
    config: PPOConfig,
    extensions: Sequence[LossTerm] = (),
    total_weight: Tensor | None = None,
    inner_resets: bool | None = None,
    loss_function: Callable[..., MinibatchLoss] | None = None,
) -> MinibatchLoss:
    """All terms of the loss on one (micro)batch; `total_weight` is the weight of the whole minibatch it belongs to.

    `loss_function`: what to call in the place of `loss_of_features`, a compiled one for example.
    """
    features = policy.features(batch.obs, batch.state, batch.episode_start, inner_resets)
    # Dead rows can fill a small minibatch: its terms are then 0, not 0 / 0.
    total_weight = (batch.weights.sum() if total_weight is None else total_weight).clamp(min=1)
    return (loss_function or loss_of_features)(policy, features, batch, hyper, config, extensions, total_weight)


def loss_of_features(
    policy: ActorCritic,
    features: Sequence[Tensor],
    batch: Batch,
    hyper: Hyper,
    config: PPOConfig,
    extensions: Sequence[LossTerm],
    total_weight: Tensor,
) -> MinibatchLoss:
    """All terms of the loss, from what the trunks made of the batch: heads, distributions and arithmetic."""
    output = policy.heads(features)
    weights = batch.weights

    def mean(values: Tensor) -> Tensor:
        return masked_mean(values, weights, total_weight)

    head = policy.action_head
    log_prob = head.log_prob(output.dist_params, batch.actions)
    log_ratio = log_prob - batch.log_probs
    guarded = guard_log_ratio(log_ratio, config.log_ratio_limit, weights)
    surrogate = clipped_surrogate(guarded.log_ratio, batch.advantages, hyper.clip_range)
    kl = head.kl(batch.dist_params, output.dist_params)
    losses = critic_losses(policy, output.critics, batch, config)
    terms = {"policy": mean(surrogate.loss), **critic_terms(losses, config, mean)}
    metrics: dict[str, Tensor] = {}
    if config.uses_entropy:
        entropy = head.entropy(output.dist_params)
        terms["entropy"] = hyper.entropy_coef * mean(entropy_loss(entropy, log_prob))
    if config.kl_penalty > 0:
        terms["kl"] = hyper.kl_coef * mean(kl)
    for extension in extensions:
        found = split_term(extension.loss(policy, output, batch))
        terms[extension.name] = mean(found.values)
        metrics |= {name: mean(values.detach()) for name, values in found.metrics.items()}
    with torch.no_grad():
        share = weights.sum() / total_weight
        metrics |= {
            "train/approx_kl": mean(kl),
            "train/kl_k1": mean(kl_k1(log_ratio)),
            "train/kl_k3": mean(kl_k3(guarded.log_ratio)),
            "train/clip_fraction": mean(surrogate.clipped),
            "train/log_ratio_clamped": guarded.clamped_share * share,
            "train/policy_gradient_loss": terms["policy"].detach(),
        }
        for name, term in terms.items():
            if name != "policy":
                metrics[f"train/{name}_loss"] = term.detach()
        if config.value_clip != "off":
            metrics |= clip_metrics(losses, mean)
        if extensions:
            sizes = {name: term.detach().abs() for name, term in terms.items()}
            whole = torch.stack(list(sizes.values())).sum().clamp(min=1e-30)
            metrics |= {f"train/{one.name}_share": share * sizes[one.name] / whole for one in extensions}
    total = torch.stack(list(terms.values())).sum()
    counted = torch.where(weights != 0, log_ratio.detach(), 0.0)
    return MinibatchLoss(total, terms, metrics, guarded.finite, counted)


def critic_minibatch_loss(
    policy: ActorCritic,
    batch: Batch,
    config: LearnerConfig,
    total_weight: Tensor,
    inner_resets: bool | None = None,
    loss_function: Callable[..., MinibatchLoss] | None = None,
) -> MinibatchLoss:
    """The critics' terms alone on one (micro)batch; arguments as of `minibatch_loss`."""
    features = policy.critic_features(batch.obs, batch.state, batch.episode_start, inner_resets)
    return (loss_function or loss_of_critic_features)(policy, features, batch, config, total_weight.clamp(min=1))


def loss_of_critic_features(
    policy: ActorCritic, features: Mapping[int, Tensor], batch: Batch, config: LearnerConfig, total_weight: Tensor
) -> MinibatchLoss:
    """The critics' terms, from what their trunks made of the batch."""

    def mean(values: Tensor) -> Tensor:
        return masked_mean(values, batch.weights, total_weight)

    losses = critic_losses(policy, policy.critic_heads(features), batch, config)
    terms = critic_terms(losses, config, mean)
    metrics = {f"train/{name}_loss": term.detach() for name, term in terms.items()}
    if config.value_clip != "off":
        metrics |= clip_metrics(losses, mean)
    total = torch.stack(list(terms.values())).sum()
    nothing = torch.zeros_like(batch.weights)
    return MinibatchLoss(total, terms, metrics, total.isfinite(), nothing)


class _Mean(Protocol):
    def __call__(self, values: Tensor) -> Tensor: ...


@dataclass(frozen=True)
class CriticLosses:
    """Per-sample losses of every critic."""

    value: list[CriticLoss]
    distribution: list[CriticLoss]
    """Empty for scalar critics."""


def critic_losses(
    policy: ActorCritic, outputs: Sequence[CriticOutput], batch: Batch, config: LearnerConfig
) -> CriticLosses:
    """Each critic against its own old output."""
    values: list[CriticLoss] = []
    distributions: list[CriticLoss] = []
    settings = config.critic_loss
    for critic, found, old_value, old_spread in zip(
        policy.each_critic(), outputs, batch.old_values, batch.old_distributions, strict=True
    ):
        values.append(critic.value.clipped_loss(found.value, batch.value_targets, old_value, settings))
        if critic.distribution is not None and found.distribution is not None:
            assert batch.distribution_targets is not None  # a distributional critic always comes with targets
            distributions.append(
                critic.distribution.clipped_loss(found.distribution, batch.distribution_targets, old_spread, settings)
            )
    return CriticLosses(values, distributions)


def critic_terms(losses: CriticLosses, config: LearnerConfig, mean: _Mean) -> dict[str, Tensor]:
    """Value and distribution terms, averaged over the critics."""
    terms = {"value": config.value_coef * torch.stack([mean(found.loss) for found in losses.value]).mean()}
    if losses.distribution:
        spread = torch.stack([mean(found.loss) for found in losses.distribution]).mean()
        terms["distribution"] = config.distribution_coef * spread
    return terms


def clip_metrics(losses: CriticLosses, mean: _Mean) -> dict[str, Tensor]:
    """How often value clipping acts, and the losses with and without it, averaged over the critics."""
    metrics: dict[str, Tensor] = {}
    for name, found in (("value", losses.value), ("distribution", losses.distribution)):
        if found:
            each = {
                f"critic/{name}_clip_share": [loss.clipped for loss in found],
                f"critic/{name}_loss_unclipped": [loss.unclipped_loss for loss in found],
                f"critic/{name}_loss_clipped": [loss.clipped_loss for loss in found],
            }
            metrics |= {key: torch.stack([mean(values) for values in parts]).mean() for key, parts in each.items()}
    return metrics
