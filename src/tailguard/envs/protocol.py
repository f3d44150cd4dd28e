"""The interface of an environment: N copies that step together, as tensors on one device."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor


@dataclass(frozen=True)
class Box:
    """Continuous actions, [N, A] float, each inside [low, high]."""

    low: Tensor
    """Lower bounds, [A]; -inf where there is none."""
    high: Tensor
    """Upper bounds, [A]; inf where there is none."""

    @property
    def size(self) -> int:
        return self.low.numel()


@dataclass(frozen=True)
class Discrete:
    """Choices, [N, K] int64: one per entry of `sizes`, counted from 0. Gymnasium's `Discrete` is the case K = 1."""

    sizes: tuple[int, ...]


ActionSpace = Box | Discrete


@dataclass(frozen=True)
class Step:
    """One transition of N environments, autoreset included.

    `obs` is the policy's next observation: where an episode ended, the first one of the next episode.
    `final_obs` is the true successor of the action just taken: where an episode ended, its last observation, and
    everywhere else equal to `obs`.
    """

    obs: Tensor
    """[N, O]"""
    reward: Tensor
    """[N] float32"""
    terminated: Tensor
    """[N] bool: the episode ended; its last state has value 0 (no bootstrap)."""
    truncated: Tensor
    """[N] bool: a time limit ended the episode; its last state keeps its value (bootstrap)."""
    final_obs: Tensor
    """[N, O]"""
    valid: Tensor
    """[N] bool: False where nothing happened (the row in which a NEXT_STEP environment resets); such a row has no
    loss. It is marked terminated, so no return propagates across it and the next row starts an episode."""
    outcome: dict[str, Tensor] = field(default_factory=dict)
    """Named [N] tensors about this step (costs by kind, running episode P&L, …); empty where there are none."""

    @property
    def ended(self) -> Tensor:
        return self.terminated | self.truncated


@runtime_checkable
class FunctionalEnv(Protocol):
    """A vector env whose step is a pure function of tensors, so it can be compiled and recorded.

    `step(action)` is the same as `state, step = transition(state, action, draw())`.
    """

    state: Any
    """State of the episodes: tensors, in a dataclass, a dict or a tuple."""
    generator: torch.Generator
    """All random generators of the environment."""

    def draw(self) -> Tensor:
        """The random numbers of one step."""
        ...

    def transition(self, before: Any, action: Tensor, noise: Tensor) -> tuple[Any, Step]:
        """The state after one action in each environment, and the transition."""
        ...


@runtime_checkable
class BlockwiseEnv(Protocol):
    """An environment that brings further data to its device between rollouts."""

    def exchange(self, steps: int) -> None:
        """Called before `steps` steps, outside of recorded graphs; tensors that a step reads keep their addresses."""
        ...


@runtime_checkable
class VectorEnv(Protocol):
    """N environments on one device that reset in the same step in which their episode ends.

    A risk budget also needs `episode_length`, an int: the steps in an episode that is not cut short.
    """

    num_envs: int
    observation_size: int
    action_space: ActionSpace
    device: torch.device

    def reset(self, seed: int | None = None) -> Tensor:
        """Start N new episodes and return their first observations, [N, O]."""
        ...

    def step(self, action: Tensor) -> Step:
        """Apply one action to each environment."""
        ...

    def state_dict(self) -> dict[str, Tensor]:
        """The complete state, as tensors, to resume exactly."""
        ...

    def load_state_dict(self, state: dict[str, Tensor]) -> None:
        """Restore a saved state."""
        ...

    def close(self) -> None:
        """Release resources."""
        ...
