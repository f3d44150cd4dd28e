"""Training of a learned adversary: against a frozen agent, and in turns with an agent that learns."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from tailguard.algorithm.config import PPOConfig
from tailguard.algorithm.ppo import DistributionalPPO
from tailguard.algorithm.rollout import Rollout, RolloutState
from tailguard.envs.adapt import as_vector_env
from tailguard.errors import ConfigError
from tailguard.models.memory import MemoryState
from tailguard.robust.adversary import AdversarialPolicy, AdversaryEnv, Perturbation, Position
from tailguard.robust.attacked_policy import AttackableAgent
from tailguard.robust.attacks import Attack, attackable
from tailguard.robust.config import AdversaryActs

ADVERSARY = PPOConfig()
"""Settings of an adversary where none are given."""
PARTS = ("agent", "optimizer", "observations", "returns", "episodes")
COUNTERS = ("num_timesteps", "iteration", "kl_coef")
"""What an adversary is saved with, beside its random stream and its memories."""


def train_adversary(
    agent: AttackableAgent,
    env: Any,
    attack: Attack,
    *,
    timesteps: int,
    acts: AdversaryActs = "direction",
    config: PPOConfig | None = None,
    seed: int = 0,
    mask: Tensor | None = None,
    **options: Any,
) -> AdversarialPolicy:
    """Train an adversary against a frozen agent for so many steps of `env`; returns the agent under its attack.

    `env`: an environment of the agent's kind for the adversary to learn on; not the one it is judged on.
    `attack`: the ball: its epsilon and norm.
    `config`, `options`: of the adversary's own learner, as of `DistributionalPPO`.
    `mask`: which columns can be attacked; by default those of the agent's spec.
    """
    perturbation = Perturbation(agent, attack, acts, mask)
    learner = DistributionalPPO(
        AdversaryEnv(as_vector_env(env, None, None), perturbation), config or ADVERSARY, seed=seed, **options
    )
    learner.learn(timesteps)
    (network,) = learner.scaled_networks()
    return AdversarialPolicy(agent, network, replace(attack, target="action"), acts, mask)


class Alternation:
    """An adversary that learns in turns with its agent (ATLA), in the agent's own environment and episodes.

    The agent acts on perturbed observations and learns from them: the probabilities of its actions are those at what
    it saw, so that PPO's ratio is what it should be. In the adversary's turns the agent is frozen and acts without
    noise; the episodes under way go on. Those steps are not counted among the agent's.
    """

    def __init__(self, agent: DistributionalPPO) -> None:
        self.agent, self.config = agent, agent.robust
        if agent.risk is not None:
            raise ConfigError("robust.adversary: a risk budget follows every step of an episode; set one of them off")
        if not agent.runtime.can_sync:
            raise ConfigError("robust.adversary: turns cannot be recorded as a graph; set ppo.runtime to eager")
        mask = attackable(agent.env)
        attack = Attack(epsilon=self.config.epsilon, norm=self.config.norm)
        self.env = AdversaryEnv(agent.env, Perturbation(agent, attack, self.config.adversary_acts, mask))
        self.learner = DistributionalPPO(self.env, adversary_config(agent.config), seed=agent.seed + 1)
        self.memory: MemoryState = self.learner.policy.initial_state(agent.env.num_envs)[0]
        """Of the adversary, along the agent's episodes."""
        self.turns = 0
        attacked = math.ceil(self.config.adversary_share * agent.env.num_envs)
        self.attacked = (torch.arange(agent.env.num_envs, device=agent.device) < attacked)[:, None]
        """Environments whose observations are perturbed when the agent acts, [N, 1]."""

    def observe(self, obs: Tensor, episode_start: Tensor, memory: MemoryState) -> Tensor:
        """What the agent sees in the place of these observations, [N, O]; `memory` is the agent's."""
        if not self.turns:
            return obs  # an adversary that has learned nothing is noise
        (network,) = self.learner.scaled_networks()
        head = network.network.action_head
        with torch.no_grad():
            seen = network.scale(obs).nan_to_num(0.0, 0.0, 0.0)
            dist_params, self.memory = network.network.act(seen, self.memory, episode_start)
            action = head.to_env(head.mode(dist_params))
        perturbation = self._today()
        rest = self.agent.policy.initial_state(len(obs))[1:]
        moved = perturbation(obs, ((memory, *rest),), episode_start, action)
        return torch.where(self.attacked, moved, obs)

    def due(self) -> bool:
        """Whether the adversary's turn comes before the agent's next rollout."""
        iteration = self.agent.state.iteration
        return iteration > 0 and iteration % self.config.adversary_every == 0

    def take_turn(self) -> None:
        """Let the adversary learn for its rollouts, from where the agent's episodes stand."""
        agent, learner = self.agent, self.learner
        before = agent.state.rollout_state
        assert before is not None  # the agent has acted
        self.env.perturbation = self._today()
        self.env.position = Position(before.obs, before.episode_start, (before.state,))
        learner.state.progress = agent.state.progress
        held = learner.state.rollout_state
        if held is not None:
            state = (self.memory, *held.state[1:])
            learner.state.rollout_state = replace(held, obs=before.obs, episode_start=before.episode_start, state=state)
        for _ in range(self.config.adversary_rollouts):
            learner.metrics = learner.iterate(self._followed)
        position, after = self.env.position, learner.state.rollout_state
        assert position is not None
        assert after is not None
        agent.state.rollout_state = replace(
            before, obs=position.obs, episode_start=position.episode_start, state=position.memories[0]
        )
        self.memory = after.state[0]
        self.turns += 1

    def _followed(self, rollout: Rollout) -> bool:
        """Count what the agent earned in the adversary's turn as its own."""
        self.agent.episodes.add(-rollout.rewards, rollout.ended, rollout.valid, rollout.outcome)
        return True

    def _today(self) -> Perturbation:
        """By the agent's weights and statistics of now, as large as epsilon is by now."""
        epsilon = self.config.epsilon_at(self.agent.state.progress)
        attack = Attack(epsilon=epsilon, norm=self.config.norm)
        return Perturbation(self.agent, attack, self.config.adversary_acts, self.env.perturbation.victim.mask)

    def metrics(self) -> dict[str, Tensor]:
        """What the adversary makes the agent lose in an episode, by its own training; NaN before its first turn."""
        value = self.learner.metrics.get("rollout/ep_rew_mean", torch.nan)
        return {"robust/adversary_reward": torch.tensor(value, dtype=torch.float64)}

    def state_dict(self) -> dict[str, Any]:
        """The adversary and its memory; nothing before its first turn."""
        if not self.turns:
            return {}
        parts, state = self.learner.parts(), self.learner.state
        assert state.rollout_state is not None  # it has acted in its turns
        return {
            **{name: parts[name].state_dict() for name in PARTS},
            "generator": self.learner.generator.get_state(),
            "memory": [part.clone() for part in self.memory],
            "critics": [[part.clone() for part in trunk] for trunk in state.rollout_state.state[1:]],
            **{name: getattr(state, name) for name in COUNTERS},
            "turns": self.turns,
        }

    def load_state_dict(self, saved: Mapping[str, Any]) -> None:
        """Go on from what `state_dict` returned."""
        if not saved:
            return
        parts, state = self.learner.parts(), self.learner.state
        for name in PARTS:
            parts[name].load_state_dict(saved[name])
        self.learner.generator.set_state(saved["generator"].cpu())
        device = self.agent.device
        self.memory, self.turns = tuple(part.to(device) for part in saved["memory"]), saved["turns"]
        critics = tuple(tuple(part.to(device) for part in trunk) for trunk in saved["critics"])
        nothing = torch.zeros(0, device=device)  # the next turn begins where the agent stands
        state.rollout_state = RolloutState(nothing, nothing, (self.memory, *critics))
        for name in COUNTERS:
            setattr(state, name, saved[name])


def adversary_config(config: PPOConfig) -> PPOConfig:
    """The agent's own settings, with a scalar critic: the adversary's tail is nobody's concern."""
    network = replace(
        config.network, critic="scalar", twin_critics=False, twin_trunk="shared", squash=True, log_std_init=-0.5
    )
    return replace(
        config, network=network, baseline="scalar", huber_kappa=0.0, value_clip="off", target_kl=None, kl_penalty=0.0
    )
