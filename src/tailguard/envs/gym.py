"""Gymnasium environments as Tailguard vector environments: every autoreset mode gives the same transitions."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

import gymnasium
import numpy as np
import torch
from gymnasium.vector import AsyncVectorEnv, AutoresetMode, SyncVectorEnv
from gymnasium.vector.utils import concatenate, create_empty_array
from numpy.typing import NDArray
from torch import Tensor

from tailguard.envs.gym_spaces import FlatObservations, GymnasiumActions
from tailguard.envs.protocol import ActionSpace, Step
from tailguard.envs.sb3_vec_env import SB3VecEnv, is_sb3_vec_env
from tailguard.errors import ConfigError, TailguardError

GymEnv = gymnasium.Env[Any, Any]
GymVectorEnv = gymnasium.vector.VectorEnv[Any, Any, Any]
EnvFactory = Callable[[], GymEnv]
VectorizationMode = Literal["sync", "async", "vector_entry_point"]

DEFAULT_NUM_ENVS = 8


class GymnasiumEnv:
    """N copies of a Gymnasium environment behind the `VectorEnv` protocol.

    Observations are flattened to float32 rows in the column order of `gymnasium.spaces.flatten`: boxes and
    multi-binaries as they are, discrete values one-hot, dictionaries and tuples concatenated. Actions may be boxes,
    `Discrete` or `MultiDiscrete`.

    Where an environment restarts in the step after the end (NEXT_STEP), that step is a row with `valid` False, reward 0
    and `terminated` True; an ended episode is therefore `step.ended & step.valid`. Where no episode ended, `final_obs`
    and `obs` are one tensor.

    `outcome` holds `episode_return` and `episode_length`, [N]: sums over the running episode up to and including this
    step; in a row with `valid` False they are 0.

    Gymnasium has no way to save an environment's inner state. `state_dict` holds what belongs to the adapter, and
    `load_state_dict` refuses: a run on a Gymnasium environment continues with new episodes.
    """

    def __init__(
        self,
        env: str | GymEnv | GymVectorEnv | Sequence[EnvFactory],
        num_envs: int | None = None,
        *,
        seed: int | None = None,
        device: str | torch.device = "cpu",
        vectorization_mode: VectorizationMode = "sync",
        env_kwargs: Mapping[str, Any] | None = None,
    ) -> None:
        """Adapt `env`.

        Args:
            env: A Gymnasium id, one environment, a list of functions that make one each, an SB3 `VecEnv`, or a vector
                environment, which must state its autoreset mode in `metadata["autoreset_mode"]`.
            num_envs: Copies of an id, 8 by default; in every other case the number is known.
            seed: Used by the first `reset` that is given none. As in Gymnasium, copy i is seeded with seed + i.
            device: Where the tensors live; the environments themselves run on the CPU.
            vectorization_mode: How an id or a list is stepped: one after the other ("sync"), in a process each
                ("async"), or by the id's own vectorised implementation ("vector_entry_point").
            env_kwargs: Arguments for `gymnasium.make`, with an id.
        """
        self.vector_env = _vectorised(env, num_envs, vectorization_mode, dict(env_kwargs or {}))
        self.name = env if isinstance(env, str) else str(env if isinstance(env, gymnasium.Env) else self.vector_env)
        self.autoreset_mode = _autoreset_mode(self.vector_env, self.name)
        self.device = torch.device(device)
        self.num_envs: int = self.vector_env.num_envs
        self.observations = FlatObservations(self.vector_env.single_observation_space, self.name)
        self.actions = GymnasiumActions.of(self.vector_env.single_action_space, self.name)
        self.observation_size = self.observations.size
        self.action_space: ActionSpace = self.actions.space_on(self.device)
        self._first_seed = seed
        self._episode_return = np.zeros(self.num_envs)
        self._episode_length = np.zeros(self.num_envs, dtype=np.int64)
        self._restarts = np.zeros(self.num_envs, dtype=np.bool_)
        self.step_infos: list[list[dict[str, Any]]] | None = None
        """Set to a list to collect the environments' infos of each step, a dict each; None: infos are dropped."""

    def reset(self, seed: int | None = None) -> Tensor:
        """Start N new episodes and return their first observations, [N, O].

        Without a seed the environments' random streams continue, except at the first reset: see `seed` of the
        constructor.
        """
        seed = self._first_seed if seed is None else seed
        self._first_seed = None
        observations, _ = self.vector_env.reset(seed=seed)
        self._episode_return[:] = 0.0
        self._episode_length[:] = 0
        self._restarts[:] = False
        return self._to_device(self.observations.flatten(observations, self.num_envs))

    def step(self, action: Tensor) -> Step:
        """Apply one action to each environment: [N, A] for a box, [N, K] int64 for choices."""
        observations, rewards, *flags, infos = self.vector_env.step(self.actions.decode(action))
        terminated, truncated = (np.asarray(flag, dtype=np.bool_) for flag in flags)
        ended = terminated | truncated
        if self.step_infos is not None:
            own = self.vector_env.infos if isinstance(self.vector_env, SB3VecEnv) else None
            self.step_infos.append(own or [info_of(infos, index) for index in range(self.num_envs)])
        obs, final_obs = self._next_and_final(observations, ended, infos)

        # The step in which an environment only resets is not a transition, whatever it returns.
        valid = ~self._restarts
        reward = np.where(valid, rewards, 0.0)
        self._episode_return += reward
        self._episode_length += valid
        step = Step(
            obs=obs,
            reward=self._to_device(reward.astype(np.float32)),
            terminated=self._to_device(terminated | self._restarts),
            truncated=self._to_device(truncated & valid),
            final_obs=final_obs,
            valid=self._to_device(valid),
            outcome={
                "episode_return": self._to_device(self._episode_return.astype(np.float32)),
                "episode_length": self._to_device(self._episode_length.copy()),
            },
        )
        self._episode_return[ended] = 0.0
        self._episode_length[ended] = 0
        if self.autoreset_mode is AutoresetMode.NEXT_STEP:
            self._restarts = ended
        return step

    def state_dict(self) -> dict[str, Tensor]:
        """The adapter's own part of the state; the environments' inner state is not in it."""
        return {
            "episode_return": torch.from_numpy(self._episode_return.copy()),
            "episode_length": torch.from_numpy(self._episode_length.copy()),
            "restarts": torch.from_numpy(self._restarts.copy()),
        }

    def load_state_dict(self, state: dict[str, Tensor]) -> None:  # noqa: ARG002
        """Refuse: the saved sums belong to episodes that the environments cannot return to."""
        raise TailguardError(
            f"{self.name}: the state inside a Gymnasium environment cannot be restored, so this run cannot resume "
            "exactly where it stopped. Call reset() to continue with new episodes."
        )

    def close(self) -> None:
        """Close the wrapped environments."""
        self.vector_env.close()

    def _next_and_final(
        self, observations: Any, ended: NDArray[np.bool_], infos: dict[str, Any]
    ) -> tuple[Tensor, Tensor]:
        """The next observation of the policy and the true successor of the last action, both [N, O]."""
        seen = self.observations.flatten(observations, self.num_envs)
        if self.autoreset_mode is AutoresetMode.NEXT_STEP or not ended.any():
            obs = self._to_device(seen)
            return obs, obs
        other = seen.copy()
        if self.autoreset_mode is AutoresetMode.SAME_STEP:
            other[ended] = self._same_step_final(ended, infos)
            return self._to_device(seen), self._to_device(other)
        restarted, _ = self.vector_env.reset(options={"reset_mask": ended.copy()})
        other[ended] = self.observations.flatten(restarted, self.num_envs)[ended]
        return self._to_device(other), self._to_device(seen)

    def _same_step_final(self, ended: NDArray[np.bool_], infos: dict[str, Any]) -> NDArray[np.float32]:
        """The last observations of the episodes that ended, one row for each."""
        rows = np.flatnonzero(ended)
        final = infos.get("final_obs")
        given = np.asarray(infos.get("_final_obs", ended))
        if final is None or not given[rows].all():
            raise TailguardError(
                f"{self.name} declares the autoreset mode SAME_STEP, but returned no infos['final_obs'] for "
                f"environments {rows.tolist()}, whose episodes ended. Without it a truncated episode cannot be "
                "bootstrapped; use NEXT_STEP, or put the last observation there."
            )
        space = self.vector_env.single_observation_space
        batch: Any = create_empty_array(space, len(rows))
        return self.observations.flatten(concatenate(space, [final[row] for row in rows], batch), len(rows))

    def _to_device(self, values: NDArray[Any]) -> Tensor:
        return torch.from_numpy(values).to(self.device, non_blocking=True)


