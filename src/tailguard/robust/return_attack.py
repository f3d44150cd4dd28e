"""The attack on the return: perturbations of a whole window, found through the agent, its memory and the market.

An attack on the action does not ask whether the changed action loses money. In a market whose steps are differentiable
the loss itself has a gradient in every observation of a window, back through rewards, fills, positions and the LSTM.
It knows the window's prices in advance, which no real feed error does: what it leaves is a lower bound of what causal
attacks leave in that window.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from tailguard.envs.protocol import FunctionalEnv, VectorEnv
from tailguard.errors import ConfigError
from tailguard.models.memory import MemoryState
from tailguard.models.policy import ActorCritic
from tailguard.robust.attacked_policy import AttackableAgent, AttackedPolicy, Memories
from tailguard.robust.attacks import Attack, Ball, maximise


@dataclass(frozen=True)
class ReturnAttack:
    """What an attack on the return of T steps found."""

    delta: Tensor
    """Perturbations, [T, N, O]: of what the network reads, or, of `attack_return`, of the raw observations."""
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
    ball = Ball.of(attack, torch.zeros(env.observation_size, device=env.device), mask)

    def act(obs: Tensor, moved: Tensor, memory: MemoryState, start: Tensor) -> tuple[Tensor, MemoryState]:
        dist_params, after = policy.act(scale(obs) + moved, memory, start)
        return policy.action_head.to_env(policy.action_head.mode(dist_params)), after

    return _attack(act, policy.initial_state(env.num_envs)[0], env, attack, ball, steps, seed)


def attack_return(
    agent: AttackableAgent, env: VectorEnv, attack: Attack, steps: int, *, mask: Tensor | None = None, seed: int = 0
) -> ReturnAttack:
    """As `perturb_return`, for an agent or an ensemble, whose members see the same perturbed raw observations.

    ε is in units of the mean of the members' scales. `mask`: by default `attackable` of the agent's spec.
    """
    victim = AttackedPolicy(agent, replace(attack, target="action", through_time=False), mask)

    def act(obs: Tensor, moved: Tensor, memories: Memories, start: Tensor) -> tuple[Tensor, Memories]:
        return victim.act(obs + moved, memories, start)

    ball = victim.ball(torch.zeros_like(victim.units))
    return _attack(act, victim.initial_memories(env.num_envs), env, attack, ball, steps, seed)


def _attack(
    act: Callable[..., tuple[Tensor, Any]],
    memory: Any,
    env: VectorEnv,
    attack: Attack,
    ball: Ball,
    steps: int,
    seed: int,
) -> ReturnAttack:
    """`act`: the action on observations, perturbed by as much, given memory and episodes' starts; the memory after."""
    if not isinstance(env, FunctionalEnv) or not getattr(env, "differentiable", False):
        raise ConfigError(
            f"attack.target: the steps of {type(env).__name__} are not a differentiable function, so that the return "
            "has no gradient; use target action or critic, or a learned adversary"
        )
    first = env.reset(seed)
    begin, noise = env.state, [env.draw() for _ in range(steps)]

    def returns(delta: Tensor) -> Tensor:
        """Sum of the rewards of an agent whose observations are perturbed by delta [T, N, O], [N]."""
        state, held, obs, total = begin, memory, first, torch.zeros_like(delta[0, :, 0])
        start = torch.ones(len(first), dtype=torch.bool, device=first.device)
        for moved, draw in zip(delta, noise, strict=True):
            action, held = act(obs, moved, held, start)
            state, step = env.transition(state, action, draw)
            obs, start, total = step.obs, step.ended, total + step.reward
        return total

    nothing = torch.zeros(steps, *first.shape, device=first.device)
    generator = torch.Generator(first.device).manual_seed(attack.seed)
    with torch.no_grad():
        clean = returns(nothing)
    delta = maximise(lambda moved: -returns(moved), nothing, attack, ball, generator)
    with torch.no_grad():
        return ReturnAttack(delta, clean, returns(delta))
