"""The updates on one rollout: epochs of minibatches, each a gradient and a step."""

from __future__ import annotations

from abc import ABC, abstractmethod
from itertools import chain
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from tailguard.algorithm.losses import masked_mean
from tailguard.algorithm.nonfinite import check_finite, check_gradient
from tailguard.algorithm.optimizers import optimizer_figures, unless
from tailguard.algorithm.schedules import KLStopper, KLStopState
from tailguard.algorithm.tally import Tally
from tailguard.algorithm.update import (
    Batch,
    MinibatchLoss,
    critic_minibatch_loss,
    loss_of_critic_features,
    loss_of_features,
    minibatch_loss,
)
from tailguard.monitor.metrics import GradientNorms
from tailguard.shuffle import shuffled

if TYPE_CHECKING:
    from tailguard.algorithm.learner import Learner
    from tailguard.algorithm.pathwise import PathwiseLearner
    from tailguard.algorithm.ppo import DistributionalPPO

GROUPS = "groups"
"""Key under which the norms of all parts' gradients travel together, until they are named."""


class Updates(ABC):
    """Turns batches into optimiser steps. What it keeps lasts for one iteration, and stays in its place in memory."""

    def __init__(self, learner: Learner) -> None:
        self.learner = learner
        self.device = learner.device
        self.gradient_norms = GradientNorms(learner.agent)
        self.tally = Tally(self.device)
        self.stop = KLStopState.start(self.device)
        self.all_finite = torch.ones((), dtype=torch.bool, device=self.device)
        """Whether every minibatch of the iteration was finite, where it is not looked at one by one."""

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
        self.tally.clear()
        self.stop.clear()
        self.all_finite.fill_(True)

    def run(self, batch: Batch, inner_resets: bool) -> list[tuple[Tensor, ...]]:
        """Epochs of minibatches; stops early when the policy has moved too far. Returns each epoch's minibatches."""
        rows, sequences = batch.log_probs.shape
        count = min(max(1, round(sequences * rows / self.learner.config.minibatch_size)), sequences)
        # All drawn before the first is used: how far the epochs get must not change what is drawn later.
        orders = [shuffled(sequences, self.learner.generator).tensor_split(count) for _ in range(self.epochs)]
        for index in chain.from_iterable(orders):
            self.learner.runtime.run(
                ("minibatch", len(index)),
                lambda index: self.minibatch(batch, index, inner_resets),
                index,
            )
            if self.learner.runtime.looks and bool(self.stop.stopped):
                break
        self.learner.optimizer.zero_grad(set_to_none=True)
        return orders

    def minibatch(self, batch: Batch, index: Tensor, inner_resets: bool) -> None:
        """One optimiser step on the sequences with these numbers, unless the policy has moved too far already."""
        figures = self.accumulate(batch, index, inner_resets)
        if figures is None:
            self.learner.state.skipped += 1
            return
        stopper = self.kl_stopper
        if stopper is None:
            self.step(figures["train/grad_norm"])
            self.tally.add(figures)
            return
        self.stop.take(stopper.update(self.stop, figures["train/approx_kl"]))
        if self.learner.runtime.looks:
            if bool(self.stop.stopped):
                return
            self.step(figures["train/grad_norm"])
            self.tally.add(figures)
        else:
            unless(self.stop.stopped, lambda: self.step(figures["train/grad_norm"]), self.moving())
            self.tally.add(figures, ~self.stop.stopped)

    def accumulate(self, batch: Batch, index: Tensor, inner_resets: bool) -> dict[str, Tensor] | None:
        """Gradient of one minibatch, through its microbatches; None if it must be skipped."""
        config = self.learner.config
        self.learner.optimizer.zero_grad(set_to_none=True)
        figures: dict[str, Tensor] = {}
        total_weight = batch.weights.index_select(1, index).sum()
        finite = torch.ones((), dtype=torch.bool, device=self.device)
        for numbers in index.tensor_split(min(config.microbatches, len(index))):
            # Without looking at the rows, a fused call needs to know that no episode starts inside.
            found = self.loss(batch.select(numbers), total_weight, None if inner_resets else False)
            found.total.backward()  # type: ignore[no-untyped-call]
            if self.learner.runtime.looks and not check_finite(found, numbers, self.learner):
                return None
            finite = finite & found.finite & found.total.isfinite()
            for name, value in found.figures.items():
                figures[name] = figures[name] + value if name in figures else value
            figures["train/loss"] = figures.get("train/loss", torch.zeros_like(found.total)) + found.total.detach()
        measured = self.measure_gradient()
        if measured is None:
            return None
        self.all_finite &= finite
        return figures | measured

    def measure_gradient(self) -> dict[str, Tensor] | None:
        """Norms of the gradient that stands in the network; None if it must not be applied."""
        config = self.learner.config
        norm, groups = self.gradient_norms()
        if self.learner.runtime.looks and not check_gradient(norm, self.learner):
            return None
        self.all_finite &= norm.isfinite()
        figures = {
            "train/grad_norm": norm,
            "train/grad_norm_clipped": norm.clamp(max=config.max_grad_norm) if config.max_grad_norm > 0 else norm,
        }
        return figures | ({GROUPS: groups} if config.monitor else {})

    def step(self, norm: Tensor) -> None:
        """Clip the gradient, whose length is `norm`, and let the optimiser move."""
        if self.learner.scaler is not None:
            self.learner.scaler.update_statistics()
        if self.learner.config.max_grad_norm > 0:
            nn.utils.clip_grads_with_norm_(self.learner.agent.parameters(), self.learner.config.max_grad_norm, norm)
        if self.learner.scaler is None:
            self.learner.optimizer.step()
        else:
            self.learner.scaler.optimizer_step()

    def moving(self) -> list[Tensor]:
        """Everything that an optimiser step changes."""
        values = [parameter.data for parameter in self.learner.agent.parameters()]
        values += [value for state in self.learner.optimizer.state.values() for value in state.values()]
        values += [] if self.learner.scaler is None else self.learner.scaler.statistics()
        return values

    def figures(self) -> dict[str, Tensor]:
        """Figures of the minibatches and of what made steps of them."""
        means = self.tally.means()
        if GROUPS in means:
            means |= self.gradient_norms.named(means.pop(GROUPS))
        return (
            means
            | optimizer_figures(self.learner.optimizer, self.learner.scaler)
            | {"train/n_updates": self.tally.count, "train/learning_rate": self.learner.learning_rate}
        )


