"""Timing test: would the same positions at other times have earned as much?"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from tailguard.errors import ConfigError
from tailguard.validate import check_count

if TYPE_CHECKING:
    from tailguard.data.panel import Panel
    from tailguard.evaluate.backtest import BacktestResult

Float = NDArray[np.float64]


@dataclass(frozen=True)
class TimingTest:
    """The gain from prices at the actual times, and at all others."""

    earned: float
    """Gain a year before costs, as a sum of returns."""
    elsewhere: Float
    """The same of the same positions moved along the bars by 1 … T − 1 of them, [T − 1]. Costs hardly change, so they
    are left out of both."""
    p_value: float
    """Share of all times, the actual ones among them, that paid as much or more; small: they were well chosen."""


def timing_test(result: BacktestResult, panel: Panel) -> TimingTest:
    """Move the positions along the bars, round a circle, by every number of bars.

    Size, length and order of the positions stay and so does their turnover; only their relation to the prices goes.
    Where they have none, every shift is as likely as any other to pay best, so that p ≤ 5 % in at most 5 % of cases.
    That needs all shifts: those of a few bars pay nearly what the actual times do where positions are slow, and
    without them luck that lasts for a whole position passes for timing. The sums at all shifts together are a circular
    cross-correlation, which the fast Fourier transform gives at once.

    `panel`: the bars that the result was made on.
    """
    rows = np.searchsorted(panel.time, result.time)
    count = len(rows)
    check_count("traded bars", count, low=20)
    if rows.max() >= panel.rows or (panel.time[rows] != result.time).any() or panel.symbols != result.symbols:
        raise ConfigError("timing test: the result was not computed on these bars; pass the bars it was backtested on")
    before = np.vstack([np.zeros((1, panel.assets)), result.weights[:-1]])
    held = np.where(np.isnan(result.targets), before, result.targets)
    inside = panel.close[rows] / panel.open[rows] - 1
    overnight = panel.open[rows] / panel.close[rows - 1] - 1
    gains = _at_every_shift(held, inside) + _at_every_shift(before, overnight)
    years = count / result.bars_per_year
    # Positions that never change pay the same at all times, but for the rounding of the transform.
    rounding = 1e-9 * float(np.abs(held * inside + before * overnight).sum())
    reached = int(np.count_nonzero(gains[1:] >= gains[0] - rounding))
    return TimingTest(float(gains[0] / years), gains[1:] / years, (1 + reached) / count)


def _at_every_shift(positions: Float, returns: Float) -> Float:
    """Σ_t Σ_a positions[t, a] · returns[(t + s) mod T, a] for every s, [T, A] twice -> [T]."""
    spectrum = np.conj(np.fft.rfft(positions, axis=0)) * np.fft.rfft(returns, axis=0)
    return np.asarray(np.fft.irfft(spectrum, n=len(positions), axis=0).sum(1))
