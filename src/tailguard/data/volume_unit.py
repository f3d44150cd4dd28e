"""Detect a change of the volume's unit within the data, such as from dollars to coins.

A change of unit is a jump in the level of volume: sudden (from one bar to the next), lasting and of orders of
magnitude. Growth over years is not sudden, and a busy day does not last. Between quote and base units the
jump is as large as the price: volume before is of the size of notional, volume times price, after (or the other way
round). News can lift a market's volume as suddenly, but then the price jumps with it.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from datetime import timedelta
from typing import Literal

import numpy as np
import polars as pl
from numpy.typing import NDArray

from tailguard.data.findings import Check, Row, judge, number

WEEK, DAY = timedelta(weeks=1), timedelta(days=1)
FEWEST_BARS = 48
"""Bars on each side of a jump that are compared at least, where a week or a day has fewer."""
SUDDEN_BARS = 12
"""Bars on both sides whose medians must already show half the jump (in logarithms)."""
WEEK_JUMP = 30.0
"""Jump between two weeks' medians that is suspicious, and a change of unit if the price explains it."""
DAY_JUMP = 200.0
"""Jump between two days' medians that is a change of unit if the price explains it."""
ANY_JUMP = 1_000.0
"""Jump between two weeks' medians that is a change of unit whatever the price."""
PRICE_MATCH = 4.0
"""Factor within which a jump is as large as the price."""
CALM_SIGMAS = 12.0
"""Robust standard deviations that the price may move at a jump which is not news."""
CLAIM_ROUNDING = 0.1
"""Logarithmic distance within which quote volume over volume counts as 1 or as the price."""
_PROMISE = "one unit throughout"

Float = NDArray[np.float64]
VolumeUnit = Literal["base", "quote"]


def typical_price() -> pl.Expr:
    """(high + low + close) / 3, at which volume in quote units is turned into base units."""
    return (pl.col("high") + pl.col("low") + pl.col("close")) / 3


@dataclass(frozen=True)
class UnitSwitch:
    """A lasting jump of the volume's level."""

    index: int
    """First bar after the jump."""
    ratio: float
    """Median volume after over median volume before."""
    price: float
    """Median price around the jump."""
    calm: bool
    """Whether the price moved as usual when volume jumped."""

    @property
    def factor(self) -> float:
        """Size of the jump, up or down: at least 1."""
        return max(self.ratio, 1 / self.ratio)

    @property
    def explained_by_price(self) -> bool:
        """Whether volume on one side and notional on the other have the same size, without news at the jump."""
        mismatch = min(abs(np.log(self.ratio * self.price)), abs(np.log(self.ratio / self.price)))
        return self.calm and bool(mismatch < np.log(PRICE_MATCH))

    @property
    def certain(self) -> bool:
        return self.explained_by_price or self.factor >= ANY_JUMP


