"""Callbacks with Stable-Baselines3's names, called once a rollout. SB3's own callback objects work as they are."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol


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
    def __init__(self, function: Callable[[dict[str, Any], dict[str, Any]], bool | None]) -> None:
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
        return all([callback.on_step() for callback in self.callbacks])

    def on_rollout_end(self) -> None:
        for callback in self.callbacks:
            callback.on_rollout_end()

    def on_training_end(self) -> None:
        for callback in self.callbacks:
            callback.on_training_end()


CallbackLike = (
    CallbackProtocol | Callable[[dict[str, Any], dict[str, Any]], bool | None] | Sequence[CallbackProtocol] | None
)


def make_callback(given: CallbackLike) -> CallbackProtocol:
    """One callback from none, one, a function or a list."""
    if given is None:
        return Callback()
    if isinstance(given, Sequence):
        return _CallbackList([make_callback(callback) for callback in given])
    if hasattr(given, "on_step"):
        return given
    return _FunctionCallback(given)
