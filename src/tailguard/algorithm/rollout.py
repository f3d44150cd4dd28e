"""Collect rollouts: N environments, T steps, and everything the learner needs from them."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from tailguard.device_ops import may_hold_any, readable
from tailguard.envs.protocol import FunctionalEnv, Step, VectorEnv
from tailguard.member_axis import is_logical
from tailguard.models.memory import MemoryState
from tailguard.models.policy import ActorCritic, PolicyState
from tailguard.models.policy_row import RowPolicy

MEASURED = ("pnl", "drawdown", "net")
"""Outcomes of a step that a risk budget may be made of."""


@dataclass(frozen=True)
class ObservationScale:
    """Observation statistics at the start of the rollout; they are constant while it runs."""

    mean: Tensor
    std: Tensor
    clip: float
    """Bound of the scaled observations; infinite where observations are not normalised."""

    def __call__(self, obs: Tensor) -> Tensor:
        return ((obs - self.mean) / self.std).clamp(-self.clip, self.clip)

    def finite(self, obs: Tensor) -> Tensor:
        """The same with 0, the mean, for a number that is not finite."""
        if torch.is_grad_enabled() and obs.requires_grad and not is_logical(obs):
            scaled: Tensor = _Scaled.apply(obs, self.mean, self.std, self.clip)  # type: ignore[no-untyped-call]
            return scaled
        return self(obs).nan_to_num(0.0, 0.0, 0.0)


class _Scaled(torch.autograd.Function):
    """`ObservationScale.finite` as one node of the graph: it is in every bar of a window."""

    @staticmethod
    def forward(ctx: Any, obs: Tensor, mean: Tensor, std: Tensor, clip: float) -> Tensor:
        scaled = (obs - mean) / std
        ctx.save_for_backward(scaled, std)
        ctx.clip = clip
        return scaled.clamp(-clip, clip).nan_to_num(0.0, 0.0, 0.0)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        scaled, std = ctx.saved_tensors
        # A comparison with NaN is false.
        return torch.where(scaled.abs() <= ctx.clip, gradients[0] / std, 0.0), None, None, None


@dataclass(frozen=True)
class RolloutState:
    """State carried from one rollout to the next."""

    obs: Tensor
    """The next observation, raw, [N, O]."""
    episode_start: Tensor
    """Whether `obs` is the first of its episode, [N] bool."""
    state: PolicyState
    """Recurrent state of every trunk before it reads `obs`."""


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
    dist_params: Tensor
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
    """The rows after which some episode ended, and the last one, in order; all rows where checking would need a device
    sync."""
    final_obs: Tensor
    """Their true successors, raw, [K, N, O]."""
    scale: ObservationScale
    """Scaling from `obs` to `scaled_obs`."""
    start_state: PolicyState
    """Recurrent state of every trunk before the first row."""
    outcome: dict[str, Tensor]
    """The environment's `outcome` of each step, [T, N] each."""
    memory_resets: Tensor
    """Environments whose memory was not finite before the first row and was cleared, []."""

    @property
    def ended(self) -> Tensor:
        return self.terminated | self.truncated

    @property
    def inner_resets(self) -> bool:
        """Whether an episode may start after the first row."""
        return len(self.final_rows) > 1


Acted = tuple[Tensor, Tensor, Tensor]
"""Scaled observation, parameters of the action distribution (of a deterministic policy the output of the action head's
layer) and raw action, [N, ...] each."""


def act(
    policy: RowPolicy,
    scale: ObservationScale,
    obs: Tensor,
    start: Tensor,
    memory: MemoryState,
    noise: Tensor,
    mask: Tensor | None = None,
    deterministic: bool = False,
) -> tuple[Acted, MemoryState]:
    """Choose actions for one row.

    A NaN is replaced by the mean, an infinity by the clip's bound, or by the mean without a clip: such a rollout is not
    learned from, and must not corrupt the recurrent state or the environment beyond it.

    `mask`: see `collect`. `deterministic`: the action is the mode plus `noise`, whose gradient is then that of the
    action.
    """
    scaled = scale.finite(obs)
    output, memory = policy.act_output(scaled, memory, start, mask)
    head = policy.action_head
    if deterministic:
        # The spread is not used here: `collect` makes the parameters of all rows at once.
        return (scaled, output, head.mode_of(output) + noise), memory
    dist_params = head.dist_params_of(output)
    return (scaled, dist_params, head.sample_from_noise(dist_params, noise)), memory


def act_and_step(
    policy: RowPolicy,
    env: FunctionalEnv,
    scale: ObservationScale,
    obs: Tensor,
    start: Tensor,
    memory: MemoryState,
    noise: Tensor,
    env_state: Any,
    env_noise: Tensor,
    mask: Tensor | None = None,
    deterministic: bool = False,
) -> tuple[Acted, MemoryState, Any, Step]:
    """Choose actions and step the environment: from one row to the next, as a pure function."""
    acted, memory = act(policy, scale, obs, start, memory, noise, mask, deterministic)
    env_state, step = env.transition(env_state, policy.action_head.to_env(acted[2]), env_noise)
    return acted, memory, env_state, step


def finite_memory(state: PolicyState, device: torch.device) -> tuple[PolicyState, Tensor]:
    """The recurrent states, cleared for environments where they are not finite, and which these are, [N] or [] bool."""
    parts = [part for trunk in state for part in trunk]
    # A sum is finite only if every part of it is. On a CPU that may be asked for, and is always so.
    if parts and all(readable(part) and math.isfinite(float(part.detach().sum())) for part in parts):
        return state, torch.zeros((), dtype=torch.bool)
    # Made on the device: a copy from the host cannot be recorded in a CUDA graph.
    trunks, broken = [], torch.zeros((), dtype=torch.bool, device=device)
    for trunk in state:
        for part in trunk:
            # All parts of the trunk are cleared together: a cell without its output is a state the LSTM was never in.
            bad = ~part.isfinite().all(-1).all(0)
            trunk = tuple(other.masked_fill(bad[:, None], 0.0) for other in trunk)
            broken = bad | broken
        trunks.append(trunk)
    return tuple(trunks), broken