def find_unit_switches(volume: Float, price: Float, frequency: timedelta) -> list[UnitSwitch]:
    """Jumps of `volume` [T] that may be changes of its unit, `price` [T] beside it."""
    switches = find_jumps(volume, price, max(FEWEST_BARS, WEEK // frequency), WEEK_JUMP)
    for jump in find_jumps(volume, price, max(FEWEST_BARS, DAY // frequency), DAY_JUMP):
        if jump.explained_by_price and all(abs(jump.index - known.index) > SUDDEN_BARS for known in switches):
            switches.append(jump)
    return sorted(switches, key=lambda switch: switch.index)


def find_jumps(volume: Float, price: Float, window: int, smallest: float) -> list[UnitSwitch]:
    """Sudden jumps of `volume` [T] by `smallest` and more between the medians of `window` traded bars on both sides.

    Near the first and the last bars windows are shortened, to at least half.
    """
    traded = np.flatnonzero(np.isfinite(volume) & (volume > 0) & np.isfinite(price) & (price > 0))
    if len(traded) < FEWEST_BARS:
        return []
    window = min(window, len(traded) // 2)
    values = np.log(volume[traded])
    level = pl.Series(values)
    fewest = window // 2
    before = level.rolling_median(window, min_samples=fewest).shift(1).to_numpy()
    after = level.reverse().rolling_median(window, min_samples=fewest).reverse().to_numpy()
    jump = np.nan_to_num(after - before)
    side = np.sign(jump) * (np.abs(jump) >= np.log(smallest))
    edges = np.flatnonzero(np.diff(side, prepend=0.0, append=0.0))
    switches = []
    for start, stop in itertools.pairwise(edges.tolist()):
        if side[start] == 0:
            continue
        peak = start + int(np.argmax(np.abs(jump[start:stop])))
        middle = (before[peak] + after[peak]) / 2
        # With a shortened window the medians change before or after the jump itself.
        index = _locate(values, max(1, start - fewest), stop + fewest, middle, rising=bool(side[start] > 0))
        sudden = np.median(values[index : index + SUDDEN_BARS]) - np.median(values[max(0, index - SUDDEN_BARS) : index])
        if sudden * side[start] >= abs(jump[peak]) / 2:
            around = np.log(price[traded[max(0, index - window) : index + window]])
            calm = _is_calm(around, min(index, window))
            level_price = float(np.exp(np.median(around)))
            switches.append(UnitSwitch(int(traded[index]), float(np.exp(jump[peak])), level_price, calm))
    return switches


def _is_calm(log_price: Float, index: int) -> bool:
    """Whether the moves into `index`, and of the bars before and after it, are of the usual size."""
    moves = np.abs(np.diff(log_price))
    # The mean is used where most bars do not move at all.
    usual = max(1.4826 * np.median(moves), moves.mean())
    return bool(moves[max(0, index - 2) : index + 1].max() <= CALM_SIGMAS * usual)


def _locate(level: Float, start: int, stop: int, middle: float, *, rising: bool) -> int:
    """The split within [start, stop) that leaves the fewest values on the wrong side of `middle`."""
    moved = (level[start:stop] > middle) == rising
    return start + int(np.argmin(np.cumsum(np.where(moved, 1, -1)) - np.where(moved, 1, -1)))


def check_volume_unit(bars: pl.DataFrame, frequency: timedelta, volume_unit: VolumeUnit) -> Check:
    """The volume column keeps one unit, and a quote volume column, if present, agrees with `volume_unit`."""
    volume = bars["volume"].fill_null(float("nan")).to_numpy()
    typical = bars.select(typical_price()).to_series().fill_null(float("nan")).to_numpy()
    switches = find_unit_switches(volume, typical, frequency)
    if not switches:
        return _check_claim(bars, volume_unit)
    certain = [switch for switch in switches if switch.certain]
    shown = {switch.index: switch for switch in certain or switches}

    def describe(row: Row) -> str:
        switch = shown[row["index"]]
        text = f"median volume {'rises' if switch.ratio > 1 else 'falls'} {switch.factor:,.0f}× from here on"
        if not switch.explained_by_price:
            return f"{text}, which the price of {switch.price:,.6g} does not explain: contracts or lots on one side?"
        becomes_quote = (switch.ratio > 1) == (switch.price > 1)
        units = ("base", "quote") if becomes_quote else ("quote", "base")
        return f"{text}, at a price of {switch.price:,.6g}: {units[0]} units before, {units[1]} units after?"

    return judge(
        "volume unit",
        _PROMISE,
        bars.with_row_index("index").filter(pl.col("index").is_in(list(shown))),
        describe,
        noun="change",
        fault="of the volume's unit",
        remedy="Convert the volume column to one unit, preferably that of the base asset.",
        level="error" if certain else "warning",
    )


def _check_claim(bars: pl.DataFrame, claimed: VolumeUnit) -> Check:
    """Quote volume over volume is 1 where volume counts quote units, and the price where it counts base units."""
    if "quote_volume" not in bars.columns:
        return Check("volume unit", "ok", _PROMISE)
    traded = bars.filter((pl.col("volume") > 0) & (pl.col("quote_volume") > 0))
    ratio, price = (
        traded.select((pl.col("quote_volume") / pl.col("volume")).log().median().alias("ratio"))
        .with_columns(traded.select(typical_price().log().median().alias("price")))
        .row(0)
    )
    told_apart = ratio is not None and price is not None and abs(price) > 4 * CLAIM_ROUNDING
    distance = {"quote": abs(ratio), "base": abs(ratio - price)} if told_apart else {}
    other: VolumeUnit = "quote" if claimed == "base" else "base"
    wrong = bool(distance) and distance[other] < CLAIM_ROUNDING
    return judge(
        "volume unit",
        _PROMISE,
        traded.head(1 if wrong else 0),
        lambda row: f"volume {number(row['volume'])} beside quote volume {number(row['quote_volume'])}",
        noun="symbol",
        fault=f"whose volume counts {other} units, not {claimed} units",
        remedy=f'Choose volume_unit="{other}" (--volume-unit {other}).',
    )
