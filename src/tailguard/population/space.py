"""The search space: which settings a population varies, in which range, and how a value moves.

A file of YAML with one line a setting:

    pathwise.learning_rate: {log: [1.0e-4, 1.0e-1]}
    risk.ki: {linear: [0.02, 0.2], start: 0.1}
    ppo.epochs: {integer: [1, 8]}
    ppo.normalise_advantages: {choice: [global, per_env]}

`start` is the first value of every member, or the range that first values are drawn from.
"""

from __future__ import annotations

import difflib
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, get_args

import numpy as np

from tailguard.errors import ConfigError
from tailguard.plain_yaml import read_yaml
from tailguard.population.executor import Hyper, Value

Scale = Literal["log", "linear", "integer", "choice"]
FORMS = "{log: [low, high]}, {linear: [low, high]}, {integer: [low, high]} or {choice: [a, b, …]}"


@dataclass(frozen=True)
class Dimension:
    """One setting, and the values that it may have."""

    name: str
    scale: Scale
    values: tuple[Value, ...]
    """Lowest and highest of a range; all values of a choice."""
    start: tuple[Value, ...] = ()
    """First value, or the range of first values; empty: all of `values`."""

    @property
    def low(self) -> float:
        return float(self.values[0])

    @property
    def high(self) -> float:
        return float(self.values[-1])

    def draw(self, random: np.random.Generator) -> Value:
        """A value of the whole range, uniform on its scale."""
        return self._draw(self.values, random)

    def first(self, random: np.random.Generator) -> Value:
        """A value to begin with."""
        return self._draw(self.start or self.values, random)

    def _draw(self, values: tuple[Value, ...], random: np.random.Generator) -> Value:
        if len(values) == 1:
            return values[0]
        if self.scale == "choice":
            return values[int(random.integers(len(values)))]
        low, high = float(values[0]), float(values[-1])
        if self.scale == "integer":
            return int(random.integers(int(low), int(high) + 1))
        if self.scale == "linear":
            return float(random.uniform(low, high))
        small, large = sorted((abs(low), abs(high)))
        return self.clamp(math.copysign(math.exp(random.uniform(math.log(small), math.log(large))), low))

    def perturb(self, value: Value, factors: Sequence[float], random: np.random.Generator) -> Value:
        """The value times one of the factors, within the range. A choice of numbers moves to a neighbour."""
        number = int(random.integers(len(factors)))
        if self.scale == "choice":
            return self._neighbour(value, up=factors[number] > 1, random=random)
        if float(value) == 0:
            return self.draw(random)  # a factor cannot move it
        moved = float(value) * factors[number]
        if self.scale == "integer":
            # Small whole numbers would round back to where they were.
            step = 1 if factors[number] > 1 else -1
            whole = round(moved)
            moved = whole if whole != value else int(value) + step
        return self.clamp(moved)

    def _neighbour(self, value: Value, *, up: bool, random: np.random.Generator) -> Value:
        ordered = [each for each in self.values if isinstance(each, int | float) and not isinstance(each, bool)]
        if len(ordered) < len(self.values) or ordered != sorted(ordered):
            return self.draw(random)  # names have no order
        place = self.values.index(value) + (1 if up else -1)
        return self.values[min(max(place, 0), len(self.values) - 1)]

    def clamp(self, value: float) -> Value:
        """The nearest value of the range."""
        inside = min(max(value, self.low), self.high)
        return int(inside) if self.scale == "integer" else float(inside)

    def holds(self, value: Value) -> bool:
        """Whether the value is one of the range."""
        if self.scale == "choice":
            return value in self.values
        return self.low <= float(value) <= self.high

    def to_dict(self) -> dict[str, Any]:
        """As the search space's file says it."""
        start = {} if not self.start else {"start": self.start[0] if len(self.start) == 1 else list(self.start)}
        return {self.scale: list(self.values), **start}


