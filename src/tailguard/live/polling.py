"""Closed bars of an exchange as they come, through ccxt."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta

import polars as pl

from tailguard.data.bar_file import VALUES, Gap, Row
from tailguard.data.bars import TIME_TYPE, Bars, with_segments
from tailguard.data.calendars import around_the_clock
from tailguard.data.exchange import Exchange, FetchError, iso
from tailguard.errors import BarsError
from tailguard.live.bar_history import LiveBar
from tailguard.live.venue import Clock

LATE = 0.1
"""Share of a bar's length after which a bar that has not come is an alarm, and the seconds that it is at least."""
LATE_S = 10.0
SETTLE_S = 2.0
"""Seconds after a close at which the exchange is asked first: it needs a moment to finish the bar."""


@dataclass
class PollingSource:
    """One exchange object for each symbol. A bar is given once every symbol has it."""

    exchanges: Sequence[Exchange]
    after_ms: int
    """Open time of the last bar that is known."""
    clock: Clock
    stop: Callable[[], bool]
    alarm: Callable[[str], None]
    poll_s: float = 1.0
    """Pause between two questions for a bar that has closed."""
    nap_s: float = 1.0
    """Longest wait at once, so that a stop and the kill switch are seen at once."""
    longest_pause_s: float = 60.0
    """Longest pause while the exchange does not answer: pauses double with each failure."""
    _failures: int = 0

    def next_bar(self) -> LiveBar | None:
        """Wait for the next closed bar; None once a stop is asked for."""
        step = self.exchanges[0].step
        wanted = self.after_ms + step
        is_told = False
        while not self.stop():
            wait_s = (wanted + step - self.clock.now()) / 1_000 + SETTLE_S
            if wait_s > 0:
                self.clock.sleep(min(wait_s, self.nap_s))
                continue
            bar = self._asked(wanted)
            if bar is not None:
                self.after_ms = bar.time_ms
                return bar
            age_s = (self.clock.now() - wanted - step) / 1_000
            if not (is_told or self._failures) and age_s > max(LATE * step / 1_000, LATE_S):
                self.alarm(f"no new bar: that of {iso(wanted)} closed {age_s:.0f} s ago, and the exchange has none")
                is_told = True
            self._pause()
        return None

    def _pause(self) -> None:
        longest = max(self.poll_s, self.longest_pause_s)
        until = self.clock.now() + round(1_000 * min(self.poll_s * 2 ** min(max(self._failures - 1, 0), 10), longest))
        while (left := until - self.clock.now()) > 0 and not self.stop():
            self.clock.sleep(min(left / 1_000, self.nap_s))

    def _asked(self, wanted: int) -> LiveBar | None:
        step = self.exchanges[0].step
        try:
            found = {each.symbol: {row[0]: row for row in each.closed_since(wanted)} for each in self.exchanges}
        except FetchError as error:
            self._failures += 1
            self.alarm(str(error))
            return None
        self._failures = 0
        common = sorted(set.intersection(*(set(rows) for rows in found.values())))
        # A bar that is missing for a whole bar length after its close will not come: what follows is a gap.
        if not common or (common[0] > wanted and self.clock.now() < wanted + 2 * step):
            return None
        return live_bar(common[0], {symbol: rows[common[0]] for symbol, rows in found.items()})


def live_bar(time_ms: int, rows: dict[str, Row]) -> LiveBar:
    return LiveBar(time_ms, {symbol: dict(zip(VALUES, row[1:], strict=True)) for symbol, row in rows.items()})


def fetch_lead_in(exchanges: Sequence[Exchange], bars: int) -> Bars:
    """The last closed bars of every symbol, which must follow each other without a gap."""
    step = exchanges[0].step
    stop = math.floor(exchanges[0].now / step) * step
    frames = []
    for exchange in exchanges:
        gap = Gap(stop - bars * step, stop, step)
        rows = [row for page in exchange.pages(gap, None) for row in page]
        times = [row[0] for row in rows]
        if times != list(range(gap.start, stop, step)):
            raise BarsError(
                f"{exchange.client.id} {exchange.symbol}: {len(rows):,} of the last {bars:,} bars; features need them "
                "without a gap. Try again later"
            )
        columns = {name: [row[1 + place] for row in rows] for place, name in enumerate(VALUES)}
        frames.append(
            pl.DataFrame({"symbol": [exchange.symbol] * len(rows), "time": times, **columns}).with_columns(
                pl.col("time").cast(TIME_TYPE)
            )
        )
    frequency = timedelta(milliseconds=step)
    frame = with_segments(pl.concat(frames).sort("symbol", "time"), around_the_clock(frequency))
    return Bars(frame, frequency, exchanges[0].client.id)
