"""Adapt any user environment to the learner, for training and for `predict`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from tailguard.envs.asset_layout import AssetLayout
from tailguard.envs.protocol import ActionSpace, Discrete, VectorEnv
from tailguard.envs.spec import TradingSpec
from tailguard.envs.trading import TradingEnv
from tailguard.errors import ConfigError

if TYPE_CHECKING:
    from tailguard.envs.gym import GymnasiumEnv

MEMBERS = (
    "num_envs",
    "observation_size",
    "action_space",
    "device",
    "reset",
    "step",
    "state_dict",
    "load_state_dict",
    "close",
)
"""Members of `VectorEnv`."""


def as_vector_env(env: Any, num_envs: int | None, device: torch.device | str | None) -> VectorEnv:
    """The environment itself if it implements the protocol, else a Gymnasium environment or id behind an adapter."""
    if isinstance(env, VectorEnv):
        if num_envs is not None and num_envs != env.num_envs:
            raise ConfigError(f"num_envs: {num_envs} requested, but the environment has {env.num_envs}; leave it out")
        if device is not None and torch.device(device).type != env.device.type:
            raise ConfigError(f"device: {device} requested, but the environment is on {env.device}; create it there")
        return env
    missing = missing_members(env)
    has_spaces = hasattr(env, "single_observation_space") or hasattr(env, "observation_space")
    if missing and len(missing) < len(MEMBERS) / 2 and not has_spaces:
        raise ConfigError(
            f"{type(env).__name__} is nearly a tailguard.envs.protocol.VectorEnv, but lacks {', '.join(missing)}; add "
            f"{'them' if len(missing) > 1 else 'it'} to train on it"
        )
    # Gymnasium is not part of the numeric core.
    from tailguard.envs.gym import GymnasiumEnv

    return GymnasiumEnv(env, num_envs, device=device or "cpu")


def missing_members(env: Any) -> list[str]:
    """Members of `VectorEnv` that this object does not have, by name."""
    return [name for name in MEMBERS if not hasattr(env, name)]


def episode_length_of(env: Any) -> int | None:
    """Steps in an episode that is not cut short: the environment's `episode_length`, or Gymnasium's time limit.

    None where neither is known.
    """
    length = getattr(env, "episode_length", None)
    if length is None:
        vector_env = getattr(env, "vector_env", None)
        copies = getattr(vector_env, "envs", None) or ()
        for holder in (vector_env, *copies[:1]):
            length = length or getattr(getattr(holder, "spec", None), "max_episode_steps", None)
        length = length or _time_limit(copies[0] if copies else None)
    return None if length is None else int(length)


def _time_limit(env: Any) -> int | None:
    """The limit of a `gymnasium.wrappers.TimeLimit` among an environment's wrappers."""
    while env is not None:
        limit = vars(env).get("_max_episode_steps")
        if limit is not None:
            return int(limit)
        env = vars(env).get("env")
    return None


class PolicyInputs(Protocol):
    """Translates between a user's observations and actions and the network's rows."""

    @property
    def spec(self) -> TradingSpec | None:
        """For trading agents: the specification needed to trade new bars."""
        ...

    def encode(self, observation: Any) -> tuple[NDArray[np.float32], bool]:
        """Rows [n, O], and whether a single observation was given."""
        ...

    def decode(self, action: Tensor) -> NDArray[Any]:
        """Actions [n, ...] in the environment's format."""
        ...


@dataclass(frozen=True)
class FlatInputs:
    """Rows of numbers in and out."""

    observation_size: int
    action_space: ActionSpace
    spec: TradingSpec | None = None
    layout: AssetLayout | None = None
    """Of the assets, if the agent reads any number of them; None: it reads `observation_size` numbers."""

    def encode(self, observation: Any) -> tuple[NDArray[np.float32], bool]:
        rows = np.asarray(observation, dtype=np.float32)
        if self.layout is not None and rows.ndim in (1, 2):
            self.layout.assets_in(rows.shape[-1])
            return np.atleast_2d(rows), rows.ndim == 1
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
    if hasattr(env, "vector_env"):  # this check lets the numeric core avoid importing Gymnasium
        return GymnasiumInputs(env)
    return FlatInputs(env.observation_size, env.action_space)
