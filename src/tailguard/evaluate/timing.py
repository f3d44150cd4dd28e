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
    """The same of the same positions moved along the bars, [S]. Costs hardly change, so they are left out of both."""
    p_value: float
    """Share of the other times that paid as much or more; small: the times were well chosen."""


def timing_test(result: BacktestResult, panel: Panel) -> TimingTest:
    """Move the positions along the bars by a tenth to nine tenths of the record, round a circle, every way there is.

    Size, length and order of the positions stay and so does their turnover; only their relation to the prices goes. The
    sums at all shifts together are a circular cross-correlation, which the fast Fourier transform gives at once.

    `panel`: the bars that the result was made on.
    """
    rows = np.searchsorted(panel.time, result.time)
    count = len(rows)
    check_count("traded bars", count, low=20)
    if rows.max() >= panel.rows or (panel.time[rows] != result.time).any() or panel.symbols != result.symbols:
        raise ConfigError("timing test: the result was not made on these bars; pass the bars it was backtested on")
    before = np.vstack([np.zeros((1, panel.assets)), result.weights[:-1]])
    held = np.where(np.isnan(result.targets), before, result.targets)
    inside = panel.close[rows] / panel.open[rows] - 1
    overnight = panel.open[rows] / panel.close[rows - 1] - 1
    gains = _at_every_shift(held, inside) + _at_every_shift(before, overnight)
    years = count / result.bars_per_year
    elsewhere = gains[count // 10 : count - count // 10]
    exceeding = int(np.count_nonzero(elsewhere >= gains[0]))
    return TimingTest(float(gains[0] / years), elsewhere / years, (1 + exceeding) / (1 + len(elsewhere)))


def _at_every_shift(positions: Float, returns: Float) -> Float:
    """Σ_t Σ_a positions[t, a] · returns[(t + s) mod T, a] for every s, [T, A] twice -> [T]."""
    spectrum = np.conj(np.fft.rfft(positions, axis=0)) * np.fft.rfft(returns, axis=0)
    return np.asarray(np.fft.irfft(spectrum, n=len(positions), axis=0).sum(1))
