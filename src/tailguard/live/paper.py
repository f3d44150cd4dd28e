"""A paper venue: an account at an exchange that replays bars and fills orders by the simulator's own costs.

The bar that is forming gives the price, its open; orders fill there at the costs of `market.costs`, at most the bar's
capacity. When the clock passes the bar's end, funding and borrow are booked and the margin is checked at the worst
prices of the bar, as in `market.simulator`. Without faults its equity is the simulator's.

A resting order is filled at its limit once a bar has traded through it: strictly below a bid, strictly above an offer.
"""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import replace
from decimal import Decimal
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch

from tailguard.data.panel import Panel
from tailguard.live.books import Books, BookStore, Order
from tailguard.live.faults import LATE_MS, Faults
from tailguard.live.venue import (
    Clock,
    DuplicateOrder,
    ForcedTrade,
    Instrument,
    OrderReport,
    OrderRequest,
    Refused,
    VenueAccount,
    VenueError,
    WrongClock,
)
from tailguard.market.account import Account, liquidate, margin_excess, revalue
from tailguard.market.costs import Cost, Fill, Holding
from tailguard.market.tables import Bar, Market

FINE = Decimal("1e-18")
"""A lot so small that rounding to it is not seen: the rules of a simulator, which trades any fraction."""
NOTHING = 1e-12
"""Equity of an account that has lost everything: it keeps divisions defined."""
SPREAD_KINDS = ("spread", "impact")
"""Costs that are part of an order's price; all others are booked as fees."""


def fine_instruments(symbols: tuple[str, ...]) -> dict[str, Instrument]:
    """Rules without lots, ticks and minima to speak of."""
    return {symbol: Instrument(symbol, FINE, FINE) for symbol in symbols}


