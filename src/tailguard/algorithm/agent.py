"""An agent: a policy, the statistics of its observations and its environment, with Stable-Baselines3's method names."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from tailguard.algorithm.config import LearnerConfig
from tailguard.algorithm.rollout import ObservationScale
from tailguard.envs.adapt import FlatInputs, as_vector_env, policy_inputs
from tailguard.errors import ConfigError
from tailguard.memory_limits import keep_freed_memory
from tailguard.models.inference import InferencePolicy, PredictPolicy, ScaledNetwork, StepPolicy
from tailguard.models.policy import ActorCritic
from tailguard.returns import RunningMoments
from tailguard.returns.asset_moments import AssetMoments
from tailguard.validate import check_count, check_range

if TYPE_CHECKING:
    from tailguard.envs.protocol import VectorEnv
    from tailguard.envs.spec import TradingSpec


class Agent:
    """A policy and its environment. Learners derive from it and add training."""

    config: LearnerConfig

    def __init__(
        self, env: Any, config: LearnerConfig, seed: int, device: torch.device | str | None, num_envs: int | None
    ) -> None:
        given: object = seed
        seed = int(given) if isinstance(given, np.integer) else seed
        check_count("seed", seed, low=-(2**63))
        check_range("seed", seed, high=2**63, high_open=True)
        self.env: VectorEnv = as_vector_env(env, num_envs, device)
        self.config = config
        self.inputs = policy_inputs(self.env)
        self.device = self.env.device
        if self.device.type == "cpu":
            keep_freed_memory()
        self.seed = seed
        # Predictions draw from a stream of their own: asking a learning agent for actions must not change its course.
        self.prediction_generator = torch.Generator(self.device).manual_seed(seed)
        # The global generator is left as it was: weights depend on the seed alone.
        with torch.random.fork_rng(devices=[self.device] if self.device.type == "cuda" else []):
            torch.manual_seed(seed)
            layout = getattr(self.env, "asset_layout", None)
            network = ActorCritic(self.env.observation_size, self.env.action_space, config.network, layout)
        self.policy = network.to(self.device)
        if network.layout is not None and isinstance(self.inputs, FlatInputs):
            self.inputs = replace(self.inputs, layout=network.layout)
        self.observation_moments: RunningMoments | AssetMoments = (
            RunningMoments((self.env.observation_size,), device=self.device)
            if network.layout is None
            else AssetMoments(network.layout, self.device)
        )

    @property
    def spec(self) -> TradingSpec | None:
        """What the agent needs to trade new bars: features, scaling and episode rules; None if it was not trained on
        bars."""
        return self.inputs.spec

    def observation_scale(self, observation_size: int | None = None) -> ObservationScale:
        """The current observation statistics; they are constant during a rollout or an evaluation.

        `observation_size`: of a universe of another size than the environment's, for networks that can read it.
        """
        moments = self.observation_moments
        clip = self.config.observation_clip if self.config.normalise_observations else math.inf
        if isinstance(moments, AssetMoments):
            mean, std = moments.scale(observation_size or self.env.observation_size)
            return ObservationScale(mean.float(), std.float(), clip)
        return ObservationScale(moments.mean.float(), moments.std.float(), clip)

    @torch.no_grad()
    def predict(
        self,
        observation: Any,
        state: tuple[np.ndarray, ...] | None = None,
        episode_start: np.ndarray | None = None,
        deterministic: bool = False,
    ) -> tuple[np.ndarray, tuple[np.ndarray, ...] | None]:
        """The policy's action, and the recurrent state to pass with the next observation; as in Stable-Baselines3.

        `observation`: one observation or a batch, in the environment's own form. `state`: what the last call returned,
        None at the start. `episode_start`: [n] bool, where the memory must be cleared. Statistics are not updated.
        """
        rows, single = self.inputs.encode(observation)
        obs = self.observation_scale(rows.shape[-1])(torch.as_tensor(rows, device=self.device))
        count = obs.shape[0]
        memory = self.policy.initial_state(count)[0]
        if state is not None:
            expected = [tuple(part.shape) for part in memory]
            memory = tuple(torch.as_tensor(part, device=self.device) for part in state)
            shapes = [tuple(part.shape) for part in memory]
            if shapes != expected:
                raise ConfigError(
                    f"state has shape {shapes}; for {count} observations it is {expected}. Give back what the last "
                    "predict returned, or None at the start"
                )
        start = torch.zeros(count, dtype=torch.bool, device=self.device)
        if episode_start is not None:
            start = torch.as_tensor(np.asarray(episode_start), dtype=torch.bool, device=self.device).reshape(-1)
            if len(start) != count:
                raise ConfigError(f"episode_start has {len(start)} entries for {count} observations")
        dist_params, memory = self.policy.act(obs, memory, start)
        head = self.policy.action_head
        raw = head.mode(dist_params) if deterministic else head.sample(dist_params, self.prediction_generator)
        action = self.inputs.decode(head.to_env(raw))
        after = tuple(part.cpu().numpy() for part in memory) if self.policy.is_recurrent else None
        return (action[0] if single else action), after

    def inference_policy(self) -> StepPolicy:
        """The deterministic policy for one environment, step by step: the actions of `predict`, bit for bit, faster.

        It has its own recurrent state and the current weights and statistics; make a new one after further training.
        """
        if type(self).predict is not Agent.predict:
            return PredictPolicy(self)  # a subclass decides in its own way
        scale: Callable[[Tensor], Tensor] = self.observation_scale()
        if self.policy.layout is not None:
            # Any universe may come; statistics are those of now, as for the others.
            sized = cache(self.observation_scale)

            def scale(observation: Tensor) -> Tensor:
                return sized(observation.shape[-1])(observation)

        return InferencePolicy(self.policy, scale)

    def scaled_networks(self, observation_size: int | None = None) -> tuple[ScaledNetwork, ...]:
        """The networks that decide, with their inputs' scaling: one here, all members' of an ensemble.

        `observation_size`: see `observation_scale`.
        """
        scale = self.observation_scale(observation_size)
        return (ScaledNetwork(self.policy, scale, scale.std, scale.mean),)

    def combine(self, actions: Sequence[Tensor]) -> Tensor:
        """The action that the environment sees, from those of `scaled_networks`."""
        return actions[0]

    def get_env(self) -> Any:
        """The environment the agent trains on; an SB3 `VecEnv` if it was given one."""
        return getattr(getattr(self.env, "vector_env", None), "vec_env", self.env)

    def get_vec_normalize_env(self) -> Any:
        """SB3's `VecNormalize`, if the agent trains on one; else None, for the statistics are the agent's own."""
        env = self.get_env()
        while env is not None and not (hasattr(env, "norm_obs") and hasattr(env, "obs_rms")):
            env = getattr(env, "venv", None)
        return env
