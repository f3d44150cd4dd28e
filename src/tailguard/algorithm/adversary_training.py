"""Training of a learned adversary: against a frozen agent, and in turns with an agent that learns."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from tailguard.algorithm.config import LearnerConfig, PPOConfig
from tailguard.algorithm.ppo import DistributionalPPO
from tailguard.algorithm.rollout import Rollout, RolloutState
from tailguard.envs.adapt import as_vector_env
from tailguard.envs.protocol import BlockwiseEnv, FunctionalEnv
from tailguard.errors import ConfigError
from tailguard.models.memory import MemoryState
from tailguard.models.policy import PolicyState
from tailguard.robust.adversary import AdversarialPolicy, AdversaryEnv, Perturbation, Position
from tailguard.robust.attacked_policy import AttackableAgent
from tailguard.robust.attacks import Attack, attackable
from tailguard.robust.config import AdversaryActs

if TYPE_CHECKING:
    from tailguard.algorithm.learner import Learner

ADVERSARY = PPOConfig()
"""Settings of an adversary where none are given."""
LEARNING_RATE = 3e-3
"""Of an adversary in turns with a learner that is not PPO: it has few turns."""
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
    it saw, so that PPO's ratio is what it should be; gradients through the market take the perturbation as a constant.
    In the adversary's turns the agent is frozen and acts without noise. Those steps are not counted among the agent's.

    Where steps are a pure function, a turn begins from where the agent's episodes stand and leaves them there: their
    outcomes, and with them a risk budget, are the agent's own. Elsewhere the episodes go on.
    """

    def __init__(self, agent: Learner) -> None:
        self.agent, self.config = agent, agent.robust
        if not agent.runtime.can_sync:
            raise ConfigError("robust.adversary: turns cannot be recorded as a graph; set the runtime to eager")
        self.apart = isinstance(agent.env, FunctionalEnv) and not _has_blocks(agent.env)
        """Whether the agent's episodes stand still in the adversary's turns."""
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

    @torch.no_grad()
    def observe(self, obs: Tensor, episode_start: Tensor, memory: MemoryState) -> Tensor:
        """What the agent sees in the place of these observations, [N, O]; `memory` is the agent's."""
        if not self.turns:
            return obs  # an adversary that has learned nothing is noise
        (network,) = self.learner.scaled_networks()
        head, true, own = network.network.action_head, obs.detach(), tuple(part.detach() for part in memory)
        seen = network.scale(true).nan_to_num(0.0, 0.0, 0.0)
        dist_params, self.memory = network.network.act(seen, self.memory, episode_start)
        # Drawn, not its mode: an agent learns to read the truth out of what a predictable adversary shows.
        action = head.to_env(head.sample(dist_params, self.learner.generator))
        rest = self.agent.policy.initial_state(len(obs))[1:]
        moved = self._today()(true, ((own, *rest),), episode_start, action)
        seen_by_agent = torch.where(self.attacked, moved, true)
        # The gradient of gradients through the market goes on through the account: the difference is exactly 0.
        with torch.enable_grad():
            return seen_by_agent + (obs - true) if obs.requires_grad else seen_by_agent

    def due(self) -> bool:
        """Whether the adversary's turn comes before the agent's next rollout."""
        if self.agent.risk is not None and not self.apart:
            raise ConfigError(
                f"robust.adversary: a risk budget follows every step of an episode, and the episodes of "
                f"{type(self.agent.env).__name__} cannot stand still in the adversary's turns: its steps are not a "
                "pure function of tensors (see FunctionalEnv), or its bars are in blocks. Set robust.adversary to "
                "none, risk.limit to none, or data.resident_bars to 0"
            )
        iteration = self.agent.state.iteration
        return iteration > 0 and iteration % self.config.adversary_every == 0

    def take_turn(self) -> None:
        """Let the adversary learn for its rollouts, from where the agent's episodes stand."""
        agent, learner = self.agent, self.learner
        before = agent.state.rollout_state
        assert before is not None  # the agent has acted
        env: Any = agent.env
        stands, memory = (env.state, self.memory) if self.apart else (None, self.memory)
        self._begin_at(before)
        for _ in range(self.config.adversary_rollouts):
            learner.metrics = learner.iterate(None if self.apart else self._followed)
        position, after = self.env.position, learner.state.rollout_state
        assert position is not None
        assert after is not None
        if self.apart:
            env.state, self.memory = stands, memory
        else:
            agent.state.rollout_state = replace(
                before, obs=position.obs, episode_start=position.episode_start, state=position.memories[0]
            )
            self.memory = after.state[0]
        self.turns += 1

    def _begin_at(self, place: RolloutState) -> None:
        """Put the adversary where the agent's episodes stand."""
        agent, learner = self.agent, self.learner
        self.env.perturbation = self._today()
        self.env.position = Position(place.obs, place.episode_start, (place.state,))
        learner.state.progress = agent.state.progress
        learner.episodes.returns.copy_(-agent.episodes.returns)
        learner.episodes.lengths.copy_(agent.episodes.lengths)
        held = learner.state.rollout_state
        if held is not None:
            state = (self.memory, *held.state[1:])
            learner.state.rollout_state = replace(held, obs=place.obs, episode_start=place.episode_start, state=state)

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
            "memories": named_parts((self.memory, *state.rollout_state.state[1:])),
            **{name: getattr(state, name) for name in COUNTERS},
            "turns": self.turns,
        }

    def load_state_dict(self, saved: Mapping[str, Any]) -> None:
        """Go on from what `state_dict` returned; with another number of environments the memories begin empty."""
        if not saved:
            return
        parts, state, device = self.learner.parts(), self.learner.state, self.agent.device
        fresh = self.learner.policy.initial_state(self.agent.env.num_envs)
        empty = named_parts(fresh)
        # Without memory the number of environments is seen from the episodes alone.
        same = saved["episodes"]["returns"].shape == self.learner.episodes.returns.shape
        same &= all(value.shape == empty[name].shape for name, value in saved["memories"].items())
        memories = tuple(
            tuple(
                saved["memories"][f"{trunk}.{part}"].to(device) if same else value for part, value in enumerate(values)
            )
            for trunk, values in enumerate(fresh)
        )
        for name in PARTS:
            if name != "episodes" or same:
                parts[name].load_state_dict(saved[name])
        self.learner.generator.set_state(saved["generator"].cpu())
        self.memory, self.turns = memories[0], saved["turns"]
        nothing = torch.zeros(0, device=device)  # the next turn begins where the agent stands
        state.rollout_state = RolloutState(nothing, nothing, memories)
        for name in COUNTERS:
            setattr(state, name, saved[name])


def named_parts(state: PolicyState) -> dict[str, Tensor]:
    """Copies of the memories of all trunks, by the numbers of trunk and part."""
    return {f"{trunk}.{part}": value.clone() for trunk, own in enumerate(state) for part, value in enumerate(own)}


def adversary_config(config: LearnerConfig) -> PPOConfig:
    """The agent's own settings, those of PPO for another learner's, with a scalar critic: the adversary's tail is
    nobody's concern.
    """
    if not isinstance(config, PPOConfig):
        config = replace(config.as_kind(PPOConfig), n_steps=config.n_steps, learning_rate=LEARNING_RATE)
    # The adversary's actions are no positions of assets, which a network could share weights over.
    network = replace(
        config.network,
        encoder="flat",
        critic="scalar",
        twin_critics=False,
        twin_trunk="shared",
        squash=True,
        log_std_init=-0.5,
    )
    return replace(
        config, network=network, baseline="scalar", huber_kappa=0.0, value_clip="off", target_kl=None, kl_penalty=0.0
    )


def _has_blocks(env: Any) -> bool:
    """Whether bars are exchanged as episodes go on, so that no episode can go back."""
    return isinstance(env, BlockwiseEnv) and getattr(env, "blocks", None) is not None
