"""Bars: market data that has been read and checked."""

from __future__ import annotations

from dataclasses import dataclass, replace
from datetime import datetime, timedelta
from typing import Literal

import numpy as np
import polars as pl
from numpy.typing import NDArray

from tailguard.data.calendars import DailyCloses, Timetable
from tailguard.data.findings import names_in_short, time_label
from tailguard.data.frequency import frequency_label
from tailguard.data.pace import Pace
from tailguard.data.panel import Panel
from tailguard.data.universe import Rows, Universe, ragged_prices, ragged_segments
from tailguard.errors import BarsError

TIME_TYPE = pl.Datetime("ms", "UTC")
REQUIRED = ("open", "high", "low", "close", "volume")
OPTIONAL = ("quote_volume", "trades", "taker_buy_base", "taker_buy_quote", "funding_rate")

Accounts = Literal["portfolio", "per_symbol"]


def with_segments(frame: pl.DataFrame, timetable: Timetable, ragged: bool = False) -> pl.DataFrame:
    """`frame`, sorted by symbol and time, with the column `segment`: a new number after a gap and for a new symbol.

    `ragged`: only bars that no symbol has are a gap.
    """
    if ragged:
        return frame.with_columns(ragged_segments(frame, timetable))
    breaks = pl.Series(timetable.breaks(frame["time"].dt.epoch("ms").to_numpy()))
    starts = breaks | (frame["symbol"] != frame["symbol"].shift()).fill_null(False)
    return frame.with_columns(segment=starts.cum_sum().cast(pl.Int32))


def held_times(time: NDArray[np.int64], segment: NDArray[np.int32], step: int) -> NDArray[np.int64]:
    """Time from each bar's open to the next one's in its segment, ms; a segment's last bar lasts `step`, [R]."""
    steps = np.diff(time, append=time[-1] + step)
    return np.where(np.diff(segment, append=segment[-1] + 1) == 0, steps, step).astype(np.int64)


