"""Searched values in a run's settings: which may be searched, and how they are written into a config."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields, is_dataclass, replace
from typing import Any

from tailguard.algorithm.learner import Learner
from tailguard.algorithm.saving import capture
from tailguard.algorithm.schedules import Schedule
from tailguard.config import RunConfig, flat_settings, to_dict
from tailguard.envs.adapt import episode_length_of
from tailguard.errors import ConfigError
from tailguard.population.executor import Hyper, Value
from tailguard.population.space import SearchSpace, check_names
from tailguard.sealed import flat_tensors

SEARCHED = ("ppo", "pathwise", "risk", "robust")
"""Sections whose settings may change while an agent learns."""
FIXED = {
    "n_steps": "rollouts of several lengths do not end together",
    "runtime": "it changes no result",
    "monitor": "it changes no result",
    "confidence": "it acts on the finished agent, and members are judged before",
    "bound": "it acts on the finished agent, and members are judged before",
    "throttle": "it acts on the finished agent, and members are judged before",
    "volatility_half_life": "it belongs to the environment, which all members share",
    "feed": "it belongs to the bars, which all members share",
    "kl_penalty": "it is where an adaptive weight begins; search ppo.target_kl",
}
"""Settings of these sections that may not, by their last name, and why."""


def apply(config: RunConfig, hyper: Hyper) -> RunConfig:
    """The config with these values. Of a setting that is a schedule the value is the start, and its shape stays."""
    sections: dict[str, dict[str, Value]] = {}
    for name, value in hyper.items():
        section, _, rest = name.partition(".")
        sections.setdefault(section, {})[rest] = value
    return replace(config, **{name: _with(getattr(config, name), values) for name, values in sections.items()})


def _with(settings: Any, values: Mapping[str, Value]) -> Any:
    """A dataclass, or a table, with new values; all at once, because each may be valid only with the others."""
    own: dict[str, Any] = {}
    nested: dict[str, dict[str, Value]] = {}
    for name, value in values.items():
        first, _, rest = name.partition(".")
        if rest:
            nested.setdefault(first, {})[rest] = value
        else:
            now = settings[first] if isinstance(settings, dict) else getattr(settings, first)
            own[first] = scaled_schedule(now, value)
    for name, parts in nested.items():
        own[name] = _with(settings[name] if isinstance(settings, dict) else getattr(settings, name), parts)
    return {**settings, **own} if isinstance(settings, dict) else replace(settings, **own)


def scaled_schedule(now: Any, value: Value) -> Value:
    """A schedule of the same shape that begins at the value; where there is none, the value itself."""
    if not isinstance(now, str) or isinstance(value, str | bool):
        return value
    schedule = Schedule.parse(now)
    if schedule.kind == "constant" or schedule.start == 0:
        return value
    factor = value / schedule.start
    points = schedule.points or (schedule.start, schedule.end)
    return ":".join([schedule.kind, *(repr(float(point * factor)) for point in points)])


def check_space(config: RunConfig, space: SearchSpace) -> None:
    """Raise for settings that do not exist, have no effect, or may not change while an agent learns."""
    check_names(space, dict(flat_settings(to_dict(config))))
    for name in space.names:
        section, last = name.partition(".")[0], name.rpartition(".")[2]
        if section not in SEARCHED or ".network." in name:
            raise ConfigError(
                f"search space: {name}: it is fixed when an agent is made, and a member could not take over another's "
                f"state. Settings of {', '.join(SEARCHED)} can be searched, but for the network"
            )
        if section in ("ppo", "pathwise") and section != config.learner:
            raise ConfigError(f"search space: {name}: it has no effect, because the learner is {config.learner}")
        if last in FIXED:
            raise ConfigError(f"search space: {name}: it cannot be searched: {FIXED[last]}")
        if section == "risk" and not config.risk.enabled:
            raise ConfigError(f"search space: {name}: it has no effect, because risk.limit is not set")
        if isinstance(_setting(config, name), dict):
            raise ConfigError(f"search space: {name}: a section; name one of its settings")
    for each in space.dimensions:
        # Both ends now: a value that is refused must not end a population after hours.
        for value in each.values:
            try:
                apply(config, {each.name: value})
            except ConfigError as error:
                raise ConfigError(f"search space: {error}") from error
            except TypeError as error:
                raise ConfigError(f"search space: {each.name}: {value!r} is not a value of this setting") from error


def check_same_parts(name: str, value: Value, one: Learner, other: Learner) -> None:
    """Raise unless both learners consist of the same state: else neither could take over the other's."""
    if _outline(one) != _outline(other):
        raise ConfigError(
            f"search space: {name}: with {value!r} an agent has other parts than without, so that members could not "
            "take over each other's state. Leave this value out: of a weight, 0 often means that its part is not there"
        )


def _outline(learner: Learner) -> dict[str, Any]:
    shapes = {
        path: value.shape for name, part in capture(learner).items() for path, value in flat_tensors(part, f"{name}/")
    }
    return shapes | dict.fromkeys(learner.parts())


def put_in_force(learner: Learner, config: RunConfig) -> None:
    """Let a learner go on with the config's values, whatever its state was trained with.

    A learner built with the config has its rates, clips, weights, ε and the settings of VGS and UPGD; only the budget's
    limit and a fixed penalty are part of a restored state. A learner that lives on, as one of batched members, takes
    over the settings that are tensors (`OWN_SETTINGS`).
    """
    learner.config = config.chosen.completed(config.risk, episode_length_of(learner.env))
    if learner.risk is not None:
        learner.risk.set_limit(config.risk.limit, config.risk.penalty)
    learner.set_hyper()


def _setting(config: Any, name: str) -> Any:
    for part in name.split("."):
        config = config[part] if isinstance(config, dict) else getattr(config, part)
    if is_dataclass(config):
        return {item.name: None for item in fields(config)}
    return config
