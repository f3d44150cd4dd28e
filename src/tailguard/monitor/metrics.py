"""The metrics of an iteration. A new one is one line in one of the tables below.

Everything is computed on the device from tensors that the iteration has made anyway, with fixed shapes and without
waiting; the learner reads all metrics together, once.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property, partial
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from tailguard.market.costs import COST_KINDS
from tailguard.models.critics import QuantileCritic, ascending

if TYPE_CHECKING:
    from tailguard.algorithm.estimate import Estimates
    from tailguard.algorithm.rollout import Rollout
    from tailguard.models.agent import ActorCritic, AgentState

SATURATED = 0.95
"""An LSTM's output this near to ±1 has next to no slope left."""
FAN = (0.05, 0.25, 0.5, 0.75, 0.95)
"""Levels of the return's distribution that are shown over time."""


@dataclass(frozen=True)
class Snapshot:
    """The data of one iteration that metrics are computed from. Rows that do not count are left out of every mean."""

    agent: ActorCritic
    rollout: Rollout
    estimates: Estimates
    memory: AgentState
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
        return self.agent.action_head.entropy(self.rollout.parameters).detach()

    @cached_property
    def quantiles(self) -> Tensor | None:
        """Of the return, mean over the critics, sorted, in raw units, [T, N, Q]."""
        found = [view.quantiles for view in self.estimates.views if view.quantiles is not None]
        return ascending(torch.stack(found).mean(0)) if found else None

    @cached_property
    def gaps(self) -> Tensor | None:
        """From each quantile that a critic gives to the next, in standard deviations of the return, [C, T, N, Q − 1].

        As the critics say them, before they are sorted: below 0 where two stand in the wrong order.
        """
        views = self.estimates.views
        found = [
            view.output.distribution.diff(dim=-1)
            for critic, view in zip(self.agent.each_critic()[: len(views)], views, strict=True)
            if isinstance(critic.distribution, QuantileCritic) and view.output.distribution is not None
        ]
        return torch.stack(found) if found else None


def explained_variance(found: Snapshot) -> Tensor:
    """1 − Var(target − value) / Var(target)."""
    targets, values = found.estimates.value_targets, found.estimates.values
    return 1 - found.std(targets - values).square() / found.std(targets).square().clamp(min=1e-30)


ITERATION: Mapping[str, Callable[[Snapshot], Tensor]] = {
    "train/advantage_mean": lambda found: found.mean(found.estimates.advantages),
    "train/advantage_std": lambda found: found.std(found.estimates.advantages),
    "train/advantage_min": lambda found: found.lowest(found.estimates.advantages),
    "train/advantage_max": lambda found: found.highest(found.estimates.advantages),
    "train/explained_variance": explained_variance,
    "train/entropy": lambda found: found.mean(found.entropy),
    "train/entropy_min": lambda found: found.lowest(found.entropy),
    "train/entropy_max": lambda found: found.highest(found.entropy),
    "train/entropy_margin": lambda found: found.mean(found.agent.action_head.collapse_margin(found.rollout.parameters)),
    "critic/twin_pessimism": lambda found: found.mean(found.estimates.pessimism),
}
"""Metrics that every run has."""


def level_of(found: Snapshot, quantiles: Tensor, level: float) -> Tensor:
    """The return's quantile at a level (the nearest one of those at hand), mean over the rows."""
    return found.mean(quantiles[..., round(level * (quantiles.shape[-1] - 1))])


def spread_of(quantiles: Tensor) -> Tensor:
    """Standard deviation over the last dimension; `Tensor.std` takes ten times as long on a CPU."""
    return (quantiles - quantiles.mean(-1, keepdim=True)).square().mean(-1).sqrt()


def cost_of(found: Snapshot, outcome: Mapping[str, Tensor], kind: str) -> Tensor:
    """Mean of a cost, as a share of equity per bar."""
    return found.mean(outcome[kind])


DISTRIBUTION: Mapping[str, Callable[[Snapshot, Tensor], Tensor]] = {
    "critic/quantile_spread": lambda found, quantiles: found.mean(spread_of(quantiles)),
    **{f"critic/return_p{round(100 * level):02d}": partial(level_of, level=level) for level in FAN},
}
"""Metrics of the return distribution, for distributional critics."""

CROSSING: Mapping[str, Callable[[Snapshot, Tensor], Tensor]] = {
    "critic/quantile_crossing": lambda found, gaps: found.mean((gaps < 0).float().mean((0, -1))),
    "critic/quantile_crossing_depth": lambda found, gaps: found.mean(gaps.clamp(max=0).neg().sum(-1).mean(0)),
}
"""Quantiles in the wrong order: the share of neighbouring pairs, and the total size of their crossings. A nearly
constant return leaves them in random order without harm, so only the two together indicate a fault."""

HIDDEN: Mapping[str, Callable[[Tensor], Tensor]] = {
    "hidden_mean": lambda hidden: hidden.mean(),
    "hidden_std": lambda hidden: hidden.std(correction=0),
    "hidden_norm": lambda hidden: hidden.norm(dim=-1).mean(),
    "saturated": lambda hidden: (hidden.abs() > SATURATED).float().mean(),
}
"""Metrics of an LSTM layer's output after the rollout, [N, H]: `lstm/{trunk}_{layer}_{name}`."""

