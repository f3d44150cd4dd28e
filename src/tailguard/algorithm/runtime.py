"""Execution modes of the learner: eager, compiled, or recorded (captured) as CUDA graphs and replayed.

A recorded function is one launch instead of thousands. A CUDA graph always works on the same memory, so everything that
lives from one iteration to the next keeps its storage: weights, statistics and hyper-parameters are updated in place,
and a new value that a function returns goes through `Runtime.copy_in_place`.

The first iterations run unrecorded. They are real iterations, and let compilers, optimisers and libraries allocate what
they allocate on first use. Recording itself computes nothing, and random generators advance inside a graph exactly as
they would outside.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from types import FunctionType
from typing import Any, Literal, TypeVar, cast

import torch
from torch import Tensor

from tailguard.envs.protocol import FunctionalEnv

RuntimeKind = Literal["auto", "eager", "compile", "graph"]
Mode = Literal["eager", "compile", "graph"]

# What is created on first use, such as the optimiser's moments, must exist before capture.
WARMUP = 2
"""Iterations before anything is recorded."""

Kept = TypeVar("Kept")
Structure = TypeVar("Structure")
Result = TypeVar("Result")


def obstacle(env: Any, device: torch.device, on_nonfinite: str) -> str | None:
    """Why iterations cannot be recorded here, in words; None if they can."""
    # Beyond the device, both obstacles would need a value on the host in the middle of an iteration.
    if device.type != "cuda":
        return f"CUDA graphs need a GPU, and this is {device.type}"
    if not isinstance(env, FunctionalEnv):
        return f"the steps of {type(env).__name__} are not a pure function of tensors (see FunctionalEnv)"
    if on_nonfinite == "skip":
        return "on_nonfinite: skip has to look at every minibatch"
    return None


class Runtime:
    """Runs functions in one of the three ways."""

    def __init__(self, kind: RuntimeKind, env: Any, device: torch.device, on_nonfinite: str) -> None:
        why_not = obstacle(env, device, on_nonfinite)
        self.refusal: str | None = None
        """Message for the user if graphs were requested and are not possible."""
        self.mode: Mode = "eager" if kind == "auto" else kind
        if kind == "graph" and why_not is not None:
            self.mode = "eager"
            self.refusal = f"runtime: running eagerly, not as a graph: {why_not}"
        if kind == "auto" and device.type == "cuda":
            self.mode = "graph" if why_not is None else "eager"
            self.refusal = None if why_not is None else f"runtime: running eagerly, which is slower: {why_not}"
        self.device = device
        self.generators: list[torch.Generator] = []
        """Random streams that recorded functions draw from."""
        self.iterations = 0
        self._compiled: dict[str, Callable[..., Any]] = {}
        self._recorded: dict[Hashable, _Recorded] = {}
        self._pool: Any = None

    @property
    def can_sync(self) -> bool:
        """Whether a value on the device may be read in the middle of an iteration."""
        return self.mode != "graph"

    @property
    def recording(self) -> bool:
        """Whether functions are recorded and replayed by now."""
        return self.mode == "graph" and self.iterations >= WARMUP

    def compiled(self, function: Callable[..., Result]) -> Callable[..., Result]:
        """The function, compiled for fixed shapes unless the mode is eager."""
        if self.mode == "eager":
            return function
        name = function.__qualname__
        if name not in self._compiled:
            # The compiler counts recompilations by code object: every learner must have its own.
            own = FunctionType(function.__code__.replace(), function.__globals__, name, function.__defaults__)
            self._compiled[name] = torch.compile(own, dynamic=False)
        return self._compiled[name]

    def run(self, key: Hashable, function: Callable[..., Result], *inputs: Tensor) -> Result:
        """Call the function; when recording, replay what was recorded under this key, on copies of the inputs.

        What it returns is then the same memory every time.
        """
        if not self.recording:
            return function(*inputs)
        if key not in self._recorded:
            self._recorded[key] = self._record(function, inputs)
        result: Result = self._recorded[key].replay(inputs)
        return result

    def copy_in_place(self, before: Kept, after: Kept) -> Kept:
        """The successor of `before`: when recording, `before` itself, overwritten with the new values."""
        if not self.recording:
            return after
        copy_into(before, after)
        return before

    def kept_for_backward(self, before: Kept) -> Kept:
        """What a gradient may start from: when recording with gradient, a copy.

        `copy_in_place` overwrites `before` as soon as the rollout is collected, and the backward pass comes later.
        """
        if not (self.recording and torch.is_grad_enabled()):
            return before
        return cloned(before)

    def forget(self) -> None:
        """Drop all recordings: some tensor has moved to other memory, as when a state is loaded."""
        self._recorded.clear()
        self._pool = None  # it ends with the last graph that was recorded in it

    def _record(self, function: Callable[..., Any], inputs: Sequence[Tensor]) -> _Recorded:
        # One pool for all graphs: they never run at the same time, so their temporaries may overlap.
        if self._pool is None:
            self._pool = torch.cuda.graph_pool_handle()
        graph = torch.cuda.CUDAGraph()
        # A registered generator advances with every replay; an unregistered one cannot be used inside a graph.
        for generator in self.generators:
            graph.register_generator_state(generator)
        # The graph reads these copies at fixed addresses; `replay` fills them with the caller's values.
        held = tuple(value.clone() for value in inputs)
        with torch.cuda.device(self.device), torch.cuda.graph(graph, pool=self._pool):
            result = function(*held)
        return _Recorded(graph, held, result)


@dataclasses.dataclass(frozen=True)
class _Recorded:
    graph: torch.cuda.CUDAGraph
    inputs: tuple[Tensor, ...]
    result: Any

    def replay(self, inputs: Sequence[Tensor]) -> Any:
        for mine, given in zip(self.inputs, inputs, strict=True):
            # Ordered on the stream before the graph: no wait for the device.
            mine.copy_(given)
        self.graph.replay()
        return self.result


def copy_into(before: Any, after: Any) -> None:
    """Copy all tensors of a structure into those of another one of the same kind."""
    old, new = list(tensors_of(before)), list(tensors_of(after))
    if len(old) != len(new):
        raise ValueError(f"a structure of {len(new)} tensors cannot take the place of one of {len(old)}")
    for mine, value in zip(old, new, strict=True):
        if mine.shape != value.shape:
            raise ValueError(f"a tensor of shape {tuple(value.shape)} cannot take the place of {tuple(mine.shape)}")
        # A function that updated in place returns the same tensor.
        if mine is not value:
            mine.copy_(value)


def tensors_of(structure: Any) -> Iterator[Tensor]:
    """All tensors in dataclasses, mappings and sequences, in a fixed order."""
    if isinstance(structure, Tensor):
        yield structure
    elif dataclasses.is_dataclass(structure):
        for field in dataclasses.fields(structure):
            yield from tensors_of(getattr(structure, field.name))
    elif isinstance(structure, Mapping):
        for value in structure.values():
            yield from tensors_of(value)
    elif isinstance(structure, Sequence) and not isinstance(structure, str):
        for value in structure:
            yield from tensors_of(value)


def detached(structure: Structure) -> Structure:
    """The same tensors in the same places, without their history."""
    return mapped(Tensor.detach, structure)


def cloned(structure: Structure) -> Structure:
    """Copies of the tensors in the same places."""
    return mapped(Tensor.clone, structure)


def mapped(function: Callable[[Tensor], Tensor], structure: Structure) -> Structure:
    """The structure with the function of each of its tensors."""
    if isinstance(structure, Tensor):
        return cast(Structure, function(structure))
    if dataclasses.is_dataclass(structure) and not isinstance(structure, type):
        changed = {item.name: mapped(function, getattr(structure, item.name)) for item in dataclasses.fields(structure)}
        return dataclasses.replace(structure, **changed)
    if isinstance(structure, dict):
        return cast(Structure, {name: mapped(function, value) for name, value in structure.items()})
    if isinstance(structure, tuple):
        return cast(Structure, tuple(mapped(function, value) for value in structure))
    return structure
