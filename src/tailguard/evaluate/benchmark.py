"""A result against a benchmark of the user's choice and a risk-free rate: excess returns, beta, alpha."""

from __future__ import annotations

import math
from dataclasses import dataclass, field, fields
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from tailguard.errors import BarsError
from tailguard.evaluate.metrics import growth_per_year, sharpe, volatility
from tailguard.validate import check_range

if TYPE_CHECKING:
    from tailguard.data.bars import Bars
    from tailguard.evaluate.backtest import BacktestResult

Float = NDArray[np.float64]


@dataclass(frozen=True)
class BenchmarkPath:
    """A benchmark's prices over the bars of a result."""

    name: str
    prices: Float
    """The last close known at each bar's close, [T]."""


@dataclass(frozen=True)
class OverRate:
    """A result in excess of a risk-free rate."""

    risk_free: float
    """Yearly rate, compounded."""
    own_sharpe: float
    """Of the result, in excess of the rate."""

    def describe(self) -> str:
        """One line."""
        return f"over a risk-free rate of {100 * self.risk_free:g} % a year: Sharpe {self.own_sharpe:.2f}"


@dataclass(frozen=True)
class Relative:
    """A result beside a benchmark over the same bars. Rates are per year."""

    benchmark: str
    risk_free: float
    """Yearly rate, compounded."""
    growth: float
    """Of the benchmark."""
    sharpe: float
    """Of the benchmark, in excess of the risk-free rate."""
    own_sharpe: float
    """Of the result, in excess of the risk-free rate."""
    beta: float
    """Slope of the result's excess returns on the benchmark's."""
    alpha: float
    """What the result earned a year beyond beta times the benchmark's excess return (Jensen 1968)."""
    correlation: float
    tracking_error: float
    """Volatility of the difference of the two returns."""
    information_ratio: float
    """Mean difference over the tracking error."""
    path: BenchmarkPath = field(repr=False, compare=False)

    def describe(self) -> str:
        """One line."""
        return (
            f"against {self.benchmark} (growth {100 * self.growth:+.1f} % a year, Sharpe {self.sharpe:.2f} over a "
            f"risk-free rate of {100 * self.risk_free:g} %): Sharpe {self.own_sharpe:.2f}, beta {self.beta:.2f}, alpha "
            f"{100 * self.alpha:+.1f} % a year, information ratio {self.information_ratio:.2f}"
        )


def compare_with_rate(result: BacktestResult, risk_free: float) -> OverRate:
    """The result in excess of a risk-free rate a year, over all of its bars."""
    rate = _rate_of_a_bar(result, risk_free)
    return OverRate(risk_free, sharpe(result.net - rate, result.bars_per_year))


def _rate_of_a_bar(result: BacktestResult, risk_free: float) -> float:
    check_range("risk_free", risk_free, low=-0.5, high=1)
    return float((1 + risk_free) ** (1 / result.bars_per_year) - 1)


def compare_with(result: BacktestResult, benchmark: Bars, risk_free: float = 0.0) -> Relative:
    """The result beside holding the benchmark: one symbol, of any frequency, without costs.

    Its price at each of the result's bars is its last close known at that bar's close.
    """
    free = _rate_of_a_bar(result, risk_free)
    prices = _known_closes(result, benchmark)
    theirs = prices[1:] / prices[:-1] - 1
    own, bars = result.net[1:], result.bars_per_year
    mine, other = own - free, theirs - free
    variance = float(np.var(other, ddof=1))
    beta = float(np.cov(mine, other, ddof=1)[0, 1]) / variance if variance > 0 else math.nan
    difference = own - theirs
    deviation = float(np.std(difference, ddof=1))
    return Relative(
        benchmark=benchmark.symbols[0],
        risk_free=risk_free,
        growth=growth_per_year(prices / prices[0], bars),
        sharpe=sharpe(other, bars),
        own_sharpe=sharpe(mine, bars),
        beta=beta,
        alpha=float(mine.mean() - beta * other.mean()) * bars,
        correlation=float(np.corrcoef(mine, other)[0, 1]) if variance > 0 and mine.std() > 0 else math.nan,
        tracking_error=volatility(difference, bars),
        information_ratio=float(difference.mean()) / deviation * math.sqrt(bars) if deviation > 0 else math.nan,
        path=BenchmarkPath(benchmark.symbols[0], prices),
    )


def _known_closes(result: BacktestResult, benchmark: Bars) -> Float:
    """The benchmark's last close that was known at the close of each bar of the result, [T]."""
    if len(benchmark.symbols) != 1:
        raise BarsError(
            f"benchmark {benchmark.source}: {len(benchmark.symbols)} symbols; choose one of "
            f"{', '.join(benchmark.symbols)}"
        )
    length = int(np.diff(result.time).min()) if len(result.time) > 1 else 0
    panel = benchmark.panel()
    known = panel.time + panel.frequency_ms
    place = np.searchsorted(known, result.time + length, side="right") - 1
    late = result.time + length - known[np.maximum(place, 0)]
    # A week without a new price is not a holiday.
    if place.min() < 0 or late.max() > 7 * 86_400_000 + panel.frequency_ms:
        first, last = (str(np.datetime64(int(moment), "ms").astype("datetime64[D]")) for moment in panel.time[[0, -1]])
        begin, end = (str(np.datetime64(int(t), "ms").astype("datetime64[D]")) for t in result.time[[0, -1]])
        raise BarsError(
            f"benchmark {benchmark.source}: its bars from {first} to {last} do not cover the result's, {begin} to {end}"
        )
    return np.asarray(panel.close[place, 0])


def finite_values(relative: Relative | OverRate) -> dict[str, Any]:
    """The figures as JSON values; NaN becomes null."""
    values = {each.name: getattr(relative, each.name) for each in fields(relative) if each.name != "path"}
    return {
        name: None if isinstance(value, float) and not math.isfinite(value) else value for name, value in values.items()
    }