MARKET: Mapping[str, Callable[[Snapshot, Mapping[str, Tensor]], Tensor]] = {
    "data/turnover": lambda found, outcome: found.mean(outcome["turnover"]),
    "data/unfilled": lambda found, outcome: found.mean(outcome["unfilled"]),
    **{f"data/{kind}": partial(cost_of, kind=kind) for kind in COST_KINDS},
    "data/nonfinite_costs": lambda found, outcome: found.share(~outcome["finite"]),
    "data/exposure": lambda found, outcome: found.mean(outcome["weights"].abs().sum(-1)),
    "data/shielded": lambda found, outcome: found.share(outcome["shielded"]),
    "data/flips": lambda found, outcome: flip_share(found, outcome["weights"]),
}
"""Trading metrics, for environments that trade: means over bars, costs as shares of equity."""


def flip_share(found: Snapshot, weights: Tensor) -> Tensor:
    """Share of bars at which some position changes its sign, inside an episode; weights [T, N, A]."""
    flipped = (weights[1:] * weights[:-1] < 0).any(-1) & ~found.rollout.episode_start[1:]
    return flipped.float().mean() if len(weights) > 1 else weights.new_zeros(())


def iteration_figures(found: Snapshot, detailed: bool = True) -> dict[str, Tensor]:
    """All metrics of this iteration by name, as 0-dim tensors; without `detailed` only those that every run has."""
    figures = {name: figure(found) for name, figure in ITERATION.items()}
    if not detailed:
        return figures
    if found.quantiles is not None:
        quantiles = found.quantiles
        figures |= {name: figure(found, quantiles) for name, figure in DISTRIBUTION.items()}
    if found.gaps is not None:
        gaps = found.gaps
        figures |= {name: figure(found, gaps) for name, figure in CROSSING.items()}
    # Without critics only the policy's trunk, the first, reads the rollout.
    trunks = list(zip(found.agent.trunk_names, found.memory, strict=True))
    for trunk, memory in trunks if found.estimates.views else trunks[:1]:
        for layer, hidden in enumerate(memory[0] if memory else ()):
            figures |= {f"lstm/{trunk}_{layer}_{name}": figure(hidden) for name, figure in HIDDEN.items()}
    outcome = found.rollout.outcome
    if "weights" in outcome:
        figures |= {name: figure(found, outcome) for name, figure in MARKET.items()}
    return figures


class GradientNorms:
    """Norms of the gradient of parts of the network: the root of summed squares, each parameter once.

    One pass over the parameters gives the norm of each; a product with a 0/1 matrix sums their squares by group.
    """

    def __init__(self, agent: ActorCritic) -> None:
        self.parameters = list(agent.parameters())
        groups = gradient_groups(agent)
        self.names = tuple(groups)
        position = {id(parameter): index for index, parameter in enumerate(self.parameters)}
        self.members = torch.zeros(len(groups), len(self.parameters), device=self.parameters[0].device)
        for row, modules in enumerate(groups.values()):
            for module in modules:
                for parameter in module.parameters():
                    self.members[row, position[id(parameter)]] = 1.0

    def __call__(self) -> tuple[Tensor, Tensor]:
        """The norm of the whole gradient, [], and of each group, [G]; a parameter without a gradient counts as 0."""
        gradients = {index: one.grad for index, one in enumerate(self.parameters) if one.grad is not None}
        present = list(gradients)
        squares = torch.stack(torch._foreach_norm(list(gradients.values()))).square()
        members = self.members if len(present) == len(self.parameters) else self.members[:, present]
        return squares.sum().sqrt(), (members * squares.to(members.dtype)).sum(-1).sqrt()

    def named(self, norms: Tensor) -> dict[str, Tensor]:
        """The groups' norms [G] by name, and the ratio between two critics."""
        figures = dict(zip(self.names, norms.unbind(), strict=True))
        critics = [value for name, value in figures.items() if name.startswith("critic/grad_norm_")]
        if len(critics) == 2:
            pair = torch.stack(critics)
            figures["critic/grad_ratio"] = pair.max() / pair.min().clamp(min=1e-30)
        return figures


def gradient_groups(agent: ActorCritic) -> dict[str, list[nn.Module]]:
    """Which modules a reported gradient norm covers, by its name."""
    groups: dict[str, list[nn.Module]] = {"train/grad_norm_action_head": [agent.action_head]}
    for index, (critic, trunk) in enumerate(zip(agent.each_critic(), agent.critic_trunks, strict=True)):
        own = agent.critic_trunks.count(trunk) == 1 and trunk != 0
        groups[f"critic/grad_norm_{index + 1}"] = [critic, agent.trunks[trunk]] if own else [critic]
    for name, trunk_module in zip(agent.trunk_names, agent.each_trunk(), strict=True):
        groups[f"train/grad_norm_{name}_encoder"] = [trunk_module.encoder]
        for layer, cell in enumerate(getattr(trunk_module.memory, "cells", ())):
            groups[f"lstm/{name}_{layer}_grad_norm"] = [cell]
    return {name: modules for name, modules in groups.items() if any(True for m in modules for _ in m.parameters())}
