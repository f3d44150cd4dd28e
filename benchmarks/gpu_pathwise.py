"""How fast gradients through the market learn on a GPU.

    python benchmarks/gpu_pathwise.py                 ways of running × accounts, windows and whole episodes
    python benchmarks/gpu_pathwise.py --equality      do all ways of running give the same weights?
    python benchmarks/gpu_pathwise.py --profile       where the time of an iteration goes

Needs torch and numpy only. Times are medians; a bar is one bar in one account, acted on and learned from. A learner in
mode graph replays its whole iteration; the device is read once, when the iteration's metrics are.
"""

from __future__ import annotations

import argparse
import gc
import time
from collections.abc import Iterable
from dataclasses import dataclass, replace

import torch
from gpu import market, timed

import tailguard as tg
from tailguard.algorithm.config import PathwiseConfig
from tailguard.data.prepare import PreparedBars
from tailguard.models.policy import NetworkConfig

EPISODE = 256


@dataclass(frozen=True)
class Case:
    """One way to train."""

    mode: str = "graph"
    envs: int = 32_768
    steps: int = 16
    hidden: int = 128
    features: int = 32
    critics: bool = False
    """Twin quantile critics that value the end of a window."""
    budget: bool = False
    precision: str = "auto"
    bars: int = 50_000

    def learner(self, prepared: PreparedBars | None = None, device: str = "cuda") -> tg.PathwiseLearner:
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
            lstm_size=self.hidden,
            quantiles=32,
            twin_critics=self.critics,
            precision=self.precision,  # type: ignore[arg-type]
        )
        config = PathwiseConfig(
            n_steps=self.steps,
            critic_epochs=int(self.critics),
            minibatch_size=max(1, self.envs * self.steps // 4),
            network=network,
            runtime=self.mode,  # type: ignore[arg-type]
        )
        risk = tg.RiskConfig(limit=-0.05) if self.budget else None
        return tg.PathwiseLearner(env, config, seed=0, risk=risk)

    @property
    def parts(self) -> str:
        return ", ".join(name for name, on in (("critics", self.critics), ("budget", self.budget)) if on) or "plain"


HEADER = (
    f"{'mode':8s} {'accounts × bars':>15s} {'units':>6s} {'parts':16s} {'M bars/s':>9s} {'ms':>9s} {'GiB':>6s} "
    f"{'first s':>8s} {'ready s':>8s}"
)


def measure(case: Case, repeats: int = 7) -> str:
    """Train for a few iterations, time the last ones, and return a line of the table."""
    gc.collect()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    begun = time.perf_counter()
    learner = case.learner()
    learner.iterate()
    torch.cuda.synchronize()
    first = time.perf_counter() - begun
    for _ in range(4):
        learner.iterate()
    torch.cuda.synchronize()
    ready = time.perf_counter() - begun
    seconds = timed(learner.iterate, repeats)
    memory = torch.cuda.max_memory_allocated() / 2**30
    return (
        f"{case.mode:8s} {case.envs:9,d} × {case.steps:<3d} {case.hidden:6d} {case.parts:16s} "
        f"{case.envs * case.steps / seconds / 1e6:9.2f} {1e3 * seconds:9.1f} {memory:6.1f} {first:8.1f} {ready:8.1f}"
    )


def table(modes: Iterable[str]) -> Iterable[Case]:
    for mode in modes:
        yield Case(mode)
        yield Case(mode, envs=8_192)
        yield Case(mode, critics=True)
        yield Case(mode, envs=8_192, steps=EPISODE, hidden=32, features=5, budget=True)
        yield Case(mode, envs=4_096, steps=EPISODE, hidden=32, features=5, budget=True)


def equality(modes: Iterable[str], iterations: int = 10) -> None:
    """Largest difference of any weight from the eager run's, as a share of the largest change of any weight."""
    prepared = market(5_000, 8)
    print(f"{'parts':16s} {'mode':8s} {'difference':>11s} {'of change':>10s} {'loss':>13s} {'eager loss':>13s}")
    small = Case("eager", 256, 16, 32, features=8, precision="float32")
    for case in (small, replace(small, critics=True), replace(small, budget=True, steps=EPISODE, envs=64)):
        runs = {}
        for mode in ("eager", *modes):
            learner = replace(case, mode=mode).learner(prepared)
            start = [parameter.detach().clone() for parameter in learner.policy.parameters()]
            for _ in range(iterations):
                metrics = learner.iterate()
            runs[mode] = [parameter.detach().clone() for parameter in learner.policy.parameters()], metrics
            if mode == "eager":
                change = largest(runs[mode][0], start)
                continue
            gap = largest(runs[mode][0], runs["eager"][0])
            loss, eager = runs[mode][1]["pathwise/loss"], runs["eager"][1]["pathwise/loss"]
            print(f"{case.parts:16s} {mode:8s} {gap:11.2e} {gap / change:10.2e} {loss:13.8f} {eager:13.8f}", flush=True)


def largest(some: list[torch.Tensor], others: list[torch.Tensor]) -> float:
    """Largest difference between weights."""
    return max(float((a - b).abs().max()) for a, b in zip(some, others, strict=True))


def profile(case: Case) -> None:
    """Time by kernel, of one iteration."""
    print(HEADER, measure(case), sep="\n", flush=True)
    learner = case.learner()
    for _ in range(4):
        learner.iterate()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as found:
        learner.iterate()
        torch.cuda.synchronize()
    print(found.key_averages().table(sort_by="cuda_time_total", row_limit=40, max_name_column_width=90))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--equality", action="store_true", help="compare the ways of running, weight by weight")
    parser.add_argument("--profile", action="store_true", help="time by kernel")
    parser.add_argument("--modes", nargs="*", default=["eager", "graph"], help="ways of running")
    parser.add_argument("--envs", type=int, default=32_768, help="accounts of --profile")
    parser.add_argument("--steps", type=int, default=16, help="bars in a window of --profile; an episode has a budget")
    parser.add_argument("--units", type=int, default=128, help="units of --profile")
    given = parser.parse_args()
    if not torch.cuda.is_available():
        raise SystemExit("gpu_pathwise: no CUDA device here; benchmarks/pathwise.py measures a CPU")
    if given.equality:
        equality([mode for mode in given.modes if mode != "eager"])
    elif given.profile:
        profile(Case("graph", given.envs, given.steps, given.units, budget=given.steps == EPISODE))
    else:
        print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}", HEADER, sep="\n")
        for case in table(given.modes):
            print(measure(case), flush=True)


if __name__ == "__main__":
    main()
