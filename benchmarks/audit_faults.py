"""Faults for the audit: each breaks a real object of the package, and one check must notice.

A fault replaces a function of the package wherever it is imported, a method of a class, or a number in a formula; what
it breaks and by which check it must be caught is in `FAULTS`.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from copy import copy
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor


class Injection(ExitStack):
    """Replaces parts of the package until it is closed."""

    def function(self, original: Any, broken: Any) -> None:
        """Replace a function in every module of the package that holds it."""
        found = 0
        for name, module in list(sys.modules.items()):
            if name == "tailguard" or name.startswith("tailguard."):
                for attribute, value in list(vars(module).items()):
                    if value is original:
                        self._set(module, attribute, broken)
                        found += 1
        if not found:
            raise LookupError(f"{original} is in no module of the package: the fault would break nothing")

    def method(self, owner: Any, name: str, broken: Any) -> None:
        """Replace a method of a class, or an attribute of an object or of a module."""
        if not hasattr(owner, name) and name not in getattr(owner, "__dataclass_fields__", ()):
            raise LookupError(f"{owner} has no {name}: the fault would break nothing")
        self._set(owner, name, broken)

    def _set(self, owner: Any, name: str, value: Any) -> None:
        own = name in vars(owner)
        before = vars(owner)[name] if own else None
        setattr(owner, name, value)
        self.callback(lambda: setattr(owner, name, before) if own else delattr(owner, name))


@dataclass(frozen=True)
class Fault:
    """One fault of the package."""

    check: str
    """Id of the check that must catch it."""
    name: str
    """What is broken."""
    inject: Callable[[Injection], None]


FAULTS: list[Fault] = []


def fault(check: str, name: str) -> Callable[[Callable[[Injection], None]], Callable[[Injection], None]]:
    """Decorator: add a fault to the table."""

    def register(inject: Callable[[Injection], None]) -> Callable[[Injection], None]:
        FAULTS.append(Fault(check, name, inject))
        return inject

    return register


@contextmanager
def injected(one: Fault) -> Iterator[None]:
    """The package with this fault in it."""
    with Injection() as injection:
        one.inject(injection)
        yield


# --- connections -----------------------------------------------------------------------------------------------------


@fault("C1", "the critics' trunks are detached")
def _(inject: Injection) -> None:
    from tailguard.models.policy import ActorCritic

    features = ActorCritic.features

    def detached(self: Any, *given: Any) -> tuple[Tensor, ...]:
        actor, *others = features(self, *given)
        return (actor, *(one.detach() for one in others))

    inject.method(ActorCritic, "features", detached)


@fault("C1", "the value head reads the actor's trunk")
def _(inject: Injection) -> None:
    from tailguard.models.policy import ActorCritic

    heads = ActorCritic.heads
    inject.method(ActorCritic, "heads", lambda self, features: heads(self, [features[0] + 0 * x for x in features]))


@fault("C2", "only the critics' last layers learn")
def _(inject: Injection) -> None:
    from tailguard.models.policy import ActorCritic

    features = ActorCritic.features

    def detached(self: Any, *given: Any) -> tuple[Tensor, ...]:
        actor, *others = features(self, *given)
        return (actor, *(one.detach() for one in others))

    inject.method(ActorCritic, "features", detached)


@fault("C2", "value targets have the wrong sign")
def _(inject: Injection) -> None:
    from tailguard.returns.gae import lambda_returns

    inject.function(lambda_returns, lambda advantages, values: -(advantages + values))


@fault("C3", "the cost is not mixed into the advantages")
def _(inject: Injection) -> None:
    from tailguard.risk.constraint import CVaRConstraint

    inject.method(CVaRConstraint, "combine", lambda self, reward, cost: reward)  # noqa: ARG005


@fault("C3", "the constraint goes through the value targets")
def _(inject: Injection) -> None:
    from tailguard.algorithm.risk_budget import RiskBudget

    advantages = RiskBudget.advantages

    def through_the_critic(self: Any, rollout: Any, estimates: Any) -> Any:
        found, metrics = advantages(self, rollout, estimates)
        estimates.value_targets.add_(found - estimates.advantages)
        return found, metrics

    inject.method(RiskBudget, "advantages", through_the_critic)


# --- trajectories ----------------------------------------------------------------------------------------------------


@fault("T1", "the memory is stored after the step instead of before it")
def _(inject: Injection) -> None:
    from dataclasses import replace

    from tailguard.algorithm.rollout import collect

    def after_the_step(*given: Any, **named: Any) -> Any:
        rollout, state = collect(*given, **named)
        return replace(rollout, start_state=state.state), state

    inject.function(collect, after_the_step)


@fault("T1", "the batch is scaled by other observation statistics than the rollout")
def _(inject: Injection) -> None:
    from dataclasses import replace

    from tailguard.algorithm.update import make_batch

    def rescaled(*given: Any) -> Any:
        batch = make_batch(*given)
        return replace(batch, obs=1.01 * batch.obs)

    inject.function(make_batch, rescaled)


@fault("T1", "the fused LSTM forgets to reset its state")
def _(inject: Injection) -> None:
    from tailguard.models import memory

    by_layers = memory.LSTMMemory._by_layers
    inject.method(
        memory.LSTMMemory,
        "_by_chunks",
        lambda self, x, state, start: by_layers(self, x, state, torch.zeros_like(start)),
    )


@fault("T2", "the trace of GAE runs through the end of an episode")
def _(inject: Injection) -> None:
    from tailguard.returns.gae import gae

    inject.function(
        gae,
        lambda r, v, n, terminated, truncated, gamma, lam: gae(
            r, v, n, terminated & False, truncated & False, gamma, lam
        ),
    )


@fault("T2", "samples of the return continue past a time limit")
def _(inject: Injection) -> None:
    from tailguard.returns.distributional import sr_lambda_targets

    inject.function(
        sr_lambda_targets,
        lambda r, q, terminated, truncated, gamma, coins: sr_lambda_targets(
            r, q, terminated, truncated & False, gamma, coins
        ),
    )


@fault("T2", "the budget's critic counts what comes after the time limit")
def _(inject: Injection) -> None:
    from tailguard.algorithm import risk_budget

    gae = risk_budget.gae

    def beyond(costs: Tensor, values: Tensor, following: Tensor, ended: Tensor, never: Tensor, *rest: Any) -> Tensor:
        return gae(costs, values, following, never, ended, *rest)

    inject.method(risk_budget, "gae", beyond)


@fault("T3", "the bootstrap reads the final observation with an empty memory")
def _(inject: Injection) -> None:
    from tailguard.models import policy

    some = policy._some_successors

    def emptied(trunk: Any, obs: Any, final_obs: Any, rows: Any, state: Any, start: Any) -> Any:
        features, _, after = some(trunk, obs, final_obs, rows, state, start)
        nothing = trunk.memory.initial_state(final_obs.shape[1])
        ones = torch.ones(final_obs.shape[1], dtype=torch.bool)
        with torch.set_grad_enabled(final_obs.requires_grad):
            return features, torch.stack([trunk.step(one, nothing, ones)[0] for one in final_obs]), after

    inject.function(some, emptied)


@fault("T3", "the bootstrap reads the final observation twice")
def _(inject: Injection) -> None:
    from tailguard.models import policy

    some = policy._some_successors

    def twice(trunk: Any, obs: Any, final_obs: Any, rows: Any, state: Any, start: Any) -> Any:
        features, _, after = some(trunk, obs, final_obs, rows, state, start)
        with torch.set_grad_enabled(final_obs.requires_grad):
            doubled = final_obs * 2
        _, again, _ = some(trunk, obs, doubled, rows, state, start)
        return features, again, after

    inject.function(some, twice)


# --- formulas --------------------------------------------------------------------------------------------------------


@fault("F1", "the larger of the two surrogates is taken")
def _(inject: Injection) -> None:
    from dataclasses import replace

    from tailguard.algorithm.losses import clipped_surrogate

    def optimistic(log_ratio: Tensor, advantages: Tensor, clip_range: Any) -> Any:
        found = clipped_surrogate(log_ratio, advantages, clip_range)
        ratio = log_ratio.exp()
        clipped = ratio.clamp(1 - clip_range, 1 + clip_range)
        return replace(found, loss=torch.minimum(-advantages * ratio, -advantages * clipped))

    inject.function(clipped_surrogate, optimistic)


@fault("F1", "entropy is minimised")
def _(inject: Injection) -> None:
    from tailguard.algorithm.losses import entropy_loss

    inject.function(entropy_loss, lambda entropy, log_prob: -entropy_loss(entropy, log_prob))


@fault("F2", "advantages are divided by a floored standard deviation in float32")
def _(inject: Injection) -> None:
    from tailguard.returns.normalise import normalise_advantages

    def floored(advantages: Tensor, valid: Tensor | None = None, mode: Any = "global") -> Any:  # noqa: ARG001
        return (advantages - advantages.mean()) / (advantages.std() + 1e-8), torch.zeros((), dtype=torch.bool)

    inject.function(normalise_advantages, floored)


@fault("F5", "the asymmetry of the pinball loss is turned round")
def _(inject: Injection) -> None:
    from tailguard.models.critics import quantile

    loss = quantile.quantile_loss
    inject.function(loss, lambda q, targets, tau, kappa=0.0: loss(q, targets, 1 - tau, kappa))


@fault("F5", "a Huber threshold of one standard deviation")
def _(inject: Injection) -> None:
    from tailguard.models.critics import quantile

    loss = quantile.quantile_loss
    inject.function(loss, lambda q, targets, tau, kappa=0.0: loss(q, targets, tau, 1.0))  # noqa: ARG005


@fault("F8", "CVaR is the mean of the lowest quantiles")
def _(inject: Injection) -> None:
    from tailguard.risk.cvar import cvar_from_quantiles

    def naive(quantiles: Tensor, alpha: float, method: Any = "tukey") -> Tensor:  # noqa: ARG001
        count = max(1, round(alpha * quantiles.shape[-1]))
        return quantiles.sort(-1).values[..., :count].mean(-1)

    inject.function(cvar_from_quantiles, naive)


@fault("F9", "the multiplier winds up beyond its cap")
def _(inject: Injection) -> None:
    from tailguard.risk.constraint import Dual, dual_step

    def windup(dual: Dual, violation: Tensor, config: Any) -> Dual:
        kp, ki = config.gains
        integral = dual.integral + ki * violation.clamp(-1, 1)
        multiplier = (kp * violation.clamp(-1, 1) + integral).clamp(0, config.lambda_max)
        return Dual(multiplier, integral, dual.trend)

    inject.function(dual_step, windup)


@fault("F9", "the violation is not relative to the limit")
def _(inject: Injection) -> None:
    from tailguard.risk.constraint import CVaRConstraint, dual_step

    assert CVaRConstraint  # its observe() calls the step
    inject.function(dual_step, lambda dual, violation, config: dual_step(dual, violation * -config.limit, config))


# --- promises --------------------------------------------------------------------------------------------------------


@fault("F9", "the margin is outside the limit")
def _(inject: Injection) -> None:
    from tailguard.risk.constraint import CVaRConstraint

    observe = CVaRConstraint.observe

    def lenient(self: Any, *outcomes: Tensor) -> None:
        given, self.config = self.config, copy(self.config)
        object.__setattr__(self.config, "margin", -given.margin)  # the settings themselves refuse it
        observe(self, *outcomes)
        self.config = given

    inject.method(CVaRConstraint, "observe", lenient)


@fault("P5", "costs have no gradient")
def _(inject: Injection) -> None:
    from tailguard.market import costs

    charge = costs.charge
    inject.function(charge, lambda *given: {kind: cost.detach() for kind, cost in charge(*given).items()})
