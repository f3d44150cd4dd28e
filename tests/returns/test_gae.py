"""GAE against its definition, hand-worked numbers and Stable-Baselines3; nothing crosses an episode's end."""

from __future__ import annotations

import math
from typing import NamedTuple

import gymnasium
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from tailguard.returns import gae, lambda_returns

GAMMA, LAM = 0.9, 0.8


class Segment(NamedTuple):
    """The arguments of `gae` before gamma and lam."""

    rewards: Tensor
    values: Tensor
    next_values: Tensor
    terminated: Tensor
    truncated: Tensor


def random_segment(steps: int, envs: int, seed: int, end_rate: float = 0.2) -> Segment:
    """A rollout as an environment with same-step autoreset leaves it: V(o'_t) is V(o_{t+1}) inside an episode."""
    random = torch.Generator().manual_seed(seed)

    def draw(rows: int) -> Tensor:
        return torch.randn(rows, envs, generator=random, dtype=torch.float64)

    terminated = torch.rand(steps, envs, generator=random) < end_rate
    truncated = torch.rand(steps, envs, generator=random) < end_rate
    values = draw(steps + 1)
    next_values = torch.where(terminated | truncated, draw(steps), values[1:])
    return Segment(draw(steps), values[:-1], next_values, terminated, truncated)


def gae_by_definition(segment: Segment, gamma: float, lam: float) -> np.ndarray:
    """A_t = Σ_k (γλ)^k δ_{t+k}, the sum cut after the step in which the episode ended."""
    rewards, values, next_values, terminated, truncated = (x.numpy() for x in segment)
    advantages = np.zeros_like(rewards)
    for t, n in np.ndindex(*rewards.shape):
        terms = []
        for u in range(t, len(rewards)):
            successor = 0.0 if terminated[u, n] else next_values[u, n]
            terms.append((gamma * lam) ** (u - t) * (rewards[u, n] + gamma * successor - values[u, n]))
            if terminated[u, n] or truncated[u, n]:
                break
        advantages[t, n] = math.fsum(terms)
    return advantages


@pytest.mark.parametrize(
    ("ending", "expected"),
    [("truncated", [8.528, 10.4, 18.284, 21.2]), ("terminated", [2.048, 1.4, 18.284, 21.2])],
)
def test_hand_worked_episode_end(ending: str, expected: list[float]) -> None:
    """Step 1 ends an episode whose final observation is worth 10; the rollout's last successor is worth 20."""
    rewards = torch.tensor([[1.0], [2.0], [3.0], [4.0]], dtype=torch.float64)
    values = torch.tensor([[0.5], [0.6], [0.7], [0.8]], dtype=torch.float64)
    next_values = torch.tensor([[0.6], [10.0], [0.8], [20.0]], dtype=torch.float64)
    ends = torch.tensor([[False], [True], [False], [False]])
    never = torch.zeros_like(ends)
    terminated, truncated = (ends, never) if ending == "terminated" else (never, ends)
    advantages = gae(rewards, values, next_values, terminated, truncated, GAMMA, LAM)
    np.testing.assert_allclose(advantages[:, 0].numpy(), expected, rtol=0, atol=1e-12)


@settings(max_examples=150, deadline=None)
@given(
    steps=st.integers(1, 14),
    envs=st.integers(1, 4),
    seed=st.integers(0, 2**31),
    end_rate=st.sampled_from([0.0, 0.15, 0.5, 1.0]),
    gamma=st.floats(0, 1),
    lam=st.floats(0, 1),
)
def test_equals_the_definition_under_random_endings(
    steps: int, envs: int, seed: int, end_rate: float, gamma: float, lam: float
) -> None:
    segment = random_segment(steps, envs, seed, end_rate)
    expected = gae_by_definition(segment, gamma, lam)
    np.testing.assert_allclose(gae(*segment, gamma, lam).numpy(), expected, rtol=1e-12, atol=1e-12)


