"""A synthetic market with the stylised facts of crypto and, on request, a planted signal of known strength.

One bar of one asset, after the state s ∈ {−1, +1} at the close before it (0 when nothing is planted):

    return      R = s·m + σ·ε from open to close, a martingale when nothing is planted
    volatility  σ = σ̄ · exp(slow + fast + own) · regime · time of day, with E[σ²] = σ̄² (stochastic volatility, Taylor
                1986; two components as in Chernov, Gallant, Ghysels & Tauchen 2003)
    shock       ε = √ρ · common + √(1 − ρ) · own, each a Student t with rare jumps, of unit variance
    order flow  taker buys / volume = ½ + tanh(ε)-part + s'·shift + noise, with s' the state at this bar's close

Every stream of random numbers has its own generator and is drawn in time order. A seed therefore determines the bars: a
longer market starts with the shorter one, and an asset does not depend on the number of other assets.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from enum import IntEnum
from itertools import pairwise
from pathlib import Path

import numpy as np
import polars as pl
from numpy.typing import NDArray

from tailguard.data.bars import TIME_TYPE, Bars
from tailguard.data.frequency import parse_frequency
from tailguard.data.market_law import MarketLaw as MarketLaw
from tailguard.data.panel import Float
from tailguard.data.planted import Optimum, ReturnLaw, best_growth, follow
from tailguard.data.processes import autoregression, flip_probability, heavy_tailed, price_extremes, two_state
from tailguard.data.storage import write_frame
from tailguard.errors import ConfigError
from tailguard.validate import check_count, check_range

HOURS_PER_YEAR = 24 * 365.25
START = datetime(2021, 1, 1, tzinfo=UTC)

DEFAULT_LAW = MarketLaw()
VOLATILITY = DEFAULT_LAW.volatility

# Volatility: sizes are standard deviations of log-volatility, times are relaxation times in hours.
SLOW_SIZE, SLOW_HOURS = 0.32, 720.0
FAST_SIZE, FAST_HOURS = 0.30, 8.0
OWN_SIZE, OWN_HOURS = 0.15, 96.0
SEASON_SIZE, SEASON_PEAK = 0.2, 15.0  # hour of the day, UTC

# Shocks.
JUMP_WAIT, JUMP_SIZE = 336.0, 5.0
LARGEST_MOVE = 0.5  # symmetric, so that the bound leaves the mean alone
LARGEST_LOG_PRICE = 600.0  # prices and volumes stay within 1e±260; a double holds 1e±308
GAP_SIZE = 1e-5  # log-move from one close to the next open

# The planted state, and the share of volume bought by takers that shows it; sizes for hourly bars.
STATE_HOURS = 72.0
FLOW_SHIFT, FLOW_NOISE, FLOW_SHOCK = 0.025, 0.02, 0.03

# Trading activity, in quote currency.
FIRST_PRICE = 30_000.0
VALUE_PER_HOUR = 6e8
TRADE_VALUE = 4_000.0
ACTIVITY_SIZE, ACTIVITY_HOURS, ACTIVITY_NOISE = 0.35, 24.0, 0.2

DEFAULT_COST = 0.0006
"""Taker fee of 5 bp and half a spread of 1 bp."""
DEFAULT_FUNDING = 0.0001
"""Holding cost per eight hours on the absolute notional."""

LAW_LEVELS = (0.0, 0.15, 0.3, 0.45, 0.6, 0.7, 0.8, 0.87, 0.92, 0.95, 0.97, 0.985, 0.993, 0.997, 0.999, 0.9997, 1.0)
LAW_SAMPLE, LAW_SEED = 2**18, 0


class Stream(IntEnum):
    """Independent sources of randomness; changing a number here changes the bars of every seed."""

    SLOW = 0
    FAST = 1
    REGIME = 2
    STUDENT = 3
    JUMP_TIME = 4
    JUMP = 5
    OWN = 6
    STATE = 7
    FLOW = 8
    GAP = 9
    HIGH = 10
    LOW = 11
    ACTIVITY = 12
    ACTIVITY_NOISE = 13
    TRADES = 14


@dataclass(frozen=True)
class Noise:
    """The random numbers of one asset, or of what all assets share (asset 0), for `bars` bars."""

    seed: int
    asset: int
    bars: int

    def _generator(self, stream: Stream) -> np.random.Generator:
        return np.random.Generator(np.random.PCG64(np.random.SeedSequence(self.seed, spawn_key=(self.asset, stream))))

    def normal(self, stream: Stream) -> Float:
        return self._generator(stream).standard_normal(self.bars)

    def uniform(self, stream: Stream) -> Float:
        return self._generator(stream).random(self.bars)

    def student(self, stream: Stream, tail_index: float) -> Float:
        return self._generator(stream).standard_t(tail_index, self.bars)


@dataclass(frozen=True)
class SyntheticMarket:
    """Bars, and the hidden states behind them. Arrays are [bars, assets]."""

    bars: Bars
    state: NDArray[np.int8]
    """Sign of the next bar's expected return, known at the close of each bar: −1 or +1; 0 when nothing is planted."""
    crisis: NDArray[np.bool_]
    """Whether the market is in its crisis regime, [bars]."""
    volatility: Float
    """Standard deviation of each bar's return, before the shock is drawn."""
    signal: float
    """Sharpe ratio per year, before costs, of always holding the weight `state`."""
    correlation: float
    hours: float
    """Length of a bar."""
    market_law: MarketLaw
    """Parameters of volatility, tails and regimes."""

    def law(self) -> ReturnLaw:
        """Law of the next bar's return given the state (−1, then +1), averaged over volatility."""
        shock, probability = _shock_law(self.market_law, self.hours, self.correlation)
        drift = _drift(self.market_law, self.signal, self.hours)
        flip = flip_probability(STATE_HOURS, self.hours)
        return ReturnLaw(
            returns=np.stack([shock - drift, shock + drift]),
            probability=probability,
            transition=np.array([[1 - flip, flip], [flip, 1 - flip]]),
        )

    def optimum(
        self,
        cost: float = DEFAULT_COST,
        leverage: float = 1.0,
        funding: float = DEFAULT_FUNDING,
        allow_short: bool = True,
    ) -> Optimum:
        """Best growth in one asset for a trader who sees the state, net of costs.

        `cost` is paid on traded notional and `funding`, per eight hours, on held notional. Market impact is not in it.
        """
        holding = funding * self.hours / 8
        bars_per_year = HOURS_PER_YEAR / self.hours
        return best_growth(
            self.law(),
            cost=cost,
            leverage=leverage,
            holding=holding,
            allow_short=allow_short,
            bars_per_year=bars_per_year,
        )

    def oracle_weights(
        self,
        cost: float = DEFAULT_COST,
        leverage: float = 1.0,
        funding: float = DEFAULT_FUNDING,
        allow_short: bool = True,
    ) -> Float:
        """The optimal policy's target weights on these bars, [bars, assets]; NaN: hold.

        Row t is decided at the close of bar t. Several assets each get an equal share of the leverage.
        """
        optimum = self.optimum(cost, leverage / self.state.shape[1], funding, allow_short)
        panel = self.bars.panel()
        gap = np.zeros_like(panel.open)
        gap[1:] = panel.open[1:] / panel.close[:-1] - 1
        move = panel.close / panel.open - 1
        seen = (self.state > 0).astype(np.int64)
        return follow(optimum, seen, gap, move, cost=cost, holding=funding * self.hours / 8)

    def save(self, path: str | Path) -> None:
        """Write the bars as Parquet, CSV or Feather, with the column names of Binance's dumps."""
        columns = {"time": "open_time", "trades": "number_of_trades"}
        write_frame(self.bars.frame.drop("segment").rename(columns), Path(path))