@dataclass(frozen=True, repr=False)
class Bars:
    """Validated bars of one frequency, sorted by symbol and time.

    Columns of `frame`, in this order: `symbol`, `time` (open of the bar, UTC), `open`, `high`, `low`, `close`, `volume`
    (base units), those of `OPTIONAL` that the source had, its other numeric columns (they feed features that need
    them; numbers are Float64), and `segment` (Int32: a new number after every gap and for every symbol).
    """

    frame: pl.DataFrame
    frequency: timedelta
    source: str
    """File or generator the bars came from, for messages."""
    first: datetime | None = None
    """Earlier bars only feed features (the lead-in of a split); None: every bar can be traded."""
    sessions: Pace | None = None
    """Bars of a day, a week and a year where the market closes; None: it trades around the clock."""
    universe: Universe | None = None
    """Lives of the symbols where members of a portfolio come and go; None: it trades the times that all have."""
    daily_closes: DailyCloses | None = None
    """When daily bars of a named calendar close; None: every bar closes its length after it opens."""

    def __repr__(self) -> str:
        period = "none" if self.frame.is_empty() else " to ".join(map(time_label, self.end_points))
        names = names_in_short(self.symbols)
        return f"Bars({names}: {len(self):,} of {frequency_label(self.frequency)}, {period}, from {self.source})"

    @property
    def close_times(self) -> pl.Series:
        """When each bar is known: at its session's close, or its length after it opens, and before the next opens."""
        symbol, time = self.frame["symbol"], self.frame["time"]
        if self.daily_closes is None:
            closes = time + self.frequency
        else:
            closes = pl.from_epoch(pl.Series(self.daily_closes(time.dt.epoch("ms").to_numpy())), "ms").cast(TIME_TYPE)
        following = time.shift(-1).set(symbol != symbol.shift(-1), None)
        return pl.select(pl.min_horizontal(closes, following).alias("close_time")).to_series()

    @property
    def pace(self) -> Pace:
        """Bars of a day, a week and a year."""
        return self.sessions or Pace.of_frequency(self.frequency // timedelta(milliseconds=1))

    def __len__(self) -> int:
        """Number of rows, over all symbols."""
        return self.frame.height

    @property
    def symbols(self) -> tuple[str, ...]:
        if self.universe is not None:
            return self.universe.symbols
        return tuple(self.frame["symbol"].unique(maintain_order=True))

    @property
    def start(self) -> datetime:
        """Open time of the first bar that can be traded."""
        return self.first or self.end_points[0]

    @property
    def end_points(self) -> tuple[datetime, datetime]:
        """Open times of the very first and the very last bar."""
        low, high = self.frame["time"].min(), self.frame["time"].max()
        if not isinstance(low, datetime) or not isinstance(high, datetime):
            raise BarsError(f"{self.source}: no bars")
        return low, high

    def select(self, *symbols: str) -> Bars:
        """The bars of these symbols only."""
        for symbol in symbols:
            if symbol not in self.symbols:
                raise BarsError(f"{self.source}: no symbol {symbol!r}; there are {', '.join(self.symbols)}")
        universe = None if self.universe is None else self.universe.select(symbols)
        return replace(self, frame=self.frame.filter(pl.col("symbol").is_in(list(symbols))), universe=universe)

    def between(self, start: datetime, stop: datetime, lead_in: int = 0) -> Bars:
        """Bars with `start <= time < stop`, preceded by up to `lead_in` bars that only feed features."""
        begin = start - lead_in * self.frequency
        if self.sessions is not None:
            # Bars are counted where the market closes: a week of hours has far fewer bars.
            before = self.frame["time"].filter(self.frame["time"] < start).unique().sort()
            begin = before[-lead_in] if 0 < lead_in <= len(before) else before[0] if lead_in and len(before) else start
        frame = self.frame.filter((pl.col("time") >= begin) & (pl.col("time") < stop))
        if frame.filter(pl.col("time") >= start).is_empty():
            earliest, latest = self.end_points
            raise BarsError(f"{self.source}: no bars from {start} to {stop}; they run from {earliest} to {latest}")
        return replace(self, frame=frame, first=start)

    def panel(self, accounts: Accounts = "portfolio") -> Panel:
        """The arrays a simulator runs on.

        `portfolio`: all symbols in one account, on the times that every symbol has, or that any has in a ragged
        universe. `per_symbol`: one account a symbol.
        """
        frame = self.frame
        if accounts == "portfolio" and self.universe is not None:
            return self._ragged_panel()
        if accounts == "portfolio" and len(self.symbols) > 1:
            times = frame.group_by("time").len().filter(pl.col("len") == len(self.symbols)).select("time")
            frame = frame.join(times, on="time", how="semi").sort("symbol", "time", maintain_order=True)
            if times.is_empty():
                raise BarsError(f"{self.source}: the symbols {', '.join(self.symbols)} have no time in common")
        assets = len(self.symbols) if accounts == "portfolio" else 1
        rows = frame.height // assets

        def column(name: str) -> np.ndarray:
            # Sorted by symbol, then time: each symbol is one run of `rows` values.
            values = frame[name].cast(pl.Float64).to_numpy()
            return np.ascontiguousarray(values.reshape(assets, rows).T)

        time = frame["time"].head(rows).dt.epoch("ms").to_numpy()
        step = int(self.frequency.total_seconds() * 1000)
        if accounts == "portfolio":
            # A time that is not common is a gap of some asset, and every gap starts a segment.
            marks = frame["segment"].to_numpy().reshape(assets, rows)
            breaks = (np.diff(marks, axis=1) != 0).any(axis=0)
        else:
            breaks = np.diff(frame["segment"].to_numpy()) != 0
        segment = np.concatenate([[0], np.cumsum(breaks)]).astype(np.int32)
        first_ms = int(self.start.timestamp() * 1000)
        return Panel(
            time=time.astype(np.int64),
            open=column("open"),
            high=column("high"),
            low=column("low"),
            close=column("close"),
            volume=column("volume"),
            segment=segment,
            tradeable=time >= first_ms,
            symbols=self.symbols,
            frequency_ms=step,
            sessions=self.sessions,
            held_ms=None if self.sessions is None else held_times(time, segment, step),
            funding=column("funding_rate") if "funding_rate" in frame.columns else None,
        )

    def _ragged_panel(self) -> Panel:
        rows = Rows.of(self)
        step = self.frequency // timedelta(milliseconds=1)
        marks = np.full(rows.listed.shape, -1, np.int64)
        segments = self.frame["segment"].to_numpy()
        ends = np.cumsum(rows.counts)
        for asset, (place, end) in enumerate(zip(rows.places, ends, strict=True)):
            marks[place, asset] = segments[end - len(place) : end]
        # A symbol's segment changes only at gaps that all symbols share.
        breaks = np.zeros(len(rows.time), bool)
        for asset, place in enumerate(rows.places):
            breaks[place[1:][np.diff(marks[place, asset]) != 0]] = True
        segment = np.cumsum(breaks).astype(np.int32)
        funding = None
        if "funding_rate" in self.frame.columns:
            funding = np.nan_to_num(rows.spread(self.frame["funding_rate"].to_numpy(), rows.counts))
        return Panel(
            time=rows.time,
            **ragged_prices(self, rows),
            segment=segment,
            tradeable=rows.time >= int(self.start.timestamp() * 1000),
            symbols=self.symbols,
            frequency_ms=step,
            sessions=self.sessions,
            held_ms=None if self.sessions is None else held_times(rows.time, segment, step),
            funding=funding,
            listed=rows.listed,
            halted=rows.listed & ~rows.present,
        )
