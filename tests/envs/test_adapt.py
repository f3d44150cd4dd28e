"""Whatever environment a user has: how it is taken in, and how predictions are translated."""

from __future__ import annotations

import gymnasium
import numpy as np
import pytest
import torch

from tailguard.envs.adapt import MEMBERS, FlatInputs, as_vector_env, episode_length_of, policy_inputs
from tailguard.envs.gym import GymnasiumEnv
from tailguard.envs.protocol import Box, Discrete
from tailguard.envs.tasks import BetsEnv, RecallEnv
from tailguard.errors import ConfigError


def test_what_speaks_the_protocol_is_taken_as_it_is() -> None:
    env = RecallEnv(num_envs=3)
    assert as_vector_env(env, None, None) is env
    with pytest.raises(ConfigError, match="num_envs: 4 requested, but the environment has 3"):
        as_vector_env(env, 4, None)
    with pytest.raises(ConfigError, match="cuda"):
        as_vector_env(env, None, "cuda")


def test_an_id_becomes_copies_of_an_environment() -> None:
    env = as_vector_env("CartPole-v1", 5, None)
    assert isinstance(env, GymnasiumEnv)
    assert env.num_envs == 5
    assert env.observation_size == 4


@pytest.mark.parametrize(
    ("space", "one", "many", "row"),
    [
        (gymnasium.spaces.Box(-1, 1, (2, 2)), np.arange(4.0).reshape(2, 2), np.zeros((3, 2, 2)), [0, 1, 2, 3]),
        (gymnasium.spaces.Discrete(3), 2, np.array([0, 1]), [0, 0, 1]),
        (
            gymnasium.spaces.Dict(a=gymnasium.spaces.Discrete(2), b=gymnasium.spaces.Box(-1, 1, (1,))),
            {"a": 1, "b": np.array([0.5])},
            {"a": np.array([0, 1]), "b": np.zeros((2, 1))},
            [0, 1, 0.5],
        ),
    ],
)
def test_single_observations_and_batches_are_told_apart(space, one, many, row) -> None:
    class Fixed(gymnasium.Env):
        observation_space = space
        action_space = gymnasium.spaces.Discrete(2, start=5)

        def reset(self, *, seed=None, options=None):
            super().reset(seed=seed, options=options)
            return space.sample(), {}

    inputs = policy_inputs(GymnasiumEnv(Fixed()))
    rows, single = inputs.encode(one)
    assert single
    np.testing.assert_array_equal(rows, [row])
    rows, single = inputs.encode(many)
    assert not single
    assert len(rows) == len(next(iter(many.values())) if isinstance(many, dict) else many)
    np.testing.assert_array_equal(inputs.decode(torch.tensor([[0], [1]])), [5, 6])


def test_flat_inputs_refuse_another_width_and_unpack_one_choice() -> None:
    inputs = FlatInputs(3, Discrete((4,)))
    np.testing.assert_array_equal(inputs.decode(torch.tensor([[2], [3]])), [2, 3])
    rows, single = inputs.encode([1.0, 2.0, 3.0])
    assert (rows.shape, single) == ((1, 3), True)
    with pytest.raises(ConfigError, match=r"shape \(2, 4\); the agent reads \(3,\)"):
        inputs.encode(np.zeros((2, 4)))
    box = FlatInputs(3, Box(torch.tensor([-1.0]), torch.tensor([1.0])))
    np.testing.assert_array_equal(box.decode(torch.tensor([[0.5]])), np.array([[0.5]], np.float32))


# --- what an environment lacks ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("member", MEMBERS)
def test_a_missing_member_is_named(member: str) -> None:
    class Nearly:
        pass

    env = RecallEnv(2)
    for name in MEMBERS:
        if name != member:
            setattr(Nearly, name, staticmethod(value) if callable(value := getattr(env, name)) else value)
    with pytest.raises(ConfigError, match=rf"^Nearly is nearly .*VectorEnv, but lacks {member}; add it"):
        as_vector_env(Nearly(), None, None)


def test_the_length_of_episodes_is_found_where_it_is_said() -> None:
    assert episode_length_of(BetsEnv(4, steps=7)) == 7
    assert episode_length_of(as_vector_env("Pendulum-v1", 2, None)) == 200
    assert episode_length_of(as_vector_env(gymnasium.make("CartPole-v1", max_episode_steps=33), None, None)) == 33
    bare = gymnasium.make("Pendulum-v1").unwrapped
    bare.spec = None
    assert episode_length_of(as_vector_env(gymnasium.wrappers.TimeLimit(bare, 40), None, None)) == 40
    assert episode_length_of(as_vector_env(bare, None, None)) is None
    assert episode_length_of(RecallEnv(2)) is None
