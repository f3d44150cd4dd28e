"""The state of training, in a form that can be saved and resumed."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch

from tailguard.algorithm.rollout import RolloutState
from tailguard.algorithm.schedules import EntropyState


class Stateful(Protocol):
    """A part of the learner that has state to save."""

    def state_dict(self) -> Mapping[str, Any]:
        """Nested dicts of tensors, numbers, text and lists of them: all that an exact resume needs."""
        ...

    def load_state_dict(self, state: Any) -> Any:
        """Restore what `state_dict` returned."""
        ...


@dataclass
class LearnerState:
    """Progress of training, besides the weights and the optimiser's moments."""

    rollout_state: RolloutState | None = None
    """State between two rollouts; None before the first one, which starts fresh episodes."""
    num_timesteps: int = 0
    iteration: int = 0
    progress: float = 0.0
    """Share of the requested steps that is done, for the schedules."""
    kl_coef: float = 0.0
    entropy: EntropyState = field(default_factory=EntropyState)
    skipped: int = 0
    """Minibatches and rollouts left out because something in them was not finite."""
    degenerate: int = 0
    """Rollouts whose advantages carried no signal."""

    def state_dict(self) -> dict[str, Any]:
        """Everything; the recurrent states of trunk i are `memory.i.*`."""
        state: dict[str, Any] = {
            name: getattr(self, name)
            for name in ("num_timesteps", "iteration", "progress", "kl_coef", "skipped", "degenerate")
        }
        state["entropy"] = self.entropy.to_dict()
        if self.rollout_state is not None:
            state["carry"] = {
                "obs": self.rollout_state.obs.clone(),
                "episode_start": self.rollout_state.episode_start.clone(),
                "memory": {
                    str(trunk): {str(part): value.clone() for part, value in enumerate(memory)}
                    for trunk, memory in enumerate(self.rollout_state.state)
                },
            }
        return state

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore what `state_dict` returned."""
        numbers = {name: value for name, value in state.items() if name not in ("entropy", "carry")}
        for name, value in numbers.items():
            setattr(self, name, value)
        self.entropy = EntropyState.from_dict(state["entropy"])
        self.rollout_state = None
        if "carry" in state:
            rollout_state = state["carry"]
            memory = rollout_state["memory"]
            self.rollout_state = RolloutState(
                rollout_state["obs"],
                rollout_state["episode_start"],
                tuple(
                    tuple(memory[str(trunk)][str(part)] for part in range(len(memory[str(trunk)])))
                    for trunk in range(len(memory))
                ),
            )


class GeneratorState:
    """A random stream, to save and to load. Its state is specific to the kind of device."""

    def __init__(self, generator: torch.Generator) -> None:
        self.generator = generator

    def state_dict(self) -> dict[str, Any]:
        """The stream's state and its kind of device."""
        return {"device": self.generator.device.type, "state": self.generator.get_state()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore the stream; on another kind of device it is left unchanged."""
        if state["device"] == self.generator.device.type:
            self.generator.set_state(state["state"].cpu())
