"""Bars from an exchange, through ccxt, into one Parquet file that survives interruptions.

The file holds only complete bars. Every run asks for the bars of the wanted period that the file lacks, so the same
command continues after a crash, extends the file later, and fills what an earlier run could not get.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from difflib import get_close_matches
from pathlib import Path
from typing import Any, TypeVar

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from tailguard.data.bar_file import VALUES, BarFile, Gap, Row, missing_ranges
from tailguard.data.frequency import parse_frequency
from tailguard.data.storage import check_writable
from tailguard.errors import BarsError, ConfigError, MissingExtraError, TailguardError
from tailguard.validate import check_count, check_range

LONGEST_WAIT = 60.0
"""Seconds; exchanges lift their limits every minute."""
USUAL_PAGE = 500
"""Bars to ask for where the exchange does not say how many it gives."""

Result = TypeVar("Result")


class FetchError(TailguardError):
    """The exchange cannot be reached or cannot be trusted; what was fetched before is in the file."""


@dataclass(frozen=True)
class Fetched:
    """What a download left in the file."""

    path: Path
    bars: int
    """Bars in the file now."""
    added: int
    """Bars this run added."""
    first: datetime
    last: datetime
    missing: int
    """Complete bars of the wanted period that the exchange did not give."""

    def __str__(self) -> str:
        text = f"{self.path}: {self.bars:,} bars, {self.first:%Y-%m-%d %H:%M} → {self.last:%Y-%m-%d %H:%M} UTC, "
        text += f"{self.added:,} of them new"
        return f"{text}; the exchange did not give {self.missing:,} bars of the period" if self.missing else text


@dataclass(frozen=True)
class Retry:
    """How long to insist when the exchange does not answer."""

    attempts: int = 8
    """Requests before giving up."""
    wait: float = 1.0
    """Seconds before the second attempt; it doubles from one to the next, up to a minute."""

    def __post_init__(self) -> None:
        check_count("retry.attempts", self.attempts)
        check_range("retry.wait", self.wait, low=0)


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
    """Bring the bars with `start <= open time < stop` of one symbol into the Parquet file `out`.

    Args:
        exchange: ccxt's name of the exchange, such as `binance`.
        symbol: ccxt's name of the market: `BTC/USDT` is spot, `BTC/USDT:USDT` the perpetual.
        timeframe: the exchange's name of the bar length, such as `1h`.
        out: the file to begin or to continue.
        start: ISO date or time in UTC, or how long ago, such as `90d`.
        stop: the same, or `now`; the bar that is still forming is never included.
        retry: how long to insist.
        save_every: pages after which the file is written, besides the end and any interruption.
        progress: show a progress bar on standard error.
        settings: anything ccxt's exchange class takes, such as a proxy.
    """
    path = Path(out)
    check_writable(path)
    if path.suffix != ".parquet":
        raise ConfigError(f"{path}: a download is kept as Parquet; name the file {path.with_suffix('.parquet').name}")
    check_count("save_every", save_every)
    source = _Source.open(exchange, symbol, timeframe, retry or Retry(), settings or {})
    begin, end = parse_time(start, source.now), min(parse_time(stop, source.now), source.complete)
    if begin >= end:
        raise ConfigError(
            f"{symbol}: no complete {timeframe} bar between {_iso(begin)} and {_iso(end)}; move start or stop"
        )

    file = BarFile.open(path, symbol, source.step)
    present = file.bars
    gaps = missing_ranges(file.times, begin, end, source.step)
    with _progress(f"{exchange} {symbol} {timeframe}", sum(gap.bars for gap in gaps), progress) as advance:
        try:
            for gap in gaps:
                for number, page in enumerate(source.pages(gap, file.row_at(gap.start - gap.step)), start=1):
                    file.append(page)
                    advance(len(page))
                    if number % save_every == 0:
                        file.save()
        finally:
            file.save()
    if file.bars == 0:
        raise FetchError(
            f"{exchange} gave no {symbol} {timeframe} bar from {_iso(begin)} to {_iso(end)}; was it listed then?"
        )
    times = file.times
    return Fetched(
        path=path,
        bars=file.bars,
        added=file.bars - present,
        first=_moment(int(times[0])),
        last=_moment(int(times[-1])),
        missing=sum(gap.bars for gap in missing_ranges(times, begin, end, source.step)),
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


@dataclass(frozen=True)
class _Source:
    """One market of one exchange."""

    client: Any
    errors: Any
    """ccxt itself, for its classes of errors."""
    symbol: str
    timeframe: str
    step: int
    """Length of a bar, milliseconds."""
    page: int
    """Bars to ask for at once."""
    now: int
    """The exchange's clock at the start of the download, milliseconds."""
    retry: Retry

    @property
    def complete(self) -> int:
        """Bars that open before this moment have closed."""
        return self.now - self.step + 1

    @classmethod
    def open(cls, exchange: str, symbol: str, timeframe: str, retry: Retry, settings: Mapping[str, Any]) -> _Source:
        try:
            import ccxt
        except ImportError:
            raise MissingExtraError("ccxt", "live", "Fetching bars from an exchange") from None
        _known("exchange", exchange, ccxt.exchanges)
        client = getattr(ccxt, exchange)({"enableRateLimit": True, **settings})
        if not client.has.get("fetchOHLCV"):
            raise ConfigError(f"{exchange} does not offer bars; choose another exchange")
        _known(f"{exchange} timeframe", timeframe, list(client.timeframes))
        step = parse_frequency(timeframe) // timedelta(milliseconds=1)
        _insist(client, ccxt, client.load_markets, retry)
        _known(f"{exchange} symbol", symbol, client.symbols)
        return cls(
            client=client,
            errors=ccxt,
            symbol=symbol,
            timeframe=timeframe,
            step=step,
            page=client.feature_value(symbol, "fetchOHLCV", "limit", USUAL_PAGE) or USUAL_PAGE,
            # The local clock may run ahead and take a bar for complete that is still forming.
            now=_insist(client, ccxt, client.fetch_time, retry)
            if client.has.get("fetchTime")
            else client.milliseconds(),
            retry=retry,
        )

    def pages(self, gap: Gap, known: Row | None) -> Iterator[list[Row]]:
        """The bars of a gap, page by page, each bar once and in order.

        Every page is asked for from the last bar that is known, so it must begin with that very bar: a page that does
        not shows an exchange that ignores the question, or one that gives two answers to it.
        """
        since = gap.start
        while since < gap.stop:
            asked = known[0] if known else since
            rows = self._ask(asked)
            if known:
                self._verify(known, rows)
            fresh = [row for row in rows if since <= row[0] < gap.stop]
            if fresh:
                yield fresh
                known = fresh[-1]
                since = known[0] + gap.step
            elif rows and rows[-1][0] >= gap.stop:
                return
            else:  # nothing traded or recorded for a whole page
                known = None
                since = asked + self.page * gap.step

    def _ask(self, since: int) -> list[Row]:
        answer = _insist(
            self.client,
            self.errors,
            lambda: self.client.fetch_ohlcv(self.symbol, self.timeframe, since, self.page),
            self.retry,
        )
        rows: dict[int, Row] = {}
        for opened, *values in answer:
            if len(values) < len(VALUES) or None in values:
                raise FetchError(f"{self.client.id} {self.symbol}: the bar at {_iso(opened)} is incomplete: {values}")
            open_, high, low, close, volume = map(float, values[: len(VALUES)])
            row = (int(opened), open_, high, low, close, volume)
            if rows.setdefault(row[0], row) != row:
                raise FetchError(self._contradiction(rows[row[0]], row))
        return [rows[moment] for moment in sorted(rows)]

    def _verify(self, known: Row, rows: list[Row]) -> None:
        if not rows:
            raise FetchError(
                f"{self.client.id} {self.symbol}: asked for bars from {_iso(known[0])}, one it gave before, and got "
                "none; its pages do not advance. Try again later, or another timeframe"
            )
        if rows[0][0] == known[0] and rows[0] != known:
            raise FetchError(self._contradiction(known, rows[0]))

    def _contradiction(self, before: Row, after: Row) -> str:
        return (
            f"{self.client.id} {self.symbol}: two different bars at {_iso(before[0])}: {', '.join(VALUES)} were "
            f"{before[1:]} and are now {after[1:]}. If the file is of another market or was edited, begin a new one"
        )


