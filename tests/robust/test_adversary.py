"""A learned adversary: its environment, its strength, and its turns with an agent that learns."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import tailguard as tg
from tailguard.algorithm.adversary_training import Alternation, train_adversary
from tailguard.envs.gym import GymnasiumEnv
from tailguard.errors import ConfigError
from tailguard.robust.adversary import AdversaryEnv, Perturbation
from tailguard.robust.attacks import Attack, attackable
from tailguard.robust.config import RobustConfig

Make = Callable[..., Any]


@pytest.mark.parametrize("members", [1, 2])
@pytest.mark.parametrize("acts", ["direction", "perturbation"])
def test_the_adversary_earns_what_the_agent_loses(make_pathwise: Make, make_env: Make, acts: Any, members: int) -> None:
    """Step by step the same accounts as an agent that is shown the perturbed observations, with the sign turned."""
    agents = [make_pathwise(seed=seed) for seed in range(members)]
    agent = agents[0] if members == 1 else tg.Ensemble(agents, 0.8)
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


def test_an_adversary_of_an_ensemble_is_trained_and_trades_in_its_place(make_pathwise: Make, make_env: Make) -> None:
    """Its actions are those of the ensemble on what it shows, which is in the ball."""
    ensemble = tg.Ensemble([make_pathwise(seed=seed) for seed in range(2)], 0.8)
    options: dict[str, Any] = {"n_steps": 8, "hidden": (8,), "lstm_size": 6, "minibatch_size": 32}
    worst = train_adversary(ensemble, make_env(), Attack(epsilon=0.3), timesteps=128, **options)
    obs = make_env().reset(1)
    start, memories, state = torch.ones(8, dtype=torch.bool), worst.initial_memories(8), None
    for _ in range(3):
        decision = worst.decide(obs, memories, start)
        share = ((decision.obs.double() - obs.double()) / worst.units.double()).abs()
        assert 0 < share.max() <= 0.3
        expected, state = ensemble.predict(decision.obs.numpy(), state, start.numpy())
        torch.testing.assert_close(decision.action, torch.as_tensor(expected), atol=1e-6, rtol=0)
        memories, start = decision.memories, torch.zeros(8, dtype=torch.bool)


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


def watched(learner: Any) -> list[Any]:
    """Fills with the true observations that the agent's own steps begin with."""
    true: list[Any] = []
    inner = learner.alternation.observe

    def observe(obs: Any, start: Any, memory: Any) -> Any:
        true.append(obs.detach())
        return inner(obs, start, memory)

    learner.alternation.observe = observe
    return true


@pytest.mark.parametrize("learner_kind", ["ppo", "pathwise"])
def test_in_turns_the_agent_learns_from_what_it_saw(make_ppo: Make, make_pathwise: Make, learner_kind: str) -> None:
    """Perturbed observations are in the rollout, within ε of the true ones, and PPO's ratio at them starts at 1."""
    robust = RobustConfig(epsilon=0.4, schedule="constant", adversary="alternate", adversary_every=2)
    ppo = learner_kind == "ppo"
    learner = make_ppo(robust=robust, epochs=1, minibatch_size=10_000) if ppo else make_pathwise(robust=robust)
    seen, true = [], watched(learner)
    adversary = learner.alternation.learner.policy
    weights = {name: value.clone() for name, value in adversary.state_dict().items()}
    for iteration in range(5):
        report = learner.iterate(lambda rollout: seen.append(rollout.obs) or True)
        if ppo:
            assert report["train/approx_kl"] < 1e-8  # one minibatch: measured before its step
        assert learner.alternation.turns == iteration // 2
    delta = ((torch.stack(true[-8:]) - seen[-1]) / learner.scaled_networks()[0].units).abs()
    mask = attackable(learner.env).bool()
    assert 0.1 < delta[..., mask].max() < 0.45  # in units of now, which the last rollout has moved a little
    assert delta[..., ~mask].max() == 0
    assert torch.equal(torch.stack(true[:8]), seen[0])  # before its first turn it does nothing
    assert not any(torch.equal(value, weights[name]) for name, value in adversary.state_dict().items())
    assert "robust/adversary_reward" in report
    assert learner.num_timesteps == 5 * 8 * 8


def test_the_gradient_goes_through_what_was_perturbed_as_through_the_truth(make_pathwise: Make) -> None:
    """Of gradients through the market: the perturbation is a constant, bit for bit the one without a gradient."""
    learner = make_pathwise(robust=RobustConfig(epsilon=0.4, schedule="constant", adversary="alternate"))
    learner.iterate()
    learner.alternation.take_turn()
    before = learner.state.rollout_state
    alternation, memory = learner.alternation, learner.alternation.memory
    drawn = alternation.learner.generator.get_state()
    obs = before.obs.clone().requires_grad_()
    seen = alternation.observe(obs, before.episode_start, before.state[0])
    (slope,) = torch.autograd.grad(seen.sum(), obs)
    assert torch.equal(slope, torch.ones_like(slope))
    alternation.memory = memory
    alternation.learner.generator.set_state(drawn)
    assert torch.equal(seen, alternation.observe(before.obs, before.episode_start, before.state[0]))
    assert (seen != before.obs).any(-1).all()


