"""The strong attack on an agent or an ensemble: all observations of a window at once, through the memories.

An attack bar by bar takes the memory as it is. One on a whole window also writes what it wants into the memory: the
gradient of every later decision reaches every earlier observation.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from tailguard.errors import ConfigError
from tailguard.robust.attacked_policy import AttackableAgent, AttackedPolicy, Memories
from tailguard.robust.attacks import Attack, maximise


def perturb_window(
    agent: AttackableAgent,
    obs: Tensor,
    episode_start: Tensor,
    attack: Attack,
    *,
    memories: Memories | None = None,
    mask: Tensor | None = None,
) -> Tensor:
    """Perturbed raw observations of the same shape, each inside the ball around the true one.

    obs:            raw, as recorded, [T, N, O]; members of an ensemble see the same
    episode_start:  [T, N] bool: the memories are cleared before the row is read
    memories:       of all members before the first row, as of `AttackedPolicy.initial_memories`; empty by default
    mask:           which columns can be attacked, [O]; by default `attackable` of the agent's spec

    The sum over the rows is made large, of what the target makes large in one. The account in the recorded
    observations is not traded again: `attack_return` does that.
    """
    if attack.target == "return":
        raise ConfigError("attack.target: the return depends on the market; use attack_return, which trades it")
    if obs.dim() != 3:
        raise ConfigError(f"perturb_window: needs a window [T, N, O]; the observations are {tuple(obs.shape)}")
    victim = AttackedPolicy(agent, replace(attack, through_time=False), mask)
    with torch.inference_mode(False):
        obs, episode_start = obs.clone().to(victim.units), episode_start.clone()
        first = victim.initial_memories(obs.shape[1]) if memories is None else memories
        clean, memory = [], first
        with torch.no_grad():
            for row, start in zip(obs, episode_start, strict=True):
                clean.append(victim.reference(row, memory, start))
                _, memory = victim.act(row, memory, start)

        def damage(moved: Tensor) -> Tensor:
            total, memory = torch.zeros_like(obs[0, :, 0]), first
            for truth, row, start in zip(clean, moved, episode_start, strict=True):
                total = total + victim.damage(truth, row, memory, start)
                _, memory = victim.act(row, memory, start)
            return total

        return maximise(damage, obs, attack, victim.ball(obs), victim.generator)