def _insist(client: Any, errors: Any, request: Callable[[], Result], retry: Retry) -> Result:
    """Repeat a request while the network or the exchange's limits are in the way, waiting longer each time."""
    wait = retry.wait
    for attempt in range(1, retry.attempts + 1):
        try:
            return request()
        except errors.OperationFailed as error:
            if attempt == retry.attempts:
                raise FetchError(
                    f"{client.id} did not answer in {attempt} attempts, at last {type(error).__name__}: {error}. "
                    "Complete bars fetched so far are in the file: the same command goes on from there"
                ) from error
            limited = isinstance(error, errors.DDoSProtection | errors.RateLimitExceeded)
            time.sleep(min(max(wait, _retry_after(client) if limited else 0.0), LONGEST_WAIT))
            wait *= 2
        except errors.BaseError as error:
            raise FetchError(f"{client.id} refused: {type(error).__name__}: {error}") from error
    raise AssertionError("the loop returns or raises")


def _retry_after(client: Any) -> float:
    """Seconds the last answer asked to wait, 0 when it did not say."""
    headers = {name.lower(): value for name, value in (client.last_response_headers or {}).items()}
    asked = str(headers.get("retry-after", ""))
    return float(asked) if asked.isdigit() else 0.0


def _known(what: str, name: str, names: list[str]) -> None:
    if name not in names:
        near = get_close_matches(name, names, n=3, cutoff=0.5) or sorted(names)[:8]
        raise ConfigError(f"{what}: {name!r} is unknown; near it are {', '.join(near)}")


@contextmanager
def _progress(title: str, bars: int, visible: bool) -> Iterator[Callable[[int], None]]:
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("bars"),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=Console(stderr=True), disable=not visible) as display:
        task = display.add_task(title, total=bars)
        yield lambda count: display.advance(task, count)


def _moment(milliseconds: int) -> datetime:
    return datetime.fromtimestamp(milliseconds / 1000, UTC)


def _iso(milliseconds: int) -> str:
    return _moment(milliseconds).strftime("%Y-%m-%d %H:%M")
