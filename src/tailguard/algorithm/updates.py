"""The updates on one rollout: epochs of minibatches, each a gradient and a step."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import replace
from itertools import chain
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from tailguard.algorithm.config import LearnerConfig, PathwiseConfig, PPOConfig
from tailguard.algorithm.context import TrainingContext
from tailguard.algorithm.iteration_metrics import GradientNorms
from tailguard.algorithm.loss_terms import LossTerm
from tailguard.algorithm.losses import masked_mean
from tailguard.algorithm.optimizers import optimizer_metrics, unless
from tailguard.algorithm.schedules import KLStopper, KLStopState
from tailguard.algorithm.update import (
    Batch,
    Hyper,
    MinibatchLoss,
    critic_minibatch_loss,
    loss_of_critic_features,
    loss_of_features,
    minibatch_loss,
)
from tailguard.device_ops import shuffled
from tailguard.monitor.device_metrics import MeanMetrics

if TYPE_CHECKING:
    from tailguard.algorithm.data_parallel import Ranks
    from tailguard.robust.smoothness import Smoothness

GROUPS = "groups"
"""Key under which the norms of all parts' gradients travel together, until they are named."""


class Updates(ABC):
    """Turns batches into optimiser steps. What it keeps lasts for one iteration, and stays in its place in memory."""

    config: LearnerConfig

    def __init__(self, context: TrainingContext, config: LearnerConfig) -> None:
        self.context, self.config = context, config
        device = context.learning_rate.device
        self.gradient_norms = GradientNorms(context.policy)
        self.minibatch_metrics = MeanMetrics(device)
        self.stop = KLStopState.start(device)
        self.all_finite = torch.ones((), dtype=torch.bool, device=device)
        """Whether every minibatch of the iteration was finite, where it is not looked at one by one."""
        self.ranks: Ranks | None = None
        """The processes that share the gradients, where there are several."""

    @property
    @abstractmethod
    def epochs(self) -> int:
        """Passes over a rollout."""

    @property
    def kl_stopper(self) -> KLStopper | None:
        """When to stop the epochs early."""
        return None

    @abstractmethod
    def loss(self, batch: Batch, total_weight: Tensor, inner_resets: bool | None) -> MinibatchLoss:
        """The loss of a microbatch; `total_weight` is the weight of the whole minibatch it belongs to."""

    def begin(self) -> None:
        """Forget the iteration before."""
        self.minibatch_metrics.clear()
        self.stop.clear()
        self.all_finite.fill_(True)

    def run(self, batch: Batch, inner_resets: bool) -> list[tuple[Tensor, ...]]:
        """Epochs of minibatches; stops early when the policy has moved too far. Returns each epoch's minibatches."""
        rows, sequences = batch.log_probs.shape
        count = min(max(1, round(sequences * rows / self.config.minibatch_size)), sequences)
        # All drawn before the first is used: how far the epochs get must not change what is drawn later.
        orders = [shuffled(sequences, self.context.generator).tensor_split(count) for _ in range(self.epochs)]
        for index in chain.from_iterable(orders):
            self.context.runtime.run(
                ("minibatch", len(index)),
                lambda index: self.minibatch(batch, index, inner_resets),
                index,
            )
            if self.context.runtime.can_sync and bool(self.stop.stopped):
                break
        self.context.optimizer.zero_grad(set_to_none=True)
        return orders

    def minibatch(self, batch: Batch, index: Tensor, inner_resets: bool) -> None:
        """One optimiser step on the sequences with these numbers, unless the policy has moved too far already."""
        metrics = self.accumulate(batch, index, inner_resets)
        if metrics is None:
            self.context.state.skipped += 1
            return
        stopper = self.kl_stopper
        if stopper is None:
            self.step(metrics["train/grad_norm"])
            self.minibatch_metrics.add(metrics)
            return
        # Before the step: a minibatch that finds the policy too far away must not move it further.
        self.stop.take(stopper.update(self.stop, metrics["train/approx_kl"]))
        if self.context.runtime.can_sync:
            if bool(self.stop.stopped):
                return
            self.step(metrics["train/grad_norm"])
            self.minibatch_metrics.add(metrics)
        else:
            # A recorded graph cannot branch: it takes the step and puts the old values back if it should not have.
            unless(self.stop.stopped, lambda: self.step(metrics["train/grad_norm"]), self.moving())
            self.minibatch_metrics.add(metrics, ~self.stop.stopped)

    def accumulate(self, batch: Batch, index: Tensor, inner_resets: bool) -> dict[str, Tensor] | None:
        """Gradient of one minibatch, through its microbatches; None if it must be skipped."""
        config = self.config
        self.context.optimizer.zero_grad(set_to_none=True)
        metrics: dict[str, Tensor] = {}
        # Each microbatch is divided by the weight of the whole minibatch, so that their gradients add up to its own.
        total_weight = batch.weights.index_select(1, index).sum()
        finite = torch.ones((), dtype=torch.bool, device=self.all_finite.device)
        if self.ranks is not None:
            index = self.ranks.portion(index)
        for numbers in index.tensor_split(min(config.microbatches, len(index))):
            # Without looking at the rows, a fused call needs to know that no episode starts inside.
            microbatch = self.loss(batch.select(numbers), total_weight, None if inner_resets else False)
            microbatch.total.backward()  # type: ignore[no-untyped-call]
            if self.context.runtime.can_sync and not self.context.guard.loss(microbatch, numbers):
                return None
            finite = finite & microbatch.finite & microbatch.total.isfinite()
            for name, value in microbatch.metrics.items():
                metrics[name] = metrics[name] + value if name in metrics else value
            total = microbatch.total.detach()
            metrics["train/loss"] = metrics["train/loss"] + total if "train/loss" in metrics else total
        if self.ranks is not None:
            metrics, finite = self.ranks.sum_minibatch(self.context.policy.parameters(), metrics, finite)
        measured = self.measure_gradient()
        if measured is None:
            return None
        self.all_finite &= finite
        return metrics | measured

    def measure_gradient(self) -> dict[str, Tensor] | None:
        """Norms of the gradient that stands in the network; None if it must not be applied."""
        config = self.config
        norm, groups = self.gradient_norms()
        if self.context.runtime.can_sync and not self.context.guard.gradient(norm):
            return None
        self.all_finite &= norm.isfinite()
        metrics = {
            "train/grad_norm": norm,
            "train/grad_norm_clipped": norm.clamp(max=config.max_grad_norm) if config.max_grad_norm > 0 else norm,
        }
        return metrics | ({GROUPS: groups} if config.monitor else {})

    def step(self, norm: Tensor) -> None:
        """Clip the gradient, whose length is `norm`, and let the optimiser move."""
        if self.context.scaler is not None:
            # Before the clip: the noise of the gradient is that of the batch, not of what the clip leaves of it.
            self.context.scaler.update_statistics()
        if self.config.max_grad_norm > 0:
            nn.utils.clip_grads_with_norm_(self.gradient_norms.parameters, self.config.max_grad_norm, norm)
        if self.context.scaler is None:
            self.context.optimizer.step()
        else:
            self.context.scaler.optimizer_step()

    def moving(self) -> list[Tensor]:
        """Everything that an optimiser step changes."""
        values = [parameter.data for parameter in self.context.policy.parameters()]
        values += [value for state in self.context.optimizer.state.values() for value in state.values()]
        values += [] if self.context.scaler is None else self.context.scaler.statistics()
        return values

    def metrics(self) -> dict[str, Tensor]:
        """Metrics of the minibatches and of what made steps of them."""
        means = self.minibatch_metrics.means()
        if GROUPS in means:
            means |= self.gradient_norms.named(means.pop(GROUPS))
        return (
            means
            | optimizer_metrics(self.context.optimizer, self.context.scaler)
            | {"train/n_updates": self.minibatch_metrics.count, "train/learning_rate": self.context.learning_rate}
        )


