"""Adapt any user environment to the learner, for training and for `predict`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from tailguard.envs.protocol import ActionSpace, Discrete, VectorEnv
from tailguard.envs.spec import TradingSpec
from tailguard.envs.trading import TradingEnv
from tailguard.errors import ConfigError

if TYPE_CHECKING:
    from tailguard.envs.gym import GymnasiumEnv


def as_vector_env(env: Any, num_envs: int | None, device: torch.device | str | None) -> VectorEnv:
    """The environment itself if it speaks the protocol, else a Gymnasium environment or id behind an adapter."""
    if isinstance(env, VectorEnv):
        if num_envs is not None and num_envs != env.num_envs:
            raise ConfigError(f"num_envs: {num_envs} asked for, and the environment has {env.num_envs}; leave it out")
        if device is not None and torch.device(device).type != env.device.type:
            raise ConfigError(f"device: {device} asked for, and the environment is on {env.device}; make it there")
        return env
    # Gymnasium is not part of the numeric core.
    from tailguard.envs.gym import GymnasiumEnv

    return GymnasiumEnv(env, num_envs, device=device or "cpu")


class PolicyInputs(Protocol):
    """Translates between a user's observations and actions and the network's rows."""

    @property
    def spec(self) -> TradingSpec | None:
        """For agents that trade: what is needed to meet new bars."""
        ...

    def encode(self, observation: Any) -> tuple[NDArray[np.float32], bool]:
        """Rows [n, O], and whether a single observation was given."""
        ...

    def decode(self, action: Tensor) -> NDArray[Any]:
        """Actions [n, ...] as the environment wants them."""
        ...


@dataclass(frozen=True)
class FlatInputs:
    """Rows of numbers in and out."""

    observation_size: int
    action_space: ActionSpace
    spec: TradingSpec | None = None

    def encode(self, observation: Any) -> tuple[NDArray[np.float32], bool]:
        rows = np.asarray(observation, dtype=np.float32)
        if rows.shape[-1:] != (self.observation_size,) or rows.ndim > 2:
            raise ConfigError(
                f"observation has shape {rows.shape}; the agent reads ({self.observation_size},) or a batch "
                f"(n, {self.observation_size})"
            )
        return np.atleast_2d(rows), rows.ndim == 1

    def decode(self, action: Tensor) -> NDArray[Any]:
        values = action.cpu().numpy()
        single_choice = isinstance(self.action_space, Discrete) and len(self.action_space.sizes) == 1
        return values[:, 0] if single_choice else values


@dataclass(frozen=True)
class GymnasiumInputs:
    """Observations and actions of a Gymnasium space."""

    env: GymnasiumEnv
    spec: None = None

    def encode(self, observation: Any) -> tuple[NDArray[np.float32], bool]:
        count, single = self.env.observations.count(observation)
        return self.env.observations.flatten(observation, count), single

    def decode(self, action: Tensor) -> NDArray[Any]:
        return self.env.actions.decode(action)


def policy_inputs(env: Any) -> PolicyInputs:
    """How `predict` reads and writes for agents trained on this vector environment."""
    if isinstance(env, TradingEnv):
        return FlatInputs(env.observation_size, env.action_space, TradingSpec.of(env))
    if hasattr(env, "vector_env"):  # asked this way, the numeric core need not import Gymnasium
        return GymnasiumInputs(env)
    return FlatInputs(env.observation_size, env.action_space)
