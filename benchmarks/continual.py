"""Learning without end: online accuracy on a stream of tasks, UPGD and its kin beside SGD and Adam.

    python benchmarks/continual.py                    every method tuned, then 5 seeds; a few minutes on 2 cores
    python benchmarks/continual.py --quick            3 seeds, shorter, with the settings that the full run found
    python benchmarks/continual.py --stream labels    tasks shuffle the labels instead of the pixels

Ten classes of 8×8 images, each class three random patterns under heavy noise. Every task shuffles the pixels (or the
labels) anew, and the network is not told. It sees every sample once and is asked before it may learn from it: that is
the online accuracy. A learner that keeps its plasticity does as well on the last tasks as on the first.

Every method tries four settings on a seed of its own (SGD and Adam four learning rates, UPGD and its kin two learning
rates and two memories of the utility); the best mean accuracy over the whole stream is taken to the other seeds.
Methods without weight decay stand apart from those with it, because decay alone keeps a network plastic too.
"""

from __future__ import annotations

import argparse
import itertools
import math
import os
import statistics
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from multiprocessing import get_context
from typing import Any, Literal

import torch
from rich import box
from rich.console import Console
from rich.table import Table
from scipy import stats
from torch import Tensor, nn

from tailguard.optim import UPGD, UPGDW, AdaptiveUPGD

CLASSES, PATTERNS, PIXELS = 10, 3, 64
NOISE = 1.0
"""Standard deviation of a pixel's noise; that of the patterns is 1."""
TUNING_SEED = 1_000

Settings = dict[str, Any]


@dataclass(frozen=True)
class Stream:
    """A sequence of tasks; a task is so many batches of fresh samples."""

    kind: Literal["inputs", "labels"] = "inputs"
    tasks: int = 25
    steps: int = 120
    batch: int = 16


@dataclass(frozen=True)
class Method:
    """An optimiser, its decay, the settings it may try, and which of them were best on the tuning seed."""

    name: str
    make: Callable[..., torch.optim.Optimizer]
    weight_decay: float
    grid: Sequence[Settings]
    tuned: Settings

    def optimizer(self, parameters: Any, settings: Settings) -> torch.optim.Optimizer:
        return self.make(parameters, weight_decay=self.weight_decay, **settings)


def plain(*rates: float) -> list[Settings]:
    return [{"lr": rate} for rate in rates]


def gated(*rates: float) -> list[Settings]:
    return [{"lr": rate, "beta_utility": beta} for rate, beta in itertools.product(rates, (0.9, 0.999))]


SGD_GRID, ADAM_GRID = plain(0.05, 0.1, 0.2, 0.3), plain(1e-3, 3e-3, 6e-3, 1e-2)
UPGD_GRID, ADAPTIVE_GRID = gated(0.1, 0.3), gated(3e-3, 1e-2)
DECAY, ADAM_DECAY = 0.01, 0.1
"""At their usual learning rates the two shrink a weight about equally fast."""

METHODS = (
    Method("SGD", torch.optim.SGD, 0.0, SGD_GRID, {"lr": 0.1}),
    Method("Adam", torch.optim.Adam, 0.0, ADAM_GRID, {"lr": 3e-3}),
    Method("UPGD", UPGD, 0.0, UPGD_GRID, {"lr": 0.1, "beta_utility": 0.9}),
    Method("AdaptiveUPGD", AdaptiveUPGD, 0.0, ADAPTIVE_GRID, {"lr": 3e-3, "beta_utility": 0.9}),
    Method("SGD", torch.optim.SGD, DECAY, SGD_GRID, {"lr": 0.3}),
    Method("AdamW", torch.optim.AdamW, ADAM_DECAY, ADAM_GRID, {"lr": 6e-3}),
    Method("UPGD", UPGD, DECAY, UPGD_GRID, {"lr": 0.3, "beta_utility": 0.999}),
    Method("AdaptiveUPGD", AdaptiveUPGD, ADAM_DECAY, ADAPTIVE_GRID, {"lr": 1e-2, "beta_utility": 0.9}),
    Method("UPGDW", UPGDW, ADAM_DECAY, ADAPTIVE_GRID, {"lr": 1e-2, "beta_utility": 0.9}),
)

COMPARISONS = (
    ("UPGD", "SGD", False),
    ("UPGD", "Adam", False),
    ("AdaptiveUPGD", "Adam", False),
    ("UPGD", "SGD", True),
    ("AdaptiveUPGD", "AdamW", True),
    ("UPGDW", "AdaptiveUPGD", True),
)
"""Who is compared with whom on the last tasks, and whether with decay."""


