"""Dividends and splits: bars as an owner of the shares experiences them.

Earlier prices are multiplied so that the return from a close to the next open is that of an owner who reinvests the
dividend at this open: (open · split + dividend) / close − 1. Volumes are multiplied by the splits. Later bars stay, so
returns and features up to a time do not depend on what is paid after it, beyond the unit of the price.
"""

from __future__ import annotations

import math
import re
import warnings
from collections.abc import Iterable, Sequence
from typing import Any, Literal, get_args

import numpy as np
import polars as pl
from numpy.typing import NDArray

from tailguard.data.columns import read_numbers, read_times, symbol_column
from tailguard.data.findings import time_label
from tailguard.data.frames import Frame, is_frame, read_frame
from tailguard.data.readers import Paths, files_of, read_file
from tailguard.errors import BarsError, BarsWarning
from tailguard.validate import check_choice

Adjust = Literal["none", "splits", "dividends", "all"]
"""What the prices are adjusted for; `dividends`: prices that are adjusted for splits already."""
Float = NDArray[np.float64]

NAMES = {
    "dividend": ("dividend", "dividends", "div", "cashdividend", "dividendamount", "divcash"),
    "split": ("split", "splits", "stocksplits", "splitratio", "splitfactor", "splitcoefficient"),
}
"""Accepted names of the columns, without case, spaces and punctuation: the dividend paid per share, and the new shares
for an old one (4 for 4:1; 0, 1 or nothing where there is none), on the first bar without them."""


CERTAIN = 5.0
"""Log-likelihood ratio, 150 to one, beyond which prices show whether they are adjusted for dividends."""
LEAST_SPREAD = 1e-4
"""Least usual move of a price overnight."""


def action_columns(columns: Sequence[str]) -> dict[str, str]:
    """The columns that hold dividends and splits, by kind."""
    keys = {re.sub(r"[^a-z0-9]", "", column.lower()): column for column in columns}
    found = {kind: next((keys[name] for name in names if name in keys), None) for kind, names in NAMES.items()}
    return {kind: column for kind, column in found.items() if column is not None}


def adjusted(frame: pl.DataFrame, source: str, adjust: Adjust, events: Frame | Paths | None = None) -> pl.DataFrame:
    """Bars laid out as `tailguard.data.checks` says, adjusted; `events`: dividends and splits from a table of them.

    Without `events` they are columns of the bars. Each symbol's rows must be in the order of their times, which the
    checks then require.
    """
    check_choice("adjust", adjust, get_args(Adjust))
    if adjust == "none":
        if events is not None:
            raise BarsError(f"{source}: events are given and adjust='none'; choose splits, dividends or all")
        return frame
    table = None if events is None else _read_events(events)
    columns = action_columns(frame.columns)
    if table is None and not columns:
        raise BarsError(
            f"{source}: adjust={adjust!r} needs columns named dividend and split, or a table of events; columns found: "
            f"{', '.join(name for name in frame.columns if name not in ('file', 'row', 'unreadable'))}"
        )
    actions = []
    for part in frame.partition_by("symbol", maintain_order=True):
        dividend, split = (
            _from_columns(part, columns) if table is None else _from_events(part, table, str(part["symbol"][0]))
        )
        if adjust == "dividends":
            split = np.ones_like(split)
        actions.append((part, dividend, split))
    odds = log_odds_adjusted((part, dividend) for part, dividend, _ in actions)
    for part, _, split in actions:
        _check_visible(part, split, "none" if odds > CERTAIN else "dividends")
    if adjust != "splits":
        _check_dividends_visible(source, adjust, odds, any(dividend.any() for _, dividend, _ in actions))
    return pl.concat(
        [
            _adjusted(part, np.zeros_like(dividend) if adjust == "splits" else dividend, split)
            for part, dividend, split in actions
        ]
    )


