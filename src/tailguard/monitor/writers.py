"""Where an iteration's figures go."""

from __future__ import annotations

import json
import math
from pathlib import Path

from tailguard.algorithm.callbacks import Callback


class JsonlWriter(Callback):
    """One line of JSON an iteration, `metrics.jsonl`; figures that are not finite are written as null."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def on_rollout_end(self) -> None:
        figures = {name: value if math.isfinite(value) else None for name, value in self.model.metrics.items()}
        with self.path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(figures) + "\n")


class TensorBoardWriter(Callback):
    """Scalars for TensorBoard, against environment steps."""

    def __init__(self, folder: Path) -> None:
        # TensorBoard takes a second to import; only who writes for it should wait.
        from torch.utils.tensorboard import SummaryWriter

        self.writer = SummaryWriter(str(folder))

    def on_rollout_end(self) -> None:
        for name, value in self.model.metrics.items():
            self.writer.add_scalar(name, value, self.model.num_timesteps)

    def on_training_end(self) -> None:
        self.writer.close()
