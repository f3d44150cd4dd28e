"""Bars one at a time, as they close, and the history that they extend."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, Protocol

import polars as pl

from tailguard.data.bars import REQUIRED, TIME_TYPE, Bars, with_segments
from tailguard.data.calendars import around_the_clock
from tailguard.errors import BarsError
from tailguard.live.venue import Clock

KEYS = ("symbol", "time", "segment")
"""Columns of bars that are not values of a bar."""


@dataclass(frozen=True)
class LiveBar:
    """One closed bar of every symbol."""

    time_ms: int
    """Open time, milliseconds UTC."""
    values: Mapping[str, Mapping[str, float | None]]
    """By symbol and column: open, high, low, close, volume and whatever else the agent's features need."""

    def close_ms(self, frequency_ms: int) -> int:
        return self.time_ms + frequency_ms

    def to_dict(self) -> dict[str, Any]:
        """JSON-serialisable; floats keep every bit."""
        return {"bar": self.time_ms, "values": {symbol: dict(row) for symbol, row in self.values.items()}}

    @classmethod
    def from_dict(cls, record: Mapping[str, Any]) -> LiveBar:
        return cls(int(record["bar"]), record["values"])

    def fault(self) -> str | None:
        """What is inconsistent in the bar; None where nothing is."""
        for symbol, row in self.values.items():
            for name in REQUIRED:
                value = row.get(name)
                if value is None or not 0 <= value < float("inf") or (value == 0 and name != "volume"):
                    return f"{symbol}: {name} is {value}"
            open_, high, low, close = (float(row[name] or 0) for name in ("open", "high", "low", "close"))
            if not (low <= min(open_, close) and high >= max(open_, close)):
                return f"{symbol}: open {open_:g}, high {high:g}, low {low:g}, close {close:g} do not fit together"
        return None


class BarSource(Protocol):
    """Closed bars in the order of time. None: the source has ended."""

    def next_bar(self) -> LiveBar | None: ...


class BarHistory:
    """All bars so far: a lead-in that feeds features, and the live bars after it."""

    def __init__(self, lead_in: Bars, first_ms: int) -> None:
        import datetime

        first = datetime.datetime.fromtimestamp(first_ms / 1000, datetime.UTC)
        frame = lead_in.frame.filter(pl.col("time") < first)
        self.columns = [name for name in frame.columns if name not in KEYS]
        self.schema = {name: frame.schema[name] for name in frame.columns if name != "segment"}
        self.symbols = lead_in.symbols
        self.frequency_ms = round(lead_in.frequency.total_seconds() * 1000)
        self.bars = replace(lead_in, frame=frame, first=first)
        times = frame["time"].dt.epoch("ms")
        self.last_ms = int(times.max()) if frame.height else first_ms - self.frequency_ms  # type: ignore[arg-type]

    def extend(self, *bars: LiveBar) -> Bars:
        """Append closed bars, in the order of time."""
        for bar in bars:
            self._check(bar)
            self.last_ms = bar.time_ms
        rows = [
            {"symbol": symbol, "time": bar.time_ms, **{name: bar.values[symbol].get(name) for name in self.columns}}
            for bar in bars
            for symbol in self.symbols
        ]
        columns = {name: [row[name] for row in rows] for name in self.schema}
        fresh = pl.DataFrame(
            {
                name: pl.Series(name, values, dtype=pl.Int64).cast(TIME_TYPE)
                if name == "time"
                else pl.Series(name, values, dtype=self.schema[name], strict=False)
                for name, values in columns.items()
            }
        )
        frame = pl.concat([self.bars.frame.drop("segment"), fresh])
        if len(self.symbols) > 1:
            order = {symbol: place for place, symbol in enumerate(self.symbols)}
            place = pl.col("symbol").replace_strict(order, return_dtype=pl.Int32)
            frame = frame.sort(place, "time", maintain_order=True)
        self.bars = replace(self.bars, frame=with_segments(frame, around_the_clock(self.bars.frequency)))
        return self.bars

    def _check(self, bar: LiveBar) -> None:
        if set(bar.values) != set(self.symbols):
            raise BarsError(f"a bar of {', '.join(bar.values)}; the agent trades {', '.join(self.symbols)}")
        missing = [name for name in self.columns if any(name not in row for row in bar.values.values())]
        if missing:
            raise BarsError(
                f"bars without the columns {', '.join(missing)}, which the history has. Use a source that has them, or "
                "train the agent on features that do not need them (data.features)"
            )
        if bar.time_ms <= self.last_ms or (bar.time_ms - self.last_ms) % self.frequency_ms:
            raise BarsError(f"a bar that opens at {bar.time_ms} ms cannot follow the one at {self.last_ms} ms")


def bars_of(bars: Bars, first_ms: int) -> Iterator[LiveBar]:
    """The bars from this open time on, one by one, of the times that every symbol has."""
    frame = bars.frame.filter(pl.col("time").dt.epoch("ms") >= first_ms).sort("time", "symbol")
    columns = [name for name in frame.columns if name not in KEYS]
    symbols = set(bars.symbols)
    for _, rows in frame.group_by("time", maintain_order=True):
        named = {row["symbol"]: {name: row[name] for name in columns} for row in rows.iter_rows(named=True)}
        if set(named) == symbols:
            yield LiveBar(int(rows["time"].dt.epoch("ms")[0]), named)


class ReplaySource:
    """Bars of a file, as fast as `seconds_per_bar` allows; the clock jumps to each close."""

    def __init__(self, bars: Bars, after_ms: int, clock: Clock, seconds_per_bar: float = 0.0) -> None:
        self.clock, self.seconds_per_bar = clock, seconds_per_bar
        self.frequency_ms = round(bars.frequency.total_seconds() * 1000)
        self._bars = bars_of(bars, after_ms + 1)

    def next_bar(self) -> LiveBar | None:
        import time

        bar = next(self._bars, None)
        if bar is not None:
            if self.seconds_per_bar:
                time.sleep(self.seconds_per_bar)
            self.clock.wait_until(bar.close_ms(self.frequency_ms))
        return bar
