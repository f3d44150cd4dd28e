"""What a population leaves in its run's folder: metrics and curves of every member, and the hyper-parameters."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from tailguard.monitor.tensorboard import TensorBoardWriter
from tailguard.monitor.writers import STEP, JsonlWriter
from tailguard.population.executor import Hyper, Job, JobOutcome
from tailguard.population.pbt import Standing
from tailguard.runs.folder import RunFolder

HYPER = "hyper/"
"""Prefix of the searched values among the curves."""


class MemberRecords:
    """Metrics, curves and values of each member under `members/<n>/`, written as rounds end.

    `step`: where the record of the finished rounds ends; what a killed process wrote beyond it is removed.
    """

    def __init__(self, run: RunFolder, members: Iterable[int], step: int) -> None:
        self.run = run
        for member in members:
            folder = self._folder(member)
            folder.path.mkdir(parents=True, exist_ok=True)
            folder.cut_metrics(step)

    def _folder(self, member: int) -> RunFolder:
        return RunFolder(self.run.member_path(member))

    def write(self, jobs: Sequence[Job], outcomes: Sequence[JobOutcome]) -> None:
        """Add a round."""
        for job, outcome in zip(jobs, outcomes, strict=True):
            folder = self._folder(job.member)
            lines = JsonlWriter(folder.metrics_path)
            curves = _curves(folder.tensorboard_path, job.start)
            values = {f"{HYPER}{name}": float(value) for name, value in job.hyper.items() if _is_number(value)}
            for metrics in outcome.metrics:
                step = int(metrics.get(STEP, outcome.step))
                lines.write(metrics, step)
                curves.write({**metrics, **values}, step)
            curves.writer.close()

    def write_hyper_parameters(self, standings: Sequence[Standing], metric: str) -> None:
        """The last values and scores, for TensorBoard's page of hyper-parameters."""
        for each in standings:
            if not each.failed:
                curves = _curves(self._folder(each.member).tensorboard_path, None)
                curves.writer.add_hparams(_plain(each.hyper), {f"population/{metric}": each.score}, run_name=".")
                curves.writer.close()


def _curves(folder: Path, purge: int | None) -> TensorBoardWriter:
    """A writer without a learner: those of the members are in other processes."""
    from torch.utils.tensorboard import SummaryWriter

    curves = TensorBoardWriter(folder)
    curves.writer = SummaryWriter(str(folder), purge_step=None if purge is None else purge + 1)
    curves.laid_out = True
    return curves


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _plain(hyper: Hyper) -> dict[str, Any]:
    return dict(hyper)
