"""Control tasks that need memory: classic environments with their velocities hidden."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import gymnasium
import numpy as np
from gymnasium import spaces

MASKED = {
    "CartPole-masked": ("CartPole-v1", (0, 2)),  # cart position, pole angle
    "Pendulum-masked": ("Pendulum-v1", (0, 1)),  # cosine and sine of the angle
}
"""Name: the full environment, and the observations that are kept."""


class VelocityHidden(gymnasium.ObservationWrapper[Any, Any, Any]):
    """Shows only the given entries of a one-dimensional observation."""

    def __init__(self, env: gymnasium.Env[Any, Any], kept: Sequence[int]) -> None:
        super().__init__(env)
        self.kept = np.array(kept)
        full = env.observation_space
        assert isinstance(full, spaces.Box)
        self.observation_space = spaces.Box(full.low[self.kept], full.high[self.kept], dtype=full.dtype.type)

    def observation(self, observation: Any) -> Any:
        return observation[self.kept]


def make(name: str) -> gymnasium.Env[Any, Any]:
    """One environment: a Gymnasium id, or the name of one with its velocities hidden."""
    if name not in MASKED:
        return gymnasium.make(name)
    full, kept = MASKED[name]
    return VelocityHidden(gymnasium.make(full), kept)