def make_market(
    bars: int = 26_280,
    *,
    assets: int = 1,
    frequency: str = "1h",
    seed: int = 0,
    signal: float = 0.0,
    correlation: float = 0.6,
    start: datetime = START,
    law: MarketLaw = DEFAULT_LAW,
) -> SyntheticMarket:
    """Make `bars` bars for each of `assets` assets.

    `signal` is the yearly Sharpe ratio, before costs, of always holding the planted state; 0 plants nothing, and then
    no strategy has a positive expected return. `correlation` is that of any two assets' returns. `law` sets their
    volatility, tails and regimes.
    """
    check_count("bars", bars, low=2)
    check_count("assets", assets)
    check_count("seed", seed, low=0)
    check_range("signal", signal, low=0, high=50)
    check_range("correlation", correlation, low=0, high=0.9)
    if not isinstance(law, MarketLaw):
        raise ConfigError(f"law: {law!r} is not a MarketLaw; import it from tailguard.data.synthetic")
    length = parse_frequency(frequency)
    hours = length / timedelta(hours=1)
    if bars > (datetime.max.replace(tzinfo=UTC) - start) / length:
        raise ConfigError(f"bars: {bars:,} bars of {frequency} from {start:%Y-%m-%d} on end after the year 9999")
    drift = _drift(law, signal, hours)
    if LARGEST_MOVE + drift >= 1:
        raise ConfigError(
            f"signal: {signal:g} at volatility {law.volatility:g} is a drift of {drift:.0%} per bar of {frequency}; "
            f"it must be less than {1 - LARGEST_MOVE:.0%}, or a bar could lose everything: use shorter bars"
        )
    time = pl.datetime_range(start, start + (bars - 1) * length, length, eager=True).cast(TIME_TYPE)

    shared = Noise(seed, 0, bars)
    crisis = two_state(shared.uniform(Stream.REGIME), off=law.calm_hours, on=law.crisis_hours, hours=hours)
    market_volatility = _market_volatility(law, shared, crisis, time, hours)
    market_shock = _shock(law, shared, hours)
    usual = _bar_volatility(law, hours)
    frames, states, volatilities = [], [], []
    for asset in range(assets):
        own = Noise(seed, asset + 1, bars)
        volatility = market_volatility * _own_volatility(own, hours)
        shock = _mix(market_shock, _shock(law, own, hours), correlation)
        state = _state(own, hours) if signal > 0 else np.zeros(bars, dtype=np.int8)
        moves = _moves(volatility, shock, state, drift)
        prices = _prices(own, moves, volatility, FIRST_PRICE / 10 ** (asset % 4))
        activity = _activity(own, prices, volatility / usual, shock, state, hours)
        symbol, segment = pl.lit(f"SYN{asset + 1:02d}"), pl.lit(asset, dtype=pl.Int32)
        frame = pl.DataFrame({"time": time, **prices, **activity})
        frames.append(frame.select(symbol.alias("symbol"), pl.all(), segment.alias("segment")))
        states.append(state)
        volatilities.append(volatility)
    changed = law.describe()
    source = f"synthetic market (seed {seed}, signal {signal:g}{', ' + changed if changed else ''})"
    return SyntheticMarket(
        bars=Bars(pl.concat(frames), length, source),
        state=np.stack(states, axis=1),
        crisis=crisis,
        volatility=np.stack(volatilities, axis=1),
        signal=float(signal),
        correlation=float(correlation),
        hours=hours,
        market_law=law,
    )


