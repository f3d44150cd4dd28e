"""Collecting experience: N environments, T steps, and everything the learner must know about them afterwards."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from tailguard.envs.protocol import VectorEnv
from tailguard.flags import may_hold_any
from tailguard.models.agent import ActorCritic, AgentState


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
    final_obs: dict[int, Tensor]
    """True successors, raw, [N, O], of each row after which some episode ended, and of the last row."""
    scale: ObservationScale
    """What made `scaled_obs` of `obs`."""
    start_state: AgentState
    """Memory of every trunk before the first row."""
    outcome: dict[str, Tensor]
    """What the environment said of each step, [T, N] each."""

    @property
    def ended(self) -> Tensor:
        return self.terminated | self.truncated

    @property
    def inner_resets(self) -> bool:
        """Whether an episode starts after the first row."""
        return len(self.final_obs) > 1


@torch.no_grad()
def collect(
    agent: ActorCritic,
    env: VectorEnv,
    carry: Carry,
    scale: ObservationScale,
    n_steps: int,
    generator: torch.Generator,
) -> tuple[Rollout, Carry]:
    """Act for `n_steps` steps. The carry's critic states are not advanced here: `estimate` does that."""
    head = agent.action_head
    obs, start, memory = carry.obs, carry.episode_start, carry.state[0]
    rows: dict[str, list[Tensor]] = {
        name: []
        for name in ("obs", "scaled", "start", "action", "parameter", "reward", "terminated", "truncated", "valid")
    }
    outcomes: list[dict[str, Tensor]] = []
    final_obs: dict[int, Tensor] = {}
    for t in range(n_steps):
        scaled = scale(obs)
        parameters, memory = agent.act(scaled, memory, start)
        action = head.sample(parameters, generator)
        step = env.step(head.to_env(action))
        found = (obs, scaled, start, action, parameters, step.reward, step.terminated, step.truncated, step.valid)
        for column, value in zip(rows.values(), found, strict=True):
            column.append(value)
        outcomes.append(step.outcome)
        ended = step.ended
        if t == n_steps - 1 or may_hold_any(ended):
            final_obs[t] = step.final_obs
        obs, start = step.obs, ended
    stacked = {name: torch.stack(column) for name, column in rows.items()}
    rollout = Rollout(
        obs=stacked["obs"],
        scaled_obs=stacked["scaled"],
        episode_start=stacked["start"],
        actions=stacked["action"],
        parameters=stacked["parameter"],
        log_probs=head.log_prob(stacked["parameter"], stacked["action"]),
        # Whatever a row in which nothing happened calls its reward, a NaN included, must not reach a target.
        rewards=torch.where(stacked["valid"], stacked["reward"], 0.0),
        terminated=stacked["terminated"],
        truncated=stacked["truncated"],
        valid=stacked["valid"],
        final_obs=final_obs,
        scale=scale,
        start_state=carry.state,
        outcome={name: torch.stack([outcome[name] for outcome in outcomes]) for name in outcomes[0]},
    )
    return rollout, Carry(obs, start, (memory, *carry.state[1:]))
