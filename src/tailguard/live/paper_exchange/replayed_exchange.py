"""The paper venue behind the interface: its clock, its bars, and what is drawn for each of them."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from decimal import Decimal
from pathlib import Path
from typing import Any

import numpy as np
import torch

from tailguard.data.panel import Panel
from tailguard.errors import ConfigError
from tailguard.live.books import Books, BookStore, Order
from tailguard.live.faults import BarFaultRates, FaultRates, Faults
from tailguard.live.paper import PaperVenue
from tailguard.live.paper_exchange import wire
from tailguard.live.venue import Instrument, SimulatedClock, VenueAccount
from tailguard.market import MarketConfig, build_market

BARS = ("open", "high", "low", "close", "volume")
LOT, TICK = Decimal("1e-9"), Decimal("1e-9")
"""Rules of an exchange that trades almost any fraction, so that its equity is the simulator's within 1e-9."""


@dataclass(frozen=True)
class ExchangeConfig:
    """What a paper exchange replays, and how."""

    speed: float = 0.0
    """Seconds of the market in one of ours. 0: time stands still until a client moves it."""
    key: str = "paper"
    secret: str = "paper"
    """The keys of its one account; they are worth nothing."""
    rates: FaultRates = field(default_factory=FaultRates)
    bar_rates: BarFaultRates = field(default_factory=BarFaultRates)
    seed: int = 0


