"""A paper exchange that a thread of the test serves, and ccxt's real client of it."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import ccxt

from tailguard.data.exchange import Exchange, Retry
from tailguard.live.ccxt_venue import CcxtVenue, make_client
from tailguard.live.guards import GuardConfig
from tailguard.live.journal import Journal
from tailguard.live.kill import KillSwitch
from tailguard.live.orders import OrderConfig
from tailguard.live.paper_client import EXCHANGE, KEYS, PaperAddress, PaperClock
from tailguard.live.paper_exchange.process import serving
from tailguard.live.paper_exchange.replayed_exchange import PaperExchange
from tailguard.live.polling import PollingSource
from tailguard.live.session import Session, SessionConfig
from tailguard.live.simulation import RandomWeights

from .conftest import HOUR


@contextmanager
def served(exchange: PaperExchange) -> Iterator[PaperAddress]:
    """Serve on a free port of localhost until the block ends."""
    ready, loop = threading.Event(), asyncio.new_event_loop()
    addresses: list[str] = []
    stop = asyncio.Event()

    async def run() -> None:
        async with serving(exchange) as address:
            addresses.append(address)
            ready.set()
            await stop.wait()

    thread = threading.Thread(target=lambda: loop.run_until_complete(run()), daemon=True)
    thread.start()
    assert ready.wait(60)
    try:
        yield PaperAddress.parse(addresses[0])
    finally:
        loop.call_soon_threadsafe(stop.set)
        thread.join(60)
        loop.close()


def plain_client(address: PaperAddress, **settings: Any) -> Any:
    """ccxt's client of the exchange, as anybody would make it."""
    keys = {"apiKey": KEYS.key, "secret": KEYS.secret}
    return ccxt.binanceusdm({**keys, **address.settings(), **settings})


def opened_venue(address: PaperAddress, symbols: tuple[str, ...], since_ms: int = 0) -> CcxtVenue:
    """The exchange as a venue, ready to trade."""
    clock = PaperClock(address)
    client = make_client(EXCHANGE, KEYS, address.settings())
    venue = CcxtVenue(client, KEYS, symbols, clock, since_ms=since_ms, receive_window_ms=clock.receive_window_ms)
    venue.check()
    return venue


@contextmanager
def trading(
    address: PaperAddress,
    folder: Path,
    symbols: tuple[str, ...],
    *,
    guards: GuardConfig,
    orders: OrderConfig | None = None,
    capital: float = 100_000.0,
    gross: float = 1.0,
) -> Iterator[tuple[Session, PollingSource]]:
    """A session as a new process would make it, that follows the exchange's bars and trades there by a rule."""
    journal = Journal(folder / "journal.jsonl", sync=False)
    started = [int(record["time"]) for record in journal.records if record["kind"] == "start"]
    known = [int(record["bar"]) for record in journal.records if record["kind"] == "bar"]
    venue = opened_venue(address, symbols, since_ms=started[0] if started else 0)
    clock = venue.clock
    config = SessionConfig(
        run="http",
        mode="paper",
        symbols=symbols,
        capital=capital,
        leverage=1.0,
        bar_ms=HOUR,
        window=32,
        guards=guards,
        orders=orders or OrderConfig(),
    )
    decider = RandomWeights(len(symbols), gross)
    session = Session(config, decider, journal, clock, KillSwitch(folder / "KILL"), venue=venue)
    retry = Retry(attempts=3, wait=0.01)
    exchanges = [Exchange.open(EXCHANGE, each, "1h", retry, address.settings(), lambda _: None) for each in symbols]
    after = known[-1] if known else clock.now() // HOUR * HOUR - HOUR

    def alarm(message: str) -> None:
        session.ledger.record("alarm", guard="bars", message=message)

    source = PollingSource(exchanges, after, clock, lambda: False, alarm, poll_s=HOUR / 10_000, nap_s=1e9)
    source.stop = lambda: source.after_ms >= clock.last_bar_ms or clock.now() > clock.last_bar_ms + 4 * HOUR
    with journal:
        yield session, source
