"""The strong attack on agents and ensembles: whole windows through the memories, and returns through the market."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import tailguard as tg
from tailguard.errors import ConfigError
from tailguard.robust.attacked_policy import AttackedPolicy
from tailguard.robust.attacks import Attack, attackable, perturb, window_objective
from tailguard.robust.return_attack import attack_return, perturb_return
from tailguard.robust.window_attack import perturb_window

Make = Callable[..., Any]
ROWS, COUNT = 6, 8


@pytest.fixture(scope="module")
def ensemble(make_pathwise: Make) -> tg.Ensemble:
    """Two members whose observations are scaled differently."""
    members = [make_pathwise(seed=seed, critic="quantile", quantiles=8) for seed in range(2)]
    for number, member in enumerate(members):
        for _ in range(number + 1):
            member.iterate()
    return tg.Ensemble(members, 0.8)


def window(agent: Any, rows: int = ROWS) -> tuple[Tensor, Tensor]:
    draw = torch.Generator().manual_seed(3)
    (network, *_) = agent.scaled_networks()
    obs = torch.randn(rows, COUNT, len(network.units), generator=draw) * network.units
    start = torch.zeros(rows, COUNT, dtype=torch.bool)
    start[0], start[3, :4] = True, True  # episodes begin inside
    return obs, start


def actions(ensemble: Any, obs: Tensor, episode_start: Tensor) -> Tensor:
    """Step by step, as the ensemble predicts, [T, N, A]."""
    state, found = None, []
    for row, start in zip(obs, episode_start, strict=True):
        action, state = ensemble.predict(row.numpy(), state, start.numpy())
        found.append(torch.as_tensor(action))
    return torch.stack(found)


def values(ensemble: Any, obs: Tensor, episode_start: Tensor) -> Tensor:
    """Mean of the members' values, each by one pass of its own network, [T, N]."""
    found = []
    for member in ensemble.members:
        (network,) = member.scaled_networks()
        with torch.no_grad():
            output = member.policy(network.scale(obs), member.policy.initial_state(COUNT), episode_start)
        found.append(torch.stack([critic.value.squeeze(-1) for critic in output.critics]).mean(0))
    return torch.stack(found).mean(0)


def damage(ensemble: Any, target: str, obs: Tensor, moved: Tensor, start: Tensor) -> float:
    """What the target asks for, measured from outside."""
    if target == "critic":
        return float((values(ensemble, obs, start) - values(ensemble, moved, start)).sum())
    if target == "kl":
        total = torch.zeros(())
        for member in ensemble.members:
            (network,), outputs = member.scaled_networks(), []
            for seen in (obs, moved):
                with torch.no_grad():
                    first = member.policy.initial_state(COUNT)
                    outputs.append(member.policy(network.scale(seen), first, start).dist_params)
            total = total + member.policy.action_head.kl(*outputs).sum()
        return float(total)
    before, after = actions(ensemble, obs, start), actions(ensemble, moved, start)
    change = after - before
    return float(change.square().sum() if target == "action" else -(change * before.sign()).sum())


@pytest.mark.parametrize("norm", ["linf", "l2"])
@pytest.mark.parametrize("kind", ["fgsm", "pgd", "sgld"])
@pytest.mark.parametrize("target", ["action", "kl", "reverse", "critic"])
def test_every_attack_through_time_does_more_to_an_ensemble_than_noise(
    ensemble: tg.Ensemble, target: Any, kind: Any, norm: Any
) -> None:
    """And stays in the ball of the members' mean scale, with account and clock as they are."""
    obs, start = window(ensemble)
    units = torch.stack([network.units for network in ensemble.scaled_networks()]).mean(0)
    assert not torch.equal(*(network.units for network in ensemble.scaled_networks()))
    mask = attackable(ensemble.members[0].env).bool()
    found = {}
    for name in ("random", kind):
        attack = Attack(name, 0.3, norm, steps=5, target=target, through_time=True)
        moved = perturb_window(ensemble, obs, start, attack)
        share = (moved.double() - obs.double()) / units.double()
        size = share.abs().amax(-1) if norm == "linf" else share.norm(dim=-1)
        assert size.max() <= 0.3
        assert size.min() > 0
        assert share[..., ~mask].abs().max() == 0
        found[name] = damage(ensemble, target, obs, moved, start)
    assert found[kind] > 2 * abs(found["random"])


