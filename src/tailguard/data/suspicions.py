"""Suspicions: bars that are possible but unlikely, reported as warnings. Each check takes the rows of one symbol."""

from __future__ import annotations

import math

import polars as pl

from tailguard.data.calendars import Timetable
from tailguard.data.checks import PRICES, sound_prices, with_missing
from tailguard.data.findings import Check, Row, judge, number

STALE_BARS = 3
"""Bars in a row with the same prices and the same volume that make a stale run."""
EMPTY_BARS = 5
"""Bars in a row without volume that make an empty run."""
JUMP_SIGMAS = 25.0
"""Robust standard deviations beyond which a spike or a return is suspicious."""
REVERTED = 0.25
"""Share of the jump that may remain after a spike."""
EXTREME_RETURN = 0.10
"""Log returns below this are never extreme, however calm the market is."""
SPLIT_MOVE = 0.6
"""Smallest log move between a close and the next open that may be a split; 2:1 is 0.69."""
SPLIT_SIGMAS = 8.0
"""Robust standard deviations that such a move must have."""
SPLIT_ROUNDING = 0.05
"""Largest log difference from a whole ratio that the market's own move may explain."""
SCALE_BARS = 101
"""Bars around each one that give its robust standard deviation."""


def check_stale(bars: pl.DataFrame, timetable: Timetable) -> Check:
    """No run of bars repeats itself. Bars without trade are left to `check_empty`."""
    columns = (*PRICES, "volume")
    repeats = pl.all_horizontal(pl.col(name) == pl.col(name).shift() for name in columns)
    traded = (pl.col("volume") > 0) | (pl.col("high") > pl.col("low"))
    followed = with_missing(bars, timetable)
    same = followed.select((repeats & traded & (pl.col("missing") == 0)).fill_null(False)).to_series()
    runs = _runs(same).filter(pl.col("length") >= STALE_BARS - 1)
    # A run of n repeats starts with the repeated bar.
    stale = _rows_at(bars, runs.with_columns(pl.col("start") - 1, pl.col("length") + 1))

    def describe(row: Row) -> str:
        return f"{row['length']:,} identical bars, close {number(row['close'])}, volume {number(row['volume'])}"

    return judge(
        "stale",
        "no run of identical bars",
        stale,
        describe,
        noun="run",
        fault="of identical bars",
        remedy="A frozen feed repeats its last bar; compare with another source.",
        level="warning",
    )


def check_empty(bars: pl.DataFrame) -> Check:
    """No long run of bars without volume."""
    if (bars["volume"] == 0).all():
        return Check("zero volume", "ok", "no volume in the bars at all")
    runs = _runs((bars["volume"] == 0).fill_null(False)).filter(pl.col("length") >= EMPTY_BARS)
    return judge(
        "zero volume",
        f"never {EMPTY_BARS} bars in a row",
        _rows_at(bars, runs),
        lambda row: f"{row['length']:,} bars without volume",
        noun="run",
        fault="of bars without volume",
        remedy="Nothing can be bought or sold in these bars under a participation cap.",
        level="warning",
    )


def check_spikes(bars: pl.DataFrame, timetable: Timetable) -> tuple[Check, Check]:
    """No price jumps away and back within one bar, and no return is extreme.

    Both are measured in robust standard deviations: 1.4826 times the median absolute log return of the bars around,
    and never less than the mean absolute return of all bars.
    """
    judged = _with_moves(bars, timetable)
    spikes = judged.filter(pl.col("spike").is_not_null())

    def describe_spike(row: Row) -> str:
        return f"{row['spike']} {number(row[row['spike']])} against {number(row['beside'])} around it"

    def describe_return(row: Row) -> str:
        change, sigmas = 100 * (row["close"] / row["before"] - 1), abs(row["move"]) / row["scale"]
        text = f"close {number(row['before'])} → {number(row['close'])} ({change:+.1f} %, {sigmas:,.0f} σ)"
        split = split_ratio(row["before"], row["open"])
        return f"{text}: probably a split of {split}" if split else text

    # Between a close and the next open, over a night too, prices hardly move by half: that is a split.
    overnight = (pl.col("open") / pl.col("before")).log().abs()
    halved = (overnight > SPLIT_MOVE) & (overnight > SPLIT_SIGMAS * pl.col("scale")) & pl.col("move").is_not_null()
    extreme = judged.filter(
        (pl.col("move").abs() > EXTREME_RETURN)
        & ((pl.col("move").abs() > JUMP_SIGMAS * pl.col("scale")) | halved)
        & pl.col("spike").is_null()
        & (pl.col("spike").shift() != "close").fill_null(True)
    )
    compare = "Compare with another source; if they are real, keep them."
    return (
        judge(
            "spikes",
            "no jump that fully reverts",
            spikes,
            describe_spike,
            noun="bar",
            fault="whose price jumps and reverts one bar later",
            remedy=compare,
            level="warning",
        ),
        judge(
            "returns",
            f"none beyond {JUMP_SIGMAS:.0f} robust σ",
            extreme,
            describe_return,
            noun="return",
            fault=f"beyond {JUMP_SIGMAS:.0f} robust σ and {100 * EXTREME_RETURN:.0f} %, or a split",
            remedy=f"{compare} Adjust prices and volumes before a split at the source.",
            level="warning",
        ),
    )