def draw_task(stream: Stream, patterns: Tensor, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Samples of the next task: images [steps, batch, pixels] and labels [steps, batch]."""
    shape = (stream.steps, stream.batch)
    shown = torch.randint(CLASSES * PATTERNS, shape, generator=generator)
    images = patterns[shown] + NOISE * torch.randn(*shape, PIXELS, generator=generator)
    labels = shown // PATTERNS
    if stream.kind == "inputs":
        return images[..., torch.randperm(PIXELS, generator=generator)], labels
    return images, torch.randperm(CLASSES, generator=generator)[labels]


def online_accuracy(method: Method, settings: Settings, seed: int, stream: Stream) -> list[float]:
    """Share of samples that the network got right before it learned from them, task by task."""
    generator = torch.Generator().manual_seed(seed)
    patterns = torch.randn(CLASSES * PATTERNS, PIXELS, generator=generator)
    torch.manual_seed(seed)
    network = nn.Sequential(nn.Linear(PIXELS, 64), nn.ReLU(), nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, CLASSES))
    optimizer = method.optimizer(network.parameters(), settings)
    accuracies = []
    for _ in range(stream.tasks):
        right = torch.zeros(())
        for images, labels in zip(*draw_task(stream, patterns, generator), strict=True):
            logits = network(images)
            right += (logits.argmax(1) == labels).float().mean()
            optimizer.zero_grad()
            nn.functional.cross_entropy(logits, labels).backward()
            optimizer.step()
        accuracies.append(right.item() / stream.steps)
    return accuracies


def first_and_last(accuracies: Sequence[float]) -> tuple[float, float]:
    """Mean accuracy over the first and over the last fifth of the tasks."""
    fifth = max(1, len(accuracies) // 5)
    return statistics.mean(accuracies[:fifth]), statistics.mean(accuracies[-fifth:])


def with_interval(values: Sequence[float], signed: bool = False) -> str:
    """Mean and half of Student's 95 % interval over the seeds, in per cent."""
    half = float(stats.t.ppf(0.975, len(values) - 1)) * statistics.stdev(values) / math.sqrt(len(values))
    mean = statistics.mean(values)
    return f"{100 * mean:{'+' if signed else ''}.1f} ±{100 * half:.1f}"


def run(job: tuple[int, Settings, int, Stream]) -> list[float]:
    """One stream in a process of its own; methods travel as their number in `METHODS`."""
    torch.set_num_threads(1)
    number, settings, seed, stream = job
    return online_accuracy(METHODS[number], settings, seed, stream)


def tune(pool: ProcessPoolExecutor, stream: Stream) -> list[Settings]:
    """For every method the settings with the best mean accuracy over the tuning seed's stream."""
    tries = [(number, settings) for number, method in enumerate(METHODS) for settings in method.grid]
    found = pool.map(run, [(number, settings, TUNING_SEED, stream) for number, settings in tries])
    best: dict[int, tuple[float, Settings]] = {}
    for (number, settings), accuracies in zip(tries, found, strict=True):
        mean = statistics.mean(accuracies)
        if number not in best or mean > best[number][0]:
            best[number] = (mean, settings)
    return [best[number][1] for number in range(len(METHODS))]


def show(console: Console, chosen: Sequence[Settings], results: Sequence[Sequence[list[float]]]) -> None:
    """A table without weight decay and one with it; `results`: accuracies by method, seed and task."""
    for title, decays in (("without weight decay", False), ("with weight decay", True)):
        table = Table(title=f"online accuracy in %, {title}", box=box.SIMPLE_HEAD, padding=0, pad_edge=False)
        for name in ("method", "settings", "first 20 %", "last 20 %", "change", "all tasks"):
            table.add_column(name, no_wrap=True, justify="left" if name in ("method", "settings") else "right")
        for method, settings, streams in zip(METHODS, chosen, results, strict=True):
            if (method.weight_decay > 0) != decays:
                continue
            first, last = zip(*map(first_and_last, streams), strict=True)
            table.add_row(
                method.name,
                " ".join(f"{'β' if name == 'beta_utility' else name} {value:g}" for name, value in settings.items()),
                with_interval(first),
                with_interval(last),
                with_interval([b - a for a, b in zip(first, last, strict=True)], signed=True),
                with_interval([statistics.mean(accuracies) for accuracies in streams]),
            )
        console.print(table)
    for rival, base, decays in COMPARISONS:
        lasts = [
            [first_and_last(accuracies)[1] for accuracies in streams]
            for name in (rival, base)
            for method, streams in zip(METHODS, results, strict=True)
            if method.name == name and (method.weight_decay > 0) == decays
        ]
        gap = with_interval([a - b for a, b in zip(*lasts, strict=True)], signed=True)
        console.print(f"last 20 %, {'with' if decays else 'without'} decay: {rival} − {base} {gap}, paired by seed")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="3 seeds of 15 tasks, and no tuning")
    parser.add_argument("--stream", choices=("inputs", "labels"), default="inputs", help="what the tasks shuffle")
    parser.add_argument("--tasks", type=int, default=25, help="tasks in a stream")
    parser.add_argument("--seeds", type=int, default=5, help="seeds to average over; at least 2")
    options = parser.parse_args()
    stream = Stream(options.stream, 15 if options.quick else options.tasks)
    seeds = 3 if options.quick else options.seeds
    console, begin = Console(), time.perf_counter()
    with ProcessPoolExecutor(min(os.cpu_count() or 1, 8), mp_context=get_context("spawn")) as pool:
        chosen = [method.tuned for method in METHODS] if options.quick else tune(pool, stream)
        jobs = [(number, chosen[number], seed, stream) for number in range(len(METHODS)) for seed in range(seeds)]
        found = list(pool.map(run, jobs))
    results = [found[number * seeds : (number + 1) * seeds] for number in range(len(METHODS))]
    tasks = (
        f"{stream.tasks} tasks of {stream.steps} batches of {stream.batch}, each with the {stream.kind} shuffled anew"
    )
    console.print(f"{tasks}; means over {seeds} seeds ± 95 % interval")
    show(console, chosen, results)
    console.print(f"torch {torch.__version__}, {time.perf_counter() - begin:.0f} s")


if __name__ == "__main__":
    main()