class PaperVenue:
    """`market` in float64, of the panel's bars. `store`: a SQLite file that keeps the books over restarts."""

    receive_window_ms = 5_000
    lead_ms = 1_000
    """How far ahead of the venue's clock a request may be."""

    def __init__(
        self,
        market: Market,
        panel: Panel,
        clock: Clock,
        *,
        instruments: Mapping[str, Instrument] | None = None,
        faults: Faults | None = None,
        store: Path | None = None,
    ) -> None:
        self.market, self.panel, self.clock = market, panel, clock
        self.store = None if store is None else BookStore(store)
        self.faults = faults or Faults()
        self.rules = dict(instruments or fine_instruments(panel.symbols))
        self._bars = market.table.permute(1, 0, 2).double().contiguous().numpy()
        capital = market.config.capital
        self.books = Books(capital, {symbol: Decimal(0) for symbol in panel.symbols}, self._forming(), capital, {})
        if self.store is not None:
            self.books = self.store.read() or self.books
        self.on_change: Callable[[Order], None] = lambda _: None
        """Called with every order that is new or has changed."""
        self._before: deque[tuple[int, Books]] = deque()
        """The books before each of the last changes of a position, with its time."""
        self.sends: list[tuple[int, str]] = []
        """Every `place` that reached us or tried to: time and client id."""
        observers = getattr(clock, "observers", None)
        if observers is not None:
            observers.append(self.pass_time)

    # --- the interface of a venue -------------------------------------------------------------------------------------

    def time(self) -> int:
        self.faults.before_read()
        return self.clock.now() + self.faults.clock_skew_ms

    def instruments(self) -> Mapping[str, Instrument]:
        return self.rules

    def prices(self) -> Mapping[str, float]:
        self.faults.before_read()
        return self.prices_now()

    def account(self) -> VenueAccount:
        self.faults.before_read()
        books = self.shown_books()
        return VenueAccount(books.cash, dict(books.positions))

    def place(self, order: OrderRequest) -> OrderReport:
        self.sends.append((self.clock.now(), order.client_id))
        return self.faults.around_place(order, self._accept, self.clock.now())

    def find(self, client_id: str, symbol: str) -> OrderReport | None:  # noqa: ARG002 (see Venue)
        self.faults.before_read()
        order = self.books.orders.get(client_id)
        if order is None or self.faults.is_hidden(order["accepted"], self.clock.now()):
            return None
        return _report(order)

    def orders(self, since_ms: int) -> list[OrderReport]:
        self.faults.before_read()
        now = self.clock.now()
        recent = [
            _report(order)
            for order in self.books.orders.values()
            if order["accepted"] >= since_ms and not self.faults.is_hidden(order["accepted"], now)
        ]
        return self.faults.repeated(recent)

    def cancel(self, client_id: str, symbol: str) -> None:  # noqa: ARG002 (see Venue)
        self.faults.before_read()
        order = self.books.orders.get(client_id)
        if order is not None and order["open"]:
            order |= {"open": False, "updated": self.clock.now()}
            self._save(order)

    def forced_trades(self, after: int) -> list[ForcedTrade]:
        self.faults.before_read()
        return [
            ForcedTrade(number, symbol, Decimal(size))
            for number, symbol, size, _ in self.books.forced
            if number > after
        ]

    def shown_books(self) -> Books:
        """The books that a question about the account is answered from: with that fault those of two seconds ago."""
        while self._before and self._before[0][0] <= self.clock.now() - LATE_MS:
            self._before.popleft()
        if self._before and self.faults.is_account_stale():
            return self._before[0][1]
        return self.books

    # --- what happens at the venue ------------------------------------------------------------------------------------

    def pass_time(self, now: int) -> None:
        """Take requests that were under way, and close every bar that has ended."""
        for moment, request in self.faults.arrived(now):
            with contextlib.suppress(VenueError):
                self._accept(request, moment)
        books, times = self.books, self.panel.time
        before = books.row, books.closed
        while True:
            if not books.closed and times[books.row] + self.panel.frequency_ms <= now:
                self._close_bar()
            elif books.closed and books.row + 1 < self.panel.rows and times[books.row + 1] <= now:
                self._open_bar()
            else:
                break
        if (books.row, books.closed) != before:
            self._save()

    def trade_outside(self, symbol: str, quantity: Decimal) -> None:
        """Somebody else trades in the same account, at the price and without costs."""
        price = self.prices_now()[symbol]
        used = dict(self.books.used)
        self._book(symbol, quantity, price, 0.0)
        self.books.used = used  # the bar's capacity is that of our own orders
        self._save()

    def liquidate_now(self) -> None:
        """Close every position by force, at the price and without costs."""
        self._remember()
        prices = self.prices_now()
        for symbol, quantity in self.books.positions.items():
            self.books.cash += float(quantity) * prices[symbol]
        self._force_flat()
        self._save()

    def fill_resting(self, order: Order, quantity: Decimal) -> None:
        """Fill so much of a resting order at its limit: the trader pays fees, and neither spread nor impact."""
        symbol, limit = order["symbol"], float(order["limit"])
        held, signed = self.books.positions[symbol], quantity.copy_sign(Decimal(order["quantity"]))
        if order["reduce_only"]:
            signed = min(abs(signed), abs(held)).copy_sign(signed) if held * signed < 0 else Decimal(0)
        paid, _ = self._costs(symbol, signed, limit, resting=True)
        before = Decimal(order["filled"])
        self._book(symbol, signed, limit, paid)
        filled = before + signed
        if filled:
            order["price"] = (float(before) * order["price"] + float(signed) * limit) / float(filled)
        left = abs(Decimal(order["quantity"])) - abs(filled)
        # What a reduce-only order can no longer reduce expires.
        is_open = bool(left) and not (order["reduce_only"] and not self.books.positions[symbol])
        order |= {"filled": str(filled), "open": is_open, "updated": self.clock.now()}
        self._save(order)

    def resting(self) -> list[Order]:
        """Orders that can still be filled."""
        return [order for order in self.books.orders.values() if order["open"]]

    def equity(self) -> float:
        """At the price of the forming bar's open, in the quote currency."""
        return VenueAccount(self.books.cash, self.books.positions).equity(self.prices_now())

    def _accept(self, order: OrderRequest, now: int) -> OrderReport:
        """Take an order that arrives now and fill what can be filled at the open; the rest expires, or rests."""
        self._check(order, now)
        price, rules, quantity = self.prices_now()[order.symbol], self.rules[order.symbol], order.quantity
        held = self.books.positions[order.symbol]
        if order.reduce_only and abs(quantity) > abs(held):
            quantity = -held
        filled = self._fillable(order.symbol, self.faults.partial(quantity, rules.lot), price)
        paid, average = self._costs(order.symbol, filled, price)
        beyond = (average - float(order.limit)) * (1 if filled > 0 else -1) > 1e-12 * price
        if filled and beyond and order.kind != "market":
            filled, paid, average = Decimal(0), 0.0, 0.0
        self._book(order.symbol, filled, average, paid, price)
        accepted: Order = {
            "id": order.client_id,
            "number": len(self.books.orders) + 1,
            "symbol": order.symbol,
            "quantity": str(order.quantity),
            "limit": str(order.limit),
            "kind": order.kind,
            "reduce_only": order.reduce_only,
            "filled": str(filled),
            "price": average,
            "open": order.kind == "resting" and filled != quantity,
            "accepted": now,
            "updated": now,
        }
        self.books.orders[order.client_id] = accepted
        self._save(accepted)
        return _report(accepted)

    def _check(self, order: OrderRequest, now: int) -> None:
        """Refuse an order that breaks a rule of the venue."""
        late = now + self.faults.clock_skew_ms - order.sent_ms
        if not -self.lead_ms <= late <= self.receive_window_ms:
            raise WrongClock(f"timestamp is {late} ms old; {self.receive_window_ms} ms are allowed")
        if self.books.closed:
            raise Refused("the market is closed")
        if order.client_id in self.books.orders:
            raise DuplicateOrder("duplicate client id")
        rules = self.rules.get(order.symbol)
        if rules is None:
            raise Refused(f"unknown symbol {order.symbol}")
        off_tick = order.kind != "market" and (order.limit <= 0 or order.limit % rules.tick)
        if not order.quantity or order.quantity % rules.lot or off_tick or abs(order.quantity) < rules.min_quantity:
            raise Refused(f"quantity {order.quantity} or price {order.limit} breaks a filter")
        price = self.prices_now()[order.symbol]
        if not order.reduce_only and abs(order.quantity) * Decimal(repr(price)) < rules.min_notional:
            raise Refused(f"notional is below {rules.min_notional}")
        if order.reduce_only and self.books.positions[order.symbol] * order.quantity >= 0:
            raise Refused("reduce-only order would increase the position")

    def _book(self, symbol: str, quantity: Decimal, average: float, paid: float, price: float | None = None) -> None:
        """A fill: `paid` are all its costs on top of `price`, where the price is not the average itself."""
        if not quantity:
            return
        self._remember()
        books, price = self.books, average if price is None else price
        held = books.positions[symbol]
        after = held + quantity
        if held * quantity > 0:
            entry = (float(held) * books.entries[symbol] + float(quantity) * average) / float(after)
            books.entries[symbol] = entry
        elif after * held <= 0:
            books.entries[symbol] = average if after else 0.0
        books.cash -= float(quantity) * price + paid
        books.positions[symbol] = after
        books.used[symbol] = books.used.get(symbol, 0.0) + abs(float(quantity)) * price

    def _fillable(self, symbol: str, quantity: Decimal, price: float) -> Decimal:
        """The part of an order within what is left of the bar's capacity; an uncut order stays exact."""
        asset = self.panel.symbols.index(symbol)
        room = float(self._bar().capacity[asset]) * self.market.config.capital - self.books.used.get(symbol, 0.0)
        if abs(float(quantity)) * price <= room:
            return quantity
        lot = self.rules[symbol].lot
        return (Decimal(repr(max(room, 0.0) / price)) // lot * lot).copy_sign(quantity)

    def _costs(self, symbol: str, quantity: Decimal, price: float, *, resting: bool = False) -> tuple[float, float]:
        """Costs of a fill in money, and its average price with those costs that are part of a price."""
        if not quantity:
            return 0.0, 0.0
        asset, before = self.panel.symbols.index(symbol), self.books.before
        orders = [0.0] * self.panel.assets
        orders[asset] = float(quantity) * price / before
        trades = [abs(order) for order in orders]
        capital = self.market.config.capital
        fill = Fill(self.market, self._bar(), before / capital, orders, trades, trades[asset])
        amounts = {
            cost.kind: before * self._amount(cost, fill)
            for cost in self.market.costs["order"]
            if not (resting and cost.kind in SPREAD_KINDS)
        }
        in_price = sum(amount for kind, amount in amounts.items() if kind in SPREAD_KINDS)
        return sum(amounts.values()), price + in_price / float(quantity)

    def _amount(self, cost: Cost, basis: Fill[float, list[float]] | Holding[float, list[float]]) -> float:
        """A cost in plain floats, or by its formula in tensors where it has no other."""
        rate = self.market.rates.costs[cost.kind]
        if cost.plain is not None:
            return cost.plain(float(rate), basis)
        tensors = [
            Bar(*(None if column is None else torch.tensor([column], dtype=torch.float64) for column in part))
            if isinstance(part, Bar)
            else torch.tensor([part], dtype=torch.float64).reshape(1, -1)
            if not isinstance(part, Market)
            else part
            for part in basis
        ]
        made = cast(Callable[..., Any], type(basis))(*tensors)
        return float(cost.amount(rate, made).sum())

    def _close_bar(self) -> None:
        """Fill what the bar traded through, book what is due at the close, and check the margin."""
        self._fill_traded_through()
        books, before, bar = self.books, self.books.before, self._bar()
        opens = self.prices_now()
        values = [float(books.positions[symbol]) * opens[symbol] / before for symbol in self.panel.symbols]
        filled = Account(_row([(books.cash / before) + sum(values)]), _row(values))
        worst = torch.minimum(filled.positions * _row(bar.low), filled.positions * _row(bar.high))
        if self._runs_out(revalue(filled, worst)):
            self._liquidate(filled, worst)
        else:
            closes = [value + value * move for value, move in zip(values, bar.move, strict=True)]
            holding = Holding(
                self.market, bar, before / self.market.config.capital, float(filled.equity), values, closes
            )
            for cost in self.market.costs["close"]:
                books.cash -= before * self._amount(cost, holding)
            closed = Account(_row([(books.cash / before) + sum(closes)]), _row(closes))
            if self._runs_out(closed):
                self._liquidate(closed, worst)
        last = {symbol: float(self.panel.close[books.row, asset]) for asset, symbol in enumerate(self.panel.symbols)}
        books.before = max(VenueAccount(books.cash, books.positions).equity(last), NOTHING)
        books.closed = True

    def _fill_traded_through(self) -> None:
        row = self.books.row
        for order in self.resting():
            asset = self.panel.symbols.index(order["symbol"])
            quantity, limit = Decimal(order["quantity"]), float(order["limit"])
            through = self.panel.low[row, asset] < limit if quantity > 0 else self.panel.high[row, asset] > limit
            if through:
                left = quantity - Decimal(order["filled"])
                self.fill_resting(order, abs(self._fillable(order["symbol"], left, limit)))

    def _open_bar(self) -> None:
        """The next bar begins; an account whose margin the gap has taken is liquidated."""
        self.books.row += 1
        self.books.closed, self.books.used = False, {}
        books, opens, bar = self.books, self.prices_now(), self._bar()
        if not any(books.positions.values()):
            return
        values = [float(books.positions[symbol]) * opens[symbol] / books.before for symbol in self.panel.symbols]
        opened = Account(_row([(books.cash / books.before) + sum(values)]), _row(values))
        if self._runs_out(opened):
            # The worst prices are those of the position after the fill, as in the simulator; here it is the same one.
            self._liquidate(opened, torch.minimum(opened.positions * _row(bar.low), opened.positions * _row(bar.high)))

    def _runs_out(self, account: Account) -> bool:
        return bool(account.positions.any() and margin_excess(account, self.market.rates) <= 0)

    def _liquidate(self, account: Account, worst: torch.Tensor) -> None:
        self._remember()
        left = liquidate(account, worst, self.market)
        self.books.cash = float(left.equity) * self.books.before
        self._force_flat()

    def _force_flat(self) -> None:
        books = self.books
        for symbol, quantity in books.positions.items():
            if quantity:
                books.forced.append((len(books.forced) + 1, symbol, str(-quantity), self.clock.now()))
                books.positions[symbol], books.entries[symbol] = Decimal(0), 0.0

    def _remember(self) -> None:
        """Keep the books as they are before a change of a position, for as long as the fault can show them."""
        if self.faults.rates.stale_account:
            books = self.books
            kept = replace(books, positions=dict(books.positions), entries=dict(books.entries))
            self._before.append((self.clock.now(), kept))

    def _forming(self) -> int:
        """The row of the bar that is open now."""
        return int(np.searchsorted(self.panel.time, self.clock.now(), side="right")) - 1

    def _bar(self) -> Bar[list[float]]:
        return Bar(*self._bars[self.books.row].tolist())

    def prices_now(self) -> dict[str, float]:
        """The open of the forming bar, or the last close where the market is closed."""
        row = (self.panel.close if self.books.closed else self.panel.open)[self.books.row]
        return {symbol: float(row[asset]) for asset, symbol in enumerate(self.panel.symbols)}

    def _save(self, *changed: Order) -> None:
        for order in changed:
            self.on_change(order)
        if self.store is not None:
            self.books.time = self.clock.now()
            self.store.write(self.books, {order["id"]: order for order in changed})


def _row(values: list[float]) -> torch.Tensor:
    return torch.tensor([values], dtype=torch.float64)


def _report(order: Mapping[str, Any]) -> OrderReport:
    filled, quantity = Decimal(order["filled"]), Decimal(order["quantity"])
    return OrderReport(order["id"], order["symbol"], quantity, filled, order["price"], open=order["open"])
