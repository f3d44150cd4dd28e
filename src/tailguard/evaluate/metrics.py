"""Metrics of a track record: pure functions of per-bar net returns or of equity. Returns are fractions, 0.01 is 1 %.

Equity curves include their starting value. An undefined metric (a Sharpe ratio of constant returns) is NaN, never a
substitute. `docs/evaluation.md` explains what each metric means and where it misleads.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from tailguard.data.pace import DAYS_PER_YEAR, Pace

Float = NDArray[np.float64]
Times = NDArray[np.int64]

TAIL_LEVELS = (0.01, 0.05, 0.10)
"""Shares of the worst outcomes whose VaR and CVaR `track_record` gives."""


def growth_per_year(equity: Float, bars_per_year: float) -> float:
    """Compound yearly growth of an equity curve with its starting value; −1 for a ruined account."""
    total = float(equity[-1] / equity[0])
    years = (len(equity) - 1) / bars_per_year
    if total <= 0:
        return -1.0
    exponent = math.log(total) / years
    return math.expm1(exponent) if exponent < 700 else math.inf


def volatility(returns: Float, bars_per_year: float) -> float:
    """Yearly standard deviation of returns (ddof 1)."""
    return float(np.std(returns, ddof=1) * math.sqrt(bars_per_year))


def sharpe(returns: Float, bars_per_year: float) -> float:
    """Yearly Sharpe ratio against cash at zero interest; NaN when returns do not vary."""
    return float(sharpe_of_rows(returns)) * math.sqrt(bars_per_year)


def sharpe_of_rows(returns: Float) -> Float:
    """Sharpe ratio of a bar for each row, [..., n] -> [...]; NaN where a row does not vary."""
    mean = returns.mean(-1, keepdims=True)
    centred = returns - mean
    deviation = np.sqrt(np.einsum("...n,...n->...", centred, centred) / (returns.shape[-1] - 1))
    # Rounding leaves equal returns a deviation of this order; it is not movement.
    varies = deviation > 1e-14 * np.abs(mean[..., 0])
    return np.where(varies, mean[..., 0] / np.where(varies, deviation, 1.0), np.nan)


def sharpe_autocorrelated(returns: Float, bars_per_year: float) -> float:
    """Yearly Sharpe ratio that takes serial correlation into account (Lo 2002); NaN where it has no positive variance.

    It uses only significant lags (`significant_lags`), so without serial correlation it is the usual
    Sharpe ratio.
    """
    if not np.ptp(returns) > 0:
        return math.nan
    lags = min(significant_lags(returns), math.ceil(bars_per_year) - 1)
    return float(sharpe_of_rows(returns)) * annualisation(autocorrelations(returns, lags), bars_per_year)


def annualisation(correlations: Float, periods: float) -> float:
    """Factor from the Sharpe ratio of a bar to that of q periods (Lo 2002): q / √(q + 2 Σ (q − k) ρ_k).

    `correlations` [K] are ρ_1 … ρ_K, the later ones zero. NaN where they leave no positive variance.
    """
    lags = np.arange(1, len(correlations) + 1)
    variance = periods + 2 * float(((periods - lags) * correlations).sum())
    return periods / math.sqrt(variance) if variance > 0 else math.nan


def autocorrelations(values: Float, lags: int) -> Float:
    """Sample autocorrelations ρ_1 … ρ_lags, [lags]."""
    centred = values - values.mean()
    products = [float(centred[lag:] @ centred[:-lag]) for lag in range(1, lags + 1)]
    return np.array(products) / float(centred @ centred)


def significant_lags(values: Float) -> int:
    """Last significant lag of the autocorrelation (Politis 2003, as in Politis & White 2004).

    The smallest m after which max(5, log₁₀ n) autocorrelations in a row stay inside ±2√(log₁₀ n / n); where none does,
    the last lag outside.
    """
    count = len(values)
    quiet = max(5, math.ceil(math.log10(count)))
    furthest = min(math.ceil(math.sqrt(count)) + quiet, count - 1)
    outside = np.abs(autocorrelations(values, furthest)) > 2 * math.sqrt(math.log10(count) / count)
    last = 0
    for lag in np.flatnonzero(outside) + 1:
        if lag > last + quiet:
            break
        last = int(lag)
    return last


def sortino(returns: Float, bars_per_year: float) -> float:
    """Yearly mean return over downside deviation (root mean square of losses over all bars); NaN without losses."""
    downside = math.sqrt(float(np.mean(np.minimum(returns, 0.0) ** 2)))
    return float(np.mean(returns)) / downside * math.sqrt(bars_per_year) if downside > 0 else math.nan


def drawdowns(equity: Float) -> Float:
    """Drawdown at each point, as a fraction (0 or negative)."""
    return np.asarray(equity / np.maximum.accumulate(equity) - 1.0)


def max_drawdown(equity: Float) -> float:
    """Maximum drawdown, as a negative fraction."""
    return float(drawdowns(equity).min())


@dataclass(frozen=True)
class Drawdown:
    """A drawdown and its recovery. Positions are indices into the equity curve."""

    depth: float
    """As a negative fraction; 0 where equity never fell."""
    peak: int
    trough: int
    recovery: int | None
    """Where equity recovered to the peak; None if it has not."""
    bars: int
    """From the peak to the recovery, or to the end of the curve."""


def deepest_drawdown(equity: Float) -> Drawdown:
    """The drawdown whose depth is `max_drawdown`; the first of several equal ones."""
    trough = int(np.argmin(drawdowns(equity)))
    # The peak is the last bar at the high, before equity falls.
    peak = trough - int(np.argmax(equity[: trough + 1][::-1]))
    back = np.flatnonzero(equity[trough:] >= equity[peak])
    recovery = trough + int(back[0]) if len(back) else None
    end = len(equity) - 1 if recovery is None else recovery
    return Drawdown(float(equity[trough] / equity[peak] - 1.0), peak, trough, recovery, end - peak)


def worst_drawdowns(equity: Float, count: int = 5) -> list[Drawdown]:
    """The `count` deepest drawdowns, the deepest first; they do not overlap. `equity`: [n]."""
    falls = drawdowns(equity)
    below = (falls < 0).astype(np.int8)
    begins = np.flatnonzero(np.diff(below, prepend=0) == 1)
    ends = np.flatnonzero(np.diff(below, append=0) == -1) + 1
    spells = []
    for begin, end in zip(begins.tolist(), ends.tolist(), strict=True):
        trough = begin + int(np.argmin(falls[begin:end]))
        recovered = end < len(equity)
        bars = min(end, len(equity) - 1) - (begin - 1)
        spells.append(Drawdown(float(falls[trough]), begin - 1, trough, end if recovered else None, bars))
    return sorted(spells, key=lambda fall: fall.depth)[:count]


def longest_drawdown(equity: Float) -> int:
    """Longest drawdown in bars, from the peak to the recovery or the end."""
    at_high = np.flatnonzero(drawdowns(equity) == 0)
    ends = np.append(at_high, len(equity) - 1)
    spells = np.diff(ends)
    # Neighbouring highs are no drawdown; the last spell is one once it has a bar below the high.
    return int(max(spells[:-1][spells[:-1] > 1].max(initial=0), spells[-1]))


def calmar(equity: Float, bars_per_year: float) -> float:
    """Yearly growth over the deepest drawdown; NaN where equity never fell."""
    depth = -max_drawdown(equity)
    return growth_per_year(equity, bars_per_year) / depth if depth > 0 else math.nan


def value_at_risk(returns: Float, alpha: float) -> float:
    """The alpha-quantile of returns, the threshold of the worst alpha share."""
    return float(np.quantile(returns, alpha, method="inverted_cdf"))


def cvar(returns: Float, alpha: float) -> float:
    """Mean of the worst alpha share of returns, the boundary observation weighted by its fraction in the tail."""
    return float(cvar_of_rows(returns, alpha))


def cvar_of_rows(returns: Float, alpha: float) -> Float:
    """CVaR of each row, [..., n] -> [...]."""
    share = alpha * returns.shape[-1]
    whole = math.floor(share)
    if whole >= returns.shape[-1]:
        return np.asarray(returns.mean(-1))
    ordered = np.partition(returns, whole, axis=-1)
    tail = ordered[..., :whole].sum(-1) + (share - whole) * ordered[..., whole]
    return np.asarray(tail / share)


def horizon_returns(equity: Float, bars: int) -> Float:
    """Returns over all overlapping windows of this many bars, oldest first; 0 where equity is already zero."""
    start = equity[:-bars]
    alive = start > 0
    return np.where(alive, equity[bars:] / np.where(alive, start, 1.0) - 1.0, 0.0)


def horizon_drawdowns(equity: Float, bars: int) -> Float:
    """Maximum drawdown within each overlapping window of this many bars, oldest first, 0 or negative.

    A window's first peak is its starting equity. The drawdown is 0 where equity is already zero.
    """
    windows = np.lib.stride_tricks.sliding_window_view(equity, bars + 1)
    deepest = np.zeros(len(windows))
    piece = max(1, (1 << 22) // (bars + 1))  # in blocks of windows, so memory does not grow with the record
    for begin in range(0, len(windows), piece):
        part = windows[begin : begin + piece]
        high = np.maximum.accumulate(part, axis=1)
        alive = high > 0
        deepest[begin : begin + piece] = (np.where(alive, part / np.where(alive, high, 1.0), 1.0) - 1.0).min(1)
    return deepest


def monthly_returns(time: Times, net: Float) -> dict[int, dict[int, float]]:
    """Net return by year and month, 1 to 12, UTC; a partly traded month has the return of its traded bars.

    `time`: open times of the bars in milliseconds, [T]. `net`: their net returns, [T].
    """
    months = time.astype("datetime64[ms]").astype("datetime64[M]").astype(np.int64)
    begins = np.flatnonzero(np.diff(months, prepend=months[0] - 1))
    growth = np.multiply.reduceat(1 + net, begins)
    by_year: dict[int, dict[int, float]] = {}
    for month, value in zip(months[begins], growth, strict=True):
        by_year.setdefault(1970 + int(month) // 12, {})[int(month) % 12 + 1] = float(value - 1)
    return by_year


def year_return(months: dict[int, float]) -> float:
    """Compound net return of the months."""
    return float(np.prod([1 + value for value in months.values()]) - 1)


def tail_ratio(returns: Float) -> float:
    """95 % quantile over 5 % quantile, as absolute values: above 1 the gains reach further than the losses."""
    low, high = np.quantile(returns, (0.05, 0.95))
    return float(abs(high) / abs(low)) if low != 0 else math.nan


def hit_rate(returns: Float) -> float:
    """Share of gains among the bars that moved equity; NaN where none did."""
    moved = np.count_nonzero(returns)
    return float(np.count_nonzero(returns > 0) / moved) if moved else math.nan


def profit_factor(returns: Float) -> float:
    """Sum of gains over sum of losses, by bar; NaN without losses."""
    losses = -float(returns[returns < 0].sum())
    return float(returns[returns > 0].sum()) / losses if losses > 0 else math.nan


def skewness(returns: Float) -> float:
    """Third standardised moment, population form; NaN when returns do not vary."""
    return _standardised_moment(returns, 3)


def kurtosis(returns: Float) -> float:
    """Fourth standardised moment, population form, 3 for a normal distribution; NaN when returns do not vary."""
    return _standardised_moment(returns, 4)


def _standardised_moment(returns: Float, order: int) -> float:
    centred = returns - returns.mean()
    deviation = math.sqrt(float(np.mean(centred**2)))
    return float(np.mean(centred**order)) / deviation**order if deviation > 0 else math.nan


def horizons(pace: Pace | float) -> dict[str, int]:
    """Bars in a bar, a day and a week; a horizon shorter than a bar is left out.

    `pace`: a number is the bars per year of a market that trades around the clock.
    """
    pace = Pace.of(pace)
    lengths = {"day": pace.per_day, "week": pace.per_week}
    # The tolerance is the rounding of bars per year, which makes a weekly bar slightly shorter than a week.
    return {"bar": 1} | {name: round(bars) for name, bars in lengths.items() if bars > 1 - 1e-9}


def tail_metrics(equity: Float, windows: Mapping[str, int], levels: Sequence[float] = TAIL_LEVELS) -> dict[str, float]:
    """VaR and CVaR of overlapping windows: `var_5_day`, `cvar_5_day` …; windows as long as the record are excluded.

    `windows`: bars by name, as `horizons` gives them.
    """
    metrics = {}
    for name, bars in windows.items():
        if bars < len(equity):
            returns = horizon_returns(equity, bars)
            for level in levels:
                metrics[f"var_{100 * level:g}_{name}"] = value_at_risk(returns, level)
                metrics[f"cvar_{100 * level:g}_{name}"] = cvar(returns, level)
    return metrics


def track_record(equity: Float, returns: Float, pace: Pace | float) -> dict[str, float]:
    """All metrics of equity [T + 1] and its per-bar returns [T]; lengths of drawdowns in days.

    `pace`: see `horizons`.
    """
    bars_per_year = Pace.of(pace).per_year
    days_per_bar = DAYS_PER_YEAR / bars_per_year
    return {
        "total_return": float(equity[-1] / equity[0] - 1),
        "growth_per_year": growth_per_year(equity, bars_per_year),
        "volatility": volatility(returns, bars_per_year),
        "sharpe": sharpe(returns, bars_per_year),
        "sharpe_autocorrelated": sharpe_autocorrelated(returns, bars_per_year),
        "sortino": sortino(returns, bars_per_year),
        "calmar": calmar(equity, bars_per_year),
        "max_drawdown": max_drawdown(equity),
        "max_drawdown_days": deepest_drawdown(equity).bars * days_per_bar,
        "longest_drawdown_days": longest_drawdown(equity) * days_per_bar,
        "skewness": skewness(returns),
        "kurtosis": kurtosis(returns),
        "tail_ratio": tail_ratio(returns),
        "hit_rate": hit_rate(returns),
        "profit_factor": profit_factor(returns),
        **tail_metrics(equity, horizons(pace)),
    }
