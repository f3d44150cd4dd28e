"""TensorBoard: curves, hyperparameters, the return's quantiles, histograms of actions and weights, alarms as text."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor

from tailguard.monitor.device_metrics import RETURN_QUANTILES
from tailguard.monitor.writers import MetricsWriter
from tailguard.validate import check_count

if TYPE_CHECKING:
    from tailguard.monitor.health import Alarm


BINS = 64
"""Bins of a histogram."""
FINAL_METRICS = (
    "rollout/ep_rew_mean",
    "rollout/ep_pnl_mean",
    "eval/growth",
    "risk/cvar_realised",
    "train/explained_variance",
)
"""Curves whose last value the HParams page shows beside the hyperparameters."""


class TensorBoardWriter(MetricsWriter):
    """Writes metrics, histograms and alarms against environment steps to `folder`.

    `histogram_every`: iterations between two histograms of the actions and of each weight.

    Existing curves in the folder are continued; points beyond the agent's current step are discarded, so a run that
    resumes from a checkpoint has one curve, not two overlaid ones.
    """

    def __init__(self, folder: Path, histogram_every: int = 10) -> None:
        check_count("histogram_every", histogram_every)
        self.folder, self.histogram_every = folder, histogram_every
        self.writer: Any = None
        self.laid_out = False

    def on_training_start(self, locals_: dict[str, Any], globals_: dict[str, Any]) -> None:
        # TensorBoard takes a second to import; only runs that use it should wait.
        from torch.utils.tensorboard import SummaryWriter

        super().on_training_start(locals_, globals_)
        resumed = any(self.folder.glob("events.out.tfevents.*"))
        self.writer = SummaryWriter(str(self.folder), purge_step=self.model.num_timesteps + 1)
        self.laid_out = False
        if not resumed:
            self._write_hyperparameters("start")

    def on_iteration_end(self) -> None:
        super().on_iteration_end()
        if (self.model.state.iteration - 1) % self.histogram_every == 0:
            self._write_histograms(self.model.num_timesteps)
        # A checkpoint may follow, and the curves must not be shorter than it when the process is killed.
        self.writer.flush()

    def write(self, metrics: Mapping[str, float], step: int) -> None:
        from tensorboard.compat.proto.summary_pb2 import Summary  # type: ignore[import-untyped]  # has no types

        # One event for all of them: `add_scalar` for each costs twenty times as much.
        values = [Summary.Value(tag=name, simple_value=value) for name, value in metrics.items()]
        self.writer.file_writer.add_summary(Summary(value=values), step)
        if not self.laid_out and metrics.keys() >= set(RETURN_QUANTILES):
            self.writer.add_custom_scalars(return_fan())
            self.laid_out = True

    def warn(self, alarm: Alarm) -> None:
        self.writer.add_text(f"alarms/{alarm.name}", str(alarm), alarm.step)

    def close(self) -> None:
        self._write_hyperparameters("end")
        self.writer.close()

    def _write_hyperparameters(self, part: Literal["start", "end"]) -> None:
        """Into the run itself: `add_hparams` would make a second run beside it for the same curves."""
        from torch.utils.tensorboard.summary import hparams

        experiment, start, end = hparams(hyperparameters(self.model), dict.fromkeys(FINAL_METRICS, 0.0))  # type: ignore[no-untyped-call]
        for summary in (experiment, start) if part == "start" else (end,):
            self.writer.file_writer.add_summary(summary)

    def _write_histograms(self, step: int) -> None:
        for name, histogram in histograms(self._tensors()).items():
            self.writer.add_histogram_raw(
                name,
                min=histogram.low,
                max=histogram.high,
                num=histogram.number,
                sum=histogram.total,
                sum_squares=histogram.squares,
                bucket_limits=histogram.edges,
                bucket_counts=histogram.counts,
                global_step=step,
            )

    def _tensors(self) -> dict[str, Tensor]:
        """Actions sent to the environment in the rows that count, by dimension, and all weights."""
        rollout, policy = self.model.snapshot.rollout, self.model.policy
        actions = policy.action_head.to_env(rollout.actions)[rollout.valid]
        tensors = {f"actions/{index}": column for index, column in enumerate(actions.unbind(-1)) if len(column)}
        return tensors | {f"weights/{name}": weight.detach() for name, weight in policy.named_parameters()}


def hyperparameters(model: Any) -> dict[str, bool | int | float | str]:
    """All settings of a learner by name, as `gamma` and `network.lstm_size`; those of its risk budget under `risk.`."""
    settings = {**asdict(model.config), "seed": model.seed, "num_envs": model.env.num_envs}
    if model.risk is not None:
        settings["risk"] = asdict(model.risk.config)
    return dict(_flat(settings))


def _flat(settings: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, bool | int | float | str]]:
    for name, value in settings.items():
        if isinstance(value, Mapping):
            yield from _flat(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", value if isinstance(value, bool | int | float | str) else str(value)


def return_fan() -> dict[str, dict[str, list[Any]]]:
    """Layout of the Custom Scalars page: the return's quantiles in one chart, and as bands around the median."""
    p05, p25, p50, p75, p95 = RETURN_QUANTILES
    return {
        "return": {
            "quantiles predicted by the critics": ["Multiline", [p05, p25, p50, p75, p95]],
            "median, 5 % to 95 %": ["Margin", [p50, p05, p95]],
            "median, 25 % to 75 %": ["Margin", [p50, p25, p75]],
        }
    }


@dataclass(frozen=True)
class Histogram:
    """Counts in bins of equal width."""

    low: float
    high: float
    number: float
    total: float
    squares: float
    edges: list[float]
    """Right edges."""
    counts: list[float]


def histograms(tensors: Mapping[str, Tensor], bins: int = BINS) -> dict[str, Histogram]:
    """One histogram by name for each tensor with a finite number in it; counted on the device, read in one transfer."""
    if not tensors:
        return {}
    rows = torch.stack([count(values, bins) for values in tensors.values()]).cpu()
    result = {}
    for name, row in zip(tensors, rows, strict=True):
        low, high, first, width, number, total, squares = row[:7].tolist()
        if number:
            edges = (first + width * torch.arange(1, bins + 1, dtype=torch.float64)).tolist()
            result[name] = Histogram(low, high, number, total, squares, edges, row[7:].tolist())
    return result


@torch.no_grad()
def count(values: Tensor, bins: int = BINS) -> Tensor:
    """[7 + bins]: minimum, maximum, left edge, width of a bin, number, sum, sum of squares, and the counts.

    The bins span the values; if all are the same, one unit around them, as in NumPy. No host sync: numbers that are not
    finite are counted in a bin of their own, which is dropped, rather than filtered out.
    """
    rows = values.flatten().double()
    finite = rows.isfinite()
    low = torch.where(finite, rows, torch.inf).min()
    high = torch.where(finite, rows, -torch.inf).max()
    constant = low == high
    first = torch.where(constant, low - 0.5, low)
    width = torch.where(constant, 1.0, high - low) / bins
    kept = torch.where(finite, rows, 0.0)
    place = torch.where(finite, ((kept - first) / width).floor().clamp(0, bins - 1), bins).long()
    counts = rows.new_zeros(bins + 1).scatter_add_(0, place, torch.ones_like(rows))
    summary = [low, high, first, width, finite.sum().double(), kept.sum(), kept.square().sum()]
    return torch.cat([torch.stack(summary), counts[:-1]])
