"""Baselines for portfolios: equal weight, inverse volatility, minimum variance and momentum.

Each is rebalanced every so many bars, by the pace of the market; in between positions drift with their prices. All but
equal weight are computed from a rolling window of the bars so far. An order that the volume cap cuts is repeated at
every bar until it is filled.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from tailguard.data.pace import Pace
from tailguard.evaluate.moment import HOLD, Moment
from tailguard.validate import check_count, check_range

Float = NDArray[np.float64]

PIVOTS = 100
"""Most exchanges of blocks in `long_only_solution`; a few are enough."""


def bars_between(pace: Pace) -> int:
    """Bars between two rebalancings."""
    return max(24, round(pace.per_day)) if pace.per_day > 1 else max(1, round(pace.per_year / 12))


def bars_back(pace: Pace) -> int:
    """Bars from which weights are computed."""
    return max(168, round(pace.per_week)) if pace.per_day > 1 else max(24, round(pace.per_year * 2 / 3))


@dataclass(frozen=True)
class Rebalanced(ABC):
    """A portfolio that is brought back to its weights every `every` bars."""

    exposure: float = 1.0
    """Gross weight."""
    every: int | None = None
    """Bars between two rebalancings; None: a day, at least 24 bars, or a month of bars of a day and longer."""

    def __post_init__(self) -> None:
        check_range("exposure", self.exposure, low=0)
        if self.every is not None:
            check_count("every", self.every)

    @abstractmethod
    def weights(self, moment: Moment, row: int) -> Float:
        """Weights by the bars up to this row, [A]."""

    def __call__(self, moment: Moment) -> Float:
        every = bars_between(moment.pace) if self.every is None else self.every
        since = moment.row % every
        if moment.first or since == 0 or not moment.weights.any():
            return self.weights(moment, moment.row)
        if not moment.waiting.any():
            return np.full_like(moment.weights, HOLD)
        return np.where(moment.waiting, self.weights(moment, moment.row - since), HOLD)


@dataclass(frozen=True)
class EqualWeight(Rebalanced):
    """The same weight for each listed asset."""

    def weights(self, moment: Moment, row: int) -> Float:  # noqa: ARG002 (it needs no bars)
        listed = np.ones(len(moment.weights)) if moment.listed is None else moment.listed.astype(np.float64)
        return np.asarray(self.exposure * listed / max(listed.sum(), 1))


@dataclass(frozen=True)
class FromWindow(Rebalanced):
    """Weights from a rolling window, of the assets that were listed, and moved, for the whole of it."""

    window: int | None = None
    """Bars from which weights are computed; None: a week, at least 168 bars, or eight months of bars of a day and
    longer."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.window is not None:
            check_count("window", self.window, low=2)

    @abstractmethod
    def shares(self, returns: Float) -> Float:
        """Weights whose gross is 1, [A], from the log-returns of the window, [window, A]."""

    def weights(self, moment: Moment, row: int) -> Float:
        weights = np.zeros_like(moment.weights)
        window = bars_back(moment.pace) if self.window is None else self.window
        if row < window:
            return weights
        returns = np.diff(np.log(moment.close[row - window : row + 1]), axis=0)
        known = returns.std(0) > 0
        if moment.was_listed is not None and moment.listed is not None:
            known &= moment.was_listed[row - window : row + 1].all(0) & moment.listed
        if known.any():
            weights[known] = self.exposure * self.shares(returns[:, known])
        return weights


@dataclass(frozen=True)
class InverseVolatility(FromWindow):
    """Weights in proportion to 1 / volatility."""

    def shares(self, returns: Float) -> Float:
        inverse = 1 / returns.std(0, ddof=1)
        return np.asarray(inverse / inverse.sum())


@dataclass(frozen=True)
class MinimumVariance(FromWindow):
    """The long-only portfolio of least variance, by the covariance shrunk as in Ledoit & Wolf (2004)."""

    def shares(self, returns: Float) -> Float:
        weights = long_only_solution(shrunk_covariance(returns))
        return np.asarray(weights / weights.sum())


@dataclass(frozen=True)
class Momentum(FromWindow):
    """Long the third of the assets that rose most over the window; with shorts half of it, and short the last third."""

    allow_short: bool = True

    def shares(self, returns: Float) -> Float:
        assets = returns.shape[1]
        count = max(1, assets // 3)
        order = np.argsort(returns.sum(0), kind="stable")
        weights = np.zeros(assets)
        short = self.allow_short and assets > 1
        weights[order[-count:]] = (0.5 if short else 1.0) / count
        if short:
            weights[order[:count]] = -0.5 / count
        return weights


def shrunk_covariance(returns: Float) -> Float:
    """The covariance of [T, A] returns, shrunk to a multiple of the identity by Ledoit & Wolf's (2004) share."""
    rows, assets = returns.shape
    centred = returns - returns.mean(0)
    sample = centred.T @ centred / rows
    mean = np.trace(sample) / assets
    spread = ((sample - mean * np.eye(assets)) ** 2).sum()  # δ²·A
    error = ((centred**2).sum(1) ** 2).sum() / rows**2 - (sample**2).sum() / rows  # β̄²·A
    share = min(error, spread) / spread if spread > 0 else 0.0
    return np.asarray(share * mean * np.eye(assets) + (1 - share) * sample)


def long_only_solution(covariance: Float) -> Float:
    """argmin ½ xᵀΣx − Σᵢ xᵢ with x ≥ 0, [A]: in proportion to the long-only weights of least variance.

    Block principal pivoting (Portugal, Júdice & Vicente 1994): solve on the assets that are held, drop those below 0,
    take in those whose price of being left out is negative. Where blocks do not improve, one asset at a time.
    """
    assets = len(covariance)
    held = np.ones(assets, bool)
    best, patience = assets + 1, 3
    for _ in range(PIVOTS * assets):
        x = np.zeros(assets)
        x[held] = np.linalg.solve(covariance[np.ix_(held, held)], np.ones(held.sum()))
        gradient = covariance @ x - 1
        wrong = (held & (x < 0)) | (~held & (gradient < -1e-12))
        if not wrong.any():
            break
        if wrong.sum() < best:
            best, patience = int(wrong.sum()), 3
        elif patience:
            patience -= 1
        else:
            last = np.flatnonzero(wrong)[-1]
            wrong = np.arange(assets) == last
        held ^= wrong
    return np.maximum(x, 0)
