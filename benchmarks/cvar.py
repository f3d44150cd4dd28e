"""How well CVaR is read from quantiles and samples: exact, noisy and learned quantiles, and the Pareto tail.

    python benchmarks/cvar.py

Errors are in % of the true CVaR, positive where the risk is understated. The truth is SciPy's quadrature.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any, get_args

import numpy as np
import torch
from scipy import stats
from scipy.integrate import quad
from torch import Tensor

from tailguard.models.critics import midpoints
from tailguard.risk import TailMethod, cvar_from_quantiles, cvar_from_samples, cvar_gpd_from_samples

COUNTS = (21, 32, 51, 101)
ALPHAS = (0.01, 0.05, 0.1, 0.25)
NOISY_ALPHAS = (0.01, 0.05)
NOISY_COUNT = 32
REPETITIONS = 2_000
LEARNERS = 400
METHODS: tuple[TailMethod, ...] = tuple(reversed(get_args(TailMethod)))

QuantileFunction = Callable[[Any], Any]
DISTRIBUTIONS: dict[str, QuantileFunction] = {
    "Normal": stats.norm.ppf,
    "t5": stats.t(5).ppf,
    "t3": stats.t(3).ppf,
    "skew-normal(−4)": stats.skewnorm(-4).ppf,
    "−gamma(4)": lambda tau: -stats.gamma(4).isf(tau),
    "gamma(4)": stats.gamma(4).ppf,
    "Laplace": stats.laplace.ppf,
}
NOISY = ("Normal", "t5", "t3", "−gamma(4)", "Laplace")


def true_cvar(name: str, alpha: float) -> float:
    quantile_function = DISTRIBUTIONS[name]
    return float(quad(lambda s: quantile_function(alpha * np.exp(-s)) * np.exp(-s), 0, 200, limit=500)[0])


def exact_quantiles(name: str, count: int) -> Tensor:
    return torch.as_tensor(DISTRIBUTIONS[name](midpoints(count, dtype=torch.float64).numpy()))


def draw(name: str, shape: tuple[int, ...], random: np.random.Generator) -> Tensor:
    return torch.as_tensor(DISTRIBUTIONS[name](random.uniform(size=shape)))


def percent(found: Tensor, truth: float) -> Tensor:
    return 100 * (found - truth) / abs(truth)


def print_accuracy() -> None:
    print("\nExact quantiles: average of the worst / probit / tukey\n")
    print("| | N | " + " | ".join(f"α = {alpha}" for alpha in ALPHAS) + " |")
    print("|---|---|" + "---|" * len(ALPHAS))
    for name in DISTRIBUTIONS:
        truths = [true_cvar(name, alpha) for alpha in ALPHAS]
        for count in COUNTS:
            quantiles = exact_quantiles(name, count)
            cells = []
            for alpha, truth in zip(ALPHAS, truths, strict=True):
                found = [cvar_from_samples(quantiles, alpha)]
                found += [cvar_from_quantiles(quantiles, alpha, method) for method in METHODS]
                errors = [round(percent(value, truth).item(), 1) + 0.0 for value in found]
                cells.append(" / ".join(f"{error:.1f}" for error in errors))
            print(f"| {name} | {count} | " + " | ".join(cells) + " |")


def learned_quantiles(name: str, random: np.random.Generator, steps: int = 3_000, batch: int = 32) -> Tensor:
    """Quantiles [LEARNERS, N] by pinball regression (κ = 0) on fresh samples with Adam, the step falling to 0.

    They start at the mean and the step is in standard deviations: the learner too speaks in normalised returns.
    """
    known = draw(name, (1_000_000,), random)
    tau = midpoints(NOISY_COUNT, dtype=torch.float64)
    quantiles = known.mean().expand(LEARNERS, NOISY_COUNT).clone().requires_grad_()
    optimizer = torch.optim.Adam([quantiles], lr=0.03 * known.std().item())
    schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.0, steps)
    for _ in range(steps):
        samples = draw(name, (LEARNERS, 1, batch), random)
        quantiles.grad = (samples < quantiles.detach().unsqueeze(-1)).double().mean(-1) - tau
        optimizer.step()
        schedule.step()
    return quantiles.detach()


def noisy_quantiles(name: str, kind: str, random: np.random.Generator) -> Tensor:
    exact = exact_quantiles(name, NOISY_COUNT)
    if kind == "learned":
        return learned_quantiles(name, random)
    if kind.startswith("noise"):
        sd = draw(name, (1_000_000,), random).std()
        shape = (REPETITIONS, NOISY_COUNT)
        return exact + float(kind.split()[1]) * sd * torch.as_tensor(random.normal(size=shape))
    samples = draw(name, (REPETITIONS, int(kind.split()[1])), random).numpy()
    levels = midpoints(NOISY_COUNT, dtype=torch.float64).numpy()
    return torch.as_tensor(np.quantile(samples, levels, axis=-1, method="hazen").T.copy())


def print_noise() -> None:
    titles = [f"{method}, α = {alpha}" for alpha in NOISY_ALPHAS for method in METHODS]
    print(f"\nN = {NOISY_COUNT} quantiles that are not exact: bias, sd, root mean square error\n")
    print("| | quantiles | " + " | ".join(titles) + " |")
    print("|---|---|" + "---|" * len(titles))
    for kind in ("samples 250", "samples 1000", "samples 5000", "noise 0.02", "noise 0.05", "learned"):
        for name in NOISY:
            quantiles = noisy_quantiles(name, kind, np.random.default_rng(0))
            cells = []
            for alpha in NOISY_ALPHAS:
                truth = true_cvar(name, alpha)
                for method in METHODS:
                    error = percent(cvar_from_quantiles(quantiles, alpha, method), truth)
                    rms = error.square().mean().sqrt()
                    cells.append(f"{error.mean():.1f}, {error.std():.1f}, **{rms:.1f}**")
            print(f"| {name} | {kind} | " + " | ".join(cells) + " |", flush=True)


def print_pareto() -> None:
    print("\nSamples: mean and root mean square error of the empirical CVaR / the Pareto tail\n")
    print("| | n | α = 0.01 | α = 0.001 |\n|---|---|---|---|")
    for name in ("Normal", "t5", "t3"):
        for count in (1_000, 5_000):
            samples = draw(name, (REPETITIONS, count), np.random.default_rng(1))
            cells = []
            for alpha in (0.01, 0.001):
                errors = [
                    percent(estimate(samples, alpha), true_cvar(name, alpha))
                    for estimate in (cvar_from_samples, cvar_gpd_from_samples)
                ]
                cells.append(" / ".join(f"{e.mean():.1f}, **{e.square().mean().sqrt():.1f}**" for e in errors))
            print(f"| {name} | {count:,} | " + " | ".join(cells) + " |", flush=True)


def print_time() -> None:
    print("\nCPU time of CVaR.05 of [T, N, 32] float32, one thread, best of 7: sort alone / probit / tukey, in ms\n")
    for shape in ((64, 64, 32), (64, 1024, 32)):
        quantiles = torch.randn(shape)
        calls: list[Callable[[], Any]] = [lambda q=quantiles: q.sort(-1)]
        calls += [lambda q=quantiles, m=method: cvar_from_quantiles(q, 0.05, m) for method in METHODS]
        best = []
        for call in calls:
            times = []
            for _ in range(8):
                start = time.process_time()
                call()
                times.append(1e3 * (time.process_time() - start))
            best.append(min(times[1:]))
        print(f"{list(shape)}: " + " / ".join(f"{value:.1f}" for value in best))


if __name__ == "__main__":
    torch.set_num_threads(1)
    print_accuracy()
    print_noise()
    print_pareto()
    print_time()
