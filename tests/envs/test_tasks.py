"""The recall task: what memory is worth, and that it is worth nothing without it."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from tailguard.envs.protocol import VectorEnv
from tailguard.envs.tasks import RecallEnv
from tailguard.errors import ConfigError, TailguardError


def episode_returns(env: RecallEnv, act: Callable[[Tensor], Tensor], episodes: int) -> Tensor:
    """Returns of whole episodes, [episodes · N]."""
    obs, returns = env.reset(0), []
    for _ in range(episodes * (env.delay + 1)):
        step = env.step(act(obs)[:, None])
        returns.append(step.outcome["episode_return"][step.ended])
        obs = step.obs
    return torch.cat(returns)


def test_an_episode_shows_the_cue_once_and_asks_once() -> None:
    env = RecallEnv(num_envs=3, delay=4)
    assert isinstance(env, VectorEnv)
    obs = env.reset(1)
    cue = obs[:, 0]
    assert (cue.abs() == 1).all()
    observations, steps = [obs], []
    for _ in range(5):
        steps.append(env.step(torch.tensor([[0], [1], [1]])))
        observations.append(steps[-1].obs)
    blank = torch.zeros(3)
    assert torch.equal(torch.stack(observations[:5])[:, :, 0], torch.stack([cue, blank, blank, blank, blank]))
    assert torch.stack(observations[:5])[:, :, 1].tolist() == [[0.0] * 3] * 4 + [[1.0] * 3]
    assert [step.terminated.tolist() for step in steps] == [[False] * 3] * 4 + [[True] * 3]
    assert not any(step.truncated.any() for step in steps)
    assert all(step.valid.all() for step in steps)
    assert torch.stack([step.reward for step in steps[:4]]).abs().sum() == 0
    # Choices 0, 1, 1 name the cues -1, +1, +1.
    assert torch.equal(steps[4].reward, torch.tensor([-1.0, 1.0, 1.0]) * cue)
    assert steps[4].outcome["episode_length"].tolist() == [5, 5, 5]
    assert steps[4].final_obs.tolist() == [[0.0, 0.0]] * 3
    assert all(torch.equal(step.final_obs, step.obs) for step in steps[:4])
    assert (steps[4].obs[:, 0].abs() == 1).all()


def test_an_agent_that_remembers_earns_one_every_episode() -> None:
    memory = torch.zeros(16)

    def remember(obs: Tensor) -> Tensor:
        memory.copy_(torch.where(obs[:, 0] != 0, obs[:, 0], memory))
        return (memory > 0).long()

    returns = episode_returns(RecallEnv(num_envs=16, delay=32), remember, episodes=10)
    assert returns.shape == (160,)
    assert (returns == 1).all()


@pytest.mark.parametrize("choice", [0, 1])
def test_an_agent_without_memory_earns_nothing_on_average(choice: int) -> None:
    # When asked, every observation is [0, 1], so a memoryless policy is a choice made once; 4,096 fair signs have
    # a mean within 4 / 64 of zero.
    def memoryless(obs: Tensor) -> Tensor:
        return torch.where(obs[:, 1] == 1, choice, (obs[:, 0] > 0).long())

    returns = episode_returns(RecallEnv(num_envs=1024, delay=1), memoryless, episodes=4)
    assert returns.shape == (4096,)
    assert returns.abs().eq(1).all()
    assert abs(returns.mean().item()) < 4 / 64


def test_the_question_looks_the_same_whatever_the_cue() -> None:
    env = RecallEnv(num_envs=64, delay=32)
    env.reset(0)
    for _ in range(32):
        step = env.step(torch.zeros(64, 1, dtype=torch.int64))
    assert step.obs.unique(dim=0).tolist() == [[0.0, 1.0]]


def cues(env: RecallEnv, count: int) -> Tensor:
    """The cues of the next episodes, [count, N]."""
    shown = []
    for _ in range(count * (env.delay + 1)):
        step = env.step(torch.zeros(env.num_envs, 1, dtype=torch.int64))
        if step.ended.all():
            shown.append(step.obs[:, 0])
    return torch.stack(shown)


def test_every_episode_draws_its_own_fair_cue() -> None:
    env = RecallEnv(num_envs=64, delay=1)
    first = env.reset(0)[:, 0]
    later = cues(env, 64)
    # 64 fair signs sum to 0 with standard deviation 8, for one environment over time as for one episode over all.
    assert later.sum(dim=0).abs().max() < 4 * 8
    assert later.sum(dim=1).abs().max() < 4 * 8
    assert not torch.equal(later[0], first)


def test_the_same_seed_gives_the_same_cues_and_another_one_others() -> None:
    def first_cues(constructor_seed: int | None, reset_seed: int | None) -> Tensor:
        env = RecallEnv(num_envs=32, delay=1, seed=constructor_seed)
        return torch.cat([env.reset(reset_seed)[None, :, 0], cues(env, 3)])

    assert torch.equal(first_cues(None, 5), first_cues(None, 5))
    assert torch.equal(first_cues(5, None), first_cues(None, 5))
    assert not torch.equal(first_cues(None, 5), first_cues(None, 6))
    assert not torch.equal(first_cues(None, None), first_cues(None, None))


def test_a_restored_environment_goes_on_exactly() -> None:
    env = RecallEnv(num_envs=8, delay=3)
    env.reset(0)
    env.step(torch.zeros(8, 1, dtype=torch.int64))
    state = env.state_dict()
    other = RecallEnv(num_envs=8, delay=3)
    actions = torch.randint(2, (20, 8, 1), generator=torch.Generator().manual_seed(0))
    expected = [env.step(action) for action in actions]
    other.load_state_dict(state)
    for step, action in zip(expected, actions, strict=True):
        again = other.step(action)
        assert torch.equal(again.obs, step.obs)
        assert torch.equal(again.reward, step.reward)
        assert torch.equal(again.terminated, step.terminated)
    with pytest.raises(TailguardError, match=r"num_envs 4 and delay 3, the saved state has 8 and 3"):
        RecallEnv(num_envs=4, delay=3).load_state_dict(state)
    with pytest.raises(TailguardError, match=r"num_envs 8 and delay 2, the saved state has 8 and 3"):
        RecallEnv(num_envs=8, delay=2).load_state_dict(state)


def test_impossible_sizes_are_refused() -> None:
    with pytest.raises(ConfigError, match="delay is 0"):
        RecallEnv(delay=0)
    with pytest.raises(ConfigError, match="num_envs is 0"):
        RecallEnv(num_envs=0)