class PaperExchange:
    """A paper venue, the clock that it lives by, and listeners who are told what happens."""

    def __init__(
        self,
        panel: Panel,
        market: MarketConfig,
        start_ms: int,
        config: ExchangeConfig,
        *,
        instruments: Mapping[str, Instrument] | None = None,
        store: Path | None = None,
    ) -> None:
        self.panel, self.config = panel, config
        self.ids = wire.market_ids(panel.symbols)
        self.symbols = {market_id: symbol for symbol, market_id in self.ids.items()}
        self.quote = wire.split_symbol(panel.symbols[0])[1]
        self.interval = wire.interval_of(panel.frequency_ms)
        self.faults = Faults(config.rates, config.seed)
        known = None if store is None else _known_books(store, panel)
        self.clock = SimulatedClock(start_ms if known is None else known.time)
        rules = instruments or {symbol: Instrument(symbol, LOT, TICK) for symbol in panel.symbols}
        tables = build_market(panel, market, dtype=torch.float64)
        self.venue = PaperVenue(tables, panel, self.clock, instruments=rules, faults=self.faults, store=store)
        # At speed, a second of the market is short, and a request needs as long as ever.
        scale = max(1.0, config.speed)
        self.venue.receive_window_ms, self.venue.lead_ms = round(5_000 * scale), round(1_000 * scale)
        self.venue.pass_time(self.clock.now())
        self.half_spread = float(market.half_spread)
        self.listeners: list[Callable[[str, Mapping[str, Any]], None]] = []
        """Called with the name of a stream and an event; the user's own stream is called `user`."""
        self._started = time.monotonic(), self.clock.now()
        self._changed: dict[str, Order] = {}
        self.venue.on_change = lambda order: self._changed.update({order["id"]: order})

    # --- time ---------------------------------------------------------------------------------------------------------

    def advance(self, until_ms: int | None = None) -> None:
        """Let time pass: to a moment that a client names, or as fast as the speed says."""
        if until_ms is None:
            if not self.config.speed:
                return
            began, from_ms = self._started
            until_ms = from_ms + round(1000 * self.config.speed * (time.monotonic() - began))
        books = self.venue.books
        while self.clock.now() < until_ms:
            # Bar by bar, so that each is told and has its faults.
            row, closed = books.row, books.closed
            self.clock.wait_until(min(until_ms, self._next_change(until_ms)))
            self._tell_bars(row, closed)
        self.tell_orders()

    def _next_change(self, never: int) -> int:
        """When the forming bar closes, or the next one opens."""
        books, times = self.venue.books, self.panel.time
        if not books.closed:
            return int(times[books.row]) + self.panel.frequency_ms
        return int(times[books.row + 1]) if books.row + 1 < self.panel.rows else never

    @property
    def has_ended(self) -> bool:
        return self.venue.books.closed and self.venue.books.row + 1 == self.panel.rows

    def _tell_bars(self, row: int, was_closed: bool) -> None:
        books = self.venue.books
        if not was_closed and (books.closed or books.row > row) and not self._is_hidden(row):
            for asset, symbol in enumerate(self.panel.symbols):
                event = wire.kline_event(
                    self.kline(row, asset), self.ids[symbol], self.interval, self.clock.now(), closed=True
                )
                self._tell(f"{self.ids[symbol].lower()}@kline_{self.interval}", event)
        if books.row > row:
            self._draw_faults(books.row)
            for symbol, price in self.venue.prices_now().items():
                event = wire.book_ticker(self.ids[symbol], price, self.half_spread, self.clock.now())
                names = {"b": "bidPrice", "B": "bidQty", "a": "askPrice", "A": "askQty", "s": "symbol"}
                said = {short: event[name] for short, name in names.items()}
                now = self.clock.now()
                stream = f"{self.ids[symbol].lower()}@bookTicker"
                self._tell(stream, {"e": "bookTicker", "u": now, "T": now, "E": now, **said})

    def tell_orders(self) -> None:
        """Tell the user's stream which orders have changed."""
        books, now = self.venue.books, self.clock.now()
        changed, self._changed = self._changed, {}
        for order in changed.values():
            self._tell("user", wire.order_event(order, self.ids[order["symbol"]], now))
        if changed:
            self._tell("user", wire.account_event(self.quote, self.positions(books, every=True), books, now))

    def _tell(self, stream: str, event: Mapping[str, Any]) -> None:
        for listener in self.listeners:
            listener(stream, event)

    # --- faults -------------------------------------------------------------------------------------------------------

    def _is_hidden(self, row: int) -> bool:
        return bool(self.config.bar_rates.bar_gap) and "bar_gap" in self._drawn(row)[0]

    def _drawn(self, row: int) -> tuple[set[str], np.random.Generator]:
        return self.config.bar_rates.drawn(self.config.seed, row)

    def _draw_faults(self, row: int) -> None:
        happens, draw = self._drawn(row)
        venue, counts = self.venue, self.faults.counts
        if "external_trade" in happens:
            symbol = str(draw.choice(self.panel.symbols))
            lot, price = venue.rules[symbol].lot, venue.prices_now()[symbol]
            size = Decimal(repr(float(draw.uniform(-0.1, 0.1)) * venue.equity() / price)) // lot * lot
            venue.trade_outside(symbol, size)
        if "liquidation" in happens and any(venue.books.positions.values()):
            venue.liquidate_now()
        if "resting_fill" in happens:
            for order in venue.resting():
                self._fill_part(order, draw)
        for name in happens - {"bar_gap"}:
            counts[name] = counts.get(name, 0) + 1

    def _fill_part(self, order: Order, draw: np.random.Generator) -> None:
        left = abs(Decimal(order["quantity"])) - abs(Decimal(order["filled"]))
        lot = self.venue.rules[order["symbol"]].lot
        share = Decimal(repr(min(1.0, float(draw.uniform(0, 2)))))
        self.venue.fill_resting(order, left * share // lot * lot)

    # --- what clients are shown ---------------------------------------------------------------------------------------

    def kline(self, row: int, asset: int) -> list[Any]:
        """A closed bar, or the forming one, of which nobody knows more than its open."""
        panel = self.panel
        values = {name: float(getattr(panel, name)[row, asset]) for name in BARS}
        books = self.venue.books
        if row > books.row or (row == books.row and not books.closed):
            values = dict.fromkeys(BARS, values["open"]) | {"volume": 0.0}
        return wire.kline(int(panel.time[row]), panel.frequency_ms, values)

    def klines(self, symbol: str, since: int | None, until: int | None, limit: int) -> list[list[Any]]:
        """Bars that have opened, from a time on; without one the last."""
        panel, now = self.panel, self.clock.now()
        asset = panel.symbols.index(symbol)
        last = now if until is None else min(now, until)
        first = 0 if since is None else since
        rows = np.flatnonzero((panel.time >= first) & (panel.time <= last))
        rows = rows[: self.venue.books.row + 1]
        shown = [int(row) for row in rows if row <= self.venue.books.row and not self._is_hidden(int(row))]
        chosen = shown[-limit:] if since is None else shown[:limit]
        return [self.kline(row, asset) for row in chosen]

    def positions(self, books: Books, *, every: bool = False) -> list[wire.Json]:
        """Open positions in the books, or those of every symbol."""
        prices, now = self.venue.prices_now(), self.clock.now()
        held = [symbol for symbol in self.panel.symbols if every or books.positions[symbol]]
        return [wire.position(symbol, self.ids[symbol], books, prices[symbol], now) for symbol in held]

    def account(self) -> wire.Json:
        books, now = self.venue.shown_books(), self.clock.now()
        equity = VenueAccount(books.cash, books.positions).equity(self.venue.prices_now())
        return wire.account(self.quote, self.positions(books), books, equity, now)


def _known_books(store: Path, panel: Panel) -> Books | None:
    """The books of an exchange that goes on; those of other bars are refused."""
    file = BookStore(store)
    books = file.read()
    file.close()
    fits = books is None or (
        set(books.positions) == set(panel.symbols)
        and books.row < panel.rows
        and int(panel.time[books.row]) <= books.time
    )
    if not fits:
        raise ConfigError(f"{store}: the books are those of other bars. Replay the same ones, or name another file")
    return books
