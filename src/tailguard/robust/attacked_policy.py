"""A trained agent whose observations are falsified before it decides: for backtests and evaluations."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from tailguard.envs.spec import TradingSpec
from tailguard.errors import ConfigError
from tailguard.models.actions import GaussianHead
from tailguard.models.inference import ScaledNetwork, StepPolicy
from tailguard.models.policy import PolicyState
from tailguard.robust.attacks import Attack, Ball, Objective, attackable, maximise, row_values

Memories = tuple[PolicyState, ...]
"""Of each network, of each of its trunks; what remembers in the attack itself comes last."""


class AttackableAgent(Protocol):
    """An agent, or an ensemble of them: the networks that decide, and how their actions become one."""

    @property
    def spec(self) -> TradingSpec | None: ...

    def scaled_networks(self) -> tuple[ScaledNetwork, ...]: ...

    def combine(self, actions: Sequence[Tensor]) -> Tensor: ...


@dataclass(frozen=True)
class AttackedDecision:
    """What an attacked agent decides on N observations."""

    action: Tensor
    """In the environment's form, [N, A]."""
    clean: Tensor
    """What it would have done had it seen the truth, with the same memory, [N, A]."""
    obs: Tensor
    """What it saw, raw, [N, O]."""
    memories: Memories
    """After it: those of an agent that has read what it saw."""