def split_ratio(before: float, after: float) -> str | None:
    """The split that explains a price change from `before` to `after`, as 4:1, or 1:10 if reverse; else None."""
    ratio = max(before / after, after / before)
    whole = round(ratio)
    if whole < 2 or abs(math.log(ratio / whole)) > SPLIT_ROUNDING or (whole > 10 and whole % 5):
        return None
    return f"{whole}:1" if before > after else f"1:{whole}"


def _with_moves(bars: pl.DataFrame, timetable: Timetable) -> pl.DataFrame:
    """`bars` with `before` (close of the bar before), `move` (log return), `scale`, `spike` and `beside`.

    `spike` names the price that spikes, null where none does; `beside` is the nearest price beside the spike. Moves
    from or to an invalid price, or across a gap, are null.
    """
    close = pl.when(sound_prices()).then(pl.col("close"))
    move = pl.when(pl.col("missing") == 0).then(close.log().diff())
    # The few missing moves count as 0: the rolling median is five times as fast without nulls.
    size = pl.col("move").abs().fill_null(0.0)
    around = 1.4826 * size.rolling_median(SCALE_BARS, min_samples=SCALE_BARS // 5, center=True)
    frame = (
        with_missing(bars, timetable)
        .with_columns(move=move, before=pl.col("close").shift())
        .with_columns(scale=pl.max_horizontal(around, size.mean()))
    )
    threshold = JUMP_SIGMAS * pl.col("scale")
    back = pl.col("move").shift(-1)
    remains = (pl.col("move") + back).abs()
    lowest = pl.min_horizontal("open", "close", pl.col("low").shift(), pl.col("low").shift(-1))
    highest = pl.max_horizontal("open", "close", pl.col("high").shift(), pl.col("high").shift(-1))

    def is_spike(size: pl.Expr) -> pl.Expr:
        return (size > threshold) & (remains < REVERTED * size)

    spike = (
        pl.when(is_spike(pl.min_horizontal(pl.col("move").abs(), back.abs())))
        .then(pl.lit("close"))
        .when(is_spike((lowest / pl.col("low")).log()))
        .then(pl.lit("low"))
        .when(is_spike((pl.col("high") / highest).log()))
        .then(pl.lit("high"))
    )
    beside = (
        pl.when(pl.col("spike") == "low").then(lowest).when(pl.col("spike") == "high").then(highest).otherwise("before")
    )
    return frame.with_columns(spike=spike).with_columns(beside=beside)


def _runs(mask: pl.Series) -> pl.DataFrame:
    """`start` and `length` of the runs of True in `mask` [T]."""
    runs = mask.rle().struct.unnest()
    return (
        runs.with_columns(length=pl.col("len"), start=pl.col("len").cum_sum() - pl.col("len"))
        .filter(pl.col("value"))
        .select(pl.col("start").cast(pl.Int64), pl.col("length").cast(pl.Int64))
    )


def _rows_at(bars: pl.DataFrame, runs: pl.DataFrame) -> pl.DataFrame:
    """The bars at which `runs` start, beside their `length`."""
    return bars[runs["start"]].with_columns(runs["length"])