def collect(
    policy: ActorCritic,
    env: VectorEnv,
    rollout_state: RolloutState,
    scale: ObservationScale,
    n_steps: int,
    generator: torch.Generator,
    whole_step: Callable[..., tuple[Acted, MemoryState, Any, Step]] = act_and_step,
    noise: Tensor | None = None,
    observe: Callable[[Tensor, Tensor, MemoryState], Tensor] | None = None,
    *,
    observation_noise: float = 0.0,
    mask: Tensor | None = None,
    deterministic: bool = False,
) -> tuple[Rollout, RolloutState]:
    """Act for `n_steps` steps. The rollout state's critic states are not advanced here: `evaluate_critics` does that.

    Whether gradients go back through the steps is the caller's choice: `torch.no_grad()`, or not.

    `whole_step`: what to call for a step of an environment that is a pure function; a compiled `act_and_step`.
    `noise`: of the actions, [T, N, R]; none: drawn from the generator.
    `observe`: what the policy sees in the place of an observation [N, O], given `episode_start` and its memory; the
        rollout keeps what it saw, so that the probabilities of its actions fit.
    `observation_noise`: standard deviation of noise on what the policy sees, in those of the observations. Statistics
        and successors are without it.
    `mask`: factors on the outputs of the policy's encoder, [N, E]; none: no dropout.
    `deterministic`: see `act`. The rollout's parameters of the distribution then carry no gradient.
    """
    head = policy.action_head
    functional = env if isinstance(env, FunctionalEnv) else None
    # Once a rollout, not at every step: within a rollout `act` keeps NaN observations away from the memory.
    start_state, broken = finite_memory(rollout_state.state, rollout_state.obs.device)
    obs, start, memory = rollout_state.obs, rollout_state.episode_start, start_state[0]
    rows: dict[str, list[Tensor]] = {
        name: []
        for name in ("obs", "scaled", "start", "action", "dist_params", "reward", "terminated", "truncated", "valid")
    }
    outcomes: list[dict[str, Tensor]] = []
    final_rows: list[int] = []
    final_obs: list[Tensor] = []
    drawn = None if noise is None else noise.unbind()
    # A compiler follows the modules themselves.
    acting = policy.for_window(obs, memory) if whole_step is act_and_step else policy
    for t in range(n_steps):
        noise = head.draw((env.num_envs,), generator) if drawn is None else drawn[t]
        if observe is not None:
            obs = observe(obs, start, memory)
        seen = obs
        if observation_noise:
            seen = obs + observation_noise * scale.std * torch.randn(obs.shape, generator=generator, device=obs.device)
        if functional is not None:
            # Random numbers are drawn outside the step, so that a compiled or recorded step is a function of its
            # inputs.
            env_noise = functional.draw()
            acted, memory, functional.state, step = whole_step(
                acting, env, scale, seen, start, memory, noise, functional.state, env_noise, mask, deterministic
            )
        else:
            acted, memory = act(acting, scale, seen, start, memory, noise, mask, deterministic)
            step = env.step(head.to_env(acted[2]))
        scaled, dist_params, action = acted
        row = (obs, scaled, start, action, dist_params, step.reward, step.terminated, step.truncated, step.valid)
        for column, value in zip(rows.values(), row, strict=True):
            column.append(value)
        outcomes.append(step.outcome)
        ended = step.ended
        # Autoreset replaces the last observation of an episode by the first of the next one; GAE and SR(λ) bootstrap
        # from the true successor, which is kept here. On a GPU every row is kept: asking would wait for the device.
        if t == n_steps - 1 or may_hold_any(ended):
            final_rows.append(t)
            final_obs.append(step.final_obs)
        obs, start = step.obs, ended
    # Rewards and measured outcomes carry the gradient of what was earned, and the successors that of what is to come.
    reward, valid = torch.stack(rows.pop("reward")), torch.stack(rows.pop("valid"))
    # Whatever a row in which nothing happened calls its reward, a NaN included, must not reach a target.
    rewards = torch.where(valid, reward, 0.0)
    with torch.set_grad_enabled(torch.is_grad_enabled() and not deterministic):
        stacked = {name: torch.stack(column) for name, column in rows.items()}
        if deterministic:
            stacked["dist_params"] = head.dist_params_of(stacked["dist_params"])
    outcome = {}
    for name in outcomes[0]:
        with torch.set_grad_enabled(torch.is_grad_enabled() and name in MEASURED):
            outcome[name] = torch.stack([one[name] for one in outcomes])
    rollout = Rollout(
        obs=stacked["obs"],
        scaled_obs=stacked["scaled"],
        episode_start=stacked["start"],
        actions=stacked["action"],
        dist_params=stacked["dist_params"],
        # Of raw actions, because undoing a tanh loses all digits near the bounds (see `models.actions`).
        log_probs=head.log_prob(stacked["dist_params"].detach(), stacked["action"].detach()),
        rewards=rewards,
        terminated=stacked["terminated"],
        truncated=stacked["truncated"],
        valid=valid,
        final_rows=tuple(final_rows),
        final_obs=torch.stack(final_obs),
        scale=scale,
        start_state=start_state,
        outcome=outcome,
        memory_resets=broken.sum(),
    )
    # Only the actor, trunk 0, has acted. Critics read the whole rollout later, in one pass, from their own states.
    return rollout, RolloutState(obs, start, (memory, *start_state[1:]))