def describe(market: SyntheticMarket) -> str:
    """One line: the market, and the best achievable growth at the default costs."""
    bars, assets = market.state.shape
    first, last = market.bars.end_points
    text = f"{bars:,} bars × {assets} {'asset' if assets == 1 else 'assets'}, {first:%Y-%m-%d} → {last:%Y-%m-%d}, "
    if market.signal == 0:
        return text + "no signal planted: best achievable growth 0, by not trading"
    best = market.optimum()
    where = "" if assets == 1 else " in each asset alone"
    return (
        f"{text}signal {market.signal:g}: best achievable log-growth{where} {best.log_growth_per_year:+.2f} per year "
        f"(equity ×{1 + best.growth_per_year:.3g}), Sharpe {best.sharpe:.1f}, net of {DEFAULT_COST * 1e4:g} bp a trade "
        f"and {DEFAULT_FUNDING * 1e4:g} bp funding per 8 h"
    )


def _drift(law: MarketLaw, signal: float, hours: float) -> float:
    """Expected return per bar of the weight s. Its deviation is σ̄ per year, so its Sharpe ratio is `signal`."""
    return signal * law.volatility * hours / HOURS_PER_YEAR


def _bar_volatility(law: MarketLaw, hours: float) -> float:
    """Standard deviation σ̄ of one bar's return."""
    return law.volatility * math.sqrt(hours / HOURS_PER_YEAR)