class PolicyUpdates(Updates):
    """PPO's updates: policy and critics by one loss, with an early stop by the KL divergence."""

    learner: DistributionalPPO

    def __init__(self, learner: DistributionalPPO) -> None:
        super().__init__(learner)
        self.final_kl = torch.tensor(torch.nan, device=self.device)
        """From the policy that acted to the one after the last step; NaN where no penalty asks for it."""

    @property
    def epochs(self) -> int:
        return self.learner.config.epochs

    @property
    def kl_stopper(self) -> KLStopper | None:
        return self.learner.config.kl_stopper

    def loss(self, batch: Batch, total_weight: Tensor, inner_resets: bool | None) -> MinibatchLoss:
        learner = self.learner
        return minibatch_loss(
            learner.agent,
            batch,
            learner.hyper,
            learner.config,
            learner.extensions,
            total_weight,
            inner_resets,
            learner.runtime.compiled(loss_of_features),
        )

    def run(self, batch: Batch, inner_resets: bool) -> list[tuple[Tensor, ...]]:
        self.begin()
        orders = super().run(batch, inner_resets)
        config = self.learner.config
        if config.kl_penalty > 0 and config.target_kl is not None:
            # Measured after the last step: before it, a single minibatch an iteration would always show 0.
            self.final_kl = self.learner.runtime.run(
                "policy_kl", lambda index: self._reached_kl(batch.select(index), inner_resets), orders[0][0]
            )
        return orders

    @torch.no_grad()
    def _reached_kl(self, batch: Batch, inner_resets: bool) -> Tensor:
        """Exact KL from the policy that acted to today's, mean over the batch."""
        output = self.learner.agent(batch.obs, batch.state, batch.episode_start, None if inner_resets else False)
        return masked_mean(self.learner.agent.action_head.kl(batch.parameters, output.parameters), batch.weights)

    def figures(self) -> dict[str, Tensor]:
        hyper = self.learner.hyper
        figures = super().figures() | {
            "train/early_stop": self.stop.stopped,
            "train/clip_range": hyper.clip_range,
            "train/entropy_coef": hyper.entropy_coef,
            "train/kl_coef": hyper.kl_coef,
        }
        return figures | ({"train/final_kl": self.final_kl} if self.learner.config.kl_penalty > 0 else {})


class CriticUpdates(Updates):
    """The updates of a learner that moves its policy by one step a window, and its critics by minibatches."""

    learner: PathwiseLearner

    def __init__(self, learner: PathwiseLearner) -> None:
        super().__init__(learner)
        self.policy = Tally(self.device)
        """Figures of the policy's own step."""

    @property
    def epochs(self) -> int:
        return self.learner.config.critic_epochs or 0

    def begin(self) -> None:
        super().begin()
        self.policy.clear()

    def move_policy(self) -> None:
        """One optimiser step along the gradient that stands in the network, unless it must not be applied."""
        figures = self.measure_gradient()
        if figures is None:
            self.learner.state.skipped += 1
            return
        self.step(figures["train/grad_norm"])
        self.policy.add(figures)

    def loss(self, batch: Batch, total_weight: Tensor, inner_resets: bool | None) -> MinibatchLoss:
        learner = self.learner
        return critic_minibatch_loss(
            learner.agent,
            batch,
            learner.config,
            total_weight,
            inner_resets,
            learner.runtime.compiled(loss_of_critic_features),
        )

    def figures(self) -> dict[str, Tensor]:
        """Of the policy's step and of the critics' minibatches; a part that both move has both their gradients."""
        policy, figures = self.policy.means(), super().figures()
        figures["train/n_updates"] = self.tally.count + self.policy.count
        for name in ("train/grad_norm", "train/grad_norm_clipped"):
            if name in figures:
                figures[name.replace("train/", "critic/")] = figures.pop(name)
        groups = self.gradient_norms.named(policy.pop(GROUPS)) if GROUPS in policy else {}
        for name, norm in groups.items():
            if name in figures:
                figures[name] = torch.hypot(figures[name], norm)
            elif not name.startswith(("critic/", "lstm/critic", "train/grad_norm_critic")):
                figures[name] = norm  # without epochs of their own the critics do not learn, and have no gradient
        if "critic/grad_ratio" in figures:
            figures["critic/grad_ratio"] = self._critic_ratio(figures)
        return figures | policy

    def _critic_ratio(self, figures: dict[str, Tensor]) -> Tensor:
        pair = torch.stack([figures["critic/grad_norm_1"], figures["critic/grad_norm_2"]])
        return pair.max() / pair.min().clamp(min=1e-30)
