"""What an iteration costs as environments, bars, features, quantiles and units grow: times, and the exponents.

    python benchmarks/scaling.py                    on the CPU, about 6 minutes on 2 cores
    python benchmarks/scaling.py --device cuda      on a GPU, about 15 minutes: every size is compiled and recorded anew
    python benchmarks/scaling.py --quick            three sizes each, one timed round: about a minute on the CPU
    python benchmarks/scaling.py --only envs hidden

One size grows over a range while the others stay as they are. The exponent is the slope of log time on log size: 0 is
free, 1 is proportional, 2 quadratic. Beside it the slope between the last two sizes alone, where fixed costs weigh
least. All features of the learner are on; with --plain only the scalar and quantile losses. Sizes take turns, and times
are medians. Needs torch and numpy only.
"""

from __future__ import annotations

import argparse
import gc
import statistics
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from gpu import Case

import tailguard as tg

WARM_UP = {"eager": 2, "compile": 2, "graph": 4}
"""Iterations that are not counted, by mode; a graph is recorded in the third."""
BASE = {
    "cpu": Case("eager", envs=256, steps=32, hidden=64, features=32, quantiles=32, bars=20_000),
    "cuda": Case("graph", envs=8_192, steps=32, hidden=128, features=32, quantiles=32, bars=50_000),
}
"""What stays as it is while one size grows."""
SIZES: Mapping[str, Mapping[str, Sequence[int]]] = {
    "cpu": {
        "envs": (64, 128, 256, 512, 1_024),
        "bars": (10_000, 40_000, 160_000, 640_000),
        "features": (8, 16, 32, 64, 128),
        "quantiles": (8, 16, 32, 64, 128),
        "hidden": (32, 64, 128, 256),
    },
    "cuda": {
        "envs": (2_048, 4_096, 8_192, 16_384, 32_768, 65_536),
        "bars": (10_000, 100_000, 1_000_000),
        "features": (16, 32, 64, 128, 256),
        "quantiles": (16, 32, 64, 128),
        "hidden": (64, 128, 256, 512),
    },
}
"""Sizes to go through, by the name of the field of a case."""


@dataclass(frozen=True)
class Curve:
    """Seconds of an iteration at each size."""

    name: str
    sizes: Sequence[int]
    seconds: Sequence[float]

    @property
    def exponent(self) -> float:
        """Slope of the least-squares line through log time on log size."""
        return slope(self.sizes, self.seconds)

    @property
    def last_exponent(self) -> float:
        """Slope between the last two sizes."""
        return slope(self.sizes[-2:], self.seconds[-2:])


def slope(sizes: Sequence[int], seconds: Sequence[float]) -> float:
    """Least-squares slope of log seconds on log sizes."""
    return float(np.polyfit(np.log(sizes), np.log(seconds), 1)[0])


def seconds_of(learner: tg.DistributionalPPO) -> float:
    """Time of one iteration; the device is done when it ends."""
    begun = time.perf_counter()
    learner.iterate()
    if learner.device.type == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter() - begun


def measure(name: str, sizes: Sequence[int], base: Case, device: str, rounds: int) -> Curve:
    """The sizes in turns, so that a slow moment of the machine does not bend the curve."""
    learners = [replace(base, **{name: size}).learner(device=device) for size in sizes]
    for learner in learners:
        for _ in range(WARM_UP[base.mode]):
            learner.iterate()
    times = [[seconds_of(learner) for learner in learners] for _ in range(rounds)]
    return Curve(name, sizes, [statistics.median(column) for column in zip(*times, strict=True)])


def rows(curve: Curve, base: Case) -> Iterator[str]:
    """The lines of the table for one size."""
    for index, (size, seconds) in enumerate(zip(curve.sizes, curve.seconds, strict=True)):
        envs = size if curve.name == "envs" else base.envs
        slopes = ""
        if index == len(curve.sizes) - 1:
            slopes = f"{curve.exponent:10.2f} {curve.last_exponent:13.2f}"
        name = curve.name if index == 0 else ""
        yield f"{name:10s} {size:10,d} {1e3 * seconds:12.1f} {1e6 * seconds / (envs * base.steps):12.3f} {slopes}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--mode", choices=("eager", "compile", "graph"), help="default: eager on cpu, graph on cuda")
    parser.add_argument("--only", nargs="*", choices=tuple(SIZES["cpu"]), default=tuple(SIZES["cpu"]))
    parser.add_argument("--plain", action="store_true", help="without risk budget, UPGDW, VGS, clipping and imitation")
    parser.add_argument("--rounds", type=int, default=7, help="timed rounds")
    parser.add_argument("--quick", action="store_true", help="the first three sizes, one timed round")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads(), help="CPU threads")
    given = parser.parse_args()
    if given.device == "cuda" and not torch.cuda.is_available():
        raise SystemExit("scaling: no CUDA device here; leave out --device to measure the CPU")
    torch.set_num_threads(given.threads)
    base = replace(BASE[given.device], full=not given.plain)
    base = replace(base, mode=given.mode or base.mode)
    where = torch.cuda.get_device_name() if given.device == "cuda" else f"CPU, {given.threads} threads"
    print(f"{where}, torch {torch.__version__}, {base.mode}, {'all features on' if base.full else 'plain'}")
    print(
        f"otherwise {base.envs:,} envs × {base.steps} steps, {base.bars:,} bars, {base.features} features, "
        f"{base.quantiles} quantiles, {base.hidden} units"
    )
    print(f"{'':10s} {'size':>10s} {'ms':>12s} {'µs a step':>12s} {'exponent':>10s} {'last two':>13s}")
    for name in given.only:
        sizes = SIZES[given.device][name]
        curve = measure(
            name, sizes[:3] if given.quick else sizes, base, given.device, 1 if given.quick else given.rounds
        )
        print("\n".join(rows(curve, base)), flush=True)
        gc.collect()


if __name__ == "__main__":
    main()
