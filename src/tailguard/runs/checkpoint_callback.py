"""The callback that scores a run on the validation part, saves its checkpoints and ends it."""

from __future__ import annotations

import math
import time

from tailguard.monitor.callbacks import Callback
from tailguard.runs.checkpoint import CheckpointStore
from tailguard.runs.folder import RunFolder
from tailguard.runs.signals import StopSignals
from tailguard.runs.validation import BestScore, Validation, ValidationResult


class CheckpointCallback(Callback):
    """Saves every so many steps, every so many minutes, when a score is the best so far, and at the end.

    Training ends at the step goal, on a signal, or after `patience` evaluations in a row without a better score; 0:
    never.

    Scores are computed at fixed steps only: these repeat in every repetition of a run, whereas minutes do not, and a
    metric computed at them would make two equal runs look different.

    It must stand before the writers of metrics in the list of callbacks: the score belongs to the iteration's line, and
    the line must be written before the checkpoint.
    """

    def __init__(
        self,
        store: CheckpointStore,
        folder: RunFolder,
        stop: StopSignals,
        validation: Validation | None,
        *,
        steps: int,
        evaluation_steps: int,
        minutes: float,
        goal: int,
        patience: int = 0,
        best: BestScore | None = None,
    ) -> None:
        self.store, self.folder, self.stop, self.validation = store, folder, stop, validation
        self.steps, self.evaluation_steps, self.seconds, self.goal = steps, evaluation_steps, 60 * minutes, goal
        self.patience, self.best = patience, best or BestScore()
        self.saved_step, self.saved_time = -1, time.monotonic()
        self.before = 0
        self.due = False
        self.evaluation: ValidationResult | None = None

    @property
    def is_out_of_patience(self) -> bool:
        return 0 < self.patience <= self.best.since

    def on_training_start(self, locals_: object, globals_: object) -> None:  # noqa: ARG002 (SB3's signature)
        self.saved_step, self.saved_time = self.model.num_timesteps, time.monotonic()

    def on_rollout_start(self) -> None:
        self.before = self.model.num_timesteps

    def on_iteration_end(self) -> None:
        self.due, self.evaluation = self._passed(self.steps), None
        if self.validation is not None and self._passed(self.evaluation_steps):
            self.evaluation = self.validation.evaluate(self.model)
        if self.evaluation is not None:
            self.best = self.best.after(self.evaluation.score)
            # The best so far is saved at once: the run may end with it.
            self.due |= self.best.since == 0 or self.is_out_of_patience
            self.model.metrics |= self._metrics(self.evaluation)

    def on_iteration_logged(self) -> bool:
        late = time.monotonic() - self.saved_time >= self.seconds
        if self.due or late or self.stop.received is not None:
            self._save()
        return self.stop.received is None and not self.is_out_of_patience

    def _passed(self, every: int) -> bool:
        """Whether the iteration reached a multiple of so many steps, or the goal."""
        now: int = self.model.num_timesteps
        return now // every > self.before // every or now >= self.goal

    def _metrics(self, evaluation: ValidationResult) -> dict[str, float]:
        assert self.validation is not None
        metrics = {"eval/growth": evaluation.growth, "eval/score": evaluation.score}
        if evaluation.cvar is not None:
            metrics["eval/cvar"] = evaluation.cvar
        gap = self.validation.training_growth(self.model) - evaluation.growth
        return metrics if math.isnan(gap) else metrics | {"eval/gap": gap}

    def _save(self) -> None:
        self.folder.sync_metrics()
        self.store.save(self.model, self.evaluation, self.best.since)
        self.saved_step, self.saved_time = self.model.num_timesteps, time.monotonic()