class PolicyUpdates(Updates):
    """PPO's updates: policy and critics by one loss, with an early stop by the KL divergence."""

    config: PPOConfig

    def __init__(
        self, context: TrainingContext, config: PPOConfig, hyper: Hyper, extensions: Sequence[LossTerm]
    ) -> None:
        super().__init__(context, config)
        self.hyper, self.extensions = hyper, extensions
        self.final_kl = torch.tensor(torch.nan, device=self.all_finite.device)
        """From the policy that acted to the one after the last step; NaN where no penalty asks for it."""

    @property
    def epochs(self) -> int:
        return self.config.epochs

    @property
    def kl_stopper(self) -> KLStopper | None:
        return self.config.kl_stopper

    def loss(self, batch: Batch, total_weight: Tensor, inner_resets: bool | None) -> MinibatchLoss:
        return minibatch_loss(
            self.context.policy,
            batch,
            self.hyper,
            self.config,
            self.extensions,
            total_weight,
            inner_resets,
            self.context.runtime.compiled(loss_of_features),
        )

    def run(self, batch: Batch, inner_resets: bool) -> list[tuple[Tensor, ...]]:
        self.begin()
        orders = super().run(batch, inner_resets)
        config = self.config
        if config.kl_penalty > 0 and config.target_kl is not None:
            # Measured after the last step: before it, a single minibatch an iteration would always show 0.
            self.final_kl = self.context.runtime.run(
                "policy_kl", lambda index: self._reached_kl(batch.select(index), inner_resets), orders[0][0]
            )
        return orders

    @torch.no_grad()
    def _reached_kl(self, batch: Batch, inner_resets: bool) -> Tensor:
        """Exact KL from the policy that acted to today's, mean over the batch."""
        output = self.context.policy(batch.obs, batch.state, batch.episode_start, None if inner_resets else False)
        return masked_mean(self.context.policy.action_head.kl(batch.dist_params, output.dist_params), batch.weights)

    def metrics(self) -> dict[str, Tensor]:
        hyper = self.hyper
        metrics = super().metrics() | {
            "train/early_stop": self.stop.stopped,
            "train/clip_range": hyper.clip_range,
            "train/entropy_coef": hyper.entropy_coef,
            "train/kl_coef": hyper.kl_coef,
        }
        return metrics | ({"train/final_kl": self.final_kl} if self.config.kl_penalty > 0 else {})


