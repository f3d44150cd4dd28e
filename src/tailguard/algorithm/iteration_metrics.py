"""The metrics of an iteration. A new one is one line in one of the tables below, or a function under `@metric`.

Everything is computed on the device from tensors that the iteration already holds, with fixed shapes and without a host
sync; the learner reads all metrics together, once.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property, partial
from typing import TYPE_CHECKING, TypeVar

import torch
from torch import Tensor, nn

from tailguard.errors import ConfigError
from tailguard.market.costs import COSTS
from tailguard.models.critics import ascending
from tailguard.monitor.device_metrics import RETURN_QUANTILES

if TYPE_CHECKING:
    from tailguard.algorithm.estimate import Estimates
    from tailguard.algorithm.rollout import Rollout
    from tailguard.models.policy import ActorCritic, PolicyState

SATURATED = 0.95
"""An LSTM's output this near to ±1 has next to no slope left."""


@dataclass(frozen=True)
class Snapshot:
    """The data of one iteration that metrics are computed from. Rows that do not count are left out of every mean."""

    policy: ActorCritic
    rollout: Rollout
    estimates: Estimates
    memory: PolicyState
    """Memory of every trunk after the rollout."""

    @cached_property
    def weights(self) -> Tensor:
        """1 where a row counts, divided by their number, [T, N]."""
        valid = self.rollout.valid.float()
        return valid / valid.sum().clamp(min=1)

    def mean(self, values: Tensor) -> Tensor:
        """Mean of [T, N] over the rows that count."""
        return torch.where(self.rollout.valid, values.float(), 0.0).mul(self.weights).sum()

    def std(self, values: Tensor) -> Tensor:
        """Standard deviation likewise."""
        return self.mean((values - self.mean(values)).square()).sqrt()

    def lowest(self, values: Tensor) -> Tensor:
        """Minimum likewise."""
        return torch.where(self.rollout.valid, values, torch.inf).min()

    def highest(self, values: Tensor) -> Tensor:
        """Maximum likewise."""
        return torch.where(self.rollout.valid, values, -torch.inf).max()

    def share(self, flags: Tensor) -> Tensor:
        """Share of rows with a flag set, of those that count."""
        return self.mean(flags.float())

    @cached_property
    def entropy(self) -> Tensor:
        """Of the policy that acted, [T, N]."""
        return self.policy.action_head.entropy(self.rollout.dist_params).detach()

    @cached_property
    def quantiles(self) -> Tensor | None:
        """Of the return, mean over the critics, sorted, in raw units, [T, N, Q]."""
        each = [view.quantiles for view in self.estimates.views if view.quantiles is not None]
        return ascending(torch.stack(each).mean(0)) if each else None


def explained_variance(snapshot: Snapshot) -> Tensor:
    """1 − Var(target − value) / Var(target)."""
    targets, values = snapshot.estimates.value_targets, snapshot.estimates.values
    return 1 - snapshot.std(targets - values).square() / snapshot.std(targets).square().clamp(min=1e-30)


ITERATION: dict[str, Callable[[Snapshot], Tensor]] = {
    "train/advantage_mean": lambda snapshot: snapshot.mean(snapshot.estimates.advantages),
    "train/advantage_std": lambda snapshot: snapshot.std(snapshot.estimates.advantages),
    "train/advantage_min": lambda snapshot: snapshot.lowest(snapshot.estimates.advantages),
    "train/advantage_max": lambda snapshot: snapshot.highest(snapshot.estimates.advantages),
    "train/explained_variance": explained_variance,
    "train/entropy": lambda snapshot: snapshot.mean(snapshot.entropy),
    "train/entropy_min": lambda snapshot: snapshot.lowest(snapshot.entropy),
    "train/entropy_max": lambda snapshot: snapshot.highest(snapshot.entropy),
    "train/entropy_margin": lambda snapshot: snapshot.mean(
        snapshot.policy.action_head.collapse_margin(snapshot.rollout.dist_params)
    ),
    "critic/twin_pessimism": lambda snapshot: snapshot.mean(snapshot.estimates.pessimism),
}
"""Metrics that every run has."""

