"""How fast training is on a GPU, and how near that is to what the GPU can do at all.

    python benchmarks/gpu.py                      the reference configuration, all ways of running it
    python benchmarks/gpu.py --table              modes × environments × units
    python benchmarks/gpu.py --equality           do all ways of running give the same numbers?
    python benchmarks/gpu.py --profile            where the time goes

Needs torch and numpy only. Times are medians; a step is one bar in one environment, trained on for four epochs.
"""

from __future__ import annotations

import argparse
import gc
import statistics
import time
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch

import tailguard as tg
from tailguard.algorithm.bc import BehaviourCloning
from tailguard.algorithm.config import PPOConfig
from tailguard.data.panel import Panel
from tailguard.data.prepare import PreparedBars
from tailguard.data.scaling import Scaler
from tailguard.models.policy import NetworkConfig
from tailguard.optim.config import VGSConfig

HOUR_MS = 3_600_000
EPISODE = 256


def market(rows: int, features: int, seed: int = 0) -> PreparedBars:
    """Random bars with random features."""
    draw = np.random.default_rng(seed)
    close = 100.0 * np.exp(np.cumsum(0.005 * draw.standard_normal(rows)))
    opened = np.concatenate(([100.0], close[:-1]))
    swing = np.exp(0.002 * np.abs(draw.standard_normal((2, rows))))
    columns = (opened, np.maximum(opened, close) * swing[0], np.minimum(opened, close) / swing[1], close)
    prices = [column[:, None] for column in columns]
    panel = Panel(
        HOUR_MS * np.arange(rows, dtype=np.int64),
        *prices,
        volume=np.full((rows, 1), 1e7),
        segment=np.zeros(rows, np.int32),
        tradeable=np.ones(rows, bool),
        symbols=("RANDOM",),
        frequency_ms=HOUR_MS,
    )
    names = tuple(f"x{number}" for number in range(features))
    scaler = Scaler(names, names, np.zeros(features), np.ones(features))
    shown = draw.standard_normal((rows, features)).astype(np.float32)
    return PreparedBars(panel, shown, names, np.ones(rows, bool), scaler)


@dataclass(frozen=True)
class Case:
    """One way to train."""

    mode: str = "graph"
    envs: int = 16_384
    steps: int = 64
    hidden: int = 128
    features: int = 32
    quantiles: int = 32
    bars: int = 50_000
    minibatches: int = 4
    memory: str = "shared"
    precision: str = "auto"
    full: bool = True
    """With a risk budget, UPGDW, variance scaling, distributional value clipping, entropy and imitation."""
    extra: tuple[tuple[str, Any], ...] = ()

    def learner(self, prepared: PreparedBars | None = None, device: str = "cuda") -> tg.DistributionalPPO:
        """A fresh learner on a fresh environment."""
        env = tg.TradingEnv(
            prepared or market(self.bars, self.features),
            num_envs=self.envs,
            device=device,
            episode_length=EPISODE,
            stagger=self.steps,
        )
        network = NetworkConfig(
            hidden=(self.hidden,),
            activation="silu",
            memory=self.memory,  # type: ignore[arg-type]
            lstm_size=self.hidden,
            quantiles=self.quantiles,
            twin_critics=True,
            precision=self.precision,  # type: ignore[arg-type]
        )
        config = PPOConfig(
            n_steps=self.steps,
            minibatch_size=self.envs * self.steps // self.minibatches,
            network=network,
            runtime=self.mode,  # type: ignore[arg-type]
        )
        options: dict[str, Any] = {}
        if self.full:
            config = replace(
                config,
                optimizer="upgdw",
                vgs=VGSConfig(enabled=True),
                value_clip="mean_and_variance",
                entropy_coef=0.001,
                target_kl=1.0,
            )
            options = {"risk": tg.RiskConfig(limit=-0.05), "extensions": (BehaviourCloning(0.01, beta=1.0),)}
        return tg.DistributionalPPO(env, replace(config, **dict(self.extra)), seed=0, **options)

    @property
    def samples(self) -> int:
        return self.envs * self.steps


def timed(function: Callable[[], Any], repeats: int) -> float:
    """Median seconds of a call, the device's queue emptied before and after."""
    found = []
    for _ in range(repeats):
        torch.cuda.synchronize()
        begun = time.perf_counter()
        function()
        torch.cuda.synchronize()
        found.append(time.perf_counter() - begun)
    return statistics.median(found)


