"""Gymnasium environments through the adapter, against a plain loop over single environments."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import gymnasium
import numpy as np
import pytest
import torch
from gymnasium import spaces
from gymnasium.vector import AutoresetMode, SyncVectorEnv

from tailguard.envs.gym import GymnasiumEnv
from tailguard.envs.protocol import VectorEnv
from tailguard.errors import ConfigError, TailguardError

EPISODES = [(3, "terminated"), (1, "truncated"), (4, "truncated"), (2, "terminated"), (1, "terminated")]
"""(length, how it ends), repeated for ever; environment i starts at entry i."""


class Scripted(gymnasium.Env[Any, Any]):
    """Known observations, rewards, lengths and ends; every value is exact in float32 except the reward."""

    observation_space = spaces.Box(-np.inf, np.inf, (2,), np.float64)
    action_space = spaces.Discrete(3)

    def __init__(self, offset: int = 0, reuse_observation_array: bool = False) -> None:
        self.episode = offset - 1
        self.time = 0
        self.shared = np.zeros(2) if reuse_observation_array else None

    def _observation(self) -> np.ndarray:
        observation = np.zeros(2) if self.shared is None else self.shared
        observation[:] = self.episode, self.time
        return observation

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[np.ndarray, dict]:  # noqa: ARG002
        super().reset(seed=seed)
        self.episode += 1
        self.time = 0
        return self._observation(), {}

    def step(self, action: int) -> tuple[np.ndarray, float, bool, bool, dict]:
        self.time += 1
        length, end = EPISODES[self.episode % len(EPISODES)]
        over = self.time == length
        reward = 0.1 * self.time + 10.0 * self.episode + 100.0 * float(action)
        return self._observation(), reward, over and end == "terminated", over and end == "truncated", {}


@dataclass(frozen=True)
class Transition:
    """One transition with everything the learner reads, as exact Python numbers."""

    obs: tuple[float, ...]
    reward: float
    terminated: bool
    truncated: bool
    final_obs: tuple[float, ...]
    episode_return: float
    episode_length: int


def policy(observation: np.ndarray) -> np.ndarray:
    """An action that is a function of what is seen, so that routes with and without dead rows act alike; [...]."""
    return (observation[..., 0] + 2 * observation[..., 1]).astype(np.int64) % 3


def row(values: np.ndarray) -> tuple[float, ...]:
    return tuple(np.asarray(values, dtype=np.float32).ravel().tolist())


def loop_over_one(env: gymnasium.Env, count: int, act: Callable[[np.ndarray], Any], seed: int = 0) -> list[Transition]:
    """The reference: step one environment by hand and restart it when an episode is over."""
    transitions, total, length = [], 0.0, 0
    observation, _ = env.reset(seed=seed)
    observation = observation.copy()
    for _ in range(count):
        successor, reward, terminated, truncated, _ = env.step(act(observation))
        successor = successor.copy()
        total, length = total + float(reward), length + 1
        over = terminated or truncated
        following = env.reset()[0].copy() if over else successor
        flags = (bool(terminated), bool(truncated))
        reward32, total32 = float(np.float32(reward)), float(np.float32(total))
        transitions.append(Transition(row(observation), reward32, *flags, row(successor), total32, length))
        observation = following
        if over:
            total, length = 0.0, 0
    return transitions


def through_adapter(
    env: GymnasiumEnv, steps: int, act: Callable[[np.ndarray], np.ndarray], seed: int | None = 0
) -> list[list[Transition]]:
    """The valid transitions of each environment; read only after the last step, as a rollout does."""
    obs = env.reset(seed)
    rows = []
    for _ in range(steps):
        action = torch.from_numpy(act(obs.numpy())).reshape(env.num_envs, -1)
        step = env.step(action)
        rows.append((obs, step))
        obs = step.obs
    transitions: list[list[Transition]] = [[] for _ in range(env.num_envs)]
    for seen, step in rows:
        for i in torch.nonzero(step.valid).flatten().tolist():
            flags = (step.terminated[i].item(), step.truncated[i].item())
            sums = (step.outcome["episode_return"][i].item(), step.outcome["episode_length"][i].item())
            seen_i, final_i = row(seen[i]), row(step.final_obs[i])
            transitions[i].append(Transition(seen_i, step.reward[i].item(), *flags, final_i, *sums))
    return transitions


def factories(count: int, **kwargs: Any) -> list[Callable[[], gymnasium.Env]]:
    return [partial(Scripted, offset, **kwargs) for offset in range(count)]


def sync(mode: AutoresetMode, count: int = 3, **kwargs: Any) -> SyncVectorEnv:
    return SyncVectorEnv(factories(count, **kwargs), autoreset_mode=mode)


ROUTES: dict[str, Callable[[], GymnasiumEnv]] = {
    "ready vector env, SAME_STEP": lambda: GymnasiumEnv(sync(AutoresetMode.SAME_STEP)),
    "ready vector env, NEXT_STEP": lambda: GymnasiumEnv(sync(AutoresetMode.NEXT_STEP)),
    "ready vector env, DISABLED": lambda: GymnasiumEnv(sync(AutoresetMode.DISABLED)),
    "factories": lambda: GymnasiumEnv(factories(3)),
    "factories, one process each": lambda: GymnasiumEnv(factories(3), vectorization_mode="async"),
    "factories, observation array reused": lambda: GymnasiumEnv(factories(3, reuse_observation_array=True)),
    "single env": lambda: GymnasiumEnv(Scripted()),
    "single env, observation array reused": lambda: GymnasiumEnv(Scripted(reuse_observation_array=True)),
}


@pytest.mark.parametrize("route", ROUTES)
def test_every_route_gives_the_transitions_of_a_loop_over_single_environments(route: str) -> None:
    env = ROUTES[route]()
    steps = 30
    transitions = through_adapter(env, steps, policy)
    env.close()
    for i, ours in enumerate(transitions):
        assert len(ours) >= steps * 2 // 3
        assert ours == loop_over_one(Scripted(i), len(ours), policy)


def test_the_dead_row_of_next_step_is_invalid_terminated_and_worth_nothing() -> None:
    env = GymnasiumEnv(sync(AutoresetMode.NEXT_STEP, count=1))
    assert env.reset(0).tolist() == [[0, 0]]
    steps = [env.step(torch.tensor([[1]])) for _ in range(7)]
    # Episode 0 takes three steps and terminates, row 3 restarts, episode 1 is cut after one step, row 5 restarts.
    assert [step.obs[0].tolist() for step in steps] == [[0, 1], [0, 2], [0, 3], [1, 0], [1, 1], [2, 0], [2, 1]]
    assert [step.valid.item() for step in steps] == [True, True, True, False, True, False, True]
    assert [step.terminated.item() for step in steps] == [False, False, True, True, False, True, False]
    assert [step.truncated.item() for step in steps] == [False, False, False, False, True, False, False]
    rewards = np.array([100.1, 100.2, 100.3, 0, 110.1, 0, 120.1], dtype=np.float32)
    assert [step.reward.item() for step in steps] == rewards.tolist()
    returns = np.array([100.1, 100.1 + 100.2, 100.1 + 100.2 + 100.3, 0, 110.1, 0, 120.1], dtype=np.float32)
    assert [step.outcome["episode_return"].item() for step in steps] == returns.tolist()
    assert [step.outcome["episode_length"].item() for step in steps] == [1, 2, 3, 0, 1, 0, 1]
    assert all(torch.equal(step.final_obs, step.obs) for step in steps)


class PoisonedRestarts(gymnasium.vector.VectorWrapper):
    """Puts a number into the reward of each row in which an environment restarts."""

    def __init__(self, env: gymnasium.vector.VectorEnv, poison: float) -> None:
        super().__init__(env)
        self.poison = poison
        self.restarts = np.zeros(env.num_envs, dtype=bool)

    def step(self, actions: Any) -> tuple[Any, Any, Any, Any, dict[str, Any]]:
        observations, rewards, terminated, truncated, infos = self.env.step(actions)
        rewards[self.restarts] = self.poison
        self.restarts = terminated | truncated
        return observations, rewards, terminated, truncated, infos


@pytest.mark.parametrize("poison", [1e9, np.nan])
def test_a_poisoned_reward_in_the_dead_row_changes_nothing(poison: float) -> None:
    clean = GymnasiumEnv(sync(AutoresetMode.NEXT_STEP))
    poisoned = GymnasiumEnv(PoisonedRestarts(sync(AutoresetMode.NEXT_STEP), poison))
    obs = clean.reset(0)
    assert torch.equal(obs, poisoned.reset(0))
    dead_rows = 0
    for _ in range(30):
        action = torch.from_numpy(policy(obs.numpy()))[:, None]
        expected, got = clean.step(action), poisoned.step(action)
        for name in ("obs", "reward", "terminated", "truncated", "final_obs", "valid"):
            assert torch.equal(getattr(got, name), getattr(expected, name)), name
        for name, values in expected.outcome.items():
            assert torch.equal(got.outcome[name], values), name
        dead_rows += int((~got.valid).sum())
        obs = expected.obs
    assert dead_rows > 20


class EndsWhereItStarts(gymnasium.vector.VectorEnv):
    """A NEXT_STEP environment whose first restart lands on a state that is over at once, so that it restarts again."""

    metadata = {"autoreset_mode": AutoresetMode.NEXT_STEP}  # noqa: RUF012
    num_envs = 1
    single_observation_space = spaces.Box(0, 9, (1,))
    single_action_space = spaces.Discrete(2)

    def __init__(self) -> None:
        self.rows = iter([(1.0, True, False), (5.0, False, True), (5.0, False, False), (1.0, False, False)])

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[np.ndarray, dict]:  # noqa: ARG002
        return np.zeros((1, 1)), {}

    def step(self, actions: Any) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray, dict]:  # noqa: ARG002
        reward, terminated, truncated = next(self.rows)
        return np.zeros((1, 1)), np.array([reward]), np.array([terminated]), np.array([truncated]), {}


def test_an_episode_that_is_over_in_its_restart_is_one_more_dead_row() -> None:
    env = GymnasiumEnv(EndsWhereItStarts())
    env.reset()
    steps = [env.step(torch.zeros(1, 1, dtype=torch.int64)) for _ in range(4)]
    assert [step.valid.item() for step in steps] == [True, False, False, True]
    assert [step.terminated.item() for step in steps] == [True, True, True, False]
    assert [step.truncated.item() for step in steps] == [False] * 4
    assert [step.reward.item() for step in steps] == [1.0, 0.0, 0.0, 1.0]


def test_a_reset_by_the_user_leaves_no_dead_row_behind() -> None:
    env = GymnasiumEnv(sync(AutoresetMode.NEXT_STEP, count=2))
    env.reset(0)
    ended = env.step(torch.zeros(2, 1, dtype=torch.int64))
    assert ended.truncated.tolist() == [False, True]
    env.reset()
    step = env.step(torch.zeros(2, 1, dtype=torch.int64))
    assert step.valid.tolist() == [True, True]
    assert step.outcome["episode_length"].tolist() == [1, 1]


@pytest.mark.parametrize("env_id", ["CartPole-v1", "Pendulum-v1"])
def test_an_id_gives_what_single_environments_seeded_one_after_the_other_give(env_id: str) -> None:
    def act(observation: np.ndarray) -> np.ndarray:
        lean = np.asarray(observation, dtype=np.float32)[..., -1]
        return (lean > 0.1).astype(np.int64) if env_id == "CartPole-v1" else np.sin(5 * lean)[..., None]

    env = GymnasiumEnv(env_id, num_envs=3, seed=7, env_kwargs={"max_episode_steps": 60})
    assert isinstance(env, VectorEnv)
    transitions = through_adapter(env, 150, act, seed=None)
    for i, ours in enumerate(transitions):
        single = gymnasium.make(env_id, max_episode_steps=60)
        assert ours == loop_over_one(single, 150, act, seed=7 + i)
    assert any(t.terminated or t.truncated for t in transitions[0])


def test_a_vectorised_implementation_says_next_step_and_is_read_so() -> None:
    env = GymnasiumEnv("CartPole-v1", num_envs=4, vectorization_mode="vector_entry_point")
    assert env.autoreset_mode is AutoresetMode.NEXT_STEP
    env.reset(3)
    generator = torch.Generator().manual_seed(0)
    steps = [env.step(torch.randint(2, (4, 1), generator=generator)) for _ in range(120)]
    ended = torch.stack([step.ended & step.valid for step in steps])
    valid = torch.stack([step.valid for step in steps])
    assert ended[:-1].sum() > 8
    assert torch.equal(~valid[1:], ended[:-1])
    for step in steps:
        # CartPole pays 1 for every step, so an episode's return is its length.
        assert torch.equal(step.reward, step.valid.float())
        assert torch.equal(step.outcome["episode_return"], step.outcome["episode_length"].float())


def test_the_same_seed_gives_the_same_trajectory_and_another_one_another() -> None:
    def observations(seed: int | None, reset_seed: int | None = None) -> torch.Tensor:
        env = GymnasiumEnv("CartPole-v1", num_envs=2, seed=seed)
        first = env.reset(reset_seed)
        actions = torch.randint(2, (60, 2, 1), generator=torch.Generator().manual_seed(1))
        return torch.stack([first, *[env.step(action).obs for action in actions]])

    assert torch.equal(observations(5), observations(5))
    assert torch.equal(observations(5), observations(None, reset_seed=5))
    assert not torch.equal(observations(5), observations(9))


def test_a_reset_without_a_seed_goes_on_with_the_random_stream() -> None:
    env = GymnasiumEnv("CartPole-v1", num_envs=1, seed=5)
    single = gymnasium.make("CartPole-v1")
    single.reset(seed=5)
    env.reset()
    assert env.reset()[0].tolist() == single.reset()[0].tolist()


class Silent(gymnasium.vector.VectorWrapper):
    """A vector environment whose metadata say something else, and which keeps the last observations to itself."""

    def __init__(self, env: gymnasium.vector.VectorEnv, metadata: dict[str, Any]) -> None:
        super().__init__(env)
        self.metadata = metadata

    def step(self, actions: Any) -> tuple[Any, Any, Any, Any, dict[str, Any]]:
        *results, _ = self.env.step(actions)
        return (*results, {})


def test_an_unstated_or_unknown_autoreset_mode_is_refused() -> None:
    with pytest.raises(TailguardError, match=r"does not declare its autoreset mode.*AutoresetMode.SAME_STEP"):
        GymnasiumEnv(Silent(sync(AutoresetMode.SAME_STEP), {}))
    with pytest.raises(TailguardError, match=r"'PreviousStep'; it must be one of AutoresetMode.NEXT_STEP"):
        GymnasiumEnv(Silent(sync(AutoresetMode.SAME_STEP), {"autoreset_mode": "PreviousStep"}))


def test_a_same_step_environment_without_last_observations_is_refused_when_an_episode_ends() -> None:
    env = GymnasiumEnv(Silent(sync(AutoresetMode.SAME_STEP), {"autoreset_mode": AutoresetMode.SAME_STEP}))
    env.reset(0)
    with pytest.raises(TailguardError, match=r"no infos\['final_obs'\] for environments \[1\]"):
        env.step(torch.zeros(3, 1, dtype=torch.int64))


def test_what_cannot_be_made_is_named() -> None:
    with pytest.raises(TailguardError, match="Gymnasium cannot make 'CartPoll-v1'"):
        GymnasiumEnv("CartPoll-v1")
    with pytest.raises(TailguardError, match="is not a Gymnasium environment"):
        GymnasiumEnv([Scripted()])  # type: ignore[list-item]  # environments instead of functions that make them
    with pytest.raises(ConfigError, match=r"num_envs is 4, but .* has 3"):
        GymnasiumEnv(sync(AutoresetMode.SAME_STEP), num_envs=4)
    with pytest.raises(ConfigError, match="num_envs is 0"):
        GymnasiumEnv("CartPole-v1", num_envs=0)
    with pytest.raises(ConfigError, match="vectorization_mode is 'threads'"):
        GymnasiumEnv("CartPole-v1", vectorization_mode="threads")  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match=r"env_kwargs \['gravity'\] apply to a Gymnasium id only"):
        GymnasiumEnv(Scripted(), env_kwargs={"gravity": 1.0})


def test_saving_gives_the_running_sums_and_restoring_is_refused() -> None:
    env = GymnasiumEnv(sync(AutoresetMode.NEXT_STEP))
    env.reset(0)
    env.step(torch.zeros(3, 1, dtype=torch.int64))
    state = env.state_dict()
    # The second environment's first episode ended at once: its sums start again and its next step is a restart.
    assert state["episode_return"].tolist() == [0.1, 0.0, 20.1]
    assert state["episode_length"].tolist() == [1, 0, 1]
    assert state["restarts"].tolist() == [False, True, False]
    with pytest.raises(TailguardError, match="cannot be restored"):
        env.load_state_dict(state)


def test_close_closes_the_wrapped_environments() -> None:
    env = GymnasiumEnv("CartPole-v1", num_envs=2)
    env.reset(0)
    env.close()
    assert env.vector_env.closed
    env.close()
