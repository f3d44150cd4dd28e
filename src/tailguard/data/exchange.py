"""One market of one exchange, through ccxt: its bars page by page, with retries when the network fails."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from difflib import get_close_matches
from typing import Any, TypeVar

from tailguard.data.bar_file import VALUES, Gap, Row
from tailguard.data.findings import number
from tailguard.data.frequency import parse_frequency
from tailguard.errors import ConfigError, MissingExtraError, TailguardError
from tailguard.validate import check_count, check_range

LONGEST_WAIT = 60.0
"""Seconds; exchanges lift their limits every minute."""
USUAL_PAGE = 500
"""Bars per request where the exchange does not state its page size."""
FIRST_ATTEMPTS = 3
"""Requests before giving up on an exchange that has never answered: it does not exist, or we are offline."""
LONGEST_REASON = 200
"""Longest part of an exchange's error message to quote, in characters."""

Result = TypeVar("Result")
Say = Callable[[str], None]


class FetchError(TailguardError):
    """The exchange cannot be reached or cannot be trusted; what was fetched before is in the file."""


@dataclass(frozen=True)
class Retry:
    """Retry policy when the exchange does not answer."""

    attempts: int = 8
    """Requests before giving up."""
    wait: float = 1.0
    """Seconds before the second attempt; it doubles at each attempt, up to a minute."""

    def __post_init__(self) -> None:
        check_count("retry.attempts", self.attempts)
        check_range("retry.wait", self.wait, low=0)


@dataclass(frozen=True)
class Exchange:
    """One market of one exchange."""

    client: Any
    errors: Any
    """ccxt itself, for its classes of errors."""
    symbol: str
    timeframe: str
    step: int
    """Length of a bar, milliseconds."""
    page: int
    """Bars per request."""
    now: int
    """The exchange's clock at the start of the download, milliseconds."""
    retry: Retry
    say: Say
    """Called with a message on every failed attempt."""

    @property
    def complete(self) -> int:
        """Bars that open before this moment have closed."""
        return self.now - self.step + 1

    @classmethod
    def open(
        cls, exchange: str, symbol: str, timeframe: str, retry: Retry, settings: Mapping[str, Any], say: Say
    ) -> Exchange:
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
        say(f"connecting to {exchange}")
        _with_retries(client, ccxt, client.load_markets, retry, say, first=True)
        _known(f"{exchange} symbol", symbol, client.symbols)
        return cls(
            client=client,
            errors=ccxt,
            symbol=symbol,
            timeframe=timeframe,
            step=step,
            page=client.feature_value(symbol, "fetchOHLCV", "limit", USUAL_PAGE) or USUAL_PAGE,
            # The local clock may be ahead and treat a bar as complete that is still forming.
            now=_with_retries(client, ccxt, client.fetch_time, retry, say)
            if client.has.get("fetchTime")
            else client.milliseconds(),
            retry=retry,
            say=say,
        )

    def pages(self, gap: Gap, known: Row | None) -> Iterator[list[Row]]:
        """The bars of a gap, page by page, each bar once and in order.

        Every page is requested from the last known bar, so that bar must be in it: a page that starts later would leave
        a gap, and a bar with other values contradicts the earlier answer.
        """
        since = gap.start
        while since < gap.stop:
            rows = self._following(known) if known else self._ask(since)
            fresh = [row for row in rows if since <= row[0] < gap.stop]
            if fresh:
                yield fresh
                known = fresh[-1]
                since = known[0] + gap.step
            elif rows and rows[-1][0] >= gap.stop:
                return
            elif known:  # only the known bar: request the bars after it
                known = None
            else:  # nothing traded or recorded for a whole page
                since += self.page * gap.step

    def closed_since(self, since: int) -> list[Row]:
        """Bars that open at this time or later and have closed by the exchange's clock, one page of them."""
        client = self.client
        fetch_time = client.fetch_time if client.has.get("fetchTime") else client.milliseconds
        now = _with_retries(client, self.errors, fetch_time, self.retry, self.say)
        return [row for row in self._ask(since) if row[0] >= since and row[0] + self.step <= now]

    def _following(self, known: Row) -> list[Row]:
        """A page that follows the known bar without a gap; up to three requests, the last one from a bar earlier."""
        moment = known[0]
        rows: list[Row] = []
        for asked in (moment, moment, moment - self.step):
            rows = self._ask(asked)
            again = next((row for row in rows if row[0] == moment), None)
            if again is not None and again != known:
                raise FetchError(self._contradiction(known, again))
            # Some exchanges return only bars after the requested time.
            if again is not None or (rows and rows[0][0] == moment + self.step):
                return rows
        got = f"got bars from {iso(rows[0][0])}" if rows else "got none"
        raise FetchError(
            f"{self.client.id} {self.symbol}: asked for bars from {iso(moment)}, a time that it returned before, and "
            f"{got}; its pages have gaps. Try again later, or use another timeframe"
        )

    def _ask(self, since: int) -> list[Row]:
        answer = _with_retries(
            self.client,
            self.errors,
            lambda: self.client.fetch_ohlcv(self.symbol, self.timeframe, since, self.page),
            self.retry,
            self.say,
        )
        if not isinstance(answer, list | tuple) or not all(isinstance(candle, list | tuple) for candle in answer):
            said = repr(answer)[:LONGEST_REASON]
            raise FetchError(f"{self.client.id} {self.symbol}: the response is not a list of bars: {said}")
        rows: dict[int, Row] = {}
        for candle in answer:
            row = self._row(candle)
            if rows.setdefault(row[0], row) != row:
                raise FetchError(self._contradiction(rows[row[0]], row))
        return [rows[moment] for moment in sorted(rows)]

    def _row(self, candle: list[Any] | tuple[Any, ...]) -> Row:
        """A bar as numbers; anything else is an error and is never written to the file."""
        opened, *values = candle or [None]
        if isinstance(opened, bool) or not isinstance(opened, int | float) or not math.isfinite(opened):
            raise FetchError(f"{self.client.id} {self.symbol}: a bar without a time: {list(candle)}")
        bar = f"{self.client.id} {self.symbol}: the bar at {iso(int(opened))}"
        if len(values) < len(VALUES) or None in values:
            raise FetchError(f"{bar} is incomplete: {values}")
        read = []
        for name, value in zip(VALUES, values, strict=False):
            try:
                read.append(float(value))
            except (TypeError, ValueError):
                raise FetchError(f"{bar}: {name} {value!r} is not a number") from None
            if not math.isfinite(read[-1]) or read[-1] < 0 or (read[-1] == 0 and name != "volume"):
                kind = "zero or a positive number" if name == "volume" else "a positive number"
                raise FetchError(f"{bar}: {name} {number(read[-1])} is not {kind}")
        open_, high, low, close, volume = read
        return (int(opened), open_, high, low, close, volume)

    def _contradiction(self, before: Row, after: Row) -> str:
        return (
            f"{self.client.id} {self.symbol}: two different bars at {iso(before[0])}: {', '.join(VALUES)} were "
            f"{before[1:]} and are now {after[1:]}. If the file holds another market or was edited, start a new file"
        )


