"""sb3-contrib's RecurrentPPO on our environment: unmodified, and with whole-sequence LSTM calls."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray
from sb3_contrib import RecurrentPPO
from sb3_contrib.common.recurrent.policies import RecurrentActorCriticPolicy
from stable_baselines3.common.callbacks import BaseCallback
from stable_baselines3.common.vec_env import VecEnv
from torch import Tensor, nn

from tailguard.bench.own_learner import EPOCHS, UNITS, Shape, trading_env
from tailguard.bench.timing import Workload
from tailguard.envs.gym_trading import TradingGymEnv

if TYPE_CHECKING:
    from tailguard.data.prepare import PreparedBars
    from tailguard.envs.trading import TradingEnv

Array = NDArray[Any]


class BatchedTradingVecEnv(VecEnv):
    """The tensor environment as an SB3 VecEnv: the peer steps all accounts at once too, without a loop in Python.

    `reward_scale` multiplies the rewards: the peer does not normalise returns, and log-growth of a bar is small.
    """

    def __init__(self, env: TradingEnv, single: TradingGymEnv, reward_scale: float = 1.0) -> None:
        self.env = env
        self.reward_scale = reward_scale
        super().__init__(env.num_envs, single.observation_space, single.action_space)

    def reset(self) -> Array:
        return self.env.reset(0).numpy()

    def step_async(self, actions: Array) -> None:
        self.actions = torch.as_tensor(actions)

    def step_wait(self) -> tuple[Array, Array, Array, list[dict[str, Any]]]:
        step = self.env.step(self.actions)
        ended = step.ended.numpy()
        infos: list[dict[str, Any]] = [{} for _ in range(self.num_envs)]
        for index in np.flatnonzero(ended):
            infos[index] = {
                "terminal_observation": step.final_obs[index].numpy(),
                "TimeLimit.truncated": bool(step.truncated[index]),
            }
        return step.obs.numpy(), (self.reward_scale * step.reward).numpy(), ended, infos

    def close(self) -> None:
        """Nothing to release."""

    def get_attr(self, attr_name: str, indices: Any = None) -> list[Any]:  # noqa: ARG002
        return [None] * self.num_envs

    def set_attr(self, attr_name: str, value: Any, indices: Any = None) -> None:
        """The environments have no attributes of their own."""

    def env_method(self, method_name: str, *args: Any, indices: Any = None, **kwargs: Any) -> list[Any]:  # noqa: ARG002
        return [None] * self.num_envs

    def env_is_wrapped(self, wrapper_class: Any, indices: Any = None) -> list[bool]:  # noqa: ARG002
        return [False] * self.num_envs


class WholeSequencePolicy(RecurrentActorCriticPolicy):
    """The peer's policy with one LSTM call for all rows of a minibatch, wherever that computes the same.

    As it is, it goes row by row as soon as one episode starts anywhere in a minibatch. But its minibatches are cut into
    sequences at the starts of episodes, so that a start is always a sequence's first row: clearing the state before it
    is all there is to do.
    """

    @staticmethod
    def _process_sequence(
        features: Tensor, lstm_states: tuple[Tensor, Tensor], episode_starts: Tensor, lstm: nn.LSTM
    ) -> tuple[Tensor, Any]:
        row_by_row = RecurrentActorCriticPolicy._process_sequence
        sequences = lstm_states[0].shape[1]
        starts = episode_starts.reshape(sequences, -1)
        if bool(starts[:, 1:].any()):
            return row_by_row(features, lstm_states, episode_starts, lstm)
        keep = (1.0 - starts[:, 0]).view(1, sequences, 1)
        cleared = keep * lstm_states[0], keep * lstm_states[1]
        return row_by_row(features, cleared, torch.zeros_like(episode_starts), lstm)


class _Silent(BaseCallback):
    def _on_step(self) -> bool:
        return True


class RecurrentPeer:
    """sb3-contrib's learner with its own loop, an iteration at a time."""

    def __init__(
        self,
        prepared: PreparedBars,
        shape: Shape,
        stagger: int = 64,
        *,
        whole_sequences: bool = False,
        seed: int = 0,
        reward_scale: float = 1.0,
        **options: Any,
    ) -> None:
        env = trading_env(prepared, shape.envs, stagger)
        single = TradingGymEnv(prepared, episode_length=env.episode_length)
        self.model = RecurrentPPO(
            WholeSequencePolicy if whole_sequences else "MlpLstmPolicy",
            BatchedTradingVecEnv(env, single, reward_scale),
            n_steps=shape.steps,
            batch_size=shape.minibatch,
            n_epochs=EPOCHS,
            seed=seed,
            device="cpu",
            policy_kwargs={"lstm_hidden_size": UNITS, "net_arch": {"pi": [UNITS], "vf": [UNITS]}},
            **options,
        )
        # `learn` must not begin anew each time: that would reset the environments, and with them the stagger.
        self.model._setup_learn(10**9, callback=None)
        self.model.logger.output_formats = []
        self._callback = _Silent()
        self._callback.init_callback(self.model)

    def iterate(self) -> None:
        """One rollout and all epochs on it."""
        model = self.model
        assert model.env is not None
        model.collect_rollouts(model.env, self._callback, model.rollout_buffer, n_rollout_steps=model.n_steps)
        model._update_current_progress_remaining(0, 1)
        model.train()

    @property
    def predict(self) -> Callable[..., tuple[Array, Any]]:
        """The model's own."""
        return self.model.predict


def peer(prepared: PreparedBars, shape: Shape, stagger: int = 64, *, whole_sequences: bool = False) -> Workload:
    """One iteration of the peer."""
    return Workload(RecurrentPeer(prepared, shape, stagger, whole_sequences=whole_sequences).iterate, shape.samples)
