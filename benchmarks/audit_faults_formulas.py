"""Faults in losses, critics and optimisers, each of which one check of the audit must catch."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from audit_faults import Injection, fault
from torch import Tensor

# --- losses ----------------------------------------------------------------------------------------------------------


@fault("F3", "every microbatch is divided by its own weight")
def _(inject: Injection) -> None:
    from tailguard.algorithm.updates import PolicyUpdates

    loss = PolicyUpdates.loss
    inject.method(PolicyUpdates, "loss", lambda self, batch, total, resets: loss(self, batch, None, resets))  # noqa: ARG005


@fault("F3", "microbatches are averaged with equal weights")
def _(inject: Injection) -> None:
    from tailguard.algorithm.updates import PolicyUpdates

    loss = PolicyUpdates.loss

    def averaged(self: Any, batch: Any, total: Tensor, resets: Any) -> Any:  # noqa: ARG001
        return loss(self, batch, batch.weights.sum() * self.config.microbatches, resets)

    inject.method(PolicyUpdates, "loss", averaged)


@fault("F4", "the mean is taken before the larger loss")
def _(inject: Injection) -> None:
    from tailguard.models.critics.base import larger_loss

    def means(loss: Tensor, clipped: Tensor, *predictions: Tensor) -> Any:
        found = larger_loss(loss, clipped, *predictions)
        return replace(found, loss=torch.maximum(loss.mean(), clipped.mean()).expand_as(loss))

    inject.function(larger_loss, means)


@fault("F4", "both critics are clipped around the smaller of their old values")
def _(inject: Injection) -> None:
    from tailguard.algorithm.update import make_batch

    def smaller(*given: Any) -> Any:
        batch = make_batch(*given)
        least = torch.stack(batch.old_values).min(0).values
        return replace(batch, old_values=(least,) * len(batch.old_values))

    inject.function(make_batch, smaller)


@fault("F4", "targets are clipped in the place of predictions")
def _(inject: Injection) -> None:
    from tailguard.models.critics.base import Critic, clip_value

    clipped_loss = Critic.clipped_loss

    def of_targets(self: Any, output: Tensor, targets: Tensor, old: Any, settings: Any) -> Any:
        near = targets if old is None else clip_value(targets, old, settings.clip.limit)
        return clipped_loss(self, output, near, old, settings)

    inject.method(Critic, "clipped_loss", of_targets)


@fault("F10", "the divergence has the wrong direction")
def _(inject: Injection) -> None:
    from tailguard.models.actions import GaussianHead

    kl = GaussianHead.kl
    inject.method(GaussianHead, "kl", lambda self, old, new: kl(self, new, old))


@fault("F10", "the third estimator is exp(−lr) − 1 + lr")
def _(inject: Injection) -> None:
    from tailguard.algorithm.losses import kl_k3

    inject.function(kl_k3, lambda log_ratio: kl_k3(-log_ratio))


@fault("F10", "a log-ratio is looked at after the clamp, and NaN is clamped to the limit")
def _(inject: Injection) -> None:
    from tailguard.algorithm.losses import guard_log_ratio

    def after(log_ratio: Tensor, limit: float = 20.0, weights: Any = None) -> Any:
        return guard_log_ratio(log_ratio.nan_to_num(limit), limit, weights)

    inject.function(guard_log_ratio, after)


@fault("F11", "the boost does not fade")
def _(inject: Injection) -> None:
    from tailguard.algorithm.schedules import EntropySchedule

    update = EntropySchedule.update

    def for_ever(self: Any, state: Any, monitored: float) -> Any:
        found = update(self, state, monitored)
        return replace(found, boosted=max(found.boosted, state.boosted))

    inject.method(EntropySchedule, "update", for_ever)


@fault("F11", "the floor is not in force")
def _(inject: Injection) -> None:
    from tailguard.algorithm.schedules import EntropySchedule

    coefficient = EntropySchedule.coefficient
    inject.method(EntropySchedule, "coefficient", lambda self, *given: coefficient(replace(self, floor=0.0), *given))


@fault("F12", "the exponent is not clamped")
def _(inject: Injection) -> None:
    from tailguard.algorithm.losses import awr_weights

    inject.function(awr_weights, lambda advantages, beta, most=20.0: (advantages.detach() / beta).exp())  # noqa: ARG005


@fault("F12", "the weight has a gradient")
def _(inject: Injection) -> None:
    from tailguard.algorithm.losses import awr_weights

    def attached(advantages: Tensor, beta: float, most: float = 20.0) -> Tensor:
        return (advantages / beta).clamp(max=math.log(most)).exp()

    inject.function(awr_weights, attached)


# --- critics ---------------------------------------------------------------------------------------------------------


@fault("F6", "the distribution's targets are λ-returns")
def _(inject: Injection) -> None:
    from tailguard.returns.distributional import sr_lambda_targets

    def lambda_returns(
        rewards: Tensor, nxt: Tensor, terminated: Tensor, truncated: Tensor, gamma: float, coins: Tensor
    ) -> Tensor:
        values = nxt.masked_fill(terminated.unsqueeze(-1), 0.0).mean((1, 2), keepdim=True).expand_as(nxt)
        share = coins.float().mean()
        samples, found = values[-1], []
        for t in reversed(range(len(rewards))):
            ended = (terminated | truncated)[t].unsqueeze(-1)
            mixed = torch.where(ended, values[t], share * samples + (1 - share) * values[t])
            samples = rewards[t].unsqueeze(-1) + gamma * mixed
            found.append(samples)
        return torch.stack(found[::-1])

    inject.function(sr_lambda_targets, lambda_returns)


@fault("F6", "the successor's mean stands for its distribution")
def _(inject: Injection) -> None:
    from tailguard.returns.distributional import bootstrap_samples

    inject.function(bootstrap_samples, lambda quantiles: quantiles.mean(-1, keepdim=True).expand_as(quantiles))


@fault("F7", "the mass of a sample that meets an atom is lost")
def _(inject: Injection) -> None:
    from tailguard.models.critics.categorical import two_hot

    def by_floor_and_ceiling(samples: Tensor, atoms: Tensor, mass: Any = None) -> Tensor:
        found = two_hot(samples, atoms, mass)
        if mass is not None or samples.shape[-1] > 1:
            return found
        position = (samples - atoms[0]) / (atoms[1] - atoms[0])
        return found * ((position - position.round()).abs() > 1e-9)

    inject.function(two_hot, by_floor_and_ceiling)


@fault("F7", "targets follow the clip")
def _(inject: Injection) -> None:
    from tailguard.models.critics.categorical import CategoricalCritic

    clipped_loss = CategoricalCritic.clipped_loss

    def following(self: Any, output: Tensor, targets: Tensor, old: Any, settings: Any) -> Any:
        if old is not None:
            targets = 0.5 * targets + 0.5 * old.softmax(-1)
        return clipped_loss(self, output, targets, old, settings)

    inject.method(CategoricalCritic, "clipped_loss", following)


@fault("F13", "a new scale leaves the heads as they are")
def _(inject: Injection) -> None:
    from tailguard.models.critics.base import Critic

    inject.method(Critic, "rescale", lambda self, change: None)  # noqa: ARG005


@fault("F13", "a new scale leaves the atoms where they are")
def _(inject: Injection) -> None:
    from tailguard.models.critics import CategoricalCritic

    inject.method(CategoricalCritic, "rescale", lambda self, change: None)  # noqa: ARG005


# --- optimisers ------------------------------------------------------------------------------------------------------


@fault("F15", "the spread between the elements counts as noise")
def _(inject: Injection) -> None:
    from tailguard.optim import VarianceGradientScaler

    average = VarianceGradientScaler._average_gradients

    def over_elements(self: Any) -> tuple[Tensor, ...]:
        _, *others = average(self)
        means = [float(mean.mean()) ** 2 * mean.numel() for mean in self._means]
        return (torch.tensor(means, dtype=torch.float64), *others)

    inject.method(VarianceGradientScaler, "_average_gradients", over_elements)


@fault("F15", "the factor is on the gradient, which Adam divides out")
def _(inject: Injection) -> None:
    from tailguard.optim import variance_scaler

    inject.function(variance_scaler._choose_application, lambda apply, optimizer: "gradient")  # noqa: ARG005


@fault("F16", "utilities are divided by their maximum, whatever its sign")
def _(inject: Injection) -> None:
    from tailguard.optim.utility import gate_line

    def by_maximum(normalisation: Any, lowest: Tensor, highest: Tensor) -> tuple[Tensor, Tensor]:  # noqa: ARG001
        return -1 / highest, torch.zeros_like(highest)

    inject.function(gate_line, by_maximum)


@fault("F16", "the maximum has no bias correction")
def _(inject: Injection) -> None:
    from tailguard.optim.utility import UtilityOptimizer

    gates = UtilityOptimizer._gates

    def uncorrected(self: Any, buckets: Any) -> Any:
        for bucket, gate in zip(buckets, gates(self, buckets), strict=True):
            correction = bucket.bias_correction(bucket.group["beta_utility"])[0]
            yield (gate.logit() / correction).sigmoid()

    inject.method(UtilityOptimizer, "_gates", uncorrected)


@fault("F19", "a parameter counts once for each module around it")
def _(inject: Injection) -> None:
    from tailguard.algorithm.iteration_metrics import GradientNorms

    make = GradientNorms.__init__

    def nested(self: Any, policy: Any) -> None:
        make(self, policy)
        depth: Mapping[str, int] = {name: name.count(".") for name, _ in policy.named_parameters()}
        self.members *= torch.tensor([float(depth[name]) for name, _ in policy.named_parameters()])

    inject.method(GradientNorms, "__init__", nested)


@fault("F19", "gradients are not clipped")
def _(inject: Injection) -> None:
    from torch import nn

    inject.method(nn.utils, "clip_grads_with_norm_", lambda *_, **__: None)


@fault("F19", "the root is forgotten")
def _(inject: Injection) -> None:
    from tailguard.algorithm.iteration_metrics import GradientNorms

    norms = GradientNorms.__call__
    inject.method(GradientNorms, "__call__", lambda self: tuple(value.square() for value in norms(self)))


# --- observations ----------------------------------------------------------------------------------------------------


@fault("F14", "the mean of observations moves within a rollout")
def _(inject: Injection) -> None:
    from tailguard.algorithm.rollout import ObservationScale

    scale = ObservationScale.__call__

    def moving(self: Any, obs: Tensor) -> Tensor:
        found = scale(self, obs)
        self.mean.lerp_(obs.reshape(-1, obs.shape[-1]).mean(0), 0.01)
        return found

    inject.method(ObservationScale, "__call__", moving)


@fault("F14", "predictions update the statistics")
def _(inject: Injection) -> None:
    from tailguard.algorithm.agent import Agent

    predict = Agent.predict

    def learning(self: Any, observation: Any, *given: Any, **named: Any) -> Any:
        self.observation_moments.update(torch.as_tensor(observation))
        return predict(self, observation, *given, **named)

    inject.method(Agent, "predict", learning)


@fault("F14", "saved statistics are not loaded")
def _(inject: Injection) -> None:
    from tailguard.returns import RunningMoments

    inject.method(RunningMoments, "load_state_dict", lambda self, state: None)  # noqa: ARG005


@fault("F17", "attacks start at the clean observation")
def _(inject: Injection) -> None:
    from tailguard.robust.attacks import Ball

    inject.method(Ball, "draw_inside", lambda self, like, generator: torch.zeros_like(like))  # noqa: ARG005


@fault("F17", "steps are ε/K long")
def _(inject: Injection) -> None:
    from tailguard.robust.attacks import Attack

    inject.method(Attack, "relative_step", property(lambda self: 1.0 / self.gradient_steps))


@fault("F17", "perturbations are not projected onto the ball")
def _(inject: Injection) -> None:
    from tailguard.robust.attacks import Ball

    inject.method(Ball, "project", lambda self, u: u)  # noqa: ARG005


@fault("F17", "ε compounds from rollout to rollout")
def _(inject: Injection) -> None:
    from tailguard.robust.smoothness import Smoothness

    def compounding(self: Any, progress: float) -> None:
        grown = self.config.epsilon_at(progress)
        self.epsilon.fill_(grown if float(self.epsilon) == 0 else float(self.epsilon) * (1 + progress))

    inject.method(Smoothness, "set_progress", compounding)


# --- costs -----------------------------------------------------------------------------------------------------------


@fault("F18", "one of the costs is booked and not paid")
def _(inject: Injection) -> None:
    from tailguard.market import simulator

    step = simulator.step

    def unpaid(market: Any, state: Any, target: Tensor, *given: Any, **named: Any) -> Any:
        after, done = step(market, state, target, *given, **named)
        net = done.net + done.costs["spread"]
        return replace(after, equity=state.equity * (1 + net)), replace(done, net=net)

    inject.function(step, unpaid)


@fault("F18", "fees are in units of the starting capital")
def _(inject: Injection) -> None:
    from tailguard.market import costs

    charge = costs.charge

    def in_capitals(market: Any, moment: Any, basis: Any) -> Any:
        found = charge(market, moment, basis)
        return {kind: cost * basis.equity if kind == "fee" else cost for kind, cost in found.items()}

    inject.function(charge, in_capitals)


@fault("F18", "interest is an income")
def _(inject: Injection) -> None:
    from tailguard.market import costs

    charge = costs.charge

    def turned(market: Any, moment: Any, basis: Any) -> Any:
        found = charge(market, moment, basis)
        return {kind: -cost if kind == "borrow" else cost for kind, cost in found.items()}

    inject.function(charge, turned)


@fault("F18", "accounts are liquidated only without equity")
def _(inject: Injection) -> None:
    from tailguard.market import account

    inject.function(account.margin_excess, lambda held, rates: held.equity)  # noqa: ARG005


@fault("F18", "shorts pay the funding that they should receive")
def _(inject: Injection) -> None:
    from tailguard.market import costs

    charge = costs.charge

    def paid_by_both(market: Any, moment: Any, basis: Any) -> Any:
        found = charge(market, moment, basis)
        return {kind: cost.abs() if kind == "funding" else cost for kind, cost in found.items()}

    inject.function(charge, paid_by_both)


@fault("F18", "the impact of an order grows with its size, and not with the root of it")
def _(inject: Injection) -> None:
    from tailguard.market import costs

    inject.function(costs._root, lambda values: values)
