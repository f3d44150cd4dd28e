"""Further terms of the loss: given to the learner as objects, or registered by name for the setting `loss_terms`.

A term of one's own is one function, from inside the package or from outside:

    @register_loss_term("action_size")
    def action_size(policy: ActorCritic, output: PolicyOutput, batch: Batch) -> Tensor:
        return policy.action_head.mode(output.dist_params).square().mean(-1)

and `ppo.loss_terms: {action_size: 0.01}` switches it on. A class registered in the same way may also have a `prepare`.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

import torch
from torch import Tensor

from tailguard.algorithm.losses import masked_mean
from tailguard.algorithm.schedules import Schedule
from tailguard.errors import ConfigError
from tailguard.models.policy import PolicyOutput

if TYPE_CHECKING:
    from tailguard.algorithm.estimate import Estimates
    from tailguard.algorithm.rollout import Rollout
    from tailguard.algorithm.update import Batch
    from tailguard.models.policy import ActorCritic

OWN_TERMS = ("policy", "value", "distribution", "entropy", "kl")
"""Names of the learners' own terms."""
LEARNERS = ("ppo", "pathwise")


@dataclass(frozen=True)
class TermLoss:
    """A term with metrics of its own."""

    values: Tensor
    """Per sample, [L, B]."""
    metrics: Mapping[str, Tensor] = field(default_factory=dict)
    """Per sample, [L, B], by name, as `robust/kl`; their means over the rows that count are logged."""


class LossTerm(Protocol):
    """Adds a term to the loss."""

    @property
    def name(self) -> str:
        """In metrics: `train/{name}_loss`."""
        ...

    def prepare(self, rollout: Rollout, estimates: Estimates, batch: Batch, progress: float) -> Batch:
        """Before the epochs: add what the term needs to `batch.extra`; `progress` is the share of training done."""
        ...

    def loss(self, policy: ActorCritic, output: PolicyOutput, batch: Batch) -> Tensor | TermLoss:
        """The term per sample, [L, B]. The batch has observations, memory before its first row and old dist_params."""
        ...


TermFunction = Callable[["ActorCritic", PolicyOutput, "Batch"], Tensor | TermLoss]


@dataclass(frozen=True)
class FunctionTerm:
    """A function as a term that needs nothing prepared."""

    name: str
    function: TermFunction

    def prepare(self, rollout: Rollout, estimates: Estimates, batch: Batch, progress: float) -> Batch:  # noqa: ARG002
        return batch

    def loss(self, policy: ActorCritic, output: PolicyOutput, batch: Batch) -> Tensor | TermLoss:
        return self.function(policy, output, batch)


@dataclass(frozen=True)
class RegisteredTerm:
    """An entry of the table."""

    name: str
    make: Callable[[], LossTerm]
    """A fresh term, for one learner."""
    learners: tuple[str, ...]


LOSS_TERMS: dict[str, RegisteredTerm] = {}
"""Every registered term by name."""

Registered = TypeVar("Registered", bound=Callable[..., Any])


def register_loss_term(
    name: str, *, learners: Iterable[str] = ("ppo",), replace: bool = False
) -> Callable[[Registered], Registered]:
    """Register a function `(policy, output, batch)`, or a class of `LossTerm`s made without arguments, as a term.

    `learners`: those whose loss it may be part of. In `ppo` it is part of every minibatch's loss. In `pathwise` it is
        part of the policy's step, on the window's observations, where `output.critics` is empty and no gradient goes
        through the market; a `prepare` is then called inside what a CUDA graph records.
    `replace`: allow a name that is already registered, as when a notebook cell runs twice.

    The term is multiplied by its coefficient in the setting `loss_terms`.
    """
    learners = tuple(learners)
    if not re.fullmatch(r"[a-z][a-z0-9_]*", name) or name in OWN_TERMS:
        raise ConfigError(
            f"loss term {name!r}: use lower case letters, digits and underscores, and none of {', '.join(OWN_TERMS)}"
        )
    if not learners or set(learners) - set(LEARNERS):
        raise ConfigError(f"loss term {name!r}: learners {learners!r}; choose from {', '.join(LEARNERS)}")
    if name in LOSS_TERMS and not replace:
        raise ConfigError(f"loss term {name!r} is registered already; choose another name, or pass replace=True")

    def register(given: Registered) -> Registered:
        make = given if isinstance(given, type) else lambda: FunctionTerm(name, given)
        LOSS_TERMS[name] = RegisteredTerm(name, make, learners)
        return given

    return register


@dataclass(frozen=True)
class WeightedTerm:
    """A registered term with its coefficient, in a tensor that recorded graphs hold."""

    name: str
    term: LossTerm
    schedule: Schedule
    coefficient: Tensor

    def set_coefficient(self, progress: float) -> None:
        """Write the coefficient of today into its tensor."""
        self.coefficient.fill_(self.schedule(progress))

    def prepare(self, rollout: Rollout, estimates: Estimates, batch: Batch, progress: float) -> Batch:
        return self.term.prepare(rollout, estimates, batch, progress)

    def loss(self, policy: ActorCritic, output: PolicyOutput, batch: Batch) -> TermLoss:
        found = split_term(self.term.loss(policy, output, batch))
        return TermLoss(self.coefficient * found.values, found.metrics)


def weighted_terms(coefficients: Mapping[str, float | str], device: torch.device) -> tuple[WeightedTerm, ...]:
    """The terms that the setting `loss_terms` names; one whose coefficient is always 0 is left out."""
    schedules = {name: Schedule.parse(coefficient) for name, coefficient in coefficients.items()}
    return tuple(
        WeightedTerm(name, LOSS_TERMS[name].make(), schedule, torch.zeros((), device=device))
        for name, schedule in schedules.items()
        if any(schedule.values)
    )


def check_names(terms: Iterable[LossTerm]) -> None:
    """Refuse two terms of one name: each would hide the other's metrics and gradient."""
    seen = set(OWN_TERMS)
    for term in terms:
        if term.name in seen:
            raise ConfigError(f"loss term {term.name!r}: another term has this name; give it one of its own")
        seen.add(term.name)


def split_term(found: Tensor | TermLoss) -> TermLoss:
    """What a term returned, with or without metrics."""
    return found if isinstance(found, TermLoss) else TermLoss(found)


def policy_penalty(
    terms: Iterable[WeightedTerm],
    policy: ActorCritic,
    rollout: Rollout,
    estimates: Estimates,
    batch: Batch,
    progress: float,
) -> tuple[Tensor, dict[str, Tensor]]:
    """The sum of the terms on a whole window, for the policy alone, and their metrics."""
    output = PolicyOutput(policy.act_sequence(batch.obs, batch.state, batch.episode_start), ())
    total, metrics = torch.zeros_like(batch.weights.sum()), dict[str, Tensor]()
    for term in terms:
        batch = term.prepare(rollout, estimates, batch, progress)
        found = term.loss(policy, output, batch)
        value = masked_mean(found.values, batch.weights)
        total = total + value
        metrics[f"train/{term.name}_loss"] = value.detach()
        metrics |= {name: masked_mean(each.detach(), batch.weights) for name, each in found.metrics.items()}
    return total, metrics
