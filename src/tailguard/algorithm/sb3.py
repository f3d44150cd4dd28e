"""Translate Stable-Baselines3's arguments to this learner's own; those without an equivalent are refused by name."""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import nn

from tailguard.algorithm.config import LearnerConfig
from tailguard.errors import ConfigError
from tailguard.monitor.callbacks import Callback

if TYPE_CHECKING:
    from tailguard.algorithm.learner import Learner

SETTINGS = {
    "batch_size": "minibatch_size",
    "n_epochs": "epochs",
    "ent_coef": "entropy_coef",
    "vf_coef": "value_coef",
    "normalize_advantage": "normalise_advantages",
    "clip_range_vf": "value_clip and value_clip_limit",
    "use_sde": 'std="state"',
}
"""Settings of SB3's PPO that have another name here."""
POLICY_KWARGS = (
    "net_arch",
    "activation_fn",
    "log_std_init",
    "squash_output",
    "lstm_hidden_size",
    "n_lstm_layers",
    "shared_lstm",
    "enable_critic_lstm",
)
"""Keys of SB3's `policy_kwargs` that are understood."""
RENAMED = {"lstm_hidden_size": "lstm_size", "n_lstm_layers": "lstm_layers", "squash_output": "squash"}
ACTIVATIONS: dict[type[nn.Module], str] = {nn.Tanh: "tanh", nn.SiLU: "silu", nn.ReLU: "relu"}
SCHEDULES = ("learning_rate", "clip_range")
"""Settings that may be functions of the remaining progress."""
SCHEDULE_POINTS = 1025
"""Points at which such a function is sampled; their spacing, 1/1024, is exact in floating point."""


def check_arguments(name: str, kind: type[LearnerConfig], env: Any, config: Any, options: Mapping[str, Any]) -> None:
    """Refuse arguments in SB3's form. `name`, `kind`: the learner and the class of its settings, for messages."""
    named = options.get("policy", env)
    if "policy" in options or (isinstance(env, str) and env.endswith("Policy")):
        raise ConfigError(
            f"policy: {named!r} was given. {name} has one kind of policy and takes no name for it: call "
            f"{name}(env, …). hidden, memory and lstm_size set the network; `tailguard config {kind.section}` lists all"
        )
    if config is not None and not isinstance(config, kind):
        raise ConfigError(
            f"config: {type(config).__name__} was given; it must be a {kind.__name__}. Single settings are keyword "
            f"arguments: {name}(env, n_steps=64)"
        )
    for setting in options.keys() & SETTINGS.keys():
        raise ConfigError(f"{setting}: is called {SETTINGS[setting]} here")


def network_options(given: Mapping[str, Any] | None, options: Mapping[str, Any]) -> dict[str, Any]:
    """SB3's `policy_kwargs` as settings of the network. `options` are those given by this learner's own names."""
    if given is None:
        return {}
    unknown = sorted(given.keys() - set(POLICY_KWARGS))
    if unknown:
        raise ConfigError(
            f"policy_kwargs: {', '.join(unknown)} cannot be set here; {', '.join(POLICY_KWARGS)} can. This learner's "
            "own names for the network are keyword arguments: `tailguard config ppo` lists them"
        )
    settings = {RENAMED.get(name, name): value for name, value in given.items() if name in RENAMED}
    if "log_std_init" in given:
        settings["log_std_init"] = float(given["log_std_init"])
    if "net_arch" in given:
        settings["hidden"] = _hidden(given["net_arch"])
    if "activation_fn" in given:
        if given["activation_fn"] not in ACTIVATIONS:
            known = ", ".join(f"nn.{kind.__name__}" for kind in ACTIVATIONS)
            raise ConfigError(f"policy_kwargs: activation_fn {given['activation_fn']!r} is not one of {known}")
        settings["activation"] = ACTIVATIONS[given["activation_fn"]]
    if "shared_lstm" in given or "enable_critic_lstm" in given:
        settings["memory"] = _memory(given)
    twice = sorted(settings.keys() & options.keys())
    if twice:
        raise ConfigError(f"policy_kwargs: {', '.join(twice)} was given as a setting too; give it once")
    return settings


def _hidden(net_arch: Any) -> tuple[int, ...]:
    layers = net_arch
    if isinstance(net_arch, Mapping):
        layers = net_arch.get("pi", ())
        if net_arch.keys() != {"pi", "vf"} or list(layers) != list(net_arch["vf"]):
            raise ConfigError(
                f"policy_kwargs: net_arch {dict(net_arch)}: actor and critic have encoders of the same widths here. "
                "Give one list, or hidden=(…)"
            )
    if not isinstance(layers, list | tuple) or not all(isinstance(width, int) for width in layers):
        raise ConfigError(f"policy_kwargs: net_arch {net_arch!r} is not a list of widths, as [64, 64]")
    return tuple(layers)


def _memory(given: Mapping[str, Any]) -> str:
    if given.get("shared_lstm", False):
        return "shared"
    if given.get("enable_critic_lstm", True):
        return "separate"
    raise ConfigError(
        "policy_kwargs: an LSTM for the actor alone is not available; memory can be separate, shared or none"
    )


def sample_schedules(options: Mapping[str, Any]) -> dict[str, Any]:
    """The options with functions of SB3's `progress_remaining` (1 at the start, 0 at the end) as schedules of numbers.

    Numbers can be saved with the agent, and mean the same after it is loaded; functions cannot.
    """
    return {
        name: _sampled(name, value) if name in SCHEDULES and callable(value) else value
        for name, value in options.items()
    }


def _sampled(name: str, function: Callable[[float], float]) -> float | str:
    last = SCHEDULE_POINTS - 1
    try:
        values = [float(function(1.0 - index / last)) for index in range(SCHEDULE_POINTS)]
    except (TypeError, ValueError, ArithmeticError) as error:
        raise ConfigError(
            f"{name}: a function must give a number for every remaining progress from 1 to 0: {error!r}"
        ) from error
    start, end = values[0], values[-1]
    size = max(map(abs, values))
    # Rounding apart, most are constant or linear, and then the setting says so.
    if all(abs(value - start) <= 1e-12 * size for value in values):
        return start
    if all(abs(value - start - (end - start) * i / last) <= 1e-12 * size for i, value in enumerate(values)):
        return f"linear:{start!r}:{end!r}"
    return ":".join(["points", *map(repr, values)])


def whole_number(name: str, value: Any) -> int:
    """An int from an int of any kind or a whole float, as 1e6."""
    if isinstance(value, float) and value.is_integer():
        return int(value)
    try:
        return value if isinstance(value, bool) else operator.index(value)  # a bool is refused as a count
    except TypeError:
        raise ConfigError(f"{name}: {value!r} is not a whole number") from None


def make_writers(learner: Learner, log_interval: int, run_name: str, *, new_run: bool) -> list[Callback]:
    """What `verbose` and `tensorboard_log` ask for: a table of the metrics, and curves in a numbered folder.

    `new_run`: take a new number; otherwise the last run's curves continue.
    """
    writers: list[Callback] = []
    if learner.verbose:
        from tailguard.monitor.writers import ConsoleTable

        writers.append(ConsoleTable(every=log_interval))
    if learner.tensorboard_log is not None:
        from tailguard.monitor.tensorboard import TensorBoardWriter

        folder = Path(learner.tensorboard_log)
        endings = [path.name.removeprefix(f"{run_name}_") for path in folder.glob(f"{run_name}_*")]
        last = max((int(ending) for ending in endings if ending.isdecimal()), default=0)
        writers.append(TensorBoardWriter(folder / f"{run_name}_{max(1, last + new_run)}"))
    return writers
