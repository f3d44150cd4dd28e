"""When a run is scored and saved."""

from __future__ import annotations

import time

from tailguard.algorithm.callbacks import Callback
from tailguard.runs.checkpoint import CheckpointStore
from tailguard.runs.folder import RunFolder
from tailguard.runs.signals import StopSignals
from tailguard.runs.validation import Validation

SCORE = "eval/growth"
"""Figure of the score: yearly log-growth on the validation part, net of costs."""


class Keeper(Callback):
    """Saves every so many steps, every so many minutes, when a signal asks for the end, and at the end.

    Scores come with the checkpoints by steps only. Those happen at the same steps in every repetition of a run, whereas
    minutes never repeat, and a figure that came with them would make two equal runs look different.

    It must stand before the writers of figures in the list of callbacks: the score belongs to the iteration's line, and
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
        minutes: float,
        goal: int,
    ) -> None:
        self.store, self.folder, self.stop, self.validation = store, folder, stop, validation
        self.steps, self.seconds, self.goal = steps, 60 * minutes, goal
        self.saved_step, self.saved_time = -1, time.monotonic()
        self.before = 0
        self.due = False
        self.score: float | None = None

    def on_training_start(self, locals_: object, globals_: object) -> None:  # noqa: ARG002 (SB3's signature)
        self.saved_step, self.saved_time = self.model.num_timesteps, time.monotonic()

    def on_rollout_start(self) -> None:
        self.before = self.model.num_timesteps

    def on_iteration_end(self) -> None:
        now = self.model.num_timesteps
        self.due, self.score = now // self.steps > self.before // self.steps or now >= self.goal, None
        if self.due and self.validation is not None:
            self.score = self.validation.score(self.model)
            if self.score is not None:
                self.model.metrics[SCORE] = self.score

    def on_iteration_logged(self) -> bool:
        late = time.monotonic() - self.saved_time >= self.seconds
        if self.due or late or self.stop.received is not None:
            self._save()
        return self.stop.received is None

    def _save(self) -> None:
        self.folder.sync_metrics()
        self.store.save(self.model, self.score)
        self.saved_step, self.saved_time = self.model.num_timesteps, time.monotonic()
