"""Hyper-parameters that change during training: schedules of progress, the entropy coefficient, and KL control.

Settings are frozen dataclasses; what changes is a small frozen state that ``update`` takes and returns, so that a
checkpoint holds it and nothing is hidden. All but :class:`KLStopper` run once an iteration on plain floats.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Self, cast, get_args

import torch
from torch import Tensor

from tailguard.errors import ConfigError

ScheduleKind = Literal["constant", "linear", "cosine", "exponential", "points"]


@dataclass(frozen=True)
class Schedule:
    """A number as a function of training progress in [0, 1], from ``start`` to ``end``, never below ``floor``."""

    kind: ScheduleKind
    """constant, linear, cosine (half a period), exponential (a constant factor per unit of progress), or points."""
    start: float
    """Value at progress 0."""
    end: float
    """Value at progress 1; equals start for a constant."""
    floor: float = -math.inf
    """Lower bound of the value."""
    points: tuple[float, ...] = ()
    """Values at equal steps of progress from 0 to 1, linear in between; for the kind points."""

    def __post_init__(self) -> None:
        if self.kind not in get_args(ScheduleKind):
            raise ConfigError(f"schedule {self.kind!r}; choose one of {', '.join(get_args(ScheduleKind))}")
        if not all(map(math.isfinite, self.values)):
            raise ConfigError(f"schedule {self.kind}: start {self.start} and end {self.end} must be finite")
        if self.kind == "constant" and self.start != self.end:
            raise ConfigError(f"schedule constant: start {self.start} and end {self.end} differ; give one value")
        if self.kind == "exponential" and not (self.start > 0 and self.end > 0):
            raise ConfigError(f"schedule exponential: start {self.start} and end {self.end} must be positive")

    @classmethod
    def parse(cls, spec: float | str | Sequence[str | float], floor: float = -math.inf) -> Self:
        """A schedule from ``3e-4``, ``"linear:3e-4:0"``, ``["linear", 3e-4, 0]`` or ``"points:3e-4:1e-4:1e-5"``."""
        if isinstance(spec, str):
            parts: Sequence[str | float] = spec.split(":")
        else:
            parts = [spec] if isinstance(spec, int | float) else spec
        try:
            if parts[0] == "points":
                points = tuple(map(float, parts[1:]))
                return cls("points", points[0], points[-1], floor, points)
            kind, start, end = parts if len(parts) != 1 else ("constant", parts[0], parts[0])
            start, end = float(start), float(end)
        except (TypeError, ValueError, IndexError) as error:
            raise ConfigError(
                f"schedule {repr(spec)[:80]}: give a number, or kind:start:end such as linear:3e-4:0"
            ) from error
        return cls(cast(ScheduleKind, kind), start, end, floor)

    @property
    def values(self) -> tuple[float, ...]:
        """Every value lies between two of these, apart from the floor."""
        return self.points or (self.start, self.end)

    def __call__(self, progress: float) -> float:
        progress = min(max(progress, 0.0), 1.0)
        if self.points:
            place = progress * (len(self.points) - 1)
            before = min(int(place), len(self.points) - 2)
            low, high = self.points[before : before + 2] if len(self.points) > 1 else (self.start, self.end)
            value = low + (high - low) * (place - before)
        elif self.kind == "exponential":
            value = self.start * math.pow(self.end / self.start, progress)
        else:
            remaining = 0.5 * (1 + math.cos(math.pi * progress)) if self.kind == "cosine" else 1 - progress
            value = self.end + (self.start - self.end) * remaining
        return max(value, self.floor)


def is_plateau(series: Sequence[float], tolerance: float) -> bool:
    """Whether a series has no trend: its least-squares slope is within two standard errors of zero, or the drift it
    makes from first to last is below ``tolerance`` times the mean absolute value (noise-free series creep for ever).
    """
    count = len(series)
    times = [index - (count - 1) / 2 for index in range(count)]
    spread = sum(time * time for time in times)
    mean = sum(series) / count
    slope = sum(time * value for time, value in zip(times, series, strict=True)) / spread
    residual = sum((value - mean - slope * time) ** 2 for time, value in zip(times, series, strict=True))
    standard_error = math.sqrt(residual / (count - 2) / spread)
    drift = abs(slope) * (count - 1)
    return abs(slope) <= 2 * standard_error or drift <= tolerance * sum(abs(value) for value in series) / count


@dataclass(frozen=True)
class EntropyState:
    """State of the entropy schedule."""

    history: tuple[float, ...] = ()
    """The monitored series since the last plateau, at most one window."""
    boosted: int = 0
    """Updates for which the boost still lasts."""
    plateaus: int = 0
    """Plateaus detected so far."""

    def to_dict(self) -> dict[str, Any]:
        """Plain numbers, for a checkpoint."""
        return {"history": list(self.history), "boosted": self.boosted, "plateaus": self.plateaus}

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Self:
        """The state that :meth:`to_dict` wrote."""
        return cls(tuple(float(value) for value in data["history"]), int(data["boosted"]), int(data["plateaus"]))


@dataclass(frozen=True)
class EntropySchedule:
    """The entropy coefficient: decay, plateau boost and floor, in this order.

    The coefficient follows ``decay`` whatever happens, so its end is reached on time. A plateau of the monitored series
    multiplies it by ``boost``; the extra fades linearly over the next ``window`` updates, and only a full window of new
    values can start another. The floor bounds the result.
    """

    decay: Schedule
    """The coefficient as a function of progress."""
    floor: float = 0.0
    """The coefficient is never below this; 0 or more."""
    window: int = 0
    """Updates without a trend that make a plateau, and updates a boost lasts; 3 or more, or 0 for no detection."""
    boost: float = 2.0
    """Factor on the coefficient when a plateau is found; 1 or more."""
    tolerance: float = 0.01
    """Drift over the window, relative to the series' mean absolute value, that still counts as none."""

    def __post_init__(self) -> None:
        if self.floor < 0:
            raise ConfigError(f"entropy floor {self.floor} is negative; give 0 or more")
        if self.window < 0 or self.window in (1, 2):
            raise ConfigError(f"entropy window {self.window} shows no trend; give 3 or more, or 0 for no detection")
        if self.boost < 1:
            raise ConfigError(f"entropy boost {self.boost} would lower the coefficient; give 1 or more")

    def update(self, state: EntropyState, monitored: float) -> EntropyState:
        """Add one value of the monitored series (mean episode reward, or policy entropy), once an iteration.

        A value that is not finite (no episode ended yet) is not an observation, but a running boost fades all the same.
        """
        if self.window == 0:
            return state
        boosted = max(state.boosted - 1, 0)
        history = (*state.history, monitored)[-self.window :] if math.isfinite(monitored) else state.history
        if len(history) == self.window and is_plateau(history, self.tolerance):
            return EntropyState((), self.window, state.plateaus + 1)
        return EntropyState(history, boosted, state.plateaus)

    def coefficient(self, state: EntropyState, progress: float) -> float:
        """The coefficient to train with."""
        extra = (self.boost - 1) * state.boosted / self.window if self.window else 0.0
        return max(self.decay(progress) * (1 + extra), self.floor)