def dividend_note(frame: pl.DataFrame, adjust: Adjust) -> str | None:
    """What a user must know about dividends that the prices of bars do not have, or a column of adjusted closes."""
    columns = action_columns(frame.columns)
    if "dividend" in columns:
        parts = [(part, _from_columns(part, columns)[0]) for part in frame.partition_by("symbol", maintain_order=True)]
        count = sum(int(np.count_nonzero(dividend)) for _, dividend in parts)
        if count == 0:
            return None
        return _note_of_dividends(log_odds_adjusted(parts), count, columns["dividend"], adjust)
    adjusted_close = _adjusted_close(frame)
    if adjusted_close is not None and not _same(frame, adjusted_close):
        return (
            f"{adjusted_close} is not used: the prices are not adjusted for what it is adjusted for, most often "
            "dividends. For an owner's returns give the dividends as a column or as events, with data.adjust=dividends"
        )
    return None


def _note_of_dividends(odds: float, count: int, column: str, adjust: Adjust) -> str | None:
    if adjust in ("dividends", "all"):
        return None
    if odds > CERTAIN:
        return f"the prices are adjusted for the {count:,} dividends in {column} already: leave data.adjust as it is"
    unknown = "" if odds < -CERTAIN else ", unless the prices are adjusted for them already, which they do not show"
    return (
        f"{count:,} dividends in {column} are not in the returns{unknown}: "
        f"data.adjust={'all' if adjust == 'splits' else 'dividends (or all)'} adds them"
    )


def log_odds_adjusted(parts: Iterable[tuple[pl.DataFrame, Float]]) -> float:
    """Log-likelihood ratio of prices that are adjusted for these dividends to prices that are not.

    On a day without the dividend the price opens lower by it, give or take what it moves overnight on other days.
    A column of adjusted closes beside the closes decides alone.
    """
    odds = 0.0
    for part, dividend in parts:
        places = np.flatnonzero(dividend[1:] > 0) + 1
        if not len(places):
            continue
        column = _adjusted_close(part)
        if column is not None:
            return math.inf if _same(part, column) else -math.inf
        before, opened = part["close"].to_numpy()[:-1], part["open"].to_numpy()[1:]
        with np.errstate(invalid="ignore", divide="ignore"):
            gaps, falls = opened / before - 1, dividend[1:] / before
        others = np.delete(gaps, places - 1)
        others = others[np.isfinite(others)]
        spread = max(1.4826 * float(np.median(np.abs(others))) if len(others) else 0.0, LEAST_SPREAD)
        # News of the day, or a split, must not decide: moves beyond the noise are cut.
        falls = falls[places - 1]
        moves = np.clip(gaps[places - 1], -falls - 2 * spread, 2 * spread)
        odds += float(np.nansum((moves + falls) ** 2 - moves**2) / (2 * spread**2))
    return odds


def _adjusted_close(frame: pl.DataFrame) -> str | None:
    """The column of closes that are adjusted for dividends, as Yahoo gives it."""
    keys = {re.sub(r"[^a-z0-9]", "", column.lower()): column for column in frame.columns}
    return keys.get("adjclose") or keys.get("adjustedclose")


def _same(frame: pl.DataFrame, adjusted_close: str) -> bool:
    """Whether closes and adjusted closes are the same to the digits that a file has."""
    furthest = (frame[adjusted_close] / frame["close"] - 1).abs().max()
    return not isinstance(furthest, float) or furthest <= 1e-4


def _check_dividends_visible(source: str, adjust: Adjust, odds: float, some: bool) -> None:
    """Refuse prices that are adjusted for the dividends already: they would be counted twice."""
    if odds > CERTAIN:
        raise BarsError(
            f"{source}: the prices are adjusted for the dividends already, as they do not open lower by them (yfinance "
            "does so unless auto_adjust=False): with "
            f"adjust={adjust!r} they would count twice. Use adjust={'splits' if adjust == 'all' else 'none'!r}"
            + (", or 'none'" if adjust == "all" else "")
        )
    if some and odds > -CERTAIN:
        warnings.warn(
            f"{source}: the prices do not show whether they are adjusted for the dividends already (yfinance does so "
            f"unless auto_adjust=False); with adjust={adjust!r} those that are count them twice",
            BarsWarning,
            stacklevel=4,
        )


