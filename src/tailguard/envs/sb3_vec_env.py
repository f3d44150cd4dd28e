"""Stable-Baselines3's vector environments as Gymnasium's."""

from __future__ import annotations

from typing import Any

import gymnasium
import numpy as np
from gymnasium.vector import AutoresetMode
from gymnasium.vector.utils import batch_space


def is_sb3_vec_env(env: Any) -> bool:
    """Whether this is an SB3 `VecEnv`, checked without importing SB3."""
    return any(
        kind.__module__.startswith("stable_baselines3.") and kind.__name__ == "VecEnv" for kind in type(env).__mro__
    )


class SB3VecEnv(gymnasium.vector.VectorEnv[Any, Any, Any]):
    """An SB3 `VecEnv`, which resets in the step in which an episode ends.

    SB3 has one flag for the end: an episode is truncated where its info says `TimeLimit.truncated`, else terminated.
    Its last observation is the info's `terminal_observation`.
    """

    metadata = {"autoreset_mode": AutoresetMode.SAME_STEP}  # noqa: RUF012 (Gymnasium declares a plain attribute)

    def __init__(self, vec_env: Any) -> None:
        self.vec_env = vec_env
        self.num_envs = vec_env.num_envs
        self.single_observation_space, self.single_action_space = vec_env.observation_space, vec_env.action_space
        self.observation_space = batch_space(self.single_observation_space, self.num_envs)
        self.action_space = batch_space(self.single_action_space, self.num_envs)
        self.infos: list[dict[str, Any]] = []
        """SB3's infos of the last step, one for each environment."""

    def reset(self, *, seed: Any = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:  # noqa: ARG002
        if seed is not None:
            self.vec_env.seed(seed)
        return self.vec_env.reset(), {}

    def step(self, actions: Any) -> tuple[Any, Any, Any, Any, dict[str, Any]]:
        observations, rewards, dones, self.infos = self.vec_env.step(actions)
        ended = np.asarray(dones, dtype=np.bool_)
        truncated = ended & np.array([bool(info.get("TimeLimit.truncated", False)) for info in self.infos])
        final = np.full(self.num_envs, None, dtype=object)
        given = np.zeros(self.num_envs, dtype=np.bool_)
        for index in np.flatnonzero(ended):
            if "terminal_observation" in self.infos[index]:
                final[index], given[index] = self.infos[index]["terminal_observation"], True
        return observations, rewards, ended & ~truncated, truncated, {"final_obs": final, "_final_obs": given}

    def close(self, **_: Any) -> None:
        self.vec_env.close()

    def __str__(self) -> str:
        return f"{type(self.vec_env).__name__} of {self.num_envs}"
