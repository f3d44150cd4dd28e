"""Data with publication times, such as sentiment, fundamentals or economic releases, as columns of bars.

A value belongs to a bar if it was published by the bar's close, which is when an agent decides: of a daily bar, the
close of its session where the calendar names it. It stays until the next publication, and nothing is known before the
first.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from datetime import timedelta

import polars as pl

from tailguard.data.bars import Bars
from tailguard.data.columns import extra_columns, read_times, symbol_column
from tailguard.data.frames import Frame, is_frame, read_frame
from tailguard.data.frequency import parse_frequency
from tailguard.data.readers import Paths, files_of, read_file
from tailguard.errors import BarsError


def with_published(
    bars: Bars,
    data: Frame | Paths,
    *,
    published: str = "published",
    columns: Sequence[str] | None = None,
    delay: str | timedelta = timedelta(0),
    before: float | None = None,
) -> Bars:
    """`bars` with the latest values that were published by each bar's close; features read them through `needs`.

    Args:
        bars: the bars.
        data: a file or frame with a column of publication times, numeric columns, and `symbol` where values belong to
            single symbols. Several values published at one time: the last row counts.
        published: the column of publication times; without a zone they are UTC. A date alone is its midnight, so give
            a delay of a day where values come out during the day.
        columns: those to take; None: every numeric one.
        delay: how much later the values are used, like "1d".
        before: the value before the first publication; None: it is missing there, which a feature that reads it
            refuses. A symbol without any value is an error.
    """
    name = "data" if is_frame(data) else str(data)
    raw = read_frame(data) if is_frame(data) else pl.concat([read_file(file) for file in files_of(data)])
    if published not in raw.columns:
        raise BarsError(f"{name}: no column {published!r} of publication times; columns: {', '.join(raw.columns)}")
    symbol = symbol_column(raw.columns)
    others = [column for column in raw.columns if column not in (published, symbol)]
    found = extra_columns(raw, [name for name in others if columns is None or name in columns])
    missing = [column for column in columns or () if column not in found]
    taken = [column for column in found if column in bars.frame.columns]
    if not found or missing or taken:
        reason = f"no numeric column {missing[0]!r}" if missing else "no numeric column"
        reason = f"the bars have a column {taken[0]!r} already" if taken else reason
        raise BarsError(f"{name}: {reason}; columns: {', '.join(raw.columns)}")
    wait = parse_frequency(delay) if isinstance(delay, str) else delay
    times = read_times(raw[published])
    if times.null_count():
        raise BarsError(f"{name}: {raw[published].filter(times.is_null())[0]!r} in {published!r} is not a time")
    table = (
        raw.select(known=times, **found)
        if symbol is None
        else raw.select(known=times, symbol=raw[symbol].cast(pl.String), **found)
    )
    table = table.with_columns(pl.col("known") + wait).sort("known", maintain_order=True)
    own = bars.frame.with_columns(bars.close_times).with_row_index("place")
    joined = own.sort("close_time").join_asof(
        table, left_on="close_time", right_on="known", by=None if symbol is None else "symbol", strategy="backward"
    )
    frame = joined.sort("place").select(*bars.frame.columns, *found)
    if before is not None:
        frame = frame.with_columns(pl.col(list(found)).fill_null(before))
    _check_known(frame, list(found), name)
    end = "segment"
    return replace(bars, frame=frame.select(pl.exclude(end), end))


def _check_known(frame: pl.DataFrame, columns: Sequence[str], name: str) -> None:
    """Every bar from the first publication on has a value; a symbol without any is an error."""
    for column in columns:
        empty = frame.group_by("symbol", maintain_order=True).agg(pl.col(column).count().alias("known"))
        without = empty.filter(pl.col("known") == 0)["symbol"].to_list()
        if without:
            raise BarsError(
                f"{name}: {column} has no value for {', '.join(without)} by the last bar; give before= "
                "(data.published_before), the value before the first publication, or leave the symbol out"
            )