@dataclass(frozen=True)
class AdaptiveKL:
    """Coefficient of a KL penalty that steers the KL to a target (Schulman et al. 2017, section 4)."""

    target: float = 0.01
    """The KL(old‖new) an iteration should make."""
    band: float = 1.5
    """No change while the KL is within target / band and target · band."""
    factor: float = 2.0
    """Multiplies or divides the coefficient outside the band."""
    minimum: float = 1e-4
    """Lower bound; above 0, or the coefficient could never rise again."""
    maximum: float = 100.0
    """Upper bound."""

    def __post_init__(self) -> None:
        if not (self.target > 0 and self.band >= 1 and self.factor > 1 and 0 < self.minimum <= self.maximum):
            raise ConfigError(f"adaptive KL: {self}: need target > 0, band ≥ 1, factor > 1 and 0 < minimum ≤ maximum")

    def update(self, coefficient: float, kl: float) -> float:
        """The next iteration's coefficient after one that ended with this KL."""
        if not math.isfinite(kl):
            raise ValueError(f"adaptive KL: the KL is {kl}; a batch that is not finite must not reach the penalty")
        if kl > self.target * self.band:
            coefficient *= self.factor
        elif kl < self.target / self.band:
            coefficient /= self.factor
        return min(max(coefficient, self.minimum), self.maximum)


@dataclass(frozen=True)
class KLStopState:
    """State of the stopper within one iteration: scalars on the device, so that deciding needs no host sync."""

    total: Tensor
    """Exponentially weighted sum of the KL."""
    weight: Tensor
    """The same sum of ones: total / weight is an average without start-up bias."""
    stopped: Tensor
    """Whether this iteration's remaining updates must be left out, a bool."""

    @classmethod
    def start(cls, device: torch.device | str | None = None, dtype: torch.dtype = torch.float32) -> Self:
        """The state at the beginning of an iteration."""
        zero = torch.zeros((), device=device, dtype=dtype)
        return cls(zero, zero.clone(), torch.zeros((), device=device, dtype=torch.bool))

    def take(self, other: KLStopState) -> None:
        """Copy another state's values into this one's storage."""
        self.total.copy_(other.total)
        self.weight.copy_(other.weight)
        self.stopped.copy_(other.stopped)

    def clear(self) -> None:
        """Reset to the start of an iteration, in place."""
        for value in (self.total, self.weight, self.stopped):
            value.zero_()

    @property
    def average(self) -> Tensor:
        """The averaged KL; NaN before the first update."""
        return self.total / self.weight

    def to_dict(self) -> dict[str, Tensor]:
        """Tensors by name, for a checkpoint."""
        return {"total": self.total, "weight": self.weight, "stopped": self.stopped}

    @classmethod
    def from_dict(cls, data: Mapping[str, Tensor]) -> Self:
        """The state that :meth:`to_dict` wrote."""
        return cls(data["total"], data["weight"], data["stopped"])


@dataclass(frozen=True)
class KLStopper:
    """Ends an iteration's updates early when the policy has moved too far."""

    average_limit: float = 0.015
    """Stop when the averaged KL exceeds this; about 1.5 times the KL wanted."""
    hard_limit: float = 0.1
    """Stop at once when a single minibatch's KL exceeds this."""
    decay: float = 0.5
    """Weight of the past in the average, 0 (last minibatch only) to below 1."""

    def __post_init__(self) -> None:
        if not (0 < self.average_limit <= self.hard_limit and 0 <= self.decay < 1):
            raise ConfigError(f"KL stop: {self}: need 0 < average_limit ≤ hard_limit and 0 ≤ decay < 1")

    def update(self, state: KLStopState, kl: Tensor) -> KLStopState:
        """Add one minibatch's KL (a scalar), before its optimiser step; a KL that is not a number stops too."""
        total = self.decay * state.total + (1 - self.decay) * kl.detach()
        weight = self.decay * state.weight + (1 - self.decay)
        within = (total <= self.average_limit * weight) & (kl.detach() <= self.hard_limit)
        return KLStopState(total, weight, state.stopped | ~within)