@dataclass(frozen=True)
class Measured:
    """What a case took."""

    case: Case
    first: float
    """Seconds to the end of the first iteration."""
    ready: float
    """Seconds until everything was compiled and recorded."""
    iteration: float
    rollout: float
    memory: float
    """Largest use of GPU memory, GiB."""

    def row(self) -> str:
        """One line of the table."""
        case, share = self.case, floor_seconds(self.case) / self.iteration
        return (
            f"{case.mode:8s} {case.envs:7,d} × {case.steps:<3d} {case.hidden:6d} {case.memory:9s}"
            f"{'all' if case.full else 'plain':>6s} {case.samples / self.rollout / 1e6:10.1f}"
            f"{case.samples / self.iteration / 1e6:10.2f} {1e3 * self.iteration:9.1f} {share:8.1%}"
            f"{self.memory:8.1f} {self.first:8.1f} {self.ready:8.1f}"
        )


HEADER = (
    f"{'mode':8s} {'envs × steps':>13s} {'units':>6s} {'trunks':9s}{'parts':>6s} {'rollout M/s':>10s}"
    f"{'train M/s':>10s} {'ms':>9s} {'of floor':>8s}{'GiB':>8s} {'first s':>8s} {'ready s':>8s}"
)


def measure(case: Case, repeats: int = 5) -> Measured:
    """Train for a few iterations and time the last ones."""
    gc.collect()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    begun = time.perf_counter()
    learner = case.learner()
    learner.iterate()
    torch.cuda.synchronize()
    first = time.perf_counter() - begun
    for _ in range(3):
        learner.iterate()
    torch.cuda.synchronize()
    ready = time.perf_counter() - begun
    iteration = timed(learner.iterate, repeats)
    rollout = timed(lambda: learner.runtime.run("collect", learner._collect), repeats)
    return Measured(case, first, ready, iteration, rollout, torch.cuda.max_memory_allocated() / 2**30)


# --- what the hardware allows ---------------------------------------------------------------------------------------

PEAK_FLOPS = 790e12
"""bfloat16 products of an H200, measured on large random matrices."""
PEAK_BYTES = 4.2e12
"""Bytes an H200 copies in a second, read and written."""


def flops_per_step(case: Case) -> float:
    """Operations in products for one environment step: acting, looking, and forward and backward for four epochs."""
    trunks = 1 if case.memory == "shared" else 2
    inputs, units = case.features + 4, case.hidden
    trunk = 2 * (inputs * units + 2 * units * 4 * units)
    heads = 2 * units * (1 + 2 * (1 + case.quantiles))
    acting, looking = trunk, 2 * trunk + heads
    learning = 4 * 3 * (trunks * trunk + heads)
    return acting + looking + learning


def bytes_per_step(case: Case) -> float:
    """Bytes that must move for one step if every tensor that outlives a kernel is written once and read once.

    In a pass over the segment a trunk writes and reads, in bfloat16, the encoder's output, the gates before and after
    their non-linearities and the hidden state, and in float32 the cells; the backward pass as much again. Observations
    and targets are read once a pass.
    """
    trunks = 1 if case.memory == "shared" else 2
    inputs, units = case.features + 4, case.hidden
    forward = 2 * (2 * units + 2 * 4 * units + 2 * 4 * units + 2 * units + 4 * units)
    targets = 4 * (inputs + 3 * case.quantiles + 10)
    learning = 4 * (2 * trunks * forward + 2 * targets)
    acting = 2 * (4 * inputs + 2 * 4 * units + 6 * units)
    looking = 2 * forward
    return learning + acting + looking


def floor_seconds(case: Case) -> float:
    """The longer of the two floors for one iteration."""
    return case.samples * max(flops_per_step(case) / PEAK_FLOPS, bytes_per_step(case) / PEAK_BYTES)


# --- commands -------------------------------------------------------------------------------------------------------


def show(cases: Iterator[Case]) -> None:
    """Measure and print, one line as soon as it is known."""
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}")
    print(HEADER)
    for case in cases:
        print(measure(case).row(), flush=True)


def reference() -> Iterator[Case]:
    """The reference configuration: LSTM 128, twin quantile critics, four epochs."""
    yield Case("eager", 4_096)
    yield Case("compile", 4_096)
    for envs, steps in ((4_096, 64), (16_384, 64), (32_768, 32), (65_536, 32)):
        yield Case("graph", envs, steps)
    yield Case("graph", 32_768, 32, full=False)
    yield Case("graph", 32_768, 32, memory="separate")


def table(modes: list[str], units: list[int], sizes: list[int]) -> Iterator[Case]:
    """Modes, environments and units."""
    for mode in modes:
        for hidden in units:
            for envs in sizes:
                yield Case(mode, envs, 32, hidden)