class AttackedPolicy:
    """An agent that sees attacked observations and takes its most likely action.

    It stands in for the agent in `tailguard.backtest`, in `HeldOutEpisodes.trade` and wherever SB3's `predict` is
    asked. The agent's memory is the one that the attacked observations have left in it, as it would be.

    `agent`: a learner or an ensemble. Members of an ensemble see one feed: the same perturbation of the raw
        observation, in units of the mean of the members' scales.
    `attack`: how each observation is perturbed, one after the other.
    `mask`: which columns can be attacked, [O]; by default `attackable` of the agent's spec.
    """

    def __init__(self, agent: AttackableAgent, attack: Attack, mask: Tensor | None = None) -> None:
        if attack.through_time:
            raise ConfigError(
                "attack.through_time: an agent that is asked bar by bar has no window that could be attacked at once; "
                "use perturb on a rollout's observations, or leave it false"
            )
        self.agent, self.attack = agent, attack
        self.networks = agent.scaled_networks()
        units = torch.stack([network.units for network in self.networks]).mean(0)
        self.mask = (attackable(agent.spec, len(units)) if mask is None else mask).to(units)
        self.units = units
        self.generator = torch.Generator(units.device).manual_seed(attack.seed)
        self.decisions, self._shift, self._flips = 0, 0.0, 0
        head = self.networks[0].network.action_head
        self._half_width = torch.ones(())
        if isinstance(head, GaussianHead):
            self._half_width = (0.5 * (head.high - head.low)).nan_to_num(1.0, 1.0, 1.0)

    # --- one decision -----------------------------------------------------------------------------------------------

    def initial_memories(self, count: int) -> Memories:
        """Empty memories of `count` accounts, of the agent and of what attacks it."""
        return tuple(network.network.initial_state(count) for network in self.networks)

    def decide(self, observation: Tensor, memories: Memories, episode_start: Tensor) -> AttackedDecision:
        """Attack the raw observations [N, O] and let the agent decide on what comes out."""
        with torch.inference_mode(False):
            obs, start = observation.clone().to(self.units), episode_start.clone()
            own, others = memories[: len(self.networks)], memories[len(self.networks) :]
            moved, others = self.perturbed(obs, own, others, start)
            with torch.no_grad():
                clean, _ = self.act(obs, own, start)
                action, after = self.act(moved, own, start)
        self.decisions += len(action)
        self._shift += float(((action - clean).abs() / self._half_width).mean(-1).sum())
        self._flips += int((torch.sign(action) * torch.sign(clean) < 0).any(-1).sum())
        return AttackedDecision(action, clean, moved, (*after, *others))

    def perturbed(
        self, obs: Tensor, memories: Memories, others: Memories, episode_start: Tensor
    ) -> tuple[Tensor, Memories]:
        """The attacked raw observations, [N, O]; `memories` are the agent's, `others` the attack's own."""
        objective = self._objective(obs, memories, episode_start)
        return maximise(objective, obs, self.attack, self.ball(obs), self.generator), others

    def ball(self, obs: Tensor) -> Ball:
        """Where raw observations can be moved to."""
        return Ball.of(self.attack, obs, self.mask, self.units)

    def _objective(self, obs: Tensor, memories: Memories, start: Tensor) -> Objective:
        clean = self.reference(obs, memories, start)
        return lambda moved: self.damage(clean, moved, memories, start)

    @torch.no_grad()
    def reference(self, obs: Tensor, memories: Memories, start: Tensor) -> list[Tensor]:
        """What the members make of the truth, to which `damage` compares; nothing where the target is the critic."""
        return [] if self.attack.target == "critic" else self._dist_params(obs, memories, start)

    def damage(self, clean: Sequence[Tensor], moved: Tensor, memories: Memories, start: Tensor) -> Tensor:
        """What the attack wants to be large, at these observations with these memories, [N]."""
        if self.attack.target == "critic":
            members = zip(self.networks, memories, strict=True)
            values = [row_values(member.network, member.scale(moved), memory, start) for member, memory in members]
            return -torch.stack(values).mean(0)
        found = self._dist_params(moved, memories, start)
        heads = [member.network.action_head for member in self.networks]
        if self.attack.target == "kl" or not all(isinstance(head, GaussianHead) for head in heads):
            return torch.stack([head.kl(*pair) for head, *pair in zip(heads, clean, found, strict=True)]).sum(0)
        target = self._combined(clean)
        change = (self._combined(found) - target) / self._half_width
        return change.square().sum(-1) if self.attack.target == "action" else -(change * target.sign()).sum(-1)

    def _dist_params(self, obs: Tensor, memories: Memories, start: Tensor) -> list[Tensor]:
        return [
            member.network.act(member.scale(obs).nan_to_num(0.0, 0.0, 0.0), memory[0], start)[0]
            for member, memory in zip(self.networks, memories, strict=True)
        ]

    def _combined(self, dist_params: Sequence[Tensor]) -> Tensor:
        heads = [member.network.action_head for member in self.networks]
        return self.agent.combine(
            [head.to_env(head.mode(params)) for head, params in zip(heads, dist_params, strict=True)]
        )

    def unit_action(self, obs: Tensor, memories: Memories, start: Tensor) -> Tensor:
        """The agent's deterministic action as a share of half its range, differentiable in the observation, [N, A]."""
        return self._combined(self._dist_params(obs, memories, start)) / self._half_width

    def act(
        self, obs: Tensor, memories: Memories, start: Tensor, *, critics: bool | None = None
    ) -> tuple[Tensor, Memories]:
        """The agent's action on raw observations, and its memories after them.

        `critics`: whether the critics' memories go on too; by default where the critic is the target.
        """
        params, after = [], []
        trunks = None if (self.attack.target == "critic" if critics is None else critics) else 1
        for member, memory in zip(self.networks, memories, strict=True):
            network, inputs = member.network, member.scale(obs).nan_to_num(0.0, 0.0, 0.0)
            stepped = [
                trunk.step(inputs, state, start)
                for trunk, state in list(zip(network.each_trunk(), memory, strict=True))[:trunks]
            ]
            params.append(network.action_head(stepped[0][0]))
            after.append((*(state for _, state in stepped), *memory[len(stepped) :]))
        return self._combined(params), tuple(after)

    # --- what the attack did ----------------------------------------------------------------------------------------

    @property
    def mean_shift(self) -> float:
        """Mean absolute change of an action by the attack, as a share of half the action's range."""
        return self._shift / max(self.decisions, 1)

    @property
    def flips(self) -> float:
        """Share of the decisions in which the attack turned the sign of an action."""
        return self._flips / max(self.decisions, 1)

    # --- in the place of the agent ----------------------------------------------------------------------------------

    @property
    def spec(self) -> TradingSpec | None:
        """The agent's."""
        return self.agent.spec

    def make_throttle(self) -> Any:
        """The agent's throttle; None where it has none."""
        make = getattr(self.agent, "make_throttle", None)
        return None if make is None else make()

    def inference_policy(self) -> StepPolicy:
        """The attacked agent for one environment, step by step, with a memory of its own."""
        memories = self.initial_memories(1)

        def step(observation: Tensor, reset: bool) -> Tensor:
            nonlocal memories
            start = torch.full((1,), reset, dtype=torch.bool, device=self.units.device)
            decision = self.decide(observation, memories, start)
            memories = decision.memories
            return decision.action.cpu()

        return step

    def predict(
        self,
        observation: Any,
        state: tuple[NDArray[Any], ...] | None = None,
        episode_start: NDArray[Any] | None = None,
        deterministic: bool = True,
    ) -> tuple[NDArray[Any], tuple[NDArray[Any], ...] | None]:
        """The action on the attacked observations, and the memory to give back with the next ones; as in SB3."""
        if not deterministic:
            raise ConfigError("predict: an attacked agent acts without exploration; give deterministic=True")
        inputs = getattr(self.agent, "inputs", None)
        rows, single = (
            (np.atleast_2d(np.asarray(observation, np.float32)), np.ndim(observation) == 1)
            if inputs is None
            else inputs.encode(observation)
        )
        memories = self._memories_of(state, len(rows))
        start = torch.zeros(len(rows), dtype=torch.bool, device=self.units.device)
        if episode_start is not None:
            start = torch.as_tensor(np.asarray(episode_start), dtype=torch.bool, device=start.device).reshape(-1)
        decision = self.decide(torch.as_tensor(rows, device=start.device), memories, start)
        action = decision.action.cpu().numpy() if inputs is None else inputs.decode(decision.action)
        after = tuple(part.cpu().numpy() for memory in decision.memories for trunk in memory for part in trunk)
        return (action[0] if single else action), after or None

    def _memories_of(self, state: tuple[NDArray[Any], ...] | None, count: int) -> Memories:
        fresh = self.initial_memories(count)
        if state is None:
            return fresh
        parts = iter(state)
        return tuple(
            tuple(tuple(torch.as_tensor(next(parts), device=part.device) for part in trunk) for trunk in memory)
            for memory in fresh
        )
