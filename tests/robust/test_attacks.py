"""Attacks stay in their ball, leave alone what cannot be falsified, and find more than noise does."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

import tailguard as tg
from tailguard.envs.protocol import Box
from tailguard.errors import ConfigError
from tailguard.models.policy import ActorCritic, NetworkConfig
from tailguard.robust.attacks import Attack, Ball, attackable, distance, maximise, memory_before, perturb

KINDS = ("fgsm", "pgd", "sgld", "random")
BOX = Box(torch.tensor([-1.0, -2.0]), torch.tensor([1.0, 2.0]))


def make_policy(memory: str = "separate", observation_size: int = 5, seed: int = 0, **options: Any) -> ActorCritic:
    """A network with weights of ordinary size: a fresh head is nearly 0, and would hardly answer."""
    torch.manual_seed(seed)
    config = NetworkConfig(hidden=(16,), memory=memory, lstm_size=12, critic="scalar", **options)  # type: ignore[arg-type]
    policy = ActorCritic(observation_size, BOX, config)
    nn.init.orthogonal_(policy.action_head.linear.weight)
    return policy


def rows(policy: ActorCritic, count: int = 32, size: int = 5) -> tuple[Tensor, Any, Tensor]:
    draw = torch.Generator().manual_seed(3)
    obs = 3 * torch.randn(count, size, generator=draw)
    state = tuple(
        tuple(0.5 * torch.randn(part.shape, generator=draw) for part in trunk) for trunk in policy.initial_state(count)
    )
    return obs, state, torch.rand(count, generator=draw) < 0.2


def sizes(delta: Tensor, scale: Tensor, norm: str) -> Tensor:
    """Norms of perturbations in units of the features' scales, in double precision."""
    unit = delta / scale.double()
    return unit.abs().amax(-1) if norm == "linf" else unit.norm(dim=-1)


@settings(max_examples=60, deadline=None)
@given(
    kind=st.sampled_from(KINDS),
    norm=st.sampled_from(("linf", "l2")),
    target=st.sampled_from(("action", "kl", "critic")),
    epsilon=st.floats(1e-4, 2.0),
    centre=st.sampled_from((0.0, 1.0, 1e3)),
    seed=st.integers(0, 1000),
)
def test_a_perturbation_is_in_the_ball_exactly_and_is_not_nothing(
    kind: Any, norm: Any, target: Any, epsilon: float, centre: float, seed: int
) -> None:
    """Also where the observation is so large that adding to it rounds: no tolerance."""
    policy = make_policy()
    obs, state, start = rows(policy)
    obs = obs + centre
    scale = torch.tensor([1.0, 0.3, 2.0, 1.0, 5.0])
    mask = torch.tensor([1.0, 1.0, 0.0, 1.0, 1.0])
    attack = Attack(kind, epsilon, norm, steps=3, target=target, seed=seed)
    moved = perturb(policy, obs, state, start, attack, mask=mask, scale=scale)
    delta = moved.double() - obs.double()
    assert float(sizes(delta, scale, norm).max()) <= epsilon
    assert torch.equal(moved[:, 2], obs[:, 2])
    if epsilon * 0.3 > 1e-5 * max(centre, 1.0):
        assert (delta.abs().amax(-1) > 0).all()


@pytest.mark.parametrize("norm", ["linf", "l2"])
def test_random_noise_is_as_large_as_the_ball(norm: Any) -> None:
    policy = make_policy()
    obs, state, start = rows(policy)
    moved = perturb(policy, obs, state, start, Attack("random", 0.1, norm))
    length = sizes(moved.double() - obs.double(), torch.ones(5), norm)
    assert length.min() > 0.0999


def test_the_gradient_of_the_divergence_is_zero_at_the_clean_observation_so_a_random_start_is_needed() -> None:
    policy = make_policy()
    obs, state, start = rows(policy)
    with torch.no_grad():
        clean, _ = policy.act(obs, state[0], start)
    for target in ("kl", "action"):
        here = obs.clone().requires_grad_()
        value = distance(policy.action_head, clean, policy.act(here, state[0], start)[0], target)  # type: ignore[arg-type]
        (gradient,) = torch.autograd.grad(value.sum(), here)
        assert torch.equal(value, torch.zeros_like(value))
        assert gradient.abs().max() == 0.0
        with pytest.raises(ConfigError, match="random_start"):
            Attack(target=target, random_start=False)  # type: ignore[arg-type]
    # From 0 the attack climbs nothing and stays; a value has a slope there.
    zero = torch.zeros_like(obs)
    attack = Attack(epsilon=0.1, target="kl")
    assert torch.equal(perturb(policy, obs, state, start, attack, start=zero), obs)
    moved = perturb(policy, obs, state, start, Attack(epsilon=0.1, target="critic", random_start=False))
    assert (moved - obs).abs().amax(-1).min() > 0.05


@pytest.mark.parametrize("norm", ["linf", "l2"])
def test_a_linear_policy_is_attacked_to_the_closed_form(norm: Any) -> None:
    """μ = W·s with one action: the largest KL is (ε·‖W‖_q)² / (2σ²), q = 1 for l∞ and 2 for l2 (Hölder)."""
    weight, epsilon, sigma = torch.tensor([0.5, -1.2, 0.3, 2.0, -0.1]), 0.1, 0.7
    obs = torch.randn(64, 5, generator=torch.Generator().manual_seed(0))

    def kl(moved: Tensor) -> Tensor:
        return ((moved - obs) @ weight).square() / (2 * sigma**2)

    size = weight.abs().sum() if norm == "linf" else weight.norm()
    best = float((epsilon * size) ** 2 / (2 * sigma**2))

    def reached(step_size: float | None) -> Tensor:
        attack = Attack("pgd", epsilon, norm, steps=10, step_size=step_size)
        draw = torch.Generator().manual_seed(1)
        return kl(maximise(kl, obs, attack, Ball.of(attack, obs), draw)) / best

    assert reached(None).min() >= 0.99
    assert reached(None).max() <= 1 + 1e-5
    if norm == "linf":
        # Steps of ε/K do not reach the corner from everywhere: this is why the default is twice as long.
        assert reached(epsilon / 10).mean() < 0.97