def test_an_agent_that_learns_meets_an_adversary_that_cannot_be_predicted(make_ppo: Make) -> None:
    """Of one situation met again and again it pushes the action up as often as its policy says: here in 3 of 10."""
    learner = make_ppo(robust=RobustConfig(epsilon=0.4, schedule="constant", adversary="alternate"))
    learner.iterate()
    learner.alternation.take_turn()
    alternation, before = learner.alternation, learner.state.rollout_state
    head = alternation.learner.policy.action_head
    with torch.no_grad():
        head.linear.weight.zero_()
        std = head.dist_params_of(head.linear.bias[None]).chunk(2, dim=-1)[1].exp()
        head.linear.bias.copy_(torch.special.ndtri(torch.tensor(0.3)) * std.squeeze(0))
    victim, rest = alternation.env.perturbation.victim, learner.policy.initial_state(8)[1:]
    memories, up = ((before.state[0], *rest),), []
    for _ in range(150):
        seen = alternation.observe(before.obs, before.episode_start, before.state[0])
        with torch.no_grad():
            clean, pushed = (victim.unit_action(obs, memories, before.episode_start) for obs in (before.obs, seen))
        up.append((pushed > clean).double())
    assert 0.25 < float(torch.stack(up).mean()) < 0.35  # 1,200 draws: a standard deviation of 0.013


@pytest.mark.parametrize("learner_kind", ["ppo", "pathwise"])
def test_the_agents_episodes_stand_still_in_the_adversarys_turns(
    make_ppo: Make, make_pathwise: Make, learner_kind: str
) -> None:
    """So that a budget follows them: the loss so far that it knows is that of the accounts."""
    robust = RobustConfig(
        epsilon=0.4, schedule="constant", adversary="alternate", adversary_every=1, adversary_rollouts=3
    )
    make = make_ppo if learner_kind == "ppo" else make_pathwise
    learner = make(robust=robust, risk=tg.RiskConfig(limit=-0.005, alpha=0.5), n_steps=8)
    true, ended, compared = watched(learner), [], 0
    for iteration in range(4):
        if iteration:
            stands, state = learner.state.rollout_state, learner.env.state
            learner.alternation.take_turn()
            assert learner.env.state is state
            assert learner.state.rollout_state is stands
        learner.iterate(lambda rollout: ended.append(rollout.ended[-1]) or True)
        account, _, _ = learner.env.task.account(learner.env.state)
        running = ~ended[-1]
        compared += int(running.sum())
        torch.testing.assert_close(learner.risk.running.last[running], -account.float()[running], atol=1e-7, rtol=0)
        if iteration:
            assert torch.equal(true[-8], stands.obs)
    assert learner.alternation.turns == 6
    assert compared >= 8


def test_a_budget_is_refused_where_episodes_cannot_stand_still() -> None:
    robust = RobustConfig(adversary="alternate")
    options: dict[str, Any] = {"n_steps": 4, "robust": robust, "risk": tg.RiskConfig(limit=-0.05, alpha=0.5)}
    learner = tg.DistributionalPPO("Pendulum-v1", num_envs=2, **options)
    assert isinstance(learner.env, GymnasiumEnv)
    with pytest.raises(ConfigError, match=r"cannot stand still.*robust\.adversary"):
        learner.iterate()


def test_turns_are_refused_where_iterations_are_recorded(make_ppo: Make) -> None:
    learner = make_ppo(robust=RobustConfig(adversary="alternate"))
    learner.runtime.mode = "graph"  # what `auto` is on a GPU
    with pytest.raises(ConfigError, match=r"robust\.adversary: turns cannot be recorded.*set the runtime to eager"):
        Alternation(learner)


@pytest.mark.parametrize("memory", ["separate", "none"])
@pytest.mark.parametrize("learner_kind", ["ppo", "pathwise"])
def test_an_agent_is_saved_with_its_adversary(
    make_ppo: Make, make_pathwise: Make, make_env: Make, tmp_path: Path, learner_kind: str, memory: str
) -> None:
    """It goes on with as many environments or others, and decides without any."""
    robust = RobustConfig(epsilon=0.4, adversary="alternate", adversary_every=1, adversary_rollouts=1)
    learner = (make_ppo if learner_kind == "ppo" else make_pathwise)(robust=robust, memory=memory)
    for _ in range(2):
        learner.iterate()
    learner.save(tmp_path / "agent")
    weights = learner.alternation.learner.policy.state_dict()
    for env in (None, make_env(), make_env(num_envs=4)):
        again = type(learner).load(tmp_path / "agent", env)
        held = again.alternation.learner.policy.state_dict()
        assert all(torch.equal(value, held[name]) for name, value in weights.items())
        assert again.alternation.turns == 1
        if env is None:
            observation = torch.zeros(1, again.env.observation_size).numpy()
            expected, _ = learner.predict(observation, deterministic=True)
            assert (again.predict(observation, deterministic=True)[0] == expected).all()
        else:
            again.iterate()
            assert again.alternation.turns == 2


@pytest.mark.parametrize("share", [0.25, 1.0])
def test_a_share_of_the_environments_is_attacked_and_the_others_show_the_truth(make_ppo: Make, share: float) -> None:
    robust = RobustConfig(
        epsilon=0.4, schedule="constant", adversary="alternate", adversary_every=1, adversary_share=share
    )
    learner = make_ppo(robust=robust, epochs=1)
    true, seen = watched(learner), []
    for _ in range(2):
        learner.iterate(lambda rollout: seen.append(rollout.obs) or True)
    moved = (torch.stack(true[-8:]) != seen[-1]).any(-1).any(0)
    assert moved.tolist() == [environment < share * 8 for environment in range(8)]
