"""A learned adversary: its environment, its strength, and its turns with an agent that learns."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from tailguard.robust.adversary import AdversaryEnv, Perturbation
from tailguard.robust.attacks import Attack, attackable
from tailguard.robust.config import RobustConfig

Make = Callable[..., Any]


@pytest.mark.parametrize("acts", ["direction", "perturbation"])
def test_the_adversary_earns_what_the_agent_loses(make_pathwise: Make, make_env: Make, acts: Any) -> None:
    """Step by step the same accounts as an agent that is shown the perturbed observations, with the sign turned."""
    agent = make_pathwise()
    perturbation = Perturbation(agent, Attack(epsilon=0.3), acts)
    env, other = AdversaryEnv(make_env(), perturbation), make_env()
    obs = env.reset(5)
    assert torch.equal(obs, other.reset(5))
    mask, draw = attackable(other).bool(), torch.Generator().manual_seed(0)
    units = agent.scaled_networks()[0].units
    start, state = torch.ones(8, dtype=torch.bool), None
    for _ in range(20):
        action = 2 * torch.rand(8, perturbation.size, generator=draw) - 1
        position = env.position
        assert position is not None
        moved = perturbation(position.obs, position.memories, position.episode_start, action)
        delta = (moved - position.obs) / units
        assert delta[:, ~mask].abs().max() == 0
        assert 0 < delta[:, mask].abs().max() <= 0.3 + 1e-5
        chosen, state = agent.predict(moved.numpy(), state, start.numpy(), deterministic=True)
        step, expected = env.step(action), other.step(torch.as_tensor(chosen))
        torch.testing.assert_close(step.reward, -expected.reward, atol=1e-6, rtol=0)
        start = expected.ended
    assert perturbation.size == (int(mask.sum()) if acts == "perturbation" else 1)


def test_a_direction_pushes_the_action_that_way(make_pathwise: Make) -> None:
    agent = make_pathwise()
    perturbation = Perturbation(agent, Attack(epsilon=0.3), "direction")
    obs = torch.randn(32, agent.env.observation_size, generator=torch.Generator().manual_seed(1))
    memories, start = perturbation.victim.initial_memories(32), torch.ones(32, dtype=torch.bool)
    with torch.no_grad():
        clean = perturbation.victim.unit_action(obs, memories, start)
        for sign in (-1.0, 1.0):
            moved = perturbation(obs, memories, start, torch.full((32, 1), sign))
            push = perturbation.victim.unit_action(moved, memories, start) - clean
            assert (sign * push > 0).all()


def test_in_turns_the_agent_learns_from_what_it_saw(make_ppo: Make) -> None:
    """Perturbed observations are in the rollout, within ε of the true ones, and the ratio at them starts at 1."""
    robust = RobustConfig(epsilon=0.4, schedule="constant", adversary="alternate", adversary_every=2)
    learner = make_ppo(robust=robust, epochs=1, minibatch_size=10_000)
    seen, true = [], []
    alternation = learner.alternation
    inner = alternation.observe

    def observe(obs: Any, start: Any, memory: Any) -> Any:
        true.append(obs)
        return inner(obs, start, memory)

    alternation.observe = observe
    weights = {name: value.clone() for name, value in alternation.learner.policy.state_dict().items()}
    for iteration in range(5):
        report = learner.iterate(lambda rollout: seen.append(rollout.obs) or True)
        assert report["train/approx_kl"] < 1e-8  # one minibatch: measured before its step
        assert alternation.turns == iteration // 2
    delta = ((torch.stack(true[-8:]) - seen[-1]) / learner.scaled_networks()[0].units).abs()
    mask = attackable(learner.env).bool()
    assert 0.1 < delta[..., mask].max() < 0.45  # in units of now, which the last rollout has moved a little
    assert delta[..., ~mask].max() == 0
    assert torch.equal(torch.stack(true[:8]), seen[0])  # before its first turn it does nothing
    changed = [not torch.equal(value, weights[name]) for name, value in alternation.learner.policy.state_dict().items()]
    assert all(changed)
    assert "robust/adversary_reward" in report
    assert learner.num_timesteps == 5 * 8 * 8


@pytest.mark.parametrize("share", [0.25, 1.0])
def test_a_share_of_the_environments_is_attacked_and_the_others_show_the_truth(make_ppo: Make, share: float) -> None:
    robust = RobustConfig(
        epsilon=0.4, schedule="constant", adversary="alternate", adversary_every=1, adversary_share=share
    )
    learner = make_ppo(robust=robust, epochs=1)
    true: list[Any] = []
    alternation = learner.alternation
    inner = alternation.observe

    def observe(obs: Any, start: Any, memory: Any) -> Any:
        true.append(obs)
        return inner(obs, start, memory)

    alternation.observe = observe
    seen: list[Any] = []
    for _ in range(2):
        learner.iterate(lambda rollout: seen.append(rollout.obs) or True)
    moved = (torch.stack(true[-8:]) != seen[-1]).any(-1).any(0)
    assert moved.tolist() == [environment < share * 8 for environment in range(8)]
