"""How often the verdicts are wrong where the truth is known: the risk budget, and the test of timing.

    python benchmarks/interval_coverage.py                     # about ten minutes on one core
    python benchmarks/interval_coverage.py --samples 60        # coarse
    python benchmarks/interval_coverage.py --only timing
    python benchmarks/interval_coverage.py --only estimators   # a minute

Budget: log-volatility is an AR(1) process, the limit is the true CVaR, and "kept" is false, whatever comes. Its nominal
rate is 2.5 %: half of what a 95 % interval leaves out. "bootstrap" is the rate with the bootstrap's interval alone.
P >= 90 % and P <= 10 % are the rates at which the probability that the limit holds is stated so, nominal 10 % each.
Power is the rate of "kept" where the limit allows twice the true CVaR. Timing: positions without skill, at p ≤ 0.05.
Estimators: log(estimated / true CVaR) of a short record, its mean and root mean square, from all overlapping windows,
which is what a verdict uses, from windows apart, and from a generalised Pareto tail fitted to the worst fifth of them.
"""

from __future__ import annotations

import argparse
import math

import numpy as np
from numpy.typing import NDArray
from scipy import signal

from tailguard.data.panel import Panel
from tailguard.evaluate.backtest import BacktestResult
from tailguard.evaluate.bootstrap import cvar_statistic, interval
from tailguard.evaluate.budget import BudgetVerdict, check_limit
from tailguard.evaluate.metrics import cvar, cvar_of_rows, horizon_returns
from tailguard.evaluate.timing_test import timing_test
from tailguard.market.costs import cost_kinds

Float = NDArray[np.float64]

ALPHA = 0.05
MEMORIES = (0.0, 0.98, 0.99, 0.995)
LENGTHS = (1_260, 4_320, 8_640)
RESAMPLES = 300
BARS_PER_YEAR = 8_766.0


def volatile_returns(
    draw: np.random.Generator, rows: int, count: int, memory: float, deviation: float, scale: float = 0.002
) -> Float:
    """Normal returns whose log-volatility is AR(1) with this coefficient and deviation, [rows, count]; 0: none."""
    shocks = scale * draw.normal(size=(rows, count))
    if memory == 0:
        return shocks
    noise = draw.normal(0, deviation * math.sqrt(1 - memory**2), (rows, count))
    noise[:, 0] = draw.normal(0, deviation, rows)
    return np.asarray(np.exp(signal.lfilter([1.0], [1.0, -memory], noise, axis=1)) * shocks)


def equity_of(returns: Float) -> Float:
    return np.concatenate([[1.0], np.cumprod(1 + returns)])


def true_cvar(memory: float, deviation: float, horizon: int) -> float:
    """Of windows of this many bars, from six million bars."""
    paths = volatile_returns(np.random.default_rng(99), 1_000, 6_000, memory, deviation)
    return cvar(np.concatenate([horizon_returns(equity_of(path), horizon) for path in paths]), ALPHA)


def budget_rates(memory: float, count: int, deviation: float, horizon: int, samples: int, seed: int = 1) -> Float:
    """Rates of: false kept by the bootstrap alone; false kept; false broken; P >= 90 %; P <= 10 %; kept at twice."""
    truth = true_cvar(memory, deviation, horizon)
    verdicts = np.zeros(6)
    for number, returns in enumerate(volatile_returns(np.random.default_rng(seed), samples, count, memory, deviation)):
        equity = equity_of(returns)
        alone = interval(
            horizon_returns(equity, horizon),
            cvar_statistic(ALPHA),
            np.random.default_rng(number),
            resamples=RESAMPLES,
            overlap=horizon,
        )
        judged = check_limit(
            equity, truth, np.random.default_rng(number), alpha=ALPHA, horizon=horizon, resamples=RESAMPLES
        )
        verdicts += (
            alone.low >= truth,
            judged.verdict == BudgetVerdict.KEPT,
            judged.verdict == BudgetVerdict.BROKEN,
            judged.probability >= 0.9,
            judged.probability <= 0.1,
            judged.cvar.low >= 2 * truth,
        )
    return verdicts / samples


def pareto_cvar(outcomes: Float, alpha: float = ALPHA, share: float = 0.2) -> Float:
    """CVaR of each row by a generalised Pareto tail beyond the 1 − share quantile of losses, [rows, n] -> [rows].

    Probability-weighted moments (Hosking & Wallis 1987), which are steadier in small samples than maximum likelihood.
    """
    losses = np.sort(-outcomes, axis=1)
    beyond = round(share * losses.shape[1])
    threshold = losses[:, -beyond - 1]
    excess = losses[:, -beyond:] - threshold[:, None]
    exceeded = (np.arange(beyond, 0, -1) - 0.35) / beyond
    first, second = excess.mean(1), (exceeded * excess).mean(1)
    shape = np.clip(2 - first / (first - 2 * second), -0.5, 0.9)
    shape = np.where(np.abs(shape) < 1e-6, 1e-6, shape)
    scale = 2 * first * second / (first - 2 * second)
    quantile = threshold + scale / shape * ((alpha / share) ** -shape - 1)
    return np.asarray(-(quantile + scale - shape * threshold) / (1 - shape))