def info_of(infos: Mapping[str, Any], index: int) -> dict[str, Any]:
    """One environment's info of a step: where its episode ended, that of the last step and not of the reset."""
    if "final_info" in infos and infos["_final_info"][index]:
        infos = infos["final_info"]
    said = {}
    for name, value in infos.items():
        mask = infos.get(f"_{name}")
        if name.startswith("_") or name in ("final_obs", "final_info") or (mask is not None and not mask[index]):
            continue
        said[name] = info_of(value, index) if isinstance(value, Mapping) else value[index]
    return said


class _OwnLastObservation(gymnasium.Wrapper[Any, Any, Any, Any]):
    """Returns a copy of an episode's last observation.

    An environment that writes every observation into one array would otherwise overwrite it at the reset, before
    the vector environment returns it as `final_obs`.
    """

    def step(self, action: Any) -> tuple[Any, Any, bool, bool, dict[str, Any]]:
        observation, reward, terminated, truncated, info = self.env.step(action)
        if terminated or truncated:
            observation = copy.deepcopy(observation)
        return observation, reward, terminated, truncated, info


def _vectorised(
    env: str | GymEnv | GymVectorEnv | Sequence[EnvFactory],
    num_envs: int | None,
    vectorization_mode: VectorizationMode,
    env_kwargs: dict[str, Any],
) -> GymVectorEnv:
    """The Gymnasium vector environment to step: given, or built with SAME_STEP autoreset."""
    if num_envs is not None and num_envs < 1:
        raise ConfigError(f"num_envs is {num_envs}; at least 1 environment is needed.")
    if isinstance(env, str):
        return _vectorised_id(env, DEFAULT_NUM_ENVS if num_envs is None else num_envs, vectorization_mode, env_kwargs)
    if env_kwargs:
        raise ConfigError(f"env_kwargs {sorted(env_kwargs)} apply to a Gymnasium id only; {env} is already built.")
    if isinstance(env, gymnasium.vector.VectorEnv):
        vector_env = env
    elif is_sb3_vec_env(env):
        vector_env = SB3VecEnv(env)
    elif isinstance(env, gymnasium.Env):
        vector_env = _vectorised_factories([lambda: env], "sync")
    elif isinstance(env, list | tuple) and env and all(callable(factory) for factory in env):
        vector_env = _vectorised_factories(env, vectorization_mode)
    else:
        raise TailguardError(
            f"{env!r} is not a Gymnasium environment. Give an id such as 'CartPole-v1', a gymnasium.Env, "
            "a list of functions that each make one, a gymnasium.vector.VectorEnv, or an SB3 VecEnv."
        )
    if num_envs is not None and num_envs != vector_env.num_envs:
        raise ConfigError(f"num_envs is {num_envs}, but {vector_env} has {vector_env.num_envs}. Leave num_envs out.")
    return vector_env


