"""Callbacks with Stable-Baselines3's names, called once a rollout.

SB3's own callback objects work as they are, as far as they look at the model and not inside SB3's rollout loop:
`EvalCallback`, `CheckpointCallback`, `StopTrainingOnRewardThreshold` and their like. Frequencies count rollouts.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol, runtime_checkable

CallbackFunction = Callable[[dict[str, Any], dict[str, Any]], bool | None]
"""A function of `learn`'s locals and globals; `locals["self"]` is the agent. False ends the training, None does not."""


@runtime_checkable
class CallbackProtocol(Protocol):
    """What the learner calls."""

    def init_callback(self, model: Any) -> None: ...
    def on_training_start(self, locals_: dict[str, Any], globals_: dict[str, Any]) -> None: ...
    def on_rollout_start(self) -> None: ...
    def on_step(self) -> bool: ...
    def on_rollout_end(self) -> None: ...
    def on_training_end(self) -> None: ...


class Callback:
    """Does nothing at every occasion: override what you need. `self.model` is the agent."""

    model: Any = None

    def init_callback(self, model: Any) -> None:
        """Called before anything else."""
        self.model = model

    def on_training_start(self, locals_: dict[str, Any], globals_: dict[str, Any]) -> None:
        """Called when `learn` begins."""

    def on_rollout_start(self) -> None:
        """Called before a rollout is collected."""

    def on_step(self) -> bool:
        """Called after each iteration, rollout and updates; return False to end the training."""
        return True

    def on_rollout_end(self) -> None:
        """Called after a rollout and the updates on it; `self.model.metrics` holds their figures."""

    def on_training_end(self) -> None:
        """Called when `learn` is done."""


class _FunctionCallback(Callback):
    def __init__(self, function: CallbackFunction) -> None:
        self.function = function

    def on_training_start(self, locals_: dict[str, Any], globals_: dict[str, Any]) -> None:
        self.locals, self.globals = locals_, globals_

    def on_step(self) -> bool:
        return self.function(self.locals, self.globals) is not False


class _CallbackList(Callback):
    def __init__(self, callbacks: Sequence[CallbackProtocol]) -> None:
        self.callbacks = callbacks

    def init_callback(self, model: Any) -> None:
        for callback in self.callbacks:
            callback.init_callback(model)

    def on_training_start(self, locals_: dict[str, Any], globals_: dict[str, Any]) -> None:
        for callback in self.callbacks:
            callback.on_training_start(locals_, globals_)

    def on_rollout_start(self) -> None:
        for callback in self.callbacks:
            callback.on_rollout_start()

    def on_step(self) -> bool:
        # Every callback hears of every step, also after one of them has asked for the end.
        answers = [callback.on_step() for callback in self.callbacks]
        return all(answers)

    def on_rollout_end(self) -> None:
        for callback in self.callbacks:
            callback.on_rollout_end()

    def on_training_end(self) -> None:
        for callback in self.callbacks:
            callback.on_training_end()


CallbackLike = CallbackProtocol | CallbackFunction | Sequence[CallbackProtocol | CallbackFunction] | None


def make_callback(given: CallbackLike) -> CallbackProtocol:
    """One callback from none, one, a function or a list of callbacks and functions."""
    if given is None:
        return Callback()
    if isinstance(given, Sequence):
        return _CallbackList([make_callback(callback) for callback in given])
    if isinstance(given, CallbackProtocol):
        return given
    return _FunctionCallback(given)


class CallbackLogger:
    """The `logger` of SB3's callbacks: what they record joins the iteration's figures."""

    def __init__(self, metrics: dict[str, Any]) -> None:
        self.metrics = metrics

    def record(self, key: str, value: Any, exclude: Any = None) -> None:  # noqa: ARG002
        """Add a figure; there are no output formats here to exclude it from."""
        self.metrics[key] = value

    def dump(self, step: int = 0) -> None:
        """Nothing waits to be written."""