COMBINATIONS: dict[str, dict[str, Any]] = {
    "plain": {"full": False},
    "separate trunks": {"full": False, "memory": "separate"},
    "all": {"full": True},
    "all, separate": {"full": True, "memory": "separate"},
    "accumulation": {"full": True, "extra": (("microbatches", 2),)},
    "early stop": {"full": False, "extra": (("target_kl", 1e-4), ("learning_rate", 3e-3))},
    "adaptive KL": {"full": False, "extra": (("target_kl", 1e-3), ("kl_penalty", 0.1))},
    "bfloat16": {"full": True, "precision": "bfloat16"},
}


def equality(chosen: list[str], modes: list[str], iterations: int = 10) -> None:
    """Largest difference of any weight from the eager run's after some iterations, as a share of what it has moved."""
    prepared = market(5_000, 8)
    print(
        f"{'combination':16s} {'mode':8s} {'difference':>11s} {'of way':>11s} {'loss':>13s} {'eager loss':>13s} steps"
    )
    for name in chosen:
        settings = {"precision": "float32"} | COMBINATIONS[name]
        case = Case("eager", 256, 16, 32, features=8, quantiles=8, **settings)  # type: ignore[arg-type]
        runs = {}
        for mode in ("eager", *modes):
            learner = replace(case, mode=mode).learner(prepared)
            start = [parameter.detach().clone() for parameter in learner.policy.parameters()]
            for _ in range(iterations):
                figures = learner.iterate()
            runs[mode] = [parameter.detach().clone() for parameter in learner.policy.parameters()], figures
            if mode == "eager":
                way = max(float((a - b).abs().max()) for a, b in zip(runs[mode][0], start, strict=True))
                continue
            gap = max(float((a - b).abs().max()) for a, b in zip(runs[mode][0], runs["eager"][0], strict=True))
            loss, eager = runs[mode][1]["train/loss"], runs["eager"][1]["train/loss"]
            updates = runs[mode][1]["train/n_updates"], runs["eager"][1]["train/n_updates"]
            print(
                f"{name:16s} {mode:8s} {gap:11.2e} {gap / way:11.2e} {loss:13.8f} {eager:13.8f} "
                f"{updates[0]:.0f} {updates[1]:.0f}",
                flush=True,
            )


def syncs() -> None:
    """Does an iteration wait for the device anywhere but where its figures are read?"""
    learner = Case("graph", 256, 16, 32, features=8).learner(market(5_000, 8))
    for _ in range(4):
        learner.iterate()
    torch.cuda.set_sync_debug_mode("warn")
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        learner.iterate()
    torch.cuda.set_sync_debug_mode("default")
    places = [f"{warning.filename.rsplit('/', 1)[-1]}:{warning.lineno}" for warning in found]
    print(f"waits for the device in an iteration: {len(places)} ({', '.join(places) or 'none'})")


def profile(case: Case) -> None:
    """Time by kernel, of one iteration."""
    learner = case.learner()
    for _ in range(4):
        learner.iterate()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as found:
        learner.iterate()
        torch.cuda.synchronize()
    print(found.key_averages().table(sort_by="cuda_time_total", row_limit=45, max_name_column_width=90))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--table", action="store_true", help="modes × environments × units")
    parser.add_argument("--equality", action="store_true", help="compare the ways of running, number by number")
    parser.add_argument("--profile", action="store_true", help="time by kernel")
    parser.add_argument("--only", nargs="*", default=list(COMBINATIONS), help="combinations to compare")
    parser.add_argument("--modes", nargs="*", default=["compile", "graph"], help="ways of running")
    parser.add_argument("--units", nargs="*", type=int, default=[64, 128, 256, 512], help="of the table")
    parser.add_argument(
        "--sizes", nargs="*", type=int, default=[1_024, 16_384, 65_536], help="environments of the table"
    )
    parser.add_argument("--envs", type=int, default=32_768)
    parser.add_argument("--steps", type=int, default=32)
    parser.add_argument("--memory", default="shared")
    given = parser.parse_args()
    if not torch.cuda.is_available():
        raise SystemExit("gpu: no CUDA device here; benchmarks/training.py measures a CPU")
    if given.equality:
        equality(given.only, given.modes)
        syncs()
    elif given.profile:
        print(HEADER)
        case = Case("graph", given.envs, given.steps, memory=given.memory)
        print(measure(case).row(), flush=True)
        profile(case)
    else:
        show(table(given.modes, given.units, given.sizes) if given.table else reference())


if __name__ == "__main__":
    main()