def _vectorised_id(
    env_id: str, num_envs: int, vectorization_mode: VectorizationMode, env_kwargs: dict[str, Any]
) -> GymVectorEnv:
    try:
        if vectorization_mode == "vector_entry_point":
            return gymnasium.make_vec(env_id, num_envs, vectorization_mode=vectorization_mode, **env_kwargs)
        return _vectorised_factories([lambda: gymnasium.make(env_id, **env_kwargs)] * num_envs, vectorization_mode)
    except gymnasium.error.Error as error:
        raise TailguardError(f"Gymnasium cannot make {env_id!r}: {error}") from error


def _vectorised_factories(factories: Sequence[EnvFactory], vectorization_mode: VectorizationMode) -> GymVectorEnv:
    vectorisers: dict[str, type[SyncVectorEnv[Any, Any]] | type[AsyncVectorEnv[Any, Any]]]
    vectorisers = {"sync": SyncVectorEnv, "async": AsyncVectorEnv}
    if vectorization_mode not in vectorisers:
        raise ConfigError(
            f"vectorization_mode is {vectorization_mode!r}; it can be 'sync' or 'async', "
            "or 'vector_entry_point' for an id that has one."
        )

    def with_own_last_observation(factory: EnvFactory) -> EnvFactory:
        return lambda: _OwnLastObservation(factory())

    # A forked process hangs as soon as it needs a thread of a library that ran before, Polars or OpenMP.
    options: dict[str, Any] = {"context": "spawn"} if vectorization_mode == "async" else {}
    # The observations are copied when they are flattened, so the vector environment need not do it too.
    return vectorisers[vectorization_mode](
        [with_own_last_observation(factory) for factory in factories],
        copy=False,
        autoreset_mode=AutoresetMode.SAME_STEP,
        **options,
    )


def _autoreset_mode(vector_env: GymVectorEnv, name: str) -> AutoresetMode:
    modes = ", ".join(f"AutoresetMode.{mode.name}" for mode in AutoresetMode)
    stated = vector_env.metadata.get("autoreset_mode")
    if stated is None:
        raise TailguardError(
            f"{name} does not declare its autoreset mode, and a wrong guess would corrupt the end of every episode. "
            f"Set its metadata['autoreset_mode'] to one of {modes}."
        )
    try:
        return AutoresetMode(stated)
    except ValueError as error:
        raise TailguardError(f"{name}: metadata['autoreset_mode'] is {stated!r}; it must be one of {modes}.") from error
