"""Gymnasium's spaces as rows of numbers: observations in, actions out."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from gymnasium import spaces
from numpy.typing import NDArray
from torch import Tensor

from tailguard.envs.protocol import ActionSpace, Box, Discrete
from tailguard.errors import ConfigError, TailguardError


@dataclass(frozen=True)
class _Columns:
    """The columns of a flat observation that one leaf of the observation space fills."""

    path: tuple[str | int, ...]
    """Keys from the whole observation to this leaf."""
    start: int
    stop: int
    shape: tuple[int, ...]
    """Of the leaf in one observation."""
    one_hot: NDArray[np.int64] | None
    """For discrete leaves the offset from each variable's value to its column, [K]; None: values are used directly."""


class FlatObservations:
    """Batched observations of a space as float32 rows, in the column order of `gymnasium.spaces.flatten`."""

    def __init__(self, space: spaces.Space[Any], name: str) -> None:
        self.columns: list[_Columns] = []
        self.size = 0
        for path, leaf in _leaves(space, (), name):
            one_hot = None
            if isinstance(leaf, spaces.Discrete | spaces.MultiDiscrete):
                sizes, smallest = _choices(leaf)
                one_hot = self.size + np.cumsum(sizes) - sizes - smallest
            start, self.size = self.size, self.size + spaces.flatdim(leaf)
            self.columns.append(_Columns(path, start, self.size, tuple(leaf.shape or ()), one_hot))

    def count(self, observation: Any) -> tuple[int, bool]:
        """The number of observations, and whether a single one was given; raise unless each leaf has its shape."""
        counts: set[int | None] = set()
        for columns in self.columns:
            where = "observation" + "".join(f"[{key!r}]" for key in columns.path)
            leaf = observation
            try:
                for key in columns.path:
                    leaf = leaf[key]
                shape = np.shape(leaf)
            except (KeyError, IndexError, TypeError, ValueError) as error:
                raise ConfigError(f"{where}: cannot be read from the given observation: {error!r}") from error
            if shape != columns.shape and shape[1:] != columns.shape:
                batch = str(("n", *columns.shape)).replace("'", "")
                raise ConfigError(f"{where} has shape {shape}; the agent reads {columns.shape} or a batch {batch}")
            counts.add(None if shape == columns.shape else shape[0])
        if len(counts) > 1:
            raise ConfigError(f"observation: its parts are batches of different sizes: {sorted(map(str, counts))}")
        (count,) = counts
        return (1, True) if count is None else (count, False)

    def flatten(self, observations: Any, rows: int) -> NDArray[np.float32]:
        """A fresh array, [rows, O], that shares no memory with the environments'."""
        flat = np.empty((rows, self.size), dtype=np.float32)
        for columns in self.columns:
            values = observations
            for key in columns.path:
                values = values[key]
            values = np.asarray(values).reshape(rows, -1)
            if columns.one_hot is None:
                flat[:, columns.start : columns.stop] = values
            else:
                flat[:, columns.start : columns.stop] = 0.0
                flat[np.arange(rows)[:, None], columns.one_hot + values] = 1.0
        return flat


def _leaves(
    space: spaces.Space[Any], path: tuple[str | int, ...], name: str
) -> Iterator[tuple[tuple[str | int, ...], spaces.Space[Any]]]:
    if isinstance(space, spaces.Dict | spaces.Tuple):
        parts = space.items() if isinstance(space, spaces.Dict) else enumerate(space)
        for key, part in parts:
            yield from _leaves(part, (*path, key), name)
    elif isinstance(space, spaces.Box | spaces.Discrete | spaces.MultiDiscrete | spaces.MultiBinary):
        yield path, space
    else:
        where = "".join(f"[{key!r}]" for key in path)
        raise TailguardError(
            f"{name}: observation{where} is {space}, which is not a fixed row of numbers. Use Box, Discrete, "
            "MultiDiscrete, MultiBinary, or a Dict or Tuple of them, for example through an ObservationWrapper."
        )


def _choices(space: spaces.Discrete | spaces.MultiDiscrete) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """The number of values and the smallest value of each variable, both [K]."""
    sizes = space.n if isinstance(space, spaces.Discrete) else space.nvec
    return np.asarray(sizes, dtype=np.int64).reshape(-1), np.asarray(space.start, dtype=np.int64).reshape(-1)


@dataclass(frozen=True)
class GymnasiumActions:
    """An action space, and the conversion of action tensors to Gymnasium's format."""

    space: ActionSpace
    shape: tuple[int, ...]
    dtype: np.dtype[Any]
    smallest: NDArray[np.int64] | None
    """The value of choice 0 of each variable, [K]; None for a box."""

    @classmethod
    def of(cls, space: spaces.Space[Any], name: str) -> GymnasiumActions:
        if isinstance(space, spaces.Box) and np.issubdtype(space.dtype, np.floating):
            low, high = _inner_bounds(space)
            return cls(Box(low, high), space.shape, space.dtype, smallest=None)
        if isinstance(space, spaces.Discrete | spaces.MultiDiscrete):
            sizes, smallest = _choices(space)
            return cls(Discrete(tuple(sizes.tolist())), space.shape or (), space.dtype, smallest)
        raise TailguardError(
            f"{name}: the action space is {space}. Use a Box of floats, Discrete or MultiDiscrete, "
            "for example through an ActionWrapper."
        )

    def space_on(self, device: torch.device) -> ActionSpace:
        if isinstance(self.space, Discrete):
            return self.space
        return Box(self.space.low.to(device), self.space.high.to(device))

    def decode(self, action: Tensor) -> NDArray[Any]:
        values = action.detach().cpu().numpy()
        if self.smallest is not None:
            values = values.reshape(len(values), -1) + self.smallest
        return values.reshape(len(values), *self.shape).astype(self.dtype)


def _inner_bounds(space: spaces.Box) -> tuple[Tensor, Tensor]:
    """Bounds as float32, [A] each, rounded inwards so that a float32 action at a bound is inside a float64 space."""
    low, high = space.low.reshape(-1), space.high.reshape(-1)
    low32, high32 = low.astype(np.float32), high.astype(np.float32)
    infinity = np.float32(np.inf)
    low32 = np.where(low32 < low, np.nextafter(low32, infinity), low32)
    high32 = np.where(high32 > high, np.nextafter(high32, -infinity), high32)
    return torch.from_numpy(low32), torch.from_numpy(high32)