def _market_volatility(law: MarketLaw, noise: Noise, crisis: NDArray[np.bool_], time: pl.Series, hours: float) -> Float:
    """Volatility per bar that all assets share, with mean square σ̄², [T]."""
    slow = autoregression(noise.normal(Stream.SLOW), size=SLOW_SIZE, relaxation=SLOW_HOURS, hours=hours)
    fast = autoregression(noise.normal(Stream.FAST), size=FAST_SIZE, relaxation=FAST_HOURS, hours=hours)
    middle = time.dt.epoch("ms").to_numpy() / 3.6e6 + hours / 2
    season = _season_size(hours) * np.cos(2 * math.pi * (middle - SEASON_PEAK) / 24)
    level = law.volatility * math.sqrt(hours / HOURS_PER_YEAR / _mean_square(law, hours))
    return level * np.exp(slow + fast + season) * np.where(crisis, law.crisis_factor, 1.0)


def _mean_square(law: MarketLaw, hours: float) -> float:
    """E[exp(2·(slow + fast + season))·regime²]; the mean of exp(a·cos) over a period is the Bessel function I₀(a)."""
    regime = 1 + law.crisis_share * (law.crisis_factor**2 - 1)
    return float(math.exp(2 * (SLOW_SIZE**2 + FAST_SIZE**2)) * regime * np.i0(2 * _season_size(hours)))


def _season_size(hours: float) -> float:
    return SEASON_SIZE if hours < 24 else 0.0


def _own_volatility(noise: Noise, hours: float) -> Float:
    """An asset's own factor on the shared volatility, with mean square 1, [T]."""
    own = autoregression(noise.normal(Stream.OWN), size=OWN_SIZE, relaxation=OWN_HOURS, hours=hours)
    return np.exp(own - OWN_SIZE**2)


def _shock(law: MarketLaw, noise: Noise, hours: float) -> Float:
    """Heavy-tailed shocks of unit variance, [T]."""
    return heavy_tailed(
        noise.student(Stream.STUDENT, law.tail_index),
        noise.uniform(Stream.JUMP_TIME),
        noise.normal(Stream.JUMP),
        tail_index=law.tail_index,
        jump_wait=JUMP_WAIT,
        jump_size=JUMP_SIZE,
        hours=hours,
    )


def _mix(common: Float, own: Float, correlation: float) -> Float:
    """Shock of one asset. Different volatilities lower the returns' correlation by exp(−own variance)."""
    share = correlation * math.exp(OWN_SIZE**2)
    return math.sqrt(share) * common + math.sqrt(1 - share) * own


def _state(noise: Noise, hours: float) -> NDArray[np.int8]:
    up = two_state(noise.uniform(Stream.STATE), off=STATE_HOURS, on=STATE_HOURS, hours=hours)
    return np.where(up, 1, -1).astype(np.int8)


def _moves(volatility: Float, shock: Float, state: NDArray[np.int8], drift: float) -> Float:
    """Simple returns from open to close, [T]: the state at one close moves the bar after it."""
    moves = np.clip(volatility * shock, -LARGEST_MOVE, LARGEST_MOVE)
    moves[1:] += drift * state[:-1]
    return moves