class CriticUpdates(Updates):
    """The updates of a learner that moves its policy by one step a window, and its critics by minibatches."""

    config: PathwiseConfig

    def __init__(self, context: TrainingContext, config: PathwiseConfig, smoothness: Smoothness | None = None) -> None:
        super().__init__(context, config)
        self.smoothness = smoothness
        """Keeps values from changing under the attack on the policy, if anything does."""
        self.policy_metrics = MeanMetrics(context.learning_rate.device)
        """Metrics of the policy's own step."""

    @property
    def epochs(self) -> int:
        return self.config.critic_epochs or 0

    def begin(self) -> None:
        super().begin()
        self.policy_metrics.clear()

    def move_policy(self) -> None:
        """One optimiser step along the gradient that stands in the network, unless it must not be applied."""
        metrics = self.measure_gradient()
        if metrics is None:
            self.context.state.skipped += 1
            return
        self.step(metrics["train/grad_norm"])
        self.policy_metrics.add(metrics)

    def loss(self, batch: Batch, total_weight: Tensor, inner_resets: bool | None) -> MinibatchLoss:
        loss = critic_minibatch_loss(
            self.context.policy,
            batch,
            self.config,
            total_weight,
            inner_resets,
            self.context.runtime.compiled(loss_of_critic_features),
        )
        if self.smoothness is None:
            return loss
        change = self.smoothness.critic_loss(self.context.policy, batch)
        term = masked_mean(change, batch.weights, total_weight.clamp(min=1))
        return replace(
            loss,
            total=loss.total + term,
            terms=loss.terms | {"robust": term},
            metrics=loss.metrics | {"train/robust_critic_loss": term.detach()},
            finite=loss.finite & term.isfinite(),
        )

    def metrics(self) -> dict[str, Tensor]:
        """Of the policy's step and of the critics' minibatches; a part that both move has both their gradients."""
        policy, metrics = self.policy_metrics.means(), super().metrics()
        metrics["train/n_updates"] = self.minibatch_metrics.count + self.policy_metrics.count
        for name in ("train/grad_norm", "train/grad_norm_clipped"):
            if name in metrics:
                metrics[name.replace("train/", "critic/")] = metrics.pop(name)
        groups = self.gradient_norms.named(policy.pop(GROUPS)) if GROUPS in policy else {}
        for name, norm in groups.items():
            if name in metrics:
                metrics[name] = torch.hypot(metrics[name], norm)
            elif not name.startswith(("critic/", "lstm/critic", "train/grad_norm_critic")):
                metrics[name] = norm  # without epochs of their own the critics do not learn, and have no gradient
        if "critic/grad_ratio" in metrics:
            metrics["critic/grad_ratio"] = self._critic_ratio(metrics)
        return metrics | policy

    def _critic_ratio(self, metrics: dict[str, Tensor]) -> Tensor:
        pair = torch.stack([metrics["critic/grad_norm_1"], metrics["critic/grad_norm_2"]])
        return pair.max() / pair.min().clamp(min=1e-30)