def estimator_errors(
    memory: float, deviation: float, count: int, horizon: int, samples: int, seed: int = 5
) -> dict[str, tuple[float, float]]:
    """Mean and root mean square of log(estimated / true CVaR), by estimator."""
    truth = true_cvar(memory, deviation, horizon)
    records = volatile_returns(np.random.default_rng(seed), samples, count, memory, deviation)
    windows = np.stack([horizon_returns(equity_of(record), horizon) for record in records])
    apart = windows[:, ::horizon]
    found = {
        "overlapping": cvar_of_rows(windows, ALPHA),
        "apart": cvar_of_rows(apart, ALPHA),
        "Pareto, overlapping": pareto_cvar(windows),
        "Pareto, apart": pareto_cvar(apart),
    }
    errors = {name: np.log(np.minimum(values, -1e-6) / truth) for name, values in found.items()}
    return {name: (float(error.mean()), float(np.sqrt((error**2).mean()))) for name, error in errors.items()}


def print_estimators(samples: int) -> None:
    for deviation, memory in ((0.0, 0.0), (0.3, 0.99), (0.5, 0.98), (0.5, 0.995), (1.0, 0.99)):
        for count, horizon in ((1_260, 24), (4_320, 168)):
            errors = estimator_errors(memory, deviation, count, horizon, samples)
            words = "; ".join(f"{name} {mean:+.2f}, {spread:.2f}" for name, (mean, spread) in errors.items())
            print(f"deviation {deviation}, AR {memory}, {count:,} bars, windows of {horizon}: {words}", flush=True)


def blind_positions(draw: np.random.Generator, count: int, length: int) -> Float:
    """Positions that stay for a geometric time of this mean and know nothing, [count]."""
    begins = np.where(draw.random(count) < 1 / length, np.arange(count), 0)
    return np.asarray(draw.uniform(-1, 1, count)[np.maximum.accumulate(begins)])


def timing_rate(length: int, memory: float, count: int, samples: int, seed: int = 3) -> float:
    """Share of positions without skill whose p-value is at most 0.05."""
    draw, time = np.random.default_rng(seed), np.arange(count + 1, dtype=np.int64) * 3_600_000
    passed = 0
    for returns in volatile_returns(draw, samples, count + 1, memory, 0.5):
        close = np.exp(np.cumsum(returns))[:, None]
        opens = np.vstack([[[1.0]], close[:-1]])
        panel = Panel(
            symbols=("X",), frequency_ms=3_600_000, time=time, open=opens, high=close, low=close, close=close,
            volume=np.ones_like(close), segment=np.zeros(count + 1, np.int32), tradeable=np.ones(count + 1, bool),
        )  # fmt: skip
        held = blind_positions(draw, count, length)[:, None]
        nothing = np.zeros(count)
        result = BacktestResult(
            time=time[1:], equity=np.ones(count + 1), targets=held, weights=held, net=nothing, pnl=nothing,
            costs=dict.fromkeys(cost_kinds(), nothing), turnover=nothing, unfilled=nothing,
            shielded=np.zeros(count, bool), liquidated=False, bars_per_year=BARS_PER_YEAR, symbols=("X",),
        )  # fmt: skip
        passed += timing_test(result, panel).p_value <= 0.05
    return passed / samples


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--samples", type=int, default=200)
    parser.add_argument("--deviations", type=float, nargs="+", default=[0.3, 0.5], help="Of log-volatility.")
    parser.add_argument("--horizons", type=int, nargs="+", default=[1], help="Bars of a window.")
    parser.add_argument("--only", choices=("budget", "timing", "estimators"))
    options = parser.parse_args()
    if options.only == "estimators":
        print_estimators(options.samples)
        return
    if options.only != "timing":
        print(
            f"{'deviation':>9} {'window':>6} {'AR':>6} {'bars':>6} {'bootstrap':>10} {'kept':>6} {'broken':>7} "
            f"{'P >= 90 %':>9} {'P <= 10 %':>9} power"
        )
        cases = [
            (deviation, horizon, memory, count)
            for deviation in options.deviations
            for horizon in options.horizons
            for memory in MEMORIES
            for count in LENGTHS
            if memory or deviation == options.deviations[0]  # without memory the deviation is nothing
        ]
        for deviation, horizon, memory, count in cases:
            rates = budget_rates(memory, count, deviation, horizon, options.samples)
            alone, kept, broken, above, below, power = (f"{100 * rate:.1f} %" for rate in rates)
            print(
                f"{deviation:9} {horizon:6} {memory:6} {count:6,} {alone:>10} {kept:>6} {broken:>7} {above:>9} "
                f"{below:>9} {power}",
                flush=True,
            )
    if options.only != "budget":
        print(f"\n{'regime':>6} {'AR':>6} {'bars':>6}  p <= 0.05 without skill")
        for count in (1_260, 8_640):
            for memory in (0.0, 0.99):
                for length in (20, 100, 400):
                    rate = timing_rate(length, memory, count, 5 * options.samples)
                    print(f"{length:6} {memory:6} {count:6,}  {100 * rate:.1f} %", flush=True)


if __name__ == "__main__":
    main()
