"""What moved a decision: each input's share of the target weight, by integrated gradients.

    share of input i = (x_i − t_i) · ∫₀¹ ∂w(t + s·(x − t)) / ∂x_i ds,   Σ_i share = w(x) − w(t)

(Sundararajan et al. 2017). x is the observation, t the typical one: the mean of those seen in training. w is the weight
that the policy asks for, by its own networks with the memory that it had before this bar, before throttle, limits and
shield.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from tailguard.algorithm.agent import Agent
from tailguard.algorithm.ensemble import Ensemble
from tailguard.envs.episodes import TradingTask
from tailguard.models.actions import GaussianHead
from tailguard.models.inference import ScaledNetwork
from tailguard.models.memory import MemoryState

PIECES, NODES = 16, 4
"""The way from the typical observation to the real one, in pieces with so many Gauss-Legendre points each. Where an
input or a weight is clipped, the slope jumps, and one piece is inexact; see `complete`."""
SHOWN = 6
"""Inputs that are named for a symbol; the others are summed."""
MOST_SYMBOLS = 8
"""Symbols whose weights are explained: those that move the most."""


class Explainer:
    """Follows an agent's memory, and explains its last decision.

    `agent` has `scaled_networks` and `combine`: one learner, or an ensemble.
    """

    def __init__(self, agent: Any, observation_size: int) -> None:
        self.networks: tuple[ScaledNetwork, ...] = agent.scaled_networks(observation_size)
        self.combine = agent.combine
        self._after: list[MemoryState] = [each.network.initial_state(1)[0] for each in self.networks]
        self._before = self._after
        """The memories that the last decision was made with."""
        self._observation: Tensor | None = None

    @staticmethod
    def can_explain(agent: Any) -> bool:
        """Whether the agent's decisions follow from networks that it shows, of continuous weights."""
        if not isinstance(agent, Agent | Ensemble) or type(agent).predict not in (Agent.predict, Ensemble.predict):
            return False  # it decides in its own way
        return all(isinstance(each.network.action_head, GaussianHead) for each in agent.scaled_networks())

    @torch.no_grad()
    def follow(self, observation: Tensor, reset: bool) -> None:
        """Take in the observation [1, O] of a decision; `reset`: the memory was cleared before it."""
        self._observation = observation.clone()
        self._before = [
            each.network.initial_state(1)[0] if reset else memory
            for each, memory in zip(self.networks, self._after, strict=True)
        ]
        start = torch.zeros(1, dtype=torch.bool)
        self._after = [
            each.network.act(each.scale(self._observation), memory, start)[1]
            for each, memory in zip(self.networks, self._before, strict=True)
        ]

    def weights(self, observations: Tensor, task: TradingTask, row: int) -> Tensor:
        """Weights [N, A] that the policy asks for on observations [N, O], with the memory of the last decision."""
        count = len(observations)
        start = torch.zeros(count, dtype=torch.bool)
        actions = []
        for each, memory in zip(self.networks, self._before, strict=True):
            head = each.network.action_head
            state = _repeated(memory, each.network.initial_state(count)[0])
            parameters, _ = each.network.act(each.scale(observations), state, start)
            actions.append(head.to_env(head.mode(parameters)))
        action = self.combine(actions)
        if task.holdable is not None:
            action = action * task.holdable[row]
        weights = task.to_weights(action)
        return weights if task.volatility_factors is None else weights * task.volatility_factors[row]

    @property
    def typical(self) -> Tensor:
        """The typical observation [1, O]: the mean over the members of the mean observation of each."""
        middle = torch.stack([each.typical.reshape(1, -1) for each in self.networks]).mean(0)
        layout = self.networks[0].network.layout
        if layout is None:
            return middle
        assert self._observation is not None
        # Which assets are listed is a fact: half listed has no meaning.
        own, account = torch.zeros(layout.asset_size), torch.zeros(layout.account_size)
        return torch.where(layout.spread(own, account, 1.0, middle.shape[1]).bool(), self._observation, middle)

    def explain(self, task: TradingTask, row: int, held: Sequence[float]) -> dict[str, Any]:
        """The shares of the inputs in the last decision, for the symbols whose weights move the most from `held`."""
        assert self._observation is not None
        end, start = self._observation, self.typical
        points, steps = np.polynomial.legendre.leggauss(NODES)
        places = (np.arange(PIECES)[:, None] + (points + 1) / 2) / PIECES
        along = torch.tensor(places.reshape(-1, 1), dtype=end.dtype)
        factors = torch.tensor(np.tile(steps / (2 * PIECES), PIECES), dtype=end.dtype)
        with torch.no_grad():
            corners = torch.linspace(0, 1, PIECES + 1, dtype=end.dtype).unsqueeze(1)
            known = self.weights(start + corners * (end - start), task, row).double()
        change = (known[-1] - torch.tensor(held, dtype=torch.float64)).abs()
        chosen = change.argsort(descending=True, stable=True)[:MOST_SYMBOLS].tolist()
        with torch.enable_grad():
            path = (start + along * (end - start)).requires_grad_()
            weights = self.weights(path, task, row)
            slopes = [torch.autograd.grad(weights[:, asset] @ factors, path, retain_graph=True)[0] for asset in chosen]
        standard = (end - start)[0] / torch.stack([each.units for each in self.networks]).mean(0)
        names = task.observation_names
        found = {}
        for asset, slope in zip(chosen, slopes, strict=True):
            pieces = ((end - start) * slope).double().reshape(PIECES, NODES, -1).sum(1)
            shares = complete(pieces, known[:, asset].diff()).sum(0)
            first = shares.abs().argsort(descending=True, stable=True)[:SHOWN].tolist()
            moved = [[names[place], float(shares[place]), float(standard[place])] for place in first]
            found[task.market.symbols[asset]] = {
                "weight": float(known[-1, asset]),
                "typical": float(known[0, asset]),
                "moved": moved,
                "others": float(shares.sum()) - sum(share for _, share, _ in moved),
            }
        return found


def complete(shares: Tensor, changes: Tensor) -> Tensor:
    """Shares [P, O] of the pieces of a way, so that each piece adds up to its known change [P].

    What the quadrature misses, at a corner, is divided in proportion to the sizes of the shares in that piece.
    """
    sizes = shares.abs()
    missing = changes - shares.sum(-1)
    return shares + missing.unsqueeze(-1) * sizes / sizes.sum(-1, keepdim=True).clamp(min=1e-30)


def _repeated(memory: MemoryState, like: MemoryState) -> MemoryState:
    """The memory of one account for many alike, in the shapes of `like`."""
    return tuple(
        part.repeat([wanted // own for wanted, own in zip(other.shape, part.shape, strict=True)])
        for part, other in zip(memory, like, strict=True)
    )
