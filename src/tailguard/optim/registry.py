"""The table of optimisers that the setting `optimizer` names, and what others must know of each.

One of one's own is one entry, from inside the package or from outside:

    class Sign(torch.optim.SGD): ...

    register_optimizer(
        OptimizerKind("sign", Sign, lambda parameters, given: Sign(parameters, lr=given.learning_rate), scale_free=True)
    )
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor, nn
from torch.optim import Adam, AdamW, Optimizer

from tailguard.errors import ConfigError
from tailguard.optim.upgd import UPGD, UPGDW, AdaptiveUPGD
from tailguard.optim.utility import UtilityOptimizer
from tailguard.returns import COMMON_MOMENTS, GRADIENT, SQUARED_GRADIENT, UTILITY, MomentPowers

if TYPE_CHECKING:
    from tailguard.optim.config import UPGDConfig

Parameters = list[nn.Parameter] | list[dict[str, Any]]
"""All parameters, or groups of them, each with an `lr` of its own where it differs."""

ADAM_EPS = 1e-5
"""Baselines' value for PPO: gradients are small, and torch's 1e-8 would let their noise take whole steps."""


@dataclass(frozen=True)
class OptimizerSettings:
    """What the settings of a learner give to its optimiser."""

    learning_rate: Tensor
    """A 0-dim tensor. The optimiser must hold it itself: the schedule writes the step size into it."""
    weight_decay: float
    upgd: UPGDConfig
    seed: int


@dataclass(frozen=True)
class OptimizerKind:
    """An optimiser: how it is made from the settings, and how it behaves where others must know."""

    name: str
    """In the setting `optimizer`."""
    type: type[Optimizer]
    make: Callable[[Parameters, OptimizerSettings], Optimizer]
    """Its step must read no value on the host where it is to be recorded as a CUDA graph. An optimiser that draws
    random numbers keeps its generators in `generators`, by device; they are saved with the agent."""
    moments: Mapping[str, MomentPowers] = field(default_factory=dict)
    """What each tensor of its state is an average of, by name, for a change of the return's scale."""
    scale_free: bool = False
    """Whether it divides the gradient by its own size, so that a factor on the gradient cancels out."""
    adam_moments: bool = False
    """Whether its state has Adam's `exp_avg`, `exp_avg_sq` and `step`, and its groups `betas`, which variance gradient
    scaling can read in place of averages of its own."""
    decays: bool = False
    """Whether it reads `weight_decay`."""
    gates: bool = False
    """Whether it reads `upgd`."""
    metrics: Callable[[Optimizer], dict[str, Tensor]] | None = None
    """Metrics of its last step, 0-dim tensors by name, as `upgd/gate_p50`."""


def _make_adam(parameters: Parameters, given: OptimizerSettings) -> Optimizer:
    return Adam(parameters, **_adam_options(given))


def _make_adamw(parameters: Parameters, given: OptimizerSettings) -> Optimizer:
    return AdamW(parameters, **_adam_options(given))


def _adam_options(given: OptimizerSettings) -> dict[str, Any]:
    rate = given.learning_rate
    options = {"lr": rate, "eps": ADAM_EPS, "weight_decay": given.weight_decay}
    return options | {"fused": True, "capturable": rate.is_cuda}


def _make_upgd(parameters: Parameters, given: OptimizerSettings) -> Optimizer:
    return UPGD(parameters, given.learning_rate, **_gate_options(given))


def _make_adaptive_upgd(parameters: Parameters, given: OptimizerSettings) -> Optimizer:
    return AdaptiveUPGD(parameters, given.learning_rate, eps=ADAM_EPS, **_gate_options(given))


def _make_upgdw(parameters: Parameters, given: OptimizerSettings) -> Optimizer:
    return UPGDW(parameters, given.learning_rate, eps=ADAM_EPS, **_gate_options(given))


def _gate_options(given: OptimizerSettings) -> dict[str, Any]:
    upgd = given.upgd
    return {
        "weight_decay": given.weight_decay,
        "beta_utility": upgd.beta_utility,
        "sigma": upgd.sigma,
        "step_factor": upgd.step_factor,
        "normalisation": upgd.normalisation,
        "seed": given.seed,
    }


def _gate_metrics(optimizer: Optimizer) -> dict[str, Tensor]:
    return cast(UtilityOptimizer, optimizer).metrics()


_ADAM = {"exp_avg": GRADIENT, "exp_avg_sq": SQUARED_GRADIENT, "max_exp_avg_sq": SQUARED_GRADIENT}
_ADAPTIVE: dict[str, Any] = {"moments": _ADAM, "scale_free": True, "adam_moments": True}
_GATED: dict[str, Any] = {"decays": True, "gates": True, "metrics": _gate_metrics}

OPTIMIZERS: dict[str, OptimizerKind] = {
    kind.name: kind
    for kind in (
        OptimizerKind("adam", Adam, _make_adam, **_ADAPTIVE),
        OptimizerKind("adamw", AdamW, _make_adamw, decays=True, **_ADAPTIVE),
        OptimizerKind("upgd", UPGD, _make_upgd, moments={"utility": UTILITY}, **_GATED),
        OptimizerKind(
            "adaptive_upgd",
            AdaptiveUPGD,
            _make_adaptive_upgd,
            **(_ADAPTIVE | _GATED | {"moments": _ADAM | {"utility": UTILITY}}),
        ),
        OptimizerKind("upgdw", UPGDW, _make_upgdw, **(_ADAPTIVE | _GATED | {"moments": _ADAM | {"utility": UTILITY}})),
    )
}
"""Every registered optimiser by name."""


def register_optimizer(kind: OptimizerKind, *, replace: bool = False) -> OptimizerKind:
    """Add an optimiser: it can then be named in the setting `optimizer` of every learner.

    `replace`: allow a name that is already registered, as when a notebook cell runs twice.
    """
    if not re.fullmatch(r"[a-z][a-z0-9_]*", kind.name):
        raise ConfigError(
            f"optimizer {kind.name!r}: use lower case letters, digits and underscores, starting with a letter"
        )
    if not (isinstance(kind.type, type) and issubclass(kind.type, torch.optim.Optimizer)):
        raise ConfigError(f"optimizer {kind.name!r}: {kind.type!r} is not a class of torch.optim.Optimizer")
    if kind.name in OPTIMIZERS and not replace:
        raise ConfigError(f"optimizer {kind.name!r} is registered already; choose another name, or pass replace=True")
    twin = next((other for other in OPTIMIZERS.values() if other.type is kind.type and other.name != kind.name), None)
    if twin is not None:
        raise ConfigError(
            f"optimizer {kind.name!r}: {kind.type.__name__} is registered as {twin.name!r} already; derive a class "
            "from it, so that the two can be told apart"
        )
    OPTIMIZERS[kind.name] = kind
    return kind


def kind_of(optimizer: Optimizer) -> OptimizerKind | None:
    """The entry of an optimiser's class, or of the nearest class that it is derived from."""
    by_type = {kind.type: kind for kind in OPTIMIZERS.values()}
    return next((by_type[base] for base in type(optimizer).__mro__ if base in by_type), None)


def moments_of(optimizer: Optimizer) -> Mapping[str, MomentPowers]:
    """What the tensors of its state are averages of; the usual names for an optimiser that is not registered."""
    kind = kind_of(optimizer)
    return COMMON_MOMENTS if kind is None else kind.moments
