"""Sampling error of the CVaR of windows under persistent volatility, by simulation.

A record that spans only a few volatility regimes may miss a turbulent one, and no resample of it contains what the
record does not. The persistence of volatility can still be estimated: a calm record shows how slowly and how far
volatility moves as well as a turbulent one. Log-volatility is modelled as an AR(1) process,

    r_t = exp(h_t) z_t,    h_t = φ h_{t−1} + √(1 − φ²) s ε_t,    z, ε independent standard normal,

so that log |r_t| is h_t plus white noise. Its memory τ = −1 / log φ and its deviation s are drawn from their posterior
by the Whittle likelihood (Whittle 1953), on a grid with even weights, and records of the same length are simulated with
each draw. The deviation of their CVaR from that of the process estimates the deviation of the realised CVaR from the
true one. Draws from the posterior, instead of the best fit, include the uncertainty of τ and s.
"""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray

from tailguard.evaluate.metrics import cvar, cvar_of_rows

Float = NDArray[np.float64]

FEWEST_BARS = 32
"""Fewest bars with a return for an estimate of the persistence of volatility."""
DRAWS = 16
"""Pairs (τ, s) drawn from the posterior."""
RECORDS = 24
"""Records simulated with each pair."""
SHORTEST_MEMORY = 3.0
"""Bars; the grid ends at half of the record."""
SIGNAL_SHARES = np.concatenate([[1e-4, 0.003], np.geomspace(0.01, 0.95, 24)])
"""Shares of the variance of log |r| that are volatility's, 0 to all but 5 %."""
FLOOR = 0.1
"""Of the median: smaller |r| count as this much, or the logarithms of returns near zero would dominate."""
PASSED_BY_FLOOR = 0.946
"""P(|z| > FLOOR · median |z|) for a normal z: the share of a small change of h that is left in the floored log |r|."""
LONG_RECORD = 8_192
"""For longer records a shorter one is simulated and its deviation scaled by √(shorter / length)."""
ENOUGH_MEMORIES = 50
"""… if it spans at least so many memories τ, and windows: from there on the deviation follows the square-root law."""


def memory_posterior(returns: Float) -> tuple[Float, Float, Float]:
    """Memory of log-volatility in bars [M], the deviation s of each pair [M, S], and the pair's probability [M, S].

    The Whittle log-likelihood of AR(1) plus white noise, with the level of the spectrum at its best for each pair.
    """
    size = np.abs(returns)
    logs = np.log(np.maximum(size, FLOOR * float(np.median(size))))
    count = len(logs)
    power = np.abs(np.fft.rfft(logs - logs.mean()))[1 : count // 2] ** 2 / count
    # Neighbouring high frequencies, at which the model hardly changes, are taken together: the work stays bounded.
    edges = np.arange(len(power))
    if len(power) > 64:
        edges = np.unique(np.concatenate([np.arange(64), np.geomspace(64, len(power), 80).astype(np.int64)]))[:-1]
    members = np.diff(np.append(edges, len(power)))
    frequency = np.add.reduceat(2 * np.pi * np.arange(1, len(power) + 1) / count, edges) / members
    power = np.add.reduceat(power, edges) / members
    memory = np.geomspace(SHORTEST_MEMORY, count / 2, 24)
    signal = ar1_spectrum(memory[:, None, None], frequency)
    share = SIGNAL_SHARES[:, None]
    shape = 1 - share + share * signal
    level = (members * power / shape).sum(-1) / members.sum()
    likelihood = -(members * np.log(shape)).sum(-1) - members.sum() * np.log(level)
    probability = np.exp(likelihood - likelihood.max())
    return memory, np.sqrt(SIGNAL_SHARES * level) / PASSED_BY_FLOOR, probability / probability.sum()


def ar1_spectrum(memory: Float | float, frequency: Float) -> Float:
    """Spectral density of an AR(1) process with variance 1, times 2π: (1 − φ²) / (1 + φ² − 2φ cos ω)."""
    phi = np.exp(-1 / np.asarray(memory))
    return np.asarray((1 - phi**2) / (1 + phi**2 - 2 * phi * np.cos(frequency)))


def simulated_returns(
    memory: float, deviation: float, records: int, count: int, generator: np.random.Generator
) -> Float:
    """Returns of the process, [records, count], up to scale."""
    # Noise is shaped in the frequency domain on a circle of twice the length, so the ends of the record are
    # independent.
    frequency = 2 * np.pi * np.arange(count + 1) / (2 * count)
    noise = np.fft.rfft(generator.standard_normal((records, 2 * count), dtype=np.float32), axis=1)
    log_volatility = np.fft.irfft(noise * np.sqrt(ar1_spectrum(memory, frequency)), 2 * count, axis=1)[:, :count]
    shocks = generator.standard_normal((records, count), dtype=np.float32)
    return np.asarray(np.exp(deviation * log_volatility) * shocks)


def tail_deviations(returns: Float, alpha: float, horizon: int, generator: np.random.Generator) -> Float:
    """log(estimated CVaR / true CVaR) of records like this one, over windows of `horizon` bars, [DRAWS · RECORDS].

    Bars without a return, those without a position, are left out, and windows are shorter by their share. Empty where
    fewer than `FEWEST_BARS` bars or eight windows are left.
    """
    moving = returns[returns != 0]
    count = len(moving)
    window = max(1, round(horizon * count / max(len(returns), 1)))
    if count < max(FEWEST_BARS, window + 8):
        return np.zeros(0)
    memory, deviation, probability = memory_posterior(moving)
    # Evenly spaced levels from a random start: systematic sampling of the posterior.
    levels = (np.arange(DRAWS) + generator.random()) / DRAWS
    chosen = np.minimum(np.searchsorted(np.cumsum(probability), levels), probability.size - 1)
    pairs = [(float(memory[pair // deviation.shape[1]]), float(deviation.flat[pair])) for pair in chosen]
    return np.concatenate([_deviations(*pair, count, alpha, window, generator) for pair in pairs])


def _deviations(
    memory: float, deviation: float, count: int, alpha: float, window: int, generator: np.random.Generator
) -> Float:
    length = min(count, max(LONG_RECORD, math.ceil(ENOUGH_MEMORIES * max(memory, window))))
    outcomes = simulated_returns(memory, deviation, RECORDS, length, generator)
    if window > 1:
        path = np.cumsum(outcomes, axis=1)
        outcomes = np.concatenate([path[:, window - 1 : window], path[:, window:] - path[:, :-window]], axis=1)
    truth = cvar(outcomes.reshape(-1), alpha)
    # The true value is estimated from all records together.
    scale = math.sqrt(RECORDS / (RECORDS - 1) * length / count)
    estimates = np.minimum(cvar_of_rows(outcomes, alpha), 1e-6 * truth)  # a tail that never lost has no logarithm
    return np.asarray(scale * np.log(estimates / truth))