Function = TypeVar("Function", bound=Callable[..., Tensor])


def metric(name: str) -> Callable[[Function], Function]:
    """Register a metric of one's own: a function of the `Snapshot` that returns a 0-dim tensor, under a name as `my/x`.

    It runs on the device with the others, once an iteration, and is logged, written and shown as they are.
    """
    if not re.fullmatch(r"[a-z0-9_]+(/[a-z0-9_]+)+", name):
        raise ConfigError(f"metric {name!r}: give a group and a name in small letters, as my/exposure_max")
    if name in ITERATION:
        raise ConfigError(f"metric {name!r}: exists already; choose another name")

    def register(function: Function) -> Function:
        ITERATION[name] = function
        return function

    return register


def level_of(snapshot: Snapshot, quantiles: Tensor, level: float) -> Tensor:
    """The return's quantile at a level (the nearest one of those at hand), mean over the rows."""
    return snapshot.mean(quantiles[..., round(level * (quantiles.shape[-1] - 1))])


def spread_of(quantiles: Tensor) -> Tensor:
    """Standard deviation over the last dimension; `Tensor.std` takes ten times as long on a CPU."""
    return (quantiles - quantiles.mean(-1, keepdim=True)).square().mean(-1).sqrt()


DISTRIBUTION: Mapping[str, Callable[[Snapshot, Tensor], Tensor]] = {
    "critic/quantile_spread": lambda snapshot, quantiles: snapshot.mean(spread_of(quantiles)),
    **{name: partial(level_of, level=level) for name, level in RETURN_QUANTILES.items()},
}
"""Metrics of the return distribution, for distributional critics."""

HIDDEN: Mapping[str, Callable[[Tensor], Tensor]] = {
    "hidden_mean": lambda hidden: hidden.mean(),
    "hidden_std": lambda hidden: hidden.std(correction=0),
    "hidden_norm": lambda hidden: hidden.norm(dim=-1).mean(),
    "saturated": lambda hidden: (hidden.abs() > SATURATED).float().mean(),
}
"""Metrics of an LSTM layer's output after the rollout, [N, H]: `lstm/{trunk}_{layer}_{name}`."""

MARKET: Mapping[str, Callable[[Snapshot, Mapping[str, Tensor]], Tensor]] = {
    "data/turnover": lambda snapshot, outcome: snapshot.mean(outcome["turnover"]),
    "data/unfilled": lambda snapshot, outcome: snapshot.mean(outcome["unfilled"]),
    "data/nonfinite_costs": lambda snapshot, outcome: snapshot.share(~outcome["finite"]),
    "data/exposure": lambda snapshot, outcome: snapshot.mean(outcome["weights"].abs().sum(-1)),
    "data/shielded": lambda snapshot, outcome: snapshot.share(outcome["shielded"]),
    "data/flips": lambda snapshot, outcome: flip_share(snapshot, outcome["weights"]),
}
"""Trading metrics, for environments that trade: means over bars."""


