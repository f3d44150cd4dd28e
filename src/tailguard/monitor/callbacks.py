"""Callbacks with Stable-Baselines3's names and counts, and two more for a whole iteration.

SB3's own callback objects work as they are. `on_step` is called once for every step of the vector of environments, with
SB3's `num_timesteps` and locals. A rollout is collected in one piece, so the calls for its steps come when it is
complete, in order and before the updates on it (see `tailguard.algorithm.step_replay`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, Protocol, runtime_checkable

from tailguard.errors import ConfigError

CallbackFunction = Callable[[dict[str, Any], dict[str, Any]], bool | None]
"""A function of a step's locals and globals; `locals["self"]` is the agent. False ends the training, None does not."""


@runtime_checkable
class CallbackProtocol(Protocol):
    """What the learner calls: the methods of SB3's `BaseCallback`."""

    def init_callback(self, model: Any) -> None: ...
    def on_training_start(self, locals_: dict[str, Any], globals_: dict[str, Any]) -> None: ...
    def on_rollout_start(self) -> None: ...
    def update_locals(self, locals_: dict[str, Any]) -> None: ...
    def on_step(self) -> bool: ...
    def on_rollout_end(self) -> None: ...
    def on_training_end(self) -> None: ...


class Callback:
    """Base class whose methods do nothing: override those you need. `self.model` is the agent.

    Where no callback overrides `on_step` or `update_locals`, steps are not replayed and cost nothing.
    """

    model: Any = None
    locals: dict[str, Any]
    """Of `learn`, and once steps are taken of the last one: `rewards`, `dones`, `infos` and more, as in SB3."""
    globals: dict[str, Any]

    def init_callback(self, model: Any) -> None:
        """Called before anything else."""
        self.model = model
        self.locals, self.globals = {}, {}

    def on_training_start(self, locals_: dict[str, Any], globals_: dict[str, Any]) -> None:
        """Called when `learn` begins."""
        self.locals, self.globals = locals_, globals_

    def on_rollout_start(self) -> None:
        """Called before a rollout is collected."""

    def update_locals(self, locals_: dict[str, Any]) -> None:
        """Called before `on_step` with the step's locals."""
        self.locals.update(locals_)

    def on_step(self) -> bool:
        """Called for each step of the vector of environments; return False to end the training before the updates."""
        return True

    def on_rollout_end(self) -> None:
        """Called after a rollout and before the updates on it."""

    def on_iteration_end(self) -> None:
        """Called after a rollout and the updates on it; `self.model.metrics` holds their metrics."""

    def on_iteration_logged(self) -> bool:
        """Called after `on_iteration_end` of every callback: metrics are written, and it is time to save.

        Return False to end the training.
        """
        return True

    def on_training_end(self) -> None:
        """Called when `learn` is done."""


class EveryIteration(Callback):
    """Calls a function of the agent after every iteration; False ends the training, None does not."""

    def __init__(self, function: Callable[[Any], bool | None]) -> None:
        self.function = function

    def on_iteration_logged(self) -> bool:
        return self.function(self.model) is not False


class _FunctionCallback(Callback):
    def __init__(self, function: CallbackFunction) -> None:
        self.function = function

    def on_step(self) -> bool:
        return self.function(self.locals, self.globals) is not False


class _CallbackList(Callback):
    def __init__(self, callbacks: Sequence[CallbackProtocol]) -> None:
        self.callbacks = callbacks
        self.of_iterations = list(_iteration_callbacks(callbacks))

    def init_callback(self, model: Any) -> None:
        for callback in self.callbacks:
            callback.init_callback(model)

    def on_training_start(self, locals_: dict[str, Any], globals_: dict[str, Any]) -> None:
        for callback in self.callbacks:
            callback.on_training_start(locals_, globals_)

    def on_rollout_start(self) -> None:
        for callback in self.callbacks:
            callback.on_rollout_start()

    def update_locals(self, locals_: dict[str, Any]) -> None:
        for callback in self.callbacks:
            callback.update_locals(locals_)

    def on_step(self) -> bool:
        # Every callback hears of every step, also after one of them has asked for the end.
        answers = [callback.on_step() for callback in self.callbacks]
        return all(answers)

    def on_rollout_end(self) -> None:
        for callback in self.callbacks:
            callback.on_rollout_end()

    def on_iteration_end(self) -> None:
        for callback in self.of_iterations:
            callback.on_iteration_end()

    def on_iteration_logged(self) -> bool:
        answers = [callback.on_iteration_logged() for callback in self.of_iterations]
        return all(answers)

    def on_training_end(self) -> None:
        for callback in self.callbacks:
            callback.on_training_end()


CallbackLike = CallbackProtocol | CallbackFunction | Sequence[CallbackProtocol | CallbackFunction] | None


def make_callback(given: CallbackLike) -> Callback:
    """One callback from none, one, a function or a list of callbacks and functions."""
    return _CallbackList(make_callbacks(given))


def make_callbacks(given: CallbackLike) -> list[CallbackProtocol]:
    """Callbacks from none, one, a function or a list of callbacks and functions."""
    if given is None:
        return []
    return [_one(part) for part in (given if isinstance(given, Sequence) else [given])]


def wants_steps(callback: CallbackProtocol) -> bool:
    """Whether the callback wants to be called for every step; SB3's always do."""
    if isinstance(callback, _CallbackList):
        return any(map(wants_steps, callback.callbacks))
    if not isinstance(callback, Callback):
        return True
    kind = type(callback)
    return kind.on_step is not Callback.on_step or kind.update_locals is not Callback.update_locals


def _one(given: Any) -> CallbackProtocol:
    if isinstance(given, Sequence):
        return make_callback(given)
    if isinstance(given, CallbackProtocol):
        return given
    if not callable(given):
        missing = [name for name in vars(CallbackProtocol) if name[0] != "_" and not hasattr(given, name)]
        raise ConfigError(
            f"callback: {type(given).__name__} is neither a function nor a callback: it has no {', '.join(missing)}. "
            "Derive it from tailguard.monitor.callbacks.Callback, or from SB3's BaseCallback"
        )
    return _FunctionCallback(given)


def _iteration_callbacks(callbacks: Sequence[Any]) -> Iterator[Callback]:
    """Callbacks with hooks for iterations, also inside SB3's lists and events, which do not call these hooks."""
    for callback in callbacks:
        if isinstance(callback, Callback):
            yield callback
        else:
            inner = [*getattr(callback, "callbacks", ()), getattr(callback, "callback", None)]
            yield from _iteration_callbacks([part for part in inner if part is not None])


class CallbackLogger:
    """The `logger` of SB3's callbacks: what they record joins the iteration's metrics, the last value of each name."""

    def __init__(self, metrics: dict[str, Any]) -> None:
        self.metrics = metrics

    def record(self, key: str, value: Any, exclude: Any = None) -> None:  # noqa: ARG002
        """Add a metric; there are no output formats here to exclude it from."""
        self.metrics[key] = value

    def dump(self, step: int = 0) -> None:
        """Nothing is written before the iteration ends."""
