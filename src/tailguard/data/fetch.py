"""Bars from an exchange, through ccxt, into one Parquet file that survives interruptions.

The file holds only complete bars. Every run requests the bars of the period that the file lacks, so the same
command resumes after a crash, extends the file later, and fills in bars that an earlier run could not get.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from tailguard.data.bar_file import BarFile, missing_ranges
from tailguard.data.exchange import Exchange, FetchError, Retry, iso, moment_of
from tailguard.data.frequency import parse_frequency
from tailguard.data.storage import check_writable
from tailguard.errors import BarsError, ConfigError
from tailguard.validate import check_count

__all__ = ["FetchError", "Fetched", "Retry", "fetch", "parse_time"]


@dataclass(frozen=True)
class Fetched:
    """Result of a download."""

    path: Path
    bars: int
    """Bars in the file now."""
    added: int
    """Bars this run added."""
    first: datetime
    last: datetime
    missing: int
    """Complete bars of the period that the exchange did not return."""

    def __str__(self) -> str:
        text = f"{self.path}: {self.bars:,} bars, {self.first:%Y-%m-%d %H:%M} → {self.last:%Y-%m-%d %H:%M} UTC, "
        text += f"{self.added:,} of them new"
        return f"{text}; the exchange did not return {self.missing:,} bars of the period" if self.missing else text


def fetch(
    exchange: str,
    symbol: str,
    timeframe: str,
    *,
    out: str | Path,
    start: str | datetime,
    stop: str | datetime = "now",
    retry: Retry | None = None,
    save_every: int = 50,
    progress: bool = False,
    settings: Mapping[str, Any] | None = None,
) -> Fetched:
    """Download the bars with `start <= open time < stop` of one symbol to the Parquet file `out`.

    Args:
        exchange: ccxt's name of the exchange, such as `binance`.
        symbol: ccxt's name of the market: `BTC/USDT` is spot, `BTC/USDT:USDT` the perpetual.
        timeframe: the exchange's name of the bar length, such as `1h`.
        out: the file to create or extend.
        start: ISO date or time in UTC, or how long ago, such as `90d`.
        stop: the same, or `now`; the bar that is still forming is never included.
        retry: number of attempts and pauses.
        save_every: pages after which the file is written, besides the end and any interruption.
        progress: show a progress bar and failed attempts on standard error.
        settings: anything ccxt's exchange class takes, such as a proxy.
    """
    path = Path(out)
    check_writable(path)
    if path.suffix != ".parquet":
        raise ConfigError(f"{path}: downloads are saved as Parquet; name the file {path.with_suffix('.parquet').name}")
    check_count("save_every", save_every)
    console = Console(stderr=True)

    def say(text: str) -> None:
        if progress:
            console.print(text, markup=False, highlight=False, soft_wrap=True)

    source = Exchange.open(exchange, symbol, timeframe, retry or Retry(), settings or {}, say)
    begin, end = parse_time(start, source.now), min(parse_time(stop, source.now), source.complete)
    if begin >= end:
        raise ConfigError(
            f"{symbol}: no complete {timeframe} bar between {iso(begin)} and {iso(end)}; move start or stop"
        )

    file = BarFile.open(path, symbol, source.step)
    present = file.bars
    gaps = missing_ranges(file.times, begin, end, source.step)
    with _progress(f"{exchange} {symbol} {timeframe}", sum(gap.bars for gap in gaps), console, progress) as advance:
        # Request missing bars again until a second request brings nothing: a response may lack bars by accident,
        # and only the exchange knows which bars it has.
        passes = 0
        while gaps:
            passes, before = passes + 1, file.bars
            try:
                for gap in gaps:
                    for number, page in enumerate(source.pages(gap, file.row_at(gap.start - gap.step)), start=1):
                        file.append(page)
                        advance(len(page))
                        if number % save_every == 0:
                            file.save()
            finally:
                file.save()
            gaps = missing_ranges(file.times, begin, end, source.step)
            if passes > 1 and file.bars == before:
                break
    if file.bars == 0:
        raise FetchError(
            f"{exchange} returned no {symbol} {timeframe} bar from {iso(begin)} to {iso(end)}; was it listed then?"
        )
    times = file.times
    return Fetched(
        path=path,
        bars=file.bars,
        added=file.bars - present,
        first=moment_of(int(times[0])),
        last=moment_of(int(times[-1])),
        missing=sum(gap.bars for gap in gaps),
    )


def parse_time(value: str | datetime, now: int) -> int:
    """Milliseconds since 1970 of a datetime, an ISO text (UTC unless it says), `now` or a time ago such as `90d`."""
    if isinstance(value, str):
        text = value.strip()
        if text == "now":
            return now
        try:
            return now - parse_frequency(text) // timedelta(milliseconds=1)
        except BarsError:
            pass
        try:
            value = datetime.fromisoformat(text)
        except ValueError:
            raise ConfigError(
                f"{value!r} is not a time; write 2021-01-31, 2021-01-31T08:00, now, or how long ago: 90d, 12h"
            ) from None
    if value.tzinfo is None:
        value = value.replace(tzinfo=UTC)
    return round(value.timestamp() * 1000)


@contextmanager
def _progress(title: str, bars: int, console: Console, visible: bool) -> Iterator[Callable[[int], None]]:
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("bars"),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=console, disable=not visible) as display:
        task = display.add_task(title, total=bars)
        yield lambda count: display.advance(task, count)
