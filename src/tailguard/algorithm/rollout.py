"""Collect rollouts: N environments, T steps, and everything the learner needs from them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from tailguard.envs.protocol import FunctionalEnv, Step, VectorEnv
from tailguard.flags import may_hold_any
from tailguard.models.agent import ActorCritic, AgentState
from tailguard.models.memory import MemoryState

if TYPE_CHECKING:
    from tailguard.algorithm.hindsight import Hindsight, Track


@dataclass(frozen=True)
class ObservationScale:
    """Observation statistics as they were when the rollout began; they do not move while it runs."""

    mean: Tensor
    std: Tensor
    clip: float
    """Bound of what comes out; infinite where observations are not normalised."""

    def __call__(self, obs: Tensor) -> Tensor:
        return ((obs - self.mean) / self.std).clamp(-self.clip, self.clip)


@dataclass(frozen=True)
class Carry:
    """Where acting stands between two rollouts."""

    obs: Tensor
    """What the policy sees next, raw, [N, O]."""
    episode_start: Tensor
    """Whether `obs` is the first of its episode, [N] bool."""
    state: AgentState
    """Memory of every trunk before it reads `obs`."""


@dataclass(frozen=True)
class Rollout:
    """T steps of N environments. Rows are time first."""

    obs: Tensor
    """Raw observations, [T, N, O]."""
    scaled_obs: Tensor
    """What the network saw, [T, N, O]."""
    episode_start: Tensor
    """[T, N] bool: the row's observation is the first of its episode."""
    actions: Tensor
    """Raw (pre-squash) actions, [T, N, R]."""
    parameters: Tensor
    """Parameters of the action distribution they were drawn from, [T, N, P]."""
    log_probs: Tensor
    """Log-probabilities of the raw actions, [T, N]."""
    rewards: Tensor
    """[T, N], 0 where `valid` is false."""
    terminated: Tensor
    truncated: Tensor
    valid: Tensor
    """[T, N] bool each; rows with `valid` false carry no loss (see `Step`)."""
    final_rows: tuple[int, ...]
    """The rows after which some episode ended, and the last one, in order; all rows, where looking is not free."""
    final_obs: Tensor
    """Their true successors, raw, [K, N, O]."""
    scale: ObservationScale
    """What made `scaled_obs` of `obs`."""
    start_state: AgentState
    """Memory of every trunk before the first row."""
    outcome: dict[str, Tensor]
    """What the environment said of each step, [T, N] each."""
    memory_resets: Tensor
    """Environments whose memory was not finite before the first row and was cleared, []."""
    hindsight: Hindsight | None = None
    """What the mean actions would have brought, where advantages are made of it."""

    @property
    def ended(self) -> Tensor:
        return self.terminated | self.truncated

    @property
    def inner_resets(self) -> bool:
        """Whether an episode may start after the first row."""
        return len(self.final_rows) > 1


Acted = tuple[Tensor, Tensor, Tensor]
"""What the network saw, the parameters of its action distribution and the raw action, [N, ...] each."""


def act(
    agent: ActorCritic, scale: ObservationScale, obs: Tensor, start: Tensor, memory: MemoryState, chance: Tensor
) -> tuple[Acted, MemoryState]:
    """Look at one row and choose.

    A number that is not finite is shown to the policy as the mean: the rollout is not learned from, but neither memory
    nor environment may be spoilt by it for longer.
    """
    scaled = scale(obs).nan_to_num(0.0, 0.0, 0.0)
    parameters, memory = agent.act(scaled, memory, start)
    return (scaled, parameters, agent.action_head.pick(parameters, chance)), memory


def act_and_step(
    agent: ActorCritic,
    env: FunctionalEnv,
    scale: ObservationScale,
    obs: Tensor,
    start: Tensor,
    memory: MemoryState,
    chance: Tensor,
    env_state: Any,
    env_chance: Tensor,
) -> tuple[Acted, MemoryState, Any, Step]:
    """Choose and let the environment answer: everything from one row to the next, as a pure function."""
    acted, memory = act(agent, scale, obs, start, memory, chance)
    env_state, step = env.transition(env_state, agent.action_head.to_env(acted[2]), env_chance)
    return acted, memory, env_state, step


