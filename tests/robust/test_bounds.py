"""No observation in the ball moves a decision beyond its bounds, and the bounds are not much larger than need be."""

from __future__ import annotations

from itertools import product
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

import tailguard as tg
from tailguard.envs.protocol import Box
from tailguard.models.policy import ActorCritic, NetworkConfig
from tailguard.robust.attacked_policy import AttackedPolicy
from tailguard.robust.attacks import Attack, perturb
from tailguard.robust.bounds import CertifiedPolicy, step_bounds, tightness

BOX = Box(torch.tensor([-1.0, -2.0]), torch.tensor([1.0, 3.0]))


def make_policy(memory: Any, activation: Any, layers: int = 1, hidden: Any = (16,), seed: int = 0) -> ActorCritic:
    torch.manual_seed(seed)
    config = NetworkConfig(
        hidden=hidden, activation=activation, memory=memory, lstm_size=12, lstm_layers=layers, critic="scalar"
    )
    policy = ActorCritic(4, BOX, config)
    nn.init.orthogonal_(policy.action_head.linear.weight)
    return policy


def rows(policy: ActorCritic, count: int, seed: int) -> tuple[Tensor, Any, Tensor]:
    draw = torch.Generator().manual_seed(seed)
    obs = torch.randn(count, 4, generator=draw)
    state = tuple(
        tuple(0.5 * torch.randn(part.shape, generator=draw) for part in trunk) for trunk in policy.initial_state(count)
    )
    return obs, state, torch.rand(count, generator=draw) < 0.3


def actions(policy: ActorCritic, obs: Tensor, state: Any, start: Tensor) -> Tensor:
    with torch.no_grad():
        head = policy.action_head
        return head.to_env(head.mode(policy.act(obs, state[0], start)[0]))


@settings(max_examples=40, deadline=None)
@given(
    memory=st.sampled_from(("separate", "none")),
    activation=st.sampled_from(("tanh", "silu", "relu")),
    layers=st.integers(1, 2),
    hidden=st.sampled_from(((16,), (8, 8), ())),
    norm=st.sampled_from(("linf", "l2")),
    epsilon=st.floats(1e-3, 1.0),
    seed=st.integers(0, 100),
)
def test_no_sample_of_the_ball_leaves_the_bounds(
    memory: Any, activation: Any, layers: int, hidden: Any, norm: Any, epsilon: float, seed: int
) -> None:
    """All corners of the cube, a grid inside it, and the strongest attack; one feature cannot be moved."""
    policy = make_policy(memory, activation, layers, hidden, seed)
    obs, state, start = rows(policy, 6, seed)
    mask = torch.tensor([1.0, 1.0, 0.0, 1.0])
    bounds = step_bounds(policy, obs, state[0], start, epsilon * mask, norm)
    grid = torch.tensor(list(product((-1.0, -0.5, 0.0, 0.5, 1.0), repeat=3)))
    if norm == "l2":
        grid = grid / grid.norm(dim=-1, keepdim=True).clamp(min=1.0)
    shifts = torch.zeros(len(grid), 4)
    shifts[:, mask.bool()] = epsilon * grid
    tried = [obs + shift for shift in shifts]
    tried.append(perturb(policy, obs, state, start, Attack(epsilon=epsilon, norm=norm), mask=mask))
    for moved in tried:
        action = actions(policy, moved, state, start).double()
        assert (action >= bounds.low).all()
        assert (action <= bounds.high).all()


def test_a_ball_of_size_zero_leaves_only_rounding() -> None:
    policy = make_policy("separate", "tanh")
    obs, state, start = rows(policy, 8, 0)
    bounds = step_bounds(policy, obs, state[0], start, torch.zeros(4))
    clean = actions(policy, obs, state, start).double()
    assert (bounds.high - bounds.low).max() <= 2.01e-6 * 2.5
    assert ((clean >= bounds.low) & (clean <= bounds.high)).all()


def test_a_linear_policy_is_bounded_exactly() -> None:
    """Without encoder and memory the mean moves by ε·‖w‖₁ (l∞) or ε·‖w‖₂ (l2), and tanh of that is reached."""
    policy = make_policy("none", "tanh", hidden=())
    obs, state, start = rows(policy, 8, 1)
    weight, bias = policy.action_head.linear.weight.double(), policy.action_head.linear.bias.double()
    mean = obs.double() @ weight.T + bias
    for norm, size in (("linf", weight.abs().sum(-1)), ("l2", weight.norm(dim=-1))):
        bounds = step_bounds(policy, obs, state[0], start, torch.full((4,), 0.1), norm)  # type: ignore[arg-type]
        centre, half = torch.tensor([0.0, 0.5]), torch.tensor([1.0, 2.5])
        for sign, found in ((-1, bounds.low), (1, bounds.high)):
            expected = centre + half * torch.tanh(mean + sign * 0.1 * size)
            torch.testing.assert_close(found, expected.clamp(BOX.low.double(), BOX.high.double()), atol=3e-6, rtol=0)


@pytest.mark.parametrize("activation", ["tanh", "silu", "relu"])
@pytest.mark.parametrize("memory", ["separate", "none"])
def test_the_bounds_are_near_to_what_an_attack_reaches(memory: str, activation: str) -> None:
    """Nearly exact for small errors; they loosen as the ball grows, as slopes vary more inside it."""
    policy = make_policy(memory, activation)
    obs, state, start = rows(policy, 128, 2)
    clean = actions(policy, obs, state, start).double()
    ratios = []
    for epsilon in (0.005, 0.02, 0.2):
        bounds = step_bounds(policy, obs, state[0], start, torch.full((4,), epsilon))
        found = []
        for seed in range(4):
            moved = perturb(policy, obs, state, start, Attack(epsilon=epsilon, steps=30, seed=seed))
            found.append(actions(policy, moved, state, start).double())
        ratios.append(tightness(bounds, clean, found))
    assert 1 <= ratios[0] < 1.4
    assert ratios[1] < 2.5
    assert ratios[0] < ratios[1] < ratios[2]


@pytest.fixture(scope="module")
def agents() -> list[Any]:
    market = tg.make_market(2_000, seed=1, signal=20.0)
    trained = []
    for seed in range(2):
        env = tg.TradingEnv(market.bars, num_envs=32, episode_length=32)
        agent = tg.PathwiseLearner(env, n_steps=16, seed=seed, hidden=(16,), lstm_size=8, critic="scalar")
        trained.append(agent.learn(32 * 16 * 20))
    return trained


def test_certificates_of_a_trained_agent_and_of_an_ensemble_hold_for_its_attacks(agents: list[Any]) -> None:
    obs = torch.randn(64, agents[0].env.observation_size, generator=torch.Generator().manual_seed(0))
    start = torch.ones(64, dtype=torch.bool)
    for agent in (agents[0], tg.Ensemble(agents, 0.7)):
        attack = Attack(epsilon=0.1)
        certified = CertifiedPolicy(agent, attack)
        memories = certified.initial_memories(64)
        bounds = certified.bounds(obs, memories, start)
        decision = AttackedPolicy(agent, attack).decide(obs, memories, start)
        assert (decision.action >= bounds.low).all()
        assert (decision.action <= bounds.high).all()
        honest = certified.decide(obs, memories, start)
        assert torch.equal(honest.action, honest.clean)
        summary = certified.summary()
        moved = (decision.action - decision.clean).abs().amax(-1)
        assert float(moved.mean()) <= summary["mean"] <= summary["p95"] <= summary["max"]
        turned = (torch.sign(decision.action) * torch.sign(decision.clean) < 0).any(-1)
        assert not (turned & certified.fixed[0]).any()
