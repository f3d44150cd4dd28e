"""The attack on the return loses more money than the attack on the action, and says by how much."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from tailguard.errors import ConfigError
from tailguard.robust.attacked_policy import AttackedPolicy
from tailguard.robust.attacks import Attack, attackable
from tailguard.robust.return_attack import perturb_return

Make = Callable[..., Any]
ATTACK = Attack(epsilon=0.3, steps=10, target="return", through_time=True)


def test_it_costs_more_than_the_attack_on_the_action(make_pathwise: Make, make_env: Make) -> None:
    agent, env = make_pathwise(), make_env()
    (network,) = agent.scaled_networks()
    mask = attackable(env)
    found = perturb_return(agent.policy, env, network.scale, ATTACK, 12, mask=mask, seed=3)
    assert found.delta.abs().max() <= 0.3
    assert found.delta[..., mask == 0].abs().max() == 0
    assert (found.attacked < found.clean).float().mean() > 0.9
    # The same accounts under the causal attack on the action.
    policy = AttackedPolicy(agent, Attack(epsilon=0.3))
    other = make_env()
    obs, memories = other.reset(3), policy.initial_memories(8)
    start, total = torch.ones(8, dtype=torch.bool), torch.zeros(8)
    for _ in range(12):
        decision = policy.decide(obs, memories, start)
        step = other.step(decision.action)
        memories, obs, start, total = decision.memories, step.obs, step.ended, total + step.reward
    assert found.attacked.mean() < total.mean()


def test_the_returns_are_those_of_an_agent_that_sees_the_perturbed_rows(make_pathwise: Make, make_env: Make) -> None:
    agent, env = make_pathwise(), make_env()
    (network,) = agent.scaled_networks()
    found = perturb_return(agent.policy, env, network.scale, ATTACK, 6, mask=attackable(env), seed=4)
    other = make_env()
    obs, state, total = other.reset(4), None, torch.zeros(8)
    for row in range(6):
        # predict scales what it is given: undo that for the perturbation, which is of scaled observations.
        raw = obs + found.delta[row] * network.units
        action, state = agent.predict(raw.numpy(), state, deterministic=True)
        step = other.step(torch.as_tensor(action))
        obs, total = step.obs, total + step.reward
    torch.testing.assert_close(total, found.attacked, atol=1e-5, rtol=1e-3)


def test_it_needs_steps_with_a_gradient(make_pathwise: Make) -> None:
    from tailguard.envs.tasks import RecallEnv

    agent = make_pathwise()
    with pytest.raises(ConfigError, match="not a differentiable function"):
        perturb_return(agent.policy, RecallEnv(4), agent.scaled_networks()[0].scale, ATTACK, 4)
