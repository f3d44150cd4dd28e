"""A learned adversary (ATLA, Zhang et al. 2021): a policy that chooses the perturbation of each observation.

An attack by gradients looks at one decision. An adversary that learns looks at what becomes of the account: it may wait
for the moment when a wrong step costs most. To it the agent is a part of the environment: it sees what the agent should
see, acts inside the ball, and earns what the agent loses. So the learner that trains agents trains it too.

It chooses the perturbation itself, one number for each feature; or only the direction in which the agent's action is to
be pushed, for which the gradient finds the perturbation, always of full size (as in PA-AD, Sun et al. 2022): there are
fewer actions than features, and an adversary that knows nothing yet is already as strong as noise through the gradient.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from tailguard.envs.protocol import Box, Step, VectorEnv
from tailguard.models.inference import ScaledNetwork
from tailguard.robust.attacked_policy import AttackableAgent, AttackedPolicy, Memories
from tailguard.robust.attacks import Attack, maximise
from tailguard.robust.config import AdversaryActs

DIRECTION_STEPS = 3
"""Gradient steps towards the corner of the ball that pushes the action in the chosen direction."""


@dataclass(frozen=True)
class Position:
    """Where N attacked episodes stand."""

    obs: Tensor
    """True observations, raw, [N, O]."""
    episode_start: Tensor
    """[N] bool"""
    memories: Memories
    """The agent's, before it reads what the adversary makes of them."""


class Perturbation:
    """Turns an adversary's actions in [-1, 1] into perturbed observations of one agent.

    `agent`: whom it attacks; frozen.
    `epsilon`, `norm`: the ball, in units of the agent's observation scale.
    `mask`: which columns can be attacked; by default as of `AttackedPolicy`.
    """

    def __init__(self, agent: AttackableAgent, attack: Attack, acts: AdversaryActs, mask: Tensor | None = None) -> None:
        # From 0 the push in a direction has a slope, unlike the distance from the clean action: no random start.
        climb = replace(attack, kind="pgd", steps=DIRECTION_STEPS, step_size=None, target="critic", random_start=False)
        self.victim, self.acts = AttackedPolicy(agent, climb, mask), acts
        self.columns = self.victim.mask.nonzero().flatten()
        actions = self.victim.networks[0].network.action_head.raw_size
        self.size = len(self.columns) if acts == "perturbation" else actions

    @property
    def action_space(self) -> Box:
        high = torch.ones(self.size, device=self.victim.units.device)
        return Box(-high, high)

    def __call__(self, obs: Tensor, memories: Memories, episode_start: Tensor, action: Tensor) -> Tensor:
        """Perturbed raw observations, [N, O], for the adversary's actions [N, A]."""
        ball = self.victim.ball(obs)
        if self.acts == "perturbation":
            u = torch.zeros_like(obs).index_copy(-1, self.columns, action.to(obs))
            return ball.displace(obs, ball.project(u))
        action = action.detach().to(obs)

        def push(moved: Tensor) -> Tensor:
            return (self.victim.unit_action(moved, memories, episode_start) * action).sum(-1)

        return maximise(push, obs, self.victim.attack, ball)


class AdversaryEnv:
    """The agent and its environment, as the adversary's environment: it earns what the agent loses.

    `env`: the agent's environment; it is stepped with the agent's deterministic actions on perturbed observations.
    """

    def __init__(self, env: VectorEnv, perturbation: Perturbation) -> None:
        self.env, self.perturbation = env, perturbation
        self.num_envs, self.observation_size, self.device = env.num_envs, env.observation_size, env.device
        self.action_space = perturbation.action_space
        length = getattr(env, "episode_length", None)
        if length is not None:
            self.episode_length = length
        self.position: Position | None = None

    def reset(self, seed: int | None = None) -> Tensor:
        """Go on from `position` if there is one, else start new episodes; returns their observations, [N, O]."""
        if self.position is None:
            start = torch.ones(self.num_envs, dtype=torch.bool, device=self.device)
            memories = self.perturbation.victim.initial_memories(self.num_envs)
            self.position = Position(self.env.reset(seed), start, memories)
        return self.position.obs

    def step(self, action: Tensor) -> Step:
        """Perturb the observations and let the agent act on them."""
        position = self.position
        assert position is not None  # reset made it
        obs, start, memories = position.obs, position.episode_start, position.memories
        with torch.no_grad():
            moved = self.perturbation(obs, memories, start, action)
            chosen, memories = self.perturbation.victim.act(moved, memories, start, critics=True)
        step = self.env.step(chosen)
        self.position = Position(step.obs, step.ended, memories)
        return replace(step, reward=-step.reward)

    def state_dict(self) -> dict[str, Tensor]:
        """The environment's own; the position is saved by those who set it."""
        return self.env.state_dict()

    def load_state_dict(self, state: dict[str, Tensor]) -> None:
        """Restore the environment."""
        self.env.load_state_dict(state)

    def close(self) -> None:
        """Close the environment."""
        self.env.close()


class AdversarialPolicy(AttackedPolicy):
    """An agent whose observations a learned adversary perturbs, in the place of the agent: see `AttackedPolicy`.

    `adversary`: the network of a learner that was trained on an `AdversaryEnv`, as its `scaled_networks` gives it.
    """

    def __init__(
        self,
        agent: AttackableAgent,
        adversary: ScaledNetwork,
        attack: Attack,
        acts: AdversaryActs,
        mask: Tensor | None = None,
    ) -> None:
        super().__init__(agent, attack, mask)
        self.adversary = adversary
        self.perturbation = Perturbation(agent, attack, acts, mask)

    def initial_memories(self, count: int) -> Memories:
        return (*super().initial_memories(count), self.adversary.network.initial_state(count)[:1])

    def perturbed(
        self, obs: Tensor, memories: Memories, others: Memories, episode_start: Tensor
    ) -> tuple[Tensor, Memories]:
        network, head = self.adversary.network, self.adversary.network.action_head
        with torch.no_grad():
            seen = self.adversary.scale(obs).nan_to_num(0.0, 0.0, 0.0)
            dist_params, memory = network.act(seen, others[0][0], episode_start)
            action = head.to_env(head.mode(dist_params))
        return self.perturbation(obs, memories, episode_start, action), ((memory,),)
