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
    """The gain from prices at the actual times, and at all shifted times."""

    earned: float
    """Gain a year before costs, as a sum of returns."""
    elsewhere: Float
    """The same with positions shifted by 1 … T − 1 bars, [T − 1]. Costs hardly change, so they are left out of both."""
    p_value: float
    """Share of all shifts, zero included, that earned as much or more; small: evidence of timing."""


def timing_test(result: BacktestResult, panel: Panel) -> TimingTest:
    """Shift the positions circularly along the bars, by every number of bars.

    Size, length and order of the positions stay and so does their turnover; only their relation to the prices is lost.
    Without such a relation every shift is equally likely to earn most, so p ≤ 5 % in at most 5 % of cases. That needs
    all shifts: with slow positions, small shifts earn nearly as much as the actual times, and without them the luck of
    one long position would count as timing. The sums at all shifts are a circular cross-correlation, computed by FFT.

    `panel`: the bars that the result was computed on.
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
    # Constant positions earn the same at all times, up to the rounding of the transform.
    rounding = 1e-9 * float(np.abs(held * inside + before * overnight).sum())
    reached = int(np.count_nonzero(gains[1:] >= gains[0] - rounding))
    return TimingTest(float(gains[0] / years), gains[1:] / years, (1 + reached) / count)


def _at_every_shift(positions: Float, returns: Float) -> Float:
    """Σ_t Σ_a positions[t, a] · returns[(t + s) mod T, a] for every s, [T, A] twice -> [T]."""
    spectrum = np.conj(np.fft.rfft(positions, axis=0)) * np.fft.rfft(returns, axis=0)
    return np.asarray(np.fft.irfft(spectrum, n=len(positions), axis=0).sum(1))
