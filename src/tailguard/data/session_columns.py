"""Columns that tell features where they are in a session; bars of a market that closes have them."""

from __future__ import annotations

from datetime import timedelta

import polars as pl

from tailguard.data.bars import Bars

SESSION_COLUMNS = ("session_start", "session_bar", "closed_hours")
"""1 on the first bar after a closure, else 0; bars since it, for bars shorter than a day; hours of that closure."""


def session_columns(bars: Bars) -> tuple[str, ...]:
    """Those of `SESSION_COLUMNS` that these bars have."""
    if bars.sessions is None:
        return ()
    return SESSION_COLUMNS if bars.frequency < timedelta(days=1) else ("session_start", "closed_hours")


def feature_frame(bars: Bars) -> pl.DataFrame:
    """The columns that features may read."""
    names = session_columns(bars)
    if not names:
        return bars.frame
    step = pl.col("time").diff().over("segment")
    opens = (step > bars.frequency).fill_null(True) if "session_bar" in names else pl.lit(True)
    closed = (step - bars.frequency).dt.total_milliseconds() / 3_600_000
    frame = bars.frame.with_columns(opens.alias("opens"), closed.fill_null(0.0).alias("closed"))
    frame = frame.with_columns(session=pl.col("opens").cast(pl.Int32).cum_sum())
    frame = frame.with_columns(
        session_start=pl.col("opens").cast(pl.Float64),
        session_bar=pl.int_range(pl.len()).over("session").cast(pl.Float64),
        closed_hours=pl.col("closed").first().over("session"),
    )
    return frame.select(*bars.frame.columns, *names)