def test_it_uses_the_memories(ensemble: tg.Ensemble) -> None:
    """More than the same attack bar by bar with the memories that it leaves, from the same starts."""
    obs, start = window(ensemble)
    whole = perturb_window(ensemble, obs, start, Attack(epsilon=0.3, through_time=True))
    policy, rows = AttackedPolicy(ensemble, Attack(epsilon=0.3)), []
    memories = policy.initial_memories(COUNT)
    for row, begins in zip(obs, start, strict=True):
        decision = policy.decide(row, memories, begins)
        memories = decision.memories
        rows.append(decision.obs)
    by_row = damage(ensemble, "action", obs, torch.stack(rows), start)
    assert damage(ensemble, "action", obs, whole, start) > 1.02 * by_row


@pytest.mark.parametrize("target", ["action", "critic"])
def test_of_one_agent_it_is_the_attack_on_its_network(ensemble: tg.Ensemble, target: Any) -> None:
    agent = ensemble.members[1]
    obs, start = window(agent)
    attack = Attack(epsilon=0.3, steps=5, target=target, through_time=True)
    moved = perturb_window(agent, obs, start, attack)
    (network,), state = agent.scaled_networks(), agent.policy.initial_state(COUNT)
    expected = perturb(agent.policy, network.scale(obs), state, start, attack, mask=attackable(agent.env))
    objective = window_objective(agent.policy, network.scale(obs), state, start, target)
    with torch.no_grad():
        torch.testing.assert_close(objective(network.scale(moved)), objective(expected), rtol=0.02, atol=1e-5)


def test_the_return_of_an_ensemble_is_attacked_through_the_market(ensemble: tg.Ensemble, make_env: Make) -> None:
    """Returns are those of the ensemble that sees the perturbed rows, and lower than without."""
    env, other = make_env(), make_env()
    attack = Attack(epsilon=0.3, target="return", through_time=True)
    found = attack_return(ensemble, env, attack, ROWS, seed=4)
    obs, state, total = other.reset(4), None, torch.zeros(COUNT)
    for row in range(ROWS):
        action, state = ensemble.predict((obs + found.delta[row]).numpy(), state)
        step = other.step(torch.as_tensor(action))
        obs, total = step.obs, total + step.reward
    torch.testing.assert_close(total, found.attacked, atol=1e-6, rtol=1e-3)
    assert (found.attacked < found.clean).float().mean() > 0.9
    mask = attackable(env).bool()
    assert found.delta[..., ~mask].abs().max() == 0
    noise = attack_return(ensemble, make_env(), Attack("random", 0.3, target="return", through_time=True), ROWS, seed=4)
    assert found.clean.mean() - found.attacked.mean() > 2 * (noise.clean.mean() - noise.attacked.mean()).abs()


def test_of_one_agent_it_is_the_attack_on_its_networks_return(ensemble: tg.Ensemble, make_env: Make) -> None:
    agent = ensemble.members[0]
    attack = Attack(epsilon=0.3, target="return", through_time=True)
    (network,) = agent.scaled_networks()
    found = attack_return(agent, make_env(), attack, ROWS, seed=4)
    mask = attackable(agent.env)
    expected = perturb_return(agent.policy, make_env(), network.scale, attack, ROWS, mask=mask, seed=4)
    torch.testing.assert_close(found.clean, expected.clean, atol=1e-6, rtol=1e-4)
    torch.testing.assert_close(found.attacked, expected.attacked, atol=1e-4, rtol=0.02)


def test_attacks_that_a_window_does_not_have_are_refused(ensemble: tg.Ensemble) -> None:
    obs, start = window(ensemble)
    with pytest.raises(ConfigError, match="attack_return"):
        perturb_window(ensemble, obs, start, Attack(target="return", through_time=True))
    with pytest.raises(ConfigError, match=r"window \[T, N, O\]"):
        perturb_window(ensemble, obs[0], start[0], Attack())