@pytest.mark.parametrize("memory", ["separate", "shared", "none"])
def test_pgd_at_least_doubles_what_noise_of_the_same_size_does(memory: str) -> None:
    """Noise at the corners of the cube, as large as the attack in every feature. Of one feature both are the same; the
    attack's advantage over chance grows as the square root of their number."""
    policy = make_policy(memory, 20)
    obs, state, start = rows(policy, 256, 20)

    def change(attack: Attack) -> float:
        moved = perturb(policy, obs, state, start, attack)
        with torch.no_grad():
            clean, attacked = (policy.act(seen, state[0], start)[0] for seen in (obs, moved))
            return float(distance(policy.action_head, clean, attacked, "action").sqrt().mean())

    noise = change(Attack("random", 0.1))
    assert change(Attack("pgd", 0.1)) > 2 * noise
    assert change(Attack("sgld", 0.1)) > 2 * noise
    assert change(Attack("fgsm", 0.1)) > 1.5 * noise


def test_a_window_is_attacked_row_by_row_given_the_memory_of_the_clean_rows() -> None:
    """The same as attacking each row by hand with the state that stepping through the clean rows has reached."""
    policy = make_policy(lstm_layers=2)
    draw = torch.Generator().manual_seed(5)
    obs = torch.randn(6, 4, 5, generator=draw)
    start = torch.zeros(6, 4, dtype=torch.bool)
    start[3, 1] = start[0, 2] = True
    state = policy.initial_state(4)
    begin = 2 * torch.rand(6, 4, 5, generator=draw) - 1
    attack = Attack(epsilon=0.2, steps=4)
    together = perturb(policy, obs, state, start, attack, start=begin)
    memory = memory_before(policy, obs, state, start)
    now = state
    for row in range(6):
        alone = perturb(policy, obs[row], now, start[row], attack, start=begin[row])
        torch.testing.assert_close(together[row], alone, atol=1e-5, rtol=0)
        for trunk, parts in zip(memory, now, strict=True):
            for mine, part in zip(trunk, parts, strict=True):
                torch.testing.assert_close(mine.unflatten(1, (6, 4))[:, row], part, atol=1e-6, rtol=0)
        now = tuple(
            trunk.step(obs[row], part, start[row])[1] for trunk, part in zip(policy.each_trunk(), now, strict=True)
        )


def test_through_time_is_stronger_than_row_by_row_and_uses_the_memory() -> None:
    """Judged by what the whole perturbed window does to the actions, with the memory that it leaves."""
    policy = make_policy()
    draw = torch.Generator().manual_seed(7)
    obs, start = torch.randn(12, 16, 5, generator=draw), torch.zeros(12, 16, dtype=torch.bool)
    state = policy.initial_state(16)

    def change(attack: Attack) -> float:
        moved = perturb(policy, obs, state, start, attack)
        assert float((moved - obs).abs().max()) <= attack.epsilon + 1e-6
        with torch.no_grad():
            clean, attacked = (policy(seen, state, start).dist_params for seen in (obs, moved))
            return float(distance(policy.action_head, clean, attacked, "action").sum(0).mean())

    by_rows = change(Attack(epsilon=0.2, steps=20))
    assert change(Attack(epsilon=0.2, steps=20, through_time=True)) > 1.1 * by_rows


def test_only_features_of_the_bars_can_be_attacked() -> None:
    market = tg.make_market(2_000, seed=0)
    env = tg.TradingEnv(market.bars, num_envs=2, episode_length=16)
    names = env.task.observation_names
    allowed = [name for name, free in zip(names, attackable(env).tolist(), strict=True) if free]
    assert not set(allowed) & {"weight", "pnl", "drawdown", "time_left"}
    assert not [name for name in allowed if name.startswith("time_of_")]
    constant = {name for name, scale in zip(names, env.prepared.scaler.scale, strict=False) if scale == 0}
    clock = {name for name in names if name.startswith("time_of_")}
    assert len(clock) == 4
    assert set(names) - set(allowed) == clock | constant | {"weight", "pnl", "drawdown", "time_left"}


def test_settings_that_make_no_attack_are_refused() -> None:
    policy = make_policy()
    obs, state, start = rows(policy)
    with pytest.raises(ConfigError, match=r"attack\.kind: 'bim' is not one of fgsm, pgd, sgld, random"):
        Attack("bim")  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match=r"attack\.epsilon: -0\.1 is out of range"):
        Attack(epsilon=-0.1)
    with pytest.raises(ConfigError, match="needs a window"):
        perturb(policy, obs, state, start, Attack(through_time=True))
    with pytest.raises(ConfigError, match="return"):
        Attack(target="return")


def test_an_attack_of_size_zero_changes_nothing() -> None:
    policy = make_policy()
    obs, state, start = rows(policy)
    assert math.isclose(Attack(epsilon=0.0).relative_step, 0.2)
    for kind in KINDS:
        assert torch.equal(perturb(policy, obs, state, start, Attack(kind, 0.0)), obs)  # type: ignore[arg-type]