def finite_memory(state: AgentState) -> tuple[AgentState, Tensor]:
    """The memories, cleared for the environments where they are not finite, and which these are, [N] or [] bool."""
    trunks, broken = [], torch.zeros((), dtype=torch.bool)
    for trunk in state:
        for part in trunk:
            bad = ~part.isfinite().all(-1).all(0)
            trunk = tuple(other.masked_fill(bad[:, None], 0.0) for other in trunk)
            broken = bad | broken.to(bad.device)
        trunks.append(trunk)
    return tuple(trunks), broken


def collect(
    agent: ActorCritic,
    env: VectorEnv,
    carry: Carry,
    scale: ObservationScale,
    n_steps: int,
    generator: torch.Generator,
    whole_step: Callable[..., tuple[Acted, MemoryState, Any, Step]] = act_and_step,
    track: Track | None = None,
    noise: Tensor | None = None,
) -> tuple[Rollout, Carry]:
    """Act for `n_steps` steps. The carry's critic states are not advanced here: `look` does that.

    Whether gradients go back through the steps is the caller's choice: `torch.no_grad()`, or not.

    `whole_step`: what to call for a step of an environment that is a pure function; a compiled `act_and_step`.
    `track`: filled with the states of such an environment.
    `noise`: of the actions, [T, N, R]; none: drawn from the generator.
    """
    head = agent.action_head
    start_state, broken = finite_memory(carry.state)
    obs, start, memory = carry.obs, carry.episode_start, start_state[0]
    rows: dict[str, list[Tensor]] = {
        name: []
        for name in ("obs", "scaled", "start", "action", "parameter", "reward", "terminated", "truncated", "valid")
    }
    outcomes: list[dict[str, Tensor]] = []
    final_rows: list[int] = []
    final_obs: list[Tensor] = []
    drawn = None if noise is None else noise.unbind()
    for t in range(n_steps):
        chance = head.draw((env.num_envs,), generator) if drawn is None else drawn[t]
        if isinstance(env, FunctionalEnv):
            env_chance = env.draw()
            if track is not None:
                track.states.append(env.state)
                track.chances.append(env_chance)
            acted, memory, env.state, step = whole_step(
                agent, env, scale, obs, start, memory, chance, env.state, env_chance
            )
        else:
            acted, memory = act(agent, scale, obs, start, memory, chance)
            step = env.step(head.to_env(acted[2]))
        scaled, parameters, action = acted
        found = (obs, scaled, start, action, parameters, step.reward, step.terminated, step.truncated, step.valid)
        for column, value in zip(rows.values(), found, strict=True):
            column.append(value)
        outcomes.append(step.outcome)
        ended = step.ended
        if t == n_steps - 1 or may_hold_any(ended):
            final_rows.append(t)
            final_obs.append(step.final_obs)
        obs, start = step.obs, ended
    stacked = {name: torch.stack(column) for name, column in rows.items()}
    rollout = Rollout(
        obs=stacked["obs"],
        scaled_obs=stacked["scaled"],
        episode_start=stacked["start"],
        actions=stacked["action"],
        parameters=stacked["parameter"],
        log_probs=head.log_prob(stacked["parameter"].detach(), stacked["action"].detach()),
        # Whatever a row in which nothing happened calls its reward, a NaN included, must not reach a target.
        rewards=torch.where(stacked["valid"], stacked["reward"], 0.0),
        terminated=stacked["terminated"],
        truncated=stacked["truncated"],
        valid=stacked["valid"],
        final_rows=tuple(final_rows),
        final_obs=torch.stack(final_obs),
        scale=scale,
        start_state=start_state,
        outcome={name: torch.stack([outcome[name] for outcome in outcomes]) for name in outcomes[0]},
        memory_resets=broken.sum(),
    )
    return rollout, Carry(obs, start, (memory, *start_state[1:]))
