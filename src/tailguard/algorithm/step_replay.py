"""Calls callbacks for each step of a rollout as Stable-Baselines3 does, once the rollout is collected.

A rollout is collected in one piece, on a GPU as one recorded graph, so the calls come when it is complete and before
the updates on it. The policy does not change within a rollout: an evaluation at a step uses the weights that it would
use in SB3.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, overload

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from tailguard.algorithm.rollout import Rollout
from tailguard.monitor.callbacks import Callback, wants_steps

if TYPE_CHECKING:
    from tailguard.algorithm.learner import Learner


class StepReplay:
    """Replays the rollouts of one `learn` to the callbacks."""

    def __init__(self, learner: Learner, callback: Callback) -> None:
        self.learner, self.callback = learner, callback
        self.wants_steps = wants_steps(callback)
        self.goes_on = True
        """False once a callback has asked to stop."""
        self.began = time.time()

    def begin(self) -> None:
        """Call `on_rollout_start`, and let an environment that gives its own infos keep them."""
        self.callback.on_rollout_start()
        if self.wants_steps and hasattr(self.learner.env, "step_infos"):
            self.learner.env.step_infos = []

    def __call__(self, rollout: Rollout) -> bool:
        """Call for every step, then `on_rollout_end`; whether the rollout is to be learned from.

        While callbacks are called, `num_timesteps` is SB3's. If one asks to stop, it stays there: the rollout's later
        steps are not replayed and `on_rollout_end` is not called.
        """
        state, count = self.learner.state, self.learner.env.num_envs
        begun = state.num_timesteps
        if self.wants_steps:
            steps = _Steps(self.learner, rollout, self.began)
            for row in range(len(rollout.rewards)):
                state.num_timesteps = begun + (row + 1) * count
                self.callback.update_locals(steps.locals_of(row))
                if not self.callback.on_step():
                    self.goes_on = False
                    return False
        state.num_timesteps = begun + len(rollout.rewards) * count
        self.callback.on_rollout_end()
        state.num_timesteps = begun  # until the updates are done
        return True


class _Steps:
    """The rollout as arrays, time first."""

    def __init__(self, learner: Learner, rollout: Rollout, began: float) -> None:
        rollout_state = learner.state.rollout_state
        assert rollout_state is not None  # it was collected
        self.learner, self.began = learner, began
        self.rewards, self.log_probs = _array(rollout.rewards), _array(rollout.log_probs)
        # A row in which an environment only restarts ends nothing.
        valid = _array(rollout.valid)
        self.dones = _array(rollout.ended) & valid
        self.truncated = _array(rollout.truncated) & valid
        self.obs = np.concatenate((_array(rollout.obs), _array(rollout_state.obs)[None]))
        actions = learner.policy.action_head.to_env(rollout.actions)
        self.actions = [learner.inputs.decode(row) for row in actions]
        self.outcome = {name: _array(value) for name, value in rollout.outcome.items()}
        self.own_infos = getattr(learner.env, "step_infos", None)
        last_obs = _array(rollout.final_obs)
        self.last_obs = {row: last_obs[place] for place, row in enumerate(rollout.final_rows)}
        self.returns, self.lengths = _running_sums(learner, self.rewards, valid, self.dones)

    def locals_of(self, row: int) -> dict[str, Any]:
        """What SB3's rollout loop has in its locals after a step, less the values: critics read whole rollouts."""
        return {
            "self": self.learner,
            "env": self.learner.get_env(),
            "n_rollout_steps": len(self.rewards),
            "n_steps": row,
            "actions": self.actions[row],
            "clipped_actions": self.actions[row],
            "log_probs": self.log_probs[row],
            "new_obs": self.obs[row + 1],
            "rewards": self.rewards[row],
            "dones": self.dones[row],
            "infos": StepInfos(self, row),
        }


class StepInfos(Sequence[dict[str, Any]]):
    """One step's infos, a dict for each environment, built on access: building thousands would be costly.

    What the environment said of the step; at an episode's end also SB3's `episode` (return `r`, length `l`, seconds
    since the training began `t`), `terminal_observation` and `TimeLimit.truncated`.
    """

    def __init__(self, steps: _Steps, row: int) -> None:
        self._steps, self._row = steps, row

    def __len__(self) -> int:
        return len(self._steps.dones[self._row])

    @overload
    def __getitem__(self, index: int) -> dict[str, Any]: ...
    @overload
    def __getitem__(self, index: slice) -> list[dict[str, Any]]: ...
    def __getitem__(self, index: int | slice) -> dict[str, Any] | list[dict[str, Any]]:
        if isinstance(index, slice):
            return [self._info(place) for place in range(*index.indices(len(self)))]
        if not -len(self) <= index < len(self):
            raise IndexError(f"info {index} of {len(self)} environments")
        return self._info(index % len(self))

    def _info(self, index: int) -> dict[str, Any]:
        steps, row = self._steps, self._row
        said = {name: value[row, index] for name, value in steps.outcome.items()}
        info = {name: value.item() if np.ndim(value) == 0 else value for name, value in said.items()}
        if steps.dones[row, index]:
            info["episode"] = {
                "r": round(float(steps.returns[row, index]), 6),
                "l": int(steps.lengths[row, index]),
                "t": round(time.time() - steps.began, 6),
            }
            info["terminal_observation"] = steps.last_obs[row][index]
            info["TimeLimit.truncated"] = bool(steps.truncated[row, index])
        if steps.own_infos is not None:
            info |= steps.own_infos[row][index]
        return info


def _running_sums(
    learner: Learner, rewards: NDArray[Any], valid: NDArray[np.bool_], dones: NDArray[np.bool_]
) -> tuple[NDArray[Any], NDArray[Any]]:
    """Return and length of the running episodes up to and including each step, [T, N] each."""
    returns, lengths = np.empty(rewards.shape), np.empty(rewards.shape)
    # The tracker has not taken in this rollout yet: it knows what its first episodes have gathered before.
    total, length = _array(learner.episodes.returns).copy(), _array(learner.episodes.lengths).copy()
    for row in range(len(rewards)):
        total = total + np.where(valid[row], rewards[row].astype(np.float64), 0.0)
        length = length + valid[row]
        returns[row], lengths[row] = total, length
        total, length = np.where(dones[row], 0.0, total), np.where(dones[row], 0.0, length)
    return returns, lengths


def _array(value: Tensor) -> NDArray[Any]:
    array: NDArray[Any] = value.detach().cpu().numpy()
    return array