def test_equals_stable_baselines3_which_adds_the_bootstrap_to_the_reward() -> None:
    buffers = pytest.importorskip("stable_baselines3.common.buffers")
    steps, envs = 40, 5
    segment = random_segment(steps, envs, seed=3)
    rewards, values, next_values, terminated, truncated = (x.numpy() for x in segment)
    ended = terminated | truncated

    space = gymnasium.spaces.Box(-1, 1, (1,))
    peer = buffers.RolloutBuffer(steps, space, space, device="cpu", gae_lambda=LAM, gamma=GAMMA, n_envs=envs)
    peer.rewards = rewards + np.where(truncated & ~terminated, GAMMA * next_values, 0.0)
    peer.values = values
    peer.advantages = np.zeros_like(rewards)
    peer.episode_starts = np.vstack([np.ones((1, envs)), ended[:-1]])
    peer.compute_returns_and_advantage(torch.as_tensor(next_values[-1]), ended[-1])

    advantages = gae(*segment, GAMMA, LAM)
    np.testing.assert_allclose(advantages.numpy(), peer.advantages, rtol=0, atol=1e-12)
    np.testing.assert_allclose(lambda_returns(advantages, segment.values).numpy(), peer.returns, rtol=0, atol=1e-12)


@pytest.mark.parametrize("ending", ["terminated", "truncated"])
def test_a_reward_after_an_episode_end_changes_nothing_before_it(ending: str) -> None:
    segment = random_segment(8, 3, seed=1, end_rate=0.0)
    getattr(segment, ending)[4, 1] = True
    before = gae(*segment, GAMMA, LAM)
    segment.rewards[5, 1] += 100.0
    change = gae(*segment, GAMMA, LAM) - before
    assert change[5, 1] == pytest.approx(100.0)
    change[5, 1] = 0.0
    assert torch.equal(change, torch.zeros_like(change))


@pytest.mark.parametrize("poison", [1e30, math.inf, math.nan])
def test_a_dead_row_leaks_nothing_backward(poison: float) -> None:
    """The row in which a NEXT_STEP environment resets is marked terminated; its numbers mean nothing."""
    segment = random_segment(6, 2, seed=2, end_rate=0.0)
    segment.truncated[2, 0] = True
    segment.terminated[3, 0] = True
    clean = gae(*segment, GAMMA, LAM)
    for tensor in segment[:3]:
        tensor[3, 0] = poison
    poisoned = gae(*segment, GAMMA, LAM)
    alive = torch.ones_like(segment.terminated)
    alive[3, 0] = False
    assert torch.equal(poisoned[alive], clean[alive])


def test_the_value_after_termination_is_never_read() -> None:
    segment = random_segment(6, 2, seed=4, end_rate=0.0)
    segment.terminated[2, 0] = True
    clean = gae(*segment, GAMMA, LAM)
    segment.next_values[2, 0] = math.nan
    assert torch.equal(gae(*segment, GAMMA, LAM), clean)


def test_lambda_returns_mix_bootstrap_and_continuation() -> None:
    """G_t = r_t + γ·[(1−λ)·V(o'_t) + λ·G_{t+1}] inside an episode, with λ = 0 at its end and at the rollout's end."""
    segment = random_segment(12, 3, seed=5)
    returns = lambda_returns(gae(*segment, GAMMA, LAM), segment.values)
    expected = torch.zeros_like(returns[0])
    for t in reversed(range(12)):
        last = segment.terminated[t] | segment.truncated[t] | torch.tensor(t == 11)
        successor = torch.where(last, segment.next_values[t], (1 - LAM) * segment.next_values[t] + LAM * expected)
        expected = segment.rewards[t] + GAMMA * torch.where(segment.terminated[t], 0.0, successor)
        np.testing.assert_allclose(returns[t].numpy(), expected.numpy(), rtol=0, atol=1e-12)


def test_gamma_and_lam_may_be_tensors_and_inputs_stay_untouched() -> None:
    segment = random_segment(7, 3, seed=6)
    copies = [x.clone() for x in segment]
    with_numbers = gae(*segment, GAMMA, LAM)
    with_tensors = gae(*segment, torch.tensor(GAMMA, dtype=torch.float64), torch.tensor(LAM, dtype=torch.float64))
    assert torch.equal(with_numbers, with_tensors)
    for tensor, copy in zip(segment, copies, strict=True):
        assert torch.equal(tensor, copy)


def test_no_value_is_read_on_the_host() -> None:
    """Meta tensors have no data: any branch on a value would raise. float32 stays float32."""
    segment = Segment(*(x.float() if x.is_floating_point() else x for x in random_segment(5, 2, seed=7)))
    advantages = gae(*(x.to("meta") for x in segment), GAMMA, LAM)
    assert advantages.dtype == torch.float32