@dataclass(frozen=True)
class SearchSpace:
    """The settings that a population varies."""

    dimensions: tuple[Dimension, ...]

    @classmethod
    def parse(cls, given: Mapping[str, Any], source: str = "search space") -> SearchSpace:
        """From settings and their ranges, as the file has them. Names are checked by `check_names`."""
        if not isinstance(given, Mapping) or not given:
            raise ConfigError(f"{source}: no settings to search. Write lines such as ppo.learning_rate: {FORMS}")
        return cls(tuple(_dimension(str(name), entry, source) for name, entry in given.items()))

    @classmethod
    def read(cls, path: Path) -> SearchSpace:
        """From a YAML file."""
        return cls.parse(read_yaml(path), str(path))

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(each.name for each in self.dimensions)

    def first(self, random: np.random.Generator) -> dict[str, Value]:
        """Values of a member that begins."""
        return {each.name: each.first(random) for each in self.dimensions}

    def draw(self, random: np.random.Generator) -> dict[str, Value]:
        """Values of the whole space."""
        return {each.name: each.draw(random) for each in self.dimensions}

    def perturb(
        self, hyper: Hyper, factors: Sequence[float], resample: float, random: np.random.Generator
    ) -> dict[str, Value]:
        """Every value times a factor of its own, or with the probability `resample` a new one."""
        moved = {}
        for each in self.dimensions:
            if random.random() < resample:
                moved[each.name] = each.draw(random)
            else:
                moved[each.name] = each.perturb(hyper[each.name], factors, random)
        return moved

    def resample(self, hyper: Hyper, share: float, random: np.random.Generator) -> dict[str, Value]:
        """Every value drawn anew with the probability `share`, else as it was."""
        return {
            each.name: each.draw(random) if random.random() < share else hyper[each.name] for each in self.dimensions
        }

    def check(self, hyper: Hyper) -> None:
        """Raise unless there is a value of its range for every setting, and no other."""
        if set(hyper) != set(self.names):
            raise ConfigError(f"values of {', '.join(sorted(hyper))}; the search space has {', '.join(self.names)}")
        for each in self.dimensions:
            if not each.holds(hyper[each.name]):
                raise ConfigError(f"{each.name}: {hyper[each.name]!r} is outside {each.scale} {list(each.values)}")

    def to_dict(self) -> dict[str, Any]:
        """As its file says it."""
        return {each.name: each.to_dict() for each in self.dimensions}


def check_names(space: SearchSpace, known: Mapping[str, Any], source: str = "search space") -> None:
    """Raise for a name that is no setting, with the nearest one."""
    for name in space.names:
        if name not in known:
            near = difflib.get_close_matches(name, list(known), n=1)
            hint = f"Did you mean {near[0]}?" if near else "`tailguard config` lists all settings."
            raise ConfigError(f"{source}: {name}: no such setting. {hint}")


def _dimension(name: str, given: Any, source: str) -> Dimension:
    where = f"{source}: {name}"
    if not isinstance(given, Mapping):
        raise ConfigError(f"{where}: {given!r} is no range; give {FORMS}")
    scales = [key for key in given if key in get_args(Scale)]
    unknown = [str(key) for key in given if key not in (*get_args(Scale), "start")]
    if unknown:
        near = difflib.get_close_matches(unknown[0], [*get_args(Scale), "start"], n=1)
        hint = f"Did you mean {near[0]}?" if near else f"Give {FORMS}"
        raise ConfigError(f"{where}: {unknown[0]}: no such kind of range. {hint}")
    if len(scales) != 1:
        raise ConfigError(f"{where}: one kind of range is needed, and there are {len(scales)}; give {FORMS}")
    scale: Scale = scales[0]
    values = _values(where, scale, given[scale])
    dimension = Dimension(name, scale, values)
    if "start" not in given:
        return dimension
    first = given["start"]
    start = tuple(_as_number(each) for each in (first if isinstance(first, list) else [first]))
    for each in start:
        try:
            inside = dimension.holds(each)
        except (TypeError, ValueError):
            inside = False
        if not inside:
            raise ConfigError(f"{where}: start {each!r} is outside {scale} {list(values)}")
    if scale != "choice" and (len(start) > 2 or list(start) != sorted(start, key=float)):
        raise ConfigError(f"{where}: start {list(start)}; give one value, or a range [low, high]")
    return Dimension(name, scale, values, start)


def _values(where: str, scale: Scale, given: Any) -> tuple[Value, ...]:
    if not isinstance(given, list) or not all(isinstance(each, int | float | str | bool) for each in given):
        raise ConfigError(f"{where}: {scale}: {given!r} is not a list of values")
    if scale == "choice":
        values = tuple(_as_number(each) for each in given)
        if len(set(map(repr, values))) < max(len(values), 2):
            raise ConfigError(f"{where}: choice: {given!r}; give two or more different values")
        return values
    numbers = [_as_number(each) for each in given]
    if len(numbers) != 2 or not all(isinstance(each, int | float) and not isinstance(each, bool) for each in numbers):
        raise ConfigError(f"{where}: {scale}: {given!r}; give two numbers, [low, high]")
    low, high = (float(each) for each in numbers)
    if not (math.isfinite(low) and math.isfinite(high) and low < high):
        raise ConfigError(f"{where}: {scale}: {given!r}; give [low, high] with low < high")
    if scale == "log" and low * high <= 0:
        raise ConfigError(f"{where}: log: {given!r} must not touch 0; give a linear range, or bounds of one sign")
    if scale == "integer":
        if not (low.is_integer() and high.is_integer()):
            raise ConfigError(f"{where}: integer: {given!r} are not whole numbers")
        return (int(low), int(high))
    return (low, high)


def _as_number(value: Any) -> Value:
    """YAML reads 1e-4 as text; it means a number."""
    if isinstance(value, str):
        try:
            return float(value)
        except ValueError:
            return value
    if isinstance(value, int | float | bool):
        return value
    raise ConfigError(f"{value!r} is not a number, a word, true or false")