def _with_retries(
    client: Any, errors: Any, request: Callable[[], Result], retry: Retry, say: Say, first: bool = False
) -> Result:
    """Repeat a request on network errors and rate limits, with growing pauses.

    `first`: the exchange has not answered yet; fewer attempts are made.
    """
    wait = retry.wait
    attempts = min(retry.attempts, FIRST_ATTEMPTS) if first else retry.attempts
    for attempt in range(1, attempts + 1):
        try:
            return request()
        except errors.OperationFailed as error:
            reason = _reason(error)
            if attempt == attempts and first:
                raise FetchError(
                    f"{client.id} could not be reached in {attempt} attempts; last error: {reason}. Check the "
                    "internet connection, a proxy or firewall, and whether the exchange is open to your country"
                ) from error
            if attempt == attempts:
                raise FetchError(
                    f"{client.id} did not answer in {attempt} attempts; last error: {reason}. "
                    "Complete bars fetched so far are in the file: the same command resumes from there"
                ) from error
            limited = isinstance(error, errors.DDoSProtection | errors.RateLimitExceeded)
            pause = min(max(wait, _retry_after(client) if limited else 0.0), LONGEST_WAIT)
            say(f"{client.id}: {reason}; attempt {attempt + 1} of {attempts} in {pause:.0f} s")
            time.sleep(pause)
            wait *= 2
        except errors.BaseError as error:
            raise FetchError(f"{client.id} refused: {_reason(error)}") from error
    raise AssertionError("the loop returns or raises")


def _reason(error: Exception) -> str:
    """Kind and message of an error, without the page of HTML that some exchanges send."""
    text = " ".join(str(error).split())
    shown = text if len(text) <= LONGEST_REASON else f"{text[:LONGEST_REASON]} …"
    return f"{type(error).__name__}: {shown}"


def _retry_after(client: Any) -> float:
    """Seconds to wait according to the last response, 0 if it did not say."""
    headers = {name.lower(): value for name, value in (client.last_response_headers or {}).items()}
    asked = str(headers.get("retry-after", ""))
    return float(asked) if asked.isdigit() else 0.0


def _known(what: str, name: str, names: list[str]) -> None:
    if name not in names:
        near = get_close_matches(name, names, n=3, cutoff=0.5) or sorted(names)[:8]
        raise ConfigError(f"{what}: {name!r} is unknown; similar names: {', '.join(near)}")


def moment_of(milliseconds: int) -> datetime:
    return datetime.fromtimestamp(milliseconds / 1000, UTC)


def iso(milliseconds: int) -> str:
    return moment_of(milliseconds).strftime("%Y-%m-%d %H:%M")
