"""Names that have moved: old imports work for one more version, each with a DeprecationWarning.

An entry of `MOVED` is all that a renamed or moved name needs; nothing else in the package refers to the old one.
"""

from __future__ import annotations

import importlib
import sys
import warnings
from collections.abc import Callable, Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

MOVED = {
    "tailguard.algorithm.callbacks": {
        "Callback": "tailguard.monitor.callbacks.Callback",
        "CallbackProtocol": "tailguard.monitor.callbacks.CallbackProtocol",
        "EveryIteration": "tailguard.monitor.callbacks.EveryIteration",
        "make_callback": "tailguard.monitor.callbacks.make_callback",
        "make_callbacks": "tailguard.monitor.callbacks.make_callbacks",
    },
    "tailguard.data.table": {
        "FeatureTable": "tailguard.data.panel.FeatureTable",
    },
    "tailguard.envs.mapped_market": {
        "MappedBars": "tailguard.envs.prepared_market.MappedBars",
        "PreparedMarket": "tailguard.envs.prepared_market.PreparedMarket",
        "is_prepared_market": "tailguard.envs.prepared_market.is_prepared_market",
        "open_market": "tailguard.envs.prepared_market.open_market",
    },
    "tailguard.memory": {
        "free_memory": "tailguard.memory_limits.free_memory",
        "keep_freed_memory": "tailguard.memory_limits.keep_freed_memory",
    },
    "tailguard.runs.preparing": {
        "prepare_market": "tailguard.runs.prepare_market.prepare_market",
    },
    "tailguard.evaluate.calibration": {
        "Calibration": "tailguard.evaluate.prediction_calibration.Calibration",
        "RiskBudget": "tailguard.evaluate.budget.BudgetCheck",
        "TailEvidence": "tailguard.evaluate.budget.TailEvidence",
        "Verdict": "tailguard.evaluate.budget.BudgetVerdict",
        "calibration": "tailguard.evaluate.prediction_calibration.calibration",
        "pit_values": "tailguard.evaluate.prediction_calibration.pit_values",
        "risk_budget": "tailguard.evaluate.budget.check_limit",
        "tail_evidence": "tailguard.evaluate.budget.tail_evidence",
    },
    "tailguard.evaluate.periods": {
        "monthly_returns": "tailguard.evaluate.metrics.monthly_returns",
        "worst_drawdowns": "tailguard.evaluate.metrics.worst_drawdowns",
        "year_return": "tailguard.evaluate.metrics.year_return",
    },
    "tailguard.evaluate.standing": {
        "Budget": "tailguard.evaluate.budget.Budget",
        "Standing": "tailguard.evaluate.summary.EvaluationSummary",
        "standing": "tailguard.evaluate.summary.summarise",
    },
    "tailguard.evaluate.timing": {
        "TimingTest": "tailguard.evaluate.timing_test.TimingTest",
        "timing_test": "tailguard.evaluate.timing_test.timing_test",
    },
    "tailguard.evaluate.trained": {
        "TrainedRun": "tailguard.experiment.trained_run.TrainedRun",
        "open_run": "tailguard.experiment.trained_run.open_run",
    },
    "tailguard.evaluate.volatility": {
        "tail_deviations": "tailguard.evaluate.tail_simulation.tail_deviations",
    },
}
"""By module that no longer exists: its names, and where each is now."""


def renamed_method(old: str, new: str) -> Callable[..., Any]:
    """A method under its old name, for the body of a class: `figures = renamed_method("figures", "metrics")`."""

    def call(self: Any, *arguments: Any, **options: Any) -> Any:
        name = type(self).__name__
        warnings.warn(
            f"{name}.{old} is now {name}.{new}; the old name will be removed in the next version",
            DeprecationWarning,
            stacklevel=2,
        )
        return getattr(self, new)(*arguments, **options)

    call.__doc__ = f"Deprecated: `{new}`."
    return call


class _MovedModule(ModuleType):
    """An old module: it has its old names, and warns at each use."""

    def __getattr__(self, name: str) -> Any:
        if name not in MOVED[self.__name__]:
            raise AttributeError(f"module {self.__name__!r} has no attribute {name!r}")
        place, _, new_name = MOVED[self.__name__][name].rpartition(".")
        warnings.warn(
            f"{self.__name__}.{name} is now {place}.{new_name}; the old name will be removed in the next version",
            DeprecationWarning,
            stacklevel=2,
        )
        return getattr(importlib.import_module(place), new_name)


class _MovedFinder(MetaPathFinder, Loader):
    """Finds the old modules; asked only after every other finder, so that existing modules are never affected."""

    def find_spec(
        self,
        fullname: str,
        path: Sequence[str] | None = None,  # noqa: ARG002 (the signature is importlib's)
        target: ModuleType | None = None,  # noqa: ARG002
    ) -> ModuleSpec | None:
        return ModuleSpec(fullname, self) if fullname in MOVED else None

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        return _MovedModule(spec.name, f"Deprecated: {', '.join(MOVED[spec.name].values())}.")

    def exec_module(self, module: ModuleType) -> None:
        """Nothing to run: the names are found when they are used."""


def install() -> None:
    """Let old imports be found."""
    if not any(isinstance(finder, _MovedFinder) for finder in sys.meta_path):
        sys.meta_path.append(_MovedFinder())
