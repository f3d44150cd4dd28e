"""Gymnasium's spaces as rows of numbers, through an adapted environment."""

from __future__ import annotations

from typing import Any

import gymnasium
import numpy as np
import pytest
import torch
from gymnasium import spaces

from tailguard.envs.gym import GymnasiumEnv
from tailguard.envs.protocol import Box, Discrete
from tailguard.errors import TailguardError


class Sampling(gymnasium.Env[Any, Any]):
    """Shows samples of a space, remembers what it showed and was told, and ends every third step."""

    def __init__(self, observation_space: spaces.Space, action_space: spaces.Space) -> None:
        self.observation_space, self.action_space = observation_space, action_space
        self.observation_space.seed(0)
        self.shown: list[Any] = []
        self.actions: list[Any] = []

    def _show(self) -> Any:
        self.shown.append(self.observation_space.sample())
        return self.shown[-1]

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[Any, dict]:  # noqa: ARG002
        super().reset(seed=seed)
        return self._show(), {}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict]:
        self.actions.append(action)
        return self._show(), 0.0, False, len(self.actions) % 3 == 0, {}


OBSERVATION_SPACES = {
    "box of any shape and type": spaces.Box(0, 255, (2, 3, 2), np.uint8),
    "discrete with a start": spaces.Discrete(5, start=-2),
    "multi-discrete with starts": spaces.MultiDiscrete([[3, 2], [4, 5]], start=[[1, 0], [-3, 7]]),
    "multi-binary": spaces.MultiBinary([2, 2]),
    "dict with a tuple inside": spaces.Dict(
        {
            "z": spaces.Box(-1, 1, (2,)),
            "a": spaces.Tuple((spaces.Discrete(3), spaces.Box(-5, 5, (), np.float64))),
            "m": spaces.MultiBinary(3),
        }
    ),
}


@pytest.mark.parametrize("name", OBSERVATION_SPACES)
def test_observations_are_flattened_as_gymnasium_does(name: str) -> None:
    space = OBSERVATION_SPACES[name]
    inner = Sampling(space, spaces.Discrete(2))
    env = GymnasiumEnv(inner)
    assert env.observation_size == spaces.flatdim(space)
    seen = [env.reset(0)]
    for _ in range(7):
        step = env.step(torch.zeros(1, 1, dtype=torch.int64))
        seen += [step.final_obs, step.obs] if step.truncated.item() else [step.obs]
    expected = [spaces.flatten(space, shown).astype(np.float32) for shown in inner.shown]
    assert torch.equal(torch.cat(seen), torch.from_numpy(np.stack(expected)))


def test_choices_are_counted_from_zero_here_and_from_their_start_in_the_environment() -> None:
    space = spaces.MultiDiscrete([[3, 2], [4, 5]], start=[[1, 0], [-3, 7]])
    inner = Sampling(spaces.MultiBinary(1), space)
    env = GymnasiumEnv(inner)
    assert env.action_space == Discrete((3, 2, 4, 5))
    env.reset(0)
    env.step(torch.tensor([[2, 1, 0, 4]]))
    assert inner.actions[0].tolist() == [[3, 1], [-3, 11]]
    assert space.contains(inner.actions[0])

    single = Sampling(spaces.MultiBinary(1), spaces.Discrete(4, start=10))
    env = GymnasiumEnv(single)
    assert env.action_space == Discrete((4,))
    env.reset(0)
    env.step(torch.tensor([[3]]))
    assert single.actions == [13]
    assert single.action_space.contains(single.actions[0])


def test_box_actions_keep_their_shape_and_a_bound_is_inside_the_space() -> None:
    space = spaces.Box(
        np.array([[-0.1, -np.inf], [0.1, -2.0]]), np.array([[0.7, 0.3], [np.inf, 1.0]]), dtype=np.float64
    )
    inner = Sampling(spaces.MultiBinary(1), space)
    env = GymnasiumEnv(inner)
    env.reset(0)
    assert isinstance(env.action_space, Box)
    np.testing.assert_allclose(env.action_space.low.numpy(), [-0.1, -np.inf, 0.1, -2.0], rtol=1e-7)
    np.testing.assert_allclose(env.action_space.high.numpy(), [0.7, 0.3, np.inf, 1.0], rtol=1e-7)
    for action in (env.action_space.low, env.action_space.high):
        # -0.1 and 0.7 rounded to the nearest float32 lie outside the float64 space; 0 stands in for the infinities.
        env.step(torch.where(action.isfinite(), action, 0.0)[None])
        received = inner.actions[-1]
        assert received.dtype == np.float64
        finite = action.reshape(2, 2).isfinite().numpy()
        assert (received >= space.low)[finite].all()
        assert (received <= space.high)[finite].all()
    env.step(torch.tensor([[0.0, 1.0, 2.0, 3.0]]))
    assert inner.actions[-1].tolist() == [[0.0, 1.0], [2.0, 3.0]]


@pytest.mark.parametrize(
    ("observation_space", "action_space", "message"),
    [
        (spaces.Dict({"words": spaces.Text(5)}), spaces.Discrete(2), r"observation\['words'\] is Text"),
        (spaces.Box(0, 1, (1,)), spaces.MultiBinary(3), "action space is MultiBinary"),
        (spaces.Box(0, 1, (1,)), spaces.Box(0, 9, (1,), np.int64), "Use a Box of floats"),
    ],
)
def test_spaces_that_cannot_be_a_row_of_numbers_are_refused(
    observation_space: spaces.Space, action_space: spaces.Space, message: str
) -> None:
    with pytest.raises(TailguardError, match=message):
        GymnasiumEnv(Sampling(observation_space, action_space))
