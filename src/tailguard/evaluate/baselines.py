"""Baseline policies. Each sees a `Moment`, everything known at the close of a bar, and returns target weights."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from tailguard.errors import ConfigError
from tailguard.evaluate.moment import HOLD as HOLD
from tailguard.evaluate.moment import Moment as Moment
from tailguard.evaluate.moment import Policy as Policy
from tailguard.evaluate.portfolio_baselines import EqualWeight, InverseVolatility, MinimumVariance, Momentum
from tailguard.validate import check_count, check_range

if TYPE_CHECKING:
    from tailguard.data.bars import Bars
    from tailguard.evaluate.backtest import BacktestResult

Float = NDArray[np.float64]

AGENT, OPTIMUM, BUY_AND_HOLD = "agent", "planted optimum", "buy & hold"
RANDOM = "random timing"
"""The agent's own trades at other times: a policy of equal turnover that knows nothing."""


@dataclass(frozen=True)
class Flat:
    """Never trades: cash."""

    def __call__(self, moment: Moment) -> Float:
        return np.zeros_like(moment.weights)


@dataclass(frozen=True)
class BuyAndHold:
    """Buys all assets in equal parts, at the start and after every gap that closed them, and holds them.

    An order that the volume cap cuts is repeated at every bar until it is filled.
    """

    exposure: float = 1.0
    """Gross weight bought."""

    def __call__(self, moment: Moment) -> Float:
        wanted = self.exposure / len(moment.weights)
        return np.where((moment.weights == 0) | moment.waiting, wanted, HOLD)


@dataclass(frozen=True)
class MovingAverageCross:
    """Long an asset while its fast average is above the slow one, else short (or flat without shorts).

    An order that the volume cap cuts is repeated at every bar until it is filled.
    """

    fast: int = 24
    slow: int = 168
    exposure: float = 1.0
    allow_short: bool = True

    def __post_init__(self) -> None:
        check_count("fast", self.fast)
        check_count("slow", self.slow, low=self.fast + 1)

    def __call__(self, moment: Moment) -> Float:
        if moment.row + 1 < self.slow:
            return np.zeros_like(moment.weights)
        above = moment.close[-self.fast :].mean(0) > moment.close[-self.slow :].mean(0)
        other = -1.0 if self.allow_short else 0.0
        wanted = np.where(above, 1.0, other) * self.exposure / len(moment.weights)
        # Trades on a change of side only, not to undo the drift of the weights.
        there = (np.sign(wanted) == np.sign(moment.weights)) & ~moment.waiting
        return np.where(there, HOLD, wanted)


@dataclass(frozen=True)
class VolatilityTarget:
    """Long every asset, scaled to a yearly volatility target by its trailing volatility, up to full exposure."""

    target: float = 0.2
    """Yearly volatility target, of all assets together if they were perfectly correlated."""
    window: int = 168
    exposure: float = 1.0
    """Largest gross weight."""
    band: float = 0.1
    """Trades only when a weight is off by more than this share of the full exposure, to save costs."""

    def __post_init__(self) -> None:
        check_range("target", self.target, low=0, low_open=True)
        check_count("window", self.window, low=2)

    def __call__(self, moment: Moment) -> Float:
        if moment.row < self.window:
            return np.zeros_like(moment.weights)
        assets = len(moment.weights)
        returns = np.diff(np.log(moment.close[-self.window - 1 :]), axis=0)
        deviation = returns.std(0, ddof=1) * np.sqrt(moment.bars_per_year)
        scale = np.minimum(self.target / np.maximum(deviation, 1e-12), self.exposure)
        wanted = scale / assets
        return np.where(np.abs(wanted - moment.weights) > self.band * self.exposure / assets, wanted, HOLD)


MakePolicy = Callable[[float, bool], Policy]
"""Makes a baseline's policy from the largest gross weight it may hold and from whether shorts are allowed."""

BASELINES: dict[str, MakePolicy] = {
    BUY_AND_HOLD: lambda exposure, _: BuyAndHold(exposure),
    "moving-average cross": lambda exposure, allow_short: MovingAverageCross(
        exposure=exposure, allow_short=allow_short
    ),
    "volatility target": lambda exposure, _: VolatilityTarget(exposure=exposure),
    "flat": lambda *_: Flat(),
}
"""Every baseline that is shown with an agent, in the order of the tables."""
PORTFOLIO_BASELINES: dict[str, MakePolicy] = {
    "equal weight": lambda exposure, _: EqualWeight(exposure),
    "inverse volatility": lambda exposure, _: InverseVolatility(exposure),
    "minimum variance": lambda exposure, _: MinimumVariance(exposure),
    "momentum": lambda exposure, allow_short: Momentum(exposure, allow_short=allow_short),
}
"""Baselines that are shown, after those, where an account trades several assets."""
RESERVED = ("agent", "planted optimum", "random timing")
"""Names of the other rows in those tables."""


def baseline(name: str, *, replace: bool = False, portfolio: bool = False) -> Callable[[MakePolicy], MakePolicy]:
    """Register a function `(exposure, allow_short) -> policy` as a baseline, shown with every agent from then on.

    Args:
        name: as the tables and charts show it.
        replace: allow a name that is already registered, as when a notebook cell runs twice.
        portfolio: show it only where an account trades several assets.
    """
    if not isinstance(name, str) or not name.strip() or not name.isprintable():
        raise ConfigError(f"baseline name {name!r}: choose a printable name")
    if name in RESERVED:
        raise ConfigError(f"baseline {name!r}: the name is reserved for another row of the tables; choose another name")
    table, other = (PORTFOLIO_BASELINES, BASELINES) if portfolio else (BASELINES, PORTFOLIO_BASELINES)
    if name in other or (name in table and not replace):
        raise ConfigError(f"baseline {name!r} is registered already; choose another name, or pass replace=True")

    def register(make: MakePolicy) -> MakePolicy:
        table[name] = make
        return make

    return register


def standard_baselines(leverage: float = 1.0, allow_short: bool = True, assets: int = 1) -> dict[str, Policy]:
    """The baselines shown with every agent, and those of portfolios where an account trades several assets."""
    tables = BASELINES | (PORTFOLIO_BASELINES if assets > 1 else {})
    return {name: make(min(leverage, 1.0), allow_short) for name, make in tables.items()}


def random_timing(result: BacktestResult, bars: Bars, generator: np.random.Generator) -> Float:
    """The agent's own decisions at other times: a random policy of its turnover and exposure, as target weights [R, A].

    Its targets are shifted circularly by a random number of bars, a tenth to nine tenths of the record. Size,
    frequency, holding times and costs of the trades stay the same; any relation to prices is lost. A policy with timing
    skill does worse at other times; one that is paid for its exposure does not.
    """
    panel = bars.panel("portfolio")
    rows = np.searchsorted(panel.time, result.time) - 1
    if (
        result.targets.shape[1] != panel.assets
        or rows.min() < 0
        or rows.max() + 1 >= panel.rows
        or (panel.time[rows + 1] != result.time).any()
    ):
        raise ConfigError(
            "random timing: the result was not computed on these bars; pass the bars it was backtested on"
        )
    count = len(rows)
    shift = int(generator.integers(count // 10, count - count // 10))
    targets = np.zeros((panel.rows, panel.assets))
    targets[rows] = np.roll(result.targets, shift, axis=0)
    return targets