def _prices(noise: Noise, moves: Float, volatility: Float, first: float) -> dict[str, Float]:
    body = np.log1p(moves)
    gap = GAP_SIZE * noise.normal(Stream.GAP)
    gap[0] = 0.0
    log_close = math.log(first) + np.cumsum(gap + body)
    log_open = np.concatenate([[math.log(first)], log_close[:-1] + gap[1:]])
    if np.abs(log_close).max() > LARGEST_LOG_PRICE:
        raise ConfigError(
            f"bars: the price of a market this volatile leaves the range of floating-point numbers within "
            f"{len(moves):,} bars; make fewer bars or lower the law's volatility"
        )
    opened, closed = np.exp(log_open), np.exp(log_close)
    high, low = price_extremes(opened, closed, volatility, noise.uniform(Stream.HIGH), noise.uniform(Stream.LOW))
    return {"open": opened, "high": high, "low": low, "close": closed}


def _activity(
    noise: Noise,
    prices: dict[str, Float],
    relative_volatility: Float,
    shock: Float,
    state: NDArray[np.int8],
    hours: float,
) -> dict[str, NDArray[np.generic]]:
    """Volume, trades and taker buying. Traded value, not volume, is stationary: it does not drift with the price."""
    mood = autoregression(noise.normal(Stream.ACTIVITY), size=ACTIVITY_SIZE, relaxation=ACTIVITY_HOURS, hours=hours)
    own = mood + ACTIVITY_NOISE * noise.normal(Stream.ACTIVITY_NOISE)
    value = VALUE_PER_HOUR * hours * relative_volatility * np.sqrt(0.25 + np.abs(shock)) * np.exp(own)
    average = (prices["open"] + prices["high"] + prices["low"] + prices["close"]) / 4
    # Noise scales with the bar's length, so an hour carries the same information about the state at every frequency.
    shake = (FLOW_SHOCK * np.tanh(shock) + FLOW_NOISE * noise.normal(Stream.FLOW)) / math.sqrt(hours)
    bought = np.clip(0.5 + FLOW_SHIFT * state + shake, 0.02, 0.98)
    trades = np.maximum(np.rint(value / TRADE_VALUE * np.exp(0.1 * noise.normal(Stream.TRADES))), 1)
    return {
        "volume": value / average,
        "quote_volume": value,
        "trades": trades.astype(np.int64),
        "taker_buy_base": bought * value / average,
        "taker_buy_quote": bought * value,
    }


def _shock_law(law: MarketLaw, hours: float, correlation: float) -> tuple[Float, Float]:
    """σ·ε averaged over volatility, as points and their probabilities, [K] each.

    A large fixed sample is cut at `LAW_LEVELS` of its absolute value; each piece becomes its mean, on both sides of
    zero, and the whole is scaled to the exact variance σ̄².
    """
    market, own = Noise(LAW_SEED, 0, LAW_SAMPLE), Noise(LAW_SEED, 1, LAW_SAMPLE)
    spread = math.sqrt(SLOW_SIZE**2 + FAST_SIZE**2 + OWN_SIZE**2)
    season = _season_size(hours) * np.cos(2 * math.pi * own.uniform(Stream.ACTIVITY))
    crisis = market.uniform(Stream.REGIME) < law.crisis_share
    volatility = np.exp(spread * market.normal(Stream.SLOW) + season) * np.where(crisis, law.crisis_factor, 1.0)
    size = np.sort(np.abs(volatility * _mix(_shock(law, market, hours), _shock(law, own, hours), correlation)))
    cuts = np.rint(np.array(LAW_LEVELS) * LAW_SAMPLE).astype(np.int64)
    points = np.array([size[low:high].mean() for low, high in pairwise(cuts)])
    share = np.diff(cuts) / LAW_SAMPLE
    points *= law.volatility * math.sqrt(hours / HOURS_PER_YEAR / (share @ points**2))
    points = np.minimum(points, LARGEST_MOVE)
    return np.concatenate([-points[::-1], points]), np.concatenate([share[::-1], share]) / 2
