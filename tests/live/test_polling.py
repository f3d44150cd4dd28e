"""Bars of an exchange as they close, from a scripted exchange with ccxt's interface and a simulated clock."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import ccxt
import numpy as np
import polars as pl
import pytest

import tailguard as tg
from tailguard.data.bar_file import VALUES
from tailguard.data.exchange import Exchange, Retry
from tailguard.errors import BarsError
from tailguard.live.bar_history import LiveBar
from tailguard.live.journal import read_records
from tailguard.live.polling import PollingSource, fetch_lead_in
from tailguard.live.venue import SimulatedClock

from .conftest import HOUR, ShadowMaker

BARS = tg.make_market(330, seed=8).bars
FIRST = int(BARS.panel().time[0])


class Scripted:
    """What a source uses of a ccxt exchange: every candle up to the one that is forming."""

    clock: SimulatedClock
    hidden: set[int]
    """Rows that the exchange does not return."""
    fails: int
    """Requests that will fail from now on."""

    id = "binance"
    has = {"fetchOHLCV": True, "fetchTime": True}  # noqa: RUF012 (as ccxt declares it)
    timeframes = {"1h": "1h"}  # noqa: RUF012
    symbols = ("SYN01", "OTHER")
    last_response_headers = None

    def __init__(self, settings: dict[str, Any]) -> None:
        pass

    def load_markets(self) -> None:
        pass

    def fetch_time(self) -> int:
        return self.clock.now()

    def feature_value(self, *_: Any) -> int:
        return 100

    def fetch_ohlcv(self, symbol: str, _timeframe: str, since: int, limit: int) -> list[list[float]]:
        if type(self).fails:
            type(self).fails -= 1
            raise ccxt.NetworkError("no route to host")
        rows = BARS.frame.select(pl.col("time").dt.epoch("ms"), *VALUES).rows()
        forming = self.clock.now() // HOUR * HOUR
        shown = [list(row) for place, row in enumerate(rows) if place not in self.hidden or symbol == "OTHER"]
        return [row for row in shown if since <= row[0] <= forming][:limit]


@pytest.fixture
def exchange(monkeypatch: pytest.MonkeyPatch) -> type[Scripted]:
    class Fresh(Scripted):
        clock = SimulatedClock(FIRST + 200 * HOUR + 5_000)
        hidden: set[int] = set()  # noqa: RUF012 (one class a test)
        fails = 0

    monkeypatch.setattr(ccxt, "binance", Fresh)
    return Fresh


def opened(*symbols: str) -> list[Exchange]:
    return [Exchange.open("binance", symbol, "1h", Retry(attempts=1), {}, lambda _: None) for symbol in symbols]


def source_of(exchange: type[Scripted], symbols: tuple[str, ...] = ("SYN01",), row: int = 199) -> PollingSource:
    return PollingSource(opened(*symbols), FIRST + row * HOUR, exchange.clock, lambda: False, lambda _: None)


def values_of(row: int) -> dict[str, float]:
    return BARS.frame.row(row, named=True)


def test_a_bar_is_given_once_when_it_has_closed(exchange: type[Scripted]) -> None:
    """The exchange also returns the bar that is forming, which is never given."""
    source = source_of(exchange)
    source.poll_s = 0.5
    for row in range(200, 210):
        bar = source.next_bar()
        assert bar.time_ms == FIRST + row * HOUR
        closed = bar.time_ms + HOUR
        assert closed + 2_000 <= exchange.clock.now() < closed + 3_000
        assert bar.values["SYN01"] == {name: values_of(row)[name] for name in VALUES}


def test_bars_that_were_missed_come_one_by_one(exchange: type[Scripted]) -> None:
    source = source_of(exchange, row=150)
    before = exchange.clock.now()
    assert [source.next_bar().time_ms for _ in range(49)] == [FIRST + row * HOUR for row in range(151, 200)]
    assert exchange.clock.now() == before


def test_a_failure_raises_an_alarm_and_is_tried_again(exchange: type[Scripted]) -> None:
    source = source_of(exchange)
    alarms: list[str] = []
    source.alarm = alarms.append
    exchange.fails = 3
    assert source.next_bar().time_ms == FIRST + 200 * HOUR
    assert len(alarms) == 3
    assert "no route to host" in alarms[0]


def test_a_bar_that_does_not_come_is_a_gap_after_one_bar(exchange: type[Scripted]) -> None:
    exchange.hidden = {200}
    source = source_of(exchange)
    source.poll_s = 60
    bar = source.next_bar()
    assert bar.time_ms == FIRST + 201 * HOUR
    assert exchange.clock.now() >= FIRST + 202 * HOUR


def test_a_bar_that_is_late_is_an_alarm_once(exchange: type[Scripted]) -> None:
    """The exchange answers and has nothing new for three hours, as in its maintenance: a person has to know."""
    exchange.hidden = set(range(200, 330))
    exchange.clock.observers.append(lambda now: exchange.hidden.clear() if now > FIRST + 204 * HOUR else None)
    source = source_of(exchange)
    source.poll_s = 20
    alarms: list[tuple[int, str]] = []
    source.alarm = lambda message: alarms.append((exchange.clock.now(), message))
    assert source.next_bar().time_ms == FIRST + 200 * HOUR
    ((told, message),) = alarms
    assert 360_000 < told - (FIRST + 201 * HOUR) < 400_000
    assert message.startswith("no new bar: that of 2021-01-09 08:00 closed 3")
    assert source.next_bar().time_ms == FIRST + 201 * HOUR
    assert len(alarms) == 1


def test_a_bar_waits_until_every_symbol_has_it(exchange: type[Scripted]) -> None:
    exchange.hidden = {200}
    source = source_of(exchange, ("SYN01", "OTHER"))
    exchange.clock.observers.append(lambda now: exchange.hidden.clear() if now > FIRST + 201 * HOUR + 60_000 else None)
    bar = source.next_bar()
    assert bar.time_ms == FIRST + 200 * HOUR
    assert set(bar.values) == {"SYN01", "OTHER"}
    assert exchange.clock.now() > FIRST + 201 * HOUR + 60_000


def test_a_stop_ends_the_wait(exchange: type[Scripted]) -> None:
    source = source_of(exchange)
    source.stop = lambda: exchange.clock.now() > FIRST + 200 * HOUR + 10_000
    assert source.next_bar() is None
    assert exchange.clock.now() < FIRST + 200 * HOUR + 12_000


def test_a_lead_in_has_the_last_closed_bars_and_no_gap(exchange: type[Scripted]) -> None:
    lead_in = fetch_lead_in(opened("SYN01"), 190)
    assert lead_in.panel().time.tolist() == [FIRST + row * HOUR for row in range(10, 200)]
    exchange.hidden = {50}
    with pytest.raises(BarsError, match="189 of the last 190 bars"):
        fetch_lead_in(opened("SYN01"), 190)


def test_a_session_that_follows_an_exchange_decides_as_a_backtest(
    agent, exchange: type[Scripted], shadow_session: ShadowMaker
) -> None:
    lead_in = fetch_lead_in(opened("SYN01"), 195)
    first = FIRST + 200 * HOUR
    session = shadow_session(agent, lead_in, first, exchange.clock)
    source = source_of(exchange)
    session.start()
    for _ in range(60):
        bar = source.next_bar()
        assert isinstance(bar, LiveBar)
        session.on_bar(bar)
    records = read_records(session.ledger.journal.path)
    targets = [record["target"] for record in records if record["kind"] == "decision"]
    frame = BARS.frame.select("symbol", "time", *VALUES, "segment").slice(5, 255)
    begin = pl.Series([first]).cast(pl.Datetime("ms", "UTC"))[0]
    expected = tg.backtest(agent, replace(BARS, frame=frame, first=begin), progress_bar=False)
    np.testing.assert_array_equal(targets[:-1], expected.targets)