def _adjusted(part: pl.DataFrame, dividend: Float, split: Float) -> pl.DataFrame:
    opened = part["open"].to_numpy()
    with np.errstate(invalid="ignore", divide="ignore"):
        factor = np.where((dividend > 0) | (split != 1), opened / (opened * split + dividend), 1.0)
    prices, shares = _later(factor), _later(split)
    columns = [pl.Series(name, part[name].to_numpy() * prices) for name in ("open", "high", "low", "close")]
    missing = part["volume"].is_null()
    volume = pl.Series("volume", part["volume"].to_numpy() * shares).set(missing, None)
    return part.with_columns(*(column.set(part[column.name].is_null(), None) for column in columns), volume)


def _later(factor: Float) -> Float:
    """The product of all later factors, for each row."""
    product = np.cumprod(factor[::-1])[::-1]
    return np.append(product[1:], 1.0)


def _from_columns(part: pl.DataFrame, columns: dict[str, str]) -> tuple[Float, Float]:
    def values(kind: str, none: float) -> Float:
        if kind not in columns:
            return np.full(part.height, none)
        found = part[columns[kind]].fill_null(none).to_numpy()
        return np.where(found == 0, none, found)

    return values("dividend", 0.0), values("split", 1.0)


def _from_events(part: pl.DataFrame, events: pl.DataFrame, symbol: str) -> tuple[Float, Float]:
    """Each event belongs to the first bar that opens at its time or later."""
    times = part["time"].dt.epoch("ms").fill_null(0).to_numpy()
    dividend, split = np.zeros(part.height), np.ones(part.height)
    own = events.filter(pl.col("symbol").is_null() | (pl.col("symbol") == symbol))
    for row in own.iter_rows(named=True):
        place = int(np.searchsorted(times, row["ms"]))
        if 0 < place < part.height:
            # A dividend and a split of one day: the dividend is paid on the old shares.
            dividend[place] += row["dividend"] or 0.0
            split[place] *= row["split"] or 1.0
    return dividend, split


def _check_visible(part: pl.DataFrame, split: Float, instead: str) -> None:
    """Refuse prices that are adjusted for a split already: they would be adjusted twice."""
    close, opened = part["close"].to_numpy(), part["open"].to_numpy()
    for place in np.flatnonzero(split != 1):
        if place == 0 or not split[place] > 0:
            continue
        jump = math.log(close[place - 1] / opened[place])
        if abs(jump - math.log(split[place])) > abs(jump):
            row = part.row(int(place), named=True)
            raise BarsError(
                f"{row['file']}: row {row['row']} ({time_label(row['time'])}): a split of {split[place]:g}:1 that is "
                f"not in the prices (close {close[place - 1]:g}, next open {opened[place]:g}): they are adjusted for "
                f"it already. Use adjust={instead!r}" + (", or 'none'" if instead != "none" else "")
            )


def _read_events(events: Frame | Paths) -> pl.DataFrame:
    """The columns ms, symbol (null: every symbol), dividend and split."""
    raw = read_frame(events) if is_frame(events) else pl.concat([read_file(file) for file in files_of(events)])
    columns = action_columns(raw.columns)
    time = next((name for name in raw.columns if name.lower() in ("date", "time", "ex_date", "exdate", "index")), None)
    if time is None or not columns:
        raise BarsError(
            f"events: a table of events has a column date or ex_date, and dividend or split; found: "
            f"{', '.join(raw.columns)}"
        )
    times = read_times(raw[time])
    if times.null_count():
        raise BarsError(f"events: {raw[time].filter(times.is_null())[0]!r} in column {time!r} is not a date")
    symbols = symbol_column(raw.columns)
    numbers: dict[str, Any] = {
        kind: read_numbers(raw[columns[kind]]) if kind in columns else pl.lit(None, pl.Float64) for kind in NAMES
    }
    named = pl.lit(None, pl.String) if symbols is None else raw[symbols].cast(pl.String)
    return raw.select(ms=times.dt.epoch("ms"), symbol=named, **numbers).sort("ms")
