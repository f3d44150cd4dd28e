"""An object for several processes whose arrays exist once: in a file that all of them map into memory."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from tailguard.market.tables import as_tensor

Array = NDArray[Any]
ALIGNMENT = 64
"""Bytes; arrays begin at multiples of it."""


@dataclass(frozen=True)
class Placeholder:
    """Where an array or a tensor was."""

    number: int
    is_tensor: bool


def take_arrays_out(value: Any) -> tuple[Any, list[Array]]:
    """The object with placeholders for its arrays and CPU tensors, and the arrays; the object itself is unchanged.

    It looks into tuples, lists, dicts and objects of this package; everything else stays as it is.
    """
    arrays: list[Array] = []
    known: dict[int, Any] = {}

    def take(part: Any) -> Any:
        if isinstance(part, Tensor) and part.device.type == "cpu" and part.dtype != torch.bfloat16:
            arrays.append(np.ascontiguousarray(part.detach().numpy()))
            return Placeholder(len(arrays) - 1, is_tensor=True)
        if isinstance(part, np.ndarray) and part.dtype.kind in "biufM":
            arrays.append(np.ascontiguousarray(part))
            return Placeholder(len(arrays) - 1, is_tensor=False)
        return part

    return _mapped(value, take, known), arrays


def put_arrays_back(value: Any, arrays: Sequence[Array]) -> Any:
    """The object with these arrays for its placeholders; they are not copied."""

    def put(part: Any) -> Any:
        if not isinstance(part, Placeholder):
            return part
        array = arrays[part.number]
        return as_tensor(array) if part.is_tensor else array

    return _mapped(value, put, {})


def _mapped(value: Any, change: Callable[[Any], Any], known: dict[int, Any]) -> Any:
    """The object with every part changed; one that occurs twice stays one."""
    if id(value) in known:
        return known[id(value)][1]
    found = change(value)
    if found is value and type(value) in (tuple, list):
        found = type(value)(_mapped(part, change, known) for part in value)
    elif found is value and type(value) is dict:
        found = {name: _mapped(part, change, known) for name, part in value.items()}
    elif found is value and _is_own(value):
        found = object.__new__(type(value))
        for name, part in vars(value).items():
            object.__setattr__(found, name, _mapped(part, change, known))
    known[id(value)] = (value, found)  # with the value, or its id could be given to another object
    return found


def _is_own(value: Any) -> bool:
    kind = type(value)
    return kind.__module__.startswith("tailguard.") and kind is not Placeholder and hasattr(value, "__dict__")


@dataclass(frozen=True)
class SharedObject:
    """An object without its arrays, and the file that has them."""

    outline: Any
    path: Path
    places: tuple[tuple[int, str, tuple[int, ...]], ...]
    """Offset, dtype and shape of each array."""

    def open(self) -> Any:
        """The object; its arrays are read-only and share the file's memory with those of other processes."""
        whole = np.memmap(self.path, mode="r")
        arrays = []
        for begin, dtype, shape in self.places:
            size = int(np.prod(shape)) * np.dtype(dtype).itemsize
            arrays.append(np.asarray(whole[begin : begin + size]).view(dtype).reshape(shape))
        return put_arrays_back(self.outline, arrays)


def share(value: Any, path: Path) -> SharedObject:
    """Write the arrays of an object to a file, and return what other processes open it by."""
    outline, arrays = take_arrays_out(value)
    places, end = [], 0
    with path.open("wb") as file:
        for array in arrays:
            end = -(-end // ALIGNMENT) * ALIGNMENT
            file.seek(end)
            file.write(array.tobytes())
            places.append((end, array.dtype.str, array.shape))
            end += array.nbytes
        file.truncate(max(end, 1))  # an empty file cannot be mapped
        file.flush()
        os.fsync(file.fileno())
    return SharedObject(outline, path, tuple(places))
