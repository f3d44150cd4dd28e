"""Faults of the learner of gradients through the market: windows, values after them, budgets, streams."""

from __future__ import annotations

import itertools
from dataclasses import replace
from typing import Any

import torch
from audit_faults import Injection, fault
from torch import Tensor


@fault("C1", "the policy's step reaches the critics")
def _(inject: Injection) -> None:
    from tailguard.algorithm.pathwise import PathwiseLearner

    objective = PathwiseLearner._objective

    def leaking(self: Any, rollout: Any, views: Any, final_obs: Tensor) -> Any:
        found, metrics = objective(self, rollout, views, final_obs)
        critics = [one for critic in self.policy.each_critic() for one in critic.parameters()]
        return found + 1e-3 * torch.stack([one.sum() for one in critics]).sum(), metrics

    inject.method(PathwiseLearner, "_objective", leaking)


@fault("C1", "the critics of windows learn their last layers alone")
def _(inject: Injection) -> None:
    from tailguard.algorithm.update import loss_of_critic_features

    def detached(policy: Any, features: Any, *given: Any) -> Any:
        return loss_of_critic_features(policy, {trunk: one.detach() for trunk, one in features.items()}, *given)

    inject.function(loss_of_critic_features, detached)


@fault("C3", "the cost is not in the objective of windows")
def _(inject: Injection) -> None:
    from tailguard.algorithm.risk_budget import RiskBudget

    costs = RiskBudget.costs
    inject.method(RiskBudget, "costs", lambda self, rollout: costs(self, rollout).detach() + 0 * rollout.rewards)


@fault("T2", "rewards of a window are discounted across the ends of episodes")
def _(inject: Injection) -> None:
    from tailguard.algorithm.pathwise import discounts

    inject.function(discounts, lambda ended, gamma: discounts(ended & False, gamma))


@fault("T3", "the critic's slope at a window's end has the wrong sign")
def _(inject: Injection) -> None:
    from tailguard.algorithm import pathwise

    final_values = pathwise.final_values
    inject.method(pathwise, "final_values", lambda views, mode: -final_values(views, mode))


@fault("T3", "liquidated accounts keep their value")
def _(inject: Injection) -> None:
    from tailguard.algorithm.pathwise import _bootstrapped

    inject.function(_bootstrapped, lambda rollout: torch.ones_like(rollout.rewards))


@fault("R1", "the noise of a pathwise learner is not that of its saved stream")
def _(inject: Injection) -> None:
    from tailguard.algorithm.pathwise import PathwiseLearner

    drawn = itertools.count()

    def of_the_process(self: Any) -> Tensor:
        shape = (self.config.n_steps, self.env.num_envs)
        fresh = torch.Generator().manual_seed(next(drawn))
        return self.policy.action_head.draw(shape, fresh).requires_grad_()

    inject.method(PathwiseLearner, "_noise", of_the_process)


@fault("R3", "the noise of a pathwise learner is drawn from the process's stream")
def _(inject: Injection) -> None:
    from tailguard.algorithm.pathwise import PathwiseLearner

    def of_the_process(self: Any) -> Tensor:
        shape = (self.config.n_steps, self.env.num_envs)
        return self.policy.action_head.draw(shape, None).requires_grad_()

    inject.method(PathwiseLearner, "_noise", of_the_process)


@fault("B4", "the critics of a pathwise learner learn without a discount")
def _(inject: Injection) -> None:
    from tailguard.algorithm.config import PathwiseConfig

    estimates = PathwiseConfig.estimates
    inject.method(PathwiseConfig, "estimates", property(lambda self: replace(estimates.fget(self), gamma=1.0)))
