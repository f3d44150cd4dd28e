"""Experiment trackers: MLflow and Weights & Biases."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from dataclasses import asdict
from importlib import import_module
from typing import TYPE_CHECKING, Any

from tailguard.errors import MissingExtraError
from tailguard.monitor.writers import STEP, MetricsWriter

if TYPE_CHECKING:
    from tailguard.monitor.health import Alarm

MLFLOW_PARAMETERS_A_CALL = 100
"""The server refuses more."""


class MLflowWriter(MetricsWriter):
    """One run in MLflow: the learner's settings as parameters, metrics, alarms as tags.

    `run_name`, `experiment`: names of the run and its experiment. `tracking_uri`: the server or folder; MLflow's own
    setting by default. `run_id`: an earlier run to resume.
    """

    def __init__(
        self,
        run_name: str | None = None,
        experiment: str = "tailguard",
        tracking_uri: str | None = None,
        run_id: str | None = None,
    ) -> None:
        mlflow = _optional("mlflow", "Writing metrics to MLflow")
        self.entities = mlflow.entities
        # A client of our own: the user's active run, if there is one, is left alone.
        self.client = mlflow.MlflowClient(tracking_uri)
        self.experiment, self.run_name, self.run_id = experiment, run_name, run_id

    def on_training_start(self, locals_: dict[str, Any], globals_: dict[str, Any]) -> None:
        super().on_training_start(locals_, globals_)
        if self.run_id is not None:
            self.client.update_run(self.run_id, status="RUNNING")
            return
        known = self.client.get_experiment_by_name(self.experiment)
        experiment_id = self.client.create_experiment(self.experiment) if known is None else known.experiment_id
        self.run_id = self.client.create_run(experiment_id, run_name=self.run_name).info.run_id
        settings = [self.entities.Param(name, str(value)) for name, value in flat(asdict(self.model.config))]
        for first in range(0, len(settings), MLFLOW_PARAMETERS_A_CALL):
            self.client.log_batch(self.run_id, params=settings[first : first + MLFLOW_PARAMETERS_A_CALL])

    def write(self, metrics: Mapping[str, float], step: int) -> None:
        now = round(1000 * time.time())
        rows = [self.entities.Metric(name, float(value), now, step) for name, value in metrics.items()]
        self.client.log_batch(self.run_id, metrics=rows)

    def warn(self, alarm: Alarm) -> None:
        self.client.set_tag(self.run_id, f"alarm.{alarm.name}", str(alarm))

    def close(self) -> None:
        self.client.set_terminated(self.run_id)


class WandbWriter(MetricsWriter):
    """One run in Weights & Biases: the learner's settings, metrics, alarms as alerts.

    `project`: name of the project. `options`: further arguments of `wandb.init`, like `name`, `mode="offline"`, `dir`,
    or `id` with `resume="allow"` to resume an earlier run.
    """

    def __init__(self, project: str = "tailguard", **options: Any) -> None:
        self.wandb = _optional("wandb", "Writing metrics to Weights & Biases")
        self.project, self.options = project, options

    def on_training_start(self, locals_: dict[str, Any], globals_: dict[str, Any]) -> None:
        super().on_training_start(locals_, globals_)
        self.run = self.wandb.init(project=self.project, config=asdict(self.model.config), **self.options)
        # Its own counter may only grow, and a run that resumes from a checkpoint steps back.
        self.run.define_metric("*", step_metric=STEP)

    def write(self, metrics: Mapping[str, float], step: int) -> None:
        self.run.log({**metrics, STEP: step})

    def warn(self, alarm: Alarm) -> None:
        self.run.alert(title=f"alarm {alarm.name}", text=str(alarm), level=self.wandb.AlertLevel.WARN)

    def close(self) -> None:
        self.run.finish()


def flat(settings: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Nested settings with their names joined by dots."""
    for name, value in settings.items():
        if isinstance(value, Mapping):
            yield from flat(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", value


def _optional(package: str, purpose: str) -> Any:
    """Import a package of an optional extra; an error inside an installed package is passed on."""
    try:
        return import_module(package)
    except ModuleNotFoundError as error:
        if error.name != package:
            raise
        raise MissingExtraError(package, package, purpose) from None