def cost_metrics(snapshot: Snapshot, outcome: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Mean of every cost that the environment charges, as a share of equity per bar: `data/{kind}`."""
    return {f"data/{kind}": snapshot.mean(outcome[kind]) for kind in COSTS if kind in outcome}


def flip_share(snapshot: Snapshot, weights: Tensor) -> Tensor:
    """Share of bars at which some position changes its sign, inside an episode; weights [T, N, A]."""
    flipped = (weights[1:] * weights[:-1] < 0).any(-1) & ~snapshot.rollout.episode_start[1:]
    return flipped.float().mean() if len(weights) > 1 else weights.new_zeros(())


def iteration_metrics(snapshot: Snapshot, detailed: bool = True) -> dict[str, Tensor]:
    """All metrics of this iteration by name, as 0-dim tensors; without `detailed` only those that every run has."""
    metrics = {name: function(snapshot) for name, function in ITERATION.items()}
    if not detailed:
        return metrics
    if snapshot.quantiles is not None:
        quantiles = snapshot.quantiles
        metrics |= {name: function(snapshot, quantiles) for name, function in DISTRIBUTION.items()}
        head = snapshot.policy.each_critic()[0].distribution
        outputs = [view.output.distribution for view in snapshot.estimates.views]
        if head is not None:
            metrics |= head.metrics([output for output in outputs if output is not None], snapshot.mean)
    # Without critics only the policy's trunk, the first, reads the rollout.
    trunks = list(zip(snapshot.policy.trunk_names, snapshot.memory, strict=True))
    for trunk, memory in trunks if snapshot.estimates.views else trunks[:1]:
        for layer, hidden in enumerate(memory[0] if memory else ()):
            metrics |= {f"lstm/{trunk}_{layer}_{name}": function(hidden) for name, function in HIDDEN.items()}
    outcome = snapshot.rollout.outcome
    if "weights" in outcome:
        metrics |= {name: function(snapshot, outcome) for name, function in MARKET.items()}
        metrics |= cost_metrics(snapshot, outcome)
    return metrics


class GradientNorms:
    """Norms of the gradient of parts of the network: the root of summed squares, each parameter once.

    One pass over the parameters gives the norm of each; a product with a 0/1 matrix sums their squares by group.
    """

    def __init__(self, policy: ActorCritic) -> None:
        self.parameters = list(policy.parameters())
        groups = gradient_groups(policy)
        self.names = tuple(groups)
        position = {id(parameter): index for index, parameter in enumerate(self.parameters)}
        self.members = torch.zeros(len(groups), len(self.parameters), device=self.parameters[0].device)
        for row, modules in enumerate(groups.values()):
            for module in modules:
                for parameter in module.parameters():
                    self.members[row, position[id(parameter)]] = 1.0

    def __call__(self) -> tuple[Tensor, Tensor]:
        """The norm of the whole gradient, [], and of each group, [G]; a parameter without a gradient counts as 0."""
        gradients = [one.grad for one in self.parameters]
        norms = iter(torch._foreach_norm([gradient for gradient in gradients if gradient is not None]))
        nothing = torch.zeros((), dtype=self.parameters[0].dtype, device=self.members.device)
        squares = torch.stack([nothing if gradient is None else next(norms) for gradient in gradients]).square()
        return squares.sum().sqrt(), (self.members * squares.to(self.members.dtype)).sum(-1).sqrt()

    def named(self, norms: Tensor) -> dict[str, Tensor]:
        """The groups' norms [G] by name, and the ratio between two critics."""
        metrics = dict(zip(self.names, norms.unbind(), strict=True))
        critics = [value for name, value in metrics.items() if name.startswith("critic/grad_norm_")]
        if len(critics) == 2:
            pair = torch.stack(critics)
            metrics["critic/grad_ratio"] = pair.max() / pair.min().clamp(min=1e-30)
        return metrics


def gradient_groups(policy: ActorCritic) -> dict[str, list[nn.Module]]:
    """Which modules a reported gradient norm covers, by its name."""
    groups: dict[str, list[nn.Module]] = {"train/grad_norm_action_head": [policy.action_head]}
    for index, (critic, trunk) in enumerate(zip(policy.each_critic(), policy.critic_trunks, strict=True)):
        own = policy.critic_trunks.count(trunk) == 1 and trunk != 0
        groups[f"critic/grad_norm_{index + 1}"] = [critic, policy.trunks[trunk]] if own else [critic]
    for name, trunk_module in zip(policy.trunk_names, policy.each_trunk(), strict=True):
        groups[f"train/grad_norm_{name}_encoder"] = [trunk_module.encoder]
        for layer, cell in enumerate(getattr(trunk_module.memory, "cells", ())):
            groups[f"lstm/{name}_{layer}_grad_norm"] = [cell]
    return {name: modules for name, modules in groups.items() if any(True for m in modules for _ in m.parameters())}
