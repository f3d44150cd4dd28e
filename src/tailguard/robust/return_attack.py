"""The attack on the return: perturbations of a whole window, found through the agent, its memory and the market.

An attack on the action does not ask whether the changed action loses money. In a market whose steps are differentiable
the loss itself has a gradient in every observation of a window, back through rewards, fills, positions and the LSTM.
It knows the window's prices in advance, which no real feed error does: what it leaves is a lower bound of what causal
attacks leave in that window.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from tailguard.envs.protocol import FunctionalEnv, VectorEnv
from tailguard.errors import ConfigError
from tailguard.models.memory import MemoryState
from tailguard.models.policy import ActorCritic
from tailguard.robust.attacks import Attack, Ball, maximise


@dataclass(frozen=True)
class ReturnAttack:
    """What an attack on the return of T steps found."""

    delta: Tensor
    """Perturbations of what the network reads, [T, N, O]."""
    clean: Tensor
    """Sum of the rewards without it, [N]."""
    attacked: Tensor
    """With it, [N]."""


def perturb_return(
    policy: ActorCritic,
    env: VectorEnv,
    scale: Callable[[Tensor], Tensor],
    attack: Attack,
    steps: int,
    *,
    mask: Tensor | None = None,
    seed: int = 0,
) -> ReturnAttack:
    """Attack the next `steps` steps of fresh episodes; the agent acts deterministically.

    `env`: a differentiable `FunctionalEnv`, such as a `TradingEnv`; its episodes begin anew.
    `scale`: converts raw observations to the network's input, as `agent.scaled_networks()[0].scale`.
    `mask`: which columns can be attacked, [O]; `attackable(env)`, for example.
    """
    if not isinstance(env, FunctionalEnv) or not getattr(env, "differentiable", False):
        raise ConfigError(
            f"attack.target: the steps of {type(env).__name__} are not a differentiable function, so that the return "
            "has no gradient; use target action or critic, or a learned adversary"
        )
    first = env.reset(seed)
    begin, noise = env.state, [env.draw() for _ in range(steps)]
    start = torch.ones(len(first), dtype=torch.bool, device=first.device)
    memory = policy.initial_state(len(first))[0]

    def returns(delta: Tensor) -> Tensor:
        return _trade(policy, env, scale, first, start, memory, begin, noise, delta)

    nothing = torch.zeros(steps, *first.shape, device=first.device)
    with torch.no_grad():
        clean = returns(nothing)
    generator = torch.Generator(first.device).manual_seed(attack.seed)
    delta = maximise(lambda moved: -returns(moved), nothing, attack, Ball.of(attack, nothing, mask), generator)
    with torch.no_grad():
        return ReturnAttack(delta, clean, returns(delta))


def _trade(
    policy: ActorCritic,
    env: Any,
    scale: Callable[[Tensor], Tensor],
    obs: Tensor,
    episode_start: Tensor,
    memory: MemoryState,
    state: Any,
    noise: list[Tensor],
    delta: Tensor,
) -> Tensor:
    """Sum of the rewards of an agent that sees its observations with `delta` [T, N, O] added, [N]."""
    head = policy.action_head
    total = torch.zeros_like(delta[0, :, 0])
    for moved, draw in zip(delta, noise, strict=True):
        dist_params, memory = policy.act(scale(obs) + moved, memory, episode_start)
        state, step = env.transition(state, head.to_env(head.mode(dist_params)), draw)
        total = total + step.reward
        obs, episode_start = step.obs, step.ended
    return total
