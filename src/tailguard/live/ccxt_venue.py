"""An exchange as a venue, through ccxt: the exchange's own rules, names and errors stay in ccxt.

What ccxt does not unify is configuration, one row of `TRAITS` for each exchange. An exchange without a row is not
traded: nobody has tried how it answers.
"""

from __future__ import annotations

import logging
import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from decimal import ROUND_HALF_EVEN, Decimal
from typing import Any

from tailguard.errors import ConfigError, MissingExtraError
from tailguard.live.credentials import Credentials, HidingFilter
from tailguard.live.venue import (
    Clock,
    DuplicateOrder,
    ForcedTrade,
    Instrument,
    OrderReport,
    OrderRequest,
    OutcomeUnknown,
    RateLimited,
    Refused,
    VenueAccount,
    VenueError,
    WrongClock,
)

LONGEST_REASON = 300
RECEIVE_WINDOW_MS = 5_000
READINGS = 3
"""Attempts at an account that changes while it is read."""
RULES_MS = 86_400_000
"""Longest time for which lots, ticks and minima are believed; a refused order ends it at once."""
ROUNDING = Decimal("1e-6")
"""Largest share of a lot by which a float of ccxt may miss a multiple of it."""


@dataclass(frozen=True)
class Traits:
    """What ccxt does not unify of an exchange."""

    wallet: tuple[str, str, str]
    """In the raw balance: the list of assets, the name of an asset in it, and its balance without open profits."""
    page: int = 1_000
    """Most orders in one answer."""
    duplicate: str = ""
    """Code of the answer that the client id exists, where ccxt takes it for an order that breaks a rule."""
    wait_s: float = 10.0
    """Pause after too many requests where the answer does not say how long."""


TRAITS = {"binanceusdm": Traits(wallet=("assets", "asset", "walletBalance"), duplicate="-4116")}


def make_client(exchange: str, credentials: Credentials, settings: Mapping[str, Any]) -> Any:
    """ccxt's client of an exchange. It never repeats a request by itself."""
    try:
        import ccxt
    except ImportError:
        raise MissingExtraError("ccxt", "live", "Trading at an exchange") from None
    if exchange not in TRAITS:
        raise ConfigError(f"--exchange {exchange}: orders are only sent to {', '.join(TRAITS)}, which was tested")
    secrets = {"apiKey": credentials.key, "secret": credentials.secret, "password": credentials.password}
    client = getattr(ccxt, exchange)({"enableRateLimit": True, **secrets, **settings})
    client.options["maxRetriesOnFailure"] = 0
    # Currencies are read with rights that a key for trading should not have.
    client.has["fetchCurrencies"] = False
    # ccxt writes headers, keys included, to its logger.
    client.logger = logging.getLogger(f"{__name__}.{exchange}")
    client.logger.filters = [HidingFilter(credentials)]
    return client


class CcxtVenue:
    """One account of an exchange, for linear perpetuals in one currency."""

    def __init__(
        self,
        client: Any,
        credentials: Credentials,
        symbols: Sequence[str],
        clock: Clock,
        *,
        since_ms: int,
        receive_window_ms: int = RECEIVE_WINDOW_MS,
    ) -> None:
        import ccxt

        self.errors = ccxt
        self.client, self.symbols, self.clock, self.since_ms = client, tuple(symbols), clock, since_ms
        """`since_ms`: the session's start, by the venue's clock. What was liquidated before is not its matter."""
        self.receive_window_ms = receive_window_ms
        self.reserve = 0.0
        """Money of the account that is not the session's."""
        self._hide, self.traits = credentials.hide, TRAITS[client.id]
        client.options["recvWindow"] = receive_window_ms
        # A request bears the time of its intent: a delay between the two counts against the receive window.
        client.nonce = self._time_of_request
        self._sent_ms: int | None = None
        self._offset = 0
        self._quiet_until = 0
        """No request before it: the exchange has asked for a pause."""
        self._rules: dict[str, Instrument] = {}
        self._sizes: dict[str, Decimal] = {}
        self._rules_until = 0

    def check(self) -> None:
        """Read markets and account once, with an error that says what is wrong."""
        try:
            self._read(self.client.load_markets)
            self.time()
            self._rules = {symbol: self._instrument(symbol) for symbol in self.symbols}
            self._rules_until = self.clock.now() + RULES_MS
            self.account()
        except VenueError as error:
            raise ConfigError(f"{self.client.id} cannot be used: {error}") from None

    # --- the interface of a venue -------------------------------------------------------------------------------------

    def time(self) -> int:
        moment = int(self._read(self.client.fetch_time))
        self._offset = moment - self.clock.now()
        return moment

    def instruments(self) -> Mapping[str, Instrument]:
        if self.clock.now() >= self._rules_until:
            self._read(self.client.load_markets, True)
            with self._understood("markets"):
                # A market that is gone keeps its rules: the exchange refuses its orders, and a person is told.
                for symbol in self.symbols:
                    with suppress(ConfigError):
                        self._rules[symbol] = self._instrument(symbol)
            self._rules_until = self.clock.now() + RULES_MS
        return self._rules

    def prices(self) -> Mapping[str, float]:
        tickers = self._read(self.client.fetch_bids_asks, list(self.symbols))
        with self._understood("prices"):
            prices = {symbol: (tickers[symbol]["bid"] + tickers[symbol]["ask"]) / 2 for symbol in self.symbols}
            if not all(0 < price < float("inf") for price in prices.values()):
                raise ValueError(prices)
            return prices

    def account(self) -> VenueAccount:
        for _ in range(READINGS):
            held = self._positions()
            wallet = self._wallet()
            if self._positions() == held:
                cash = wallet - sum(float(size) * entry for size, entry in held.values())
                return VenueAccount(cash - self.reserve, {symbol: size for symbol, (size, _) in held.items()})
        raise OutcomeUnknown("the account changed while it was read")

    def place(self, order: OrderRequest) -> OrderReport:
        kinds, wait = self.errors, self._quiet_until - self.clock.now()
        if wait > 0:
            raise RateLimited("the exchange has asked for a pause", wait / 1000)
        amount = f"{abs(order.quantity) / self._size(order.symbol):f}"
        limit = None if order.kind == "market" else f"{order.limit:f}"
        options: dict[str, Any] = {"clientOrderId": order.client_id, "reduceOnly": order.reduce_only}
        if order.kind != "market":
            options["timeInForce"] = "IOC" if order.kind == "immediate" else "GTC"
        side = "buy" if order.quantity > 0 else "sell"
        self._sent_ms = order.sent_ms
        try:
            answer = self.client.create_order(
                order.symbol, "market" if limit is None else "limit", side, amount, limit, options
            )
            report = self._report(answer, order.symbol)
            if report.client_id != order.client_id:
                raise ValueError("an answer for another order")
        except kinds.InvalidNonce as error:
            raise WrongClock(self._reason(error)) from None
        except (kinds.DDoSProtection, kinds.RateLimitExceeded) as error:
            raise RateLimited(self._reason(error), self._pause()) from None
        except (kinds.DuplicateOrderId, kinds.OrderNotFound) as error:
            # The id is known: an order with it may stand there.
            raise DuplicateOrder(self._reason(error)) from None
        except (
            kinds.InvalidOrder,
            kinds.BadRequest,
            kinds.InsufficientFunds,
            kinds.AuthenticationError,
            kinds.OperationRejected,
            kinds.ArgumentsRequired,
            kinds.NotSupported,
        ) as error:
            if self.traits.duplicate and re.search(rf"{self.traits.duplicate}\b", str(error)):
                raise DuplicateOrder(self._reason(error)) from None
            self._rules_until = 0
            raise Refused(self._reason(error)) from None
        except Exception as error:
            # Everything else, an answer that cannot be read included, says nothing of what the exchange has done.
            raise OutcomeUnknown(self._reason(error)) from None
        finally:
            self._sent_ms = None
        return report

    def find(self, client_id: str, symbol: str) -> OrderReport | None:
        try:
            order = self._read(self.client.fetch_order, None, symbol, {"clientOrderId": client_id})
        except _NotFound:
            return None
        with self._understood("order"):
            report = self._report(order, symbol)
            if report.client_id != client_id:
                raise ValueError("another order")
            return report

    def orders(self, since_ms: int) -> list[OrderReport]:
        return [report for symbol in self.symbols for report in self._orders_of(symbol, since_ms)]

    def _orders_of(self, symbol: str, since_ms: int) -> list[OrderReport]:
        """Page by page, as a page shows the oldest first. Each begins at the moment at which the one before ends."""
        found: dict[str, OrderReport] = {}
        while True:
            answer = self._read(self.client.fetch_orders, symbol, since_ms, self.traits.page)
            with self._understood("orders"):
                found |= {str(order["id"]): self._report(order, symbol) for order in answer}
                if len(answer) < self.traits.page:
                    return list(found.values())
                before, since_ms = since_ms, int(answer[-1]["timestamp"])
                if since_ms <= before:
                    raise ValueError("more orders in one moment than in a page")

    def cancel(self, client_id: str, symbol: str) -> None:
        try:
            self._read(self.client.cancel_order, None, symbol, {"clientOrderId": client_id})
        except _NotFound:
            return

    def forced_trades(self, after: int) -> list[ForcedTrade]:
        since = max(self.since_ms, after // 1000)
        trades = []
        for symbol in self.symbols:
            answer = self._read(self.client.fetch_my_liquidations, symbol, since)
            with self._understood("liquidations"):
                for each in answer:
                    quantity = self._lots(each["contracts"], symbol)
                    signed = -quantity if each["side"] == "sell" else quantity
                    trades.append((int(each["timestamp"]), symbol, signed))
        # The exchange numbers orders of each symbol for itself. Time orders them all, and a rank those of one moment.
        trades.sort()
        moments = [moment for moment, _, _ in trades]
        numbered = [
            ForcedTrade(moment * 1000 + place - moments.index(moment), symbol, quantity)
            for place, (moment, symbol, quantity) in enumerate(trades)
        ]
        return [trade for trade in numbered if trade.number > after]

    # --- answers ------------------------------------------------------------------------------------------------------

    def _report(self, order: Mapping[str, Any], symbol: str) -> OrderReport:
        """An order of ccxt; raises where it does not say what has become of it."""
        if order["status"] not in ("open", "closed", "canceled", "expired", "rejected"):
            raise ValueError(f"status {order['status']}")
        sign = {"buy": 1, "sell": -1}[order["side"]]
        quantity, filled = (sign * self._lots(order[name], symbol) for name in ("amount", "filled"))
        price = float(order["average"] or 0.0) if filled else 0.0
        is_open = order["status"] == "open"
        return OrderReport(str(order["clientOrderId"]), symbol, quantity, filled, price, open=is_open)

    def _positions(self) -> dict[str, tuple[Decimal, float]]:
        """Signed size and average price of every position in our symbols."""
        answer = self._read(self.client.fetch_positions, list(self.symbols))
        with self._understood("positions"):
            held: dict[str, tuple[Decimal, float]] = {}
            for each in answer:
                size = self._lots(each["contracts"], each["symbol"])
                if not size:
                    continue
                if each["symbol"] in held or each["hedged"]:
                    raise ValueError("the account is in hedge mode; switch it to one-way mode")
                signed = {"long": size, "short": -size}[each["side"]]
                held[each["symbol"]] = signed, float(each["entryPrice"])
            return held

    def _wallet(self) -> float:
        """Balance without open profits, in the currency that our symbols settle in."""
        answer = self._read(self.client.fetch_balance)
        with self._understood("balance"):
            assets, name, balance = self.traits.wallet
            currency = self.client.market(self.symbols[0])["settleId"]
            found = [float(each[balance]) for each in answer["info"][assets] if each[name] == currency]
            if not all(map(math.isfinite, found)):
                raise ValueError(found)
            return found[0] if found else 0.0

    def _instrument(self, symbol: str) -> Instrument:
        """Lots, tick and minima of a market, in units of the base currency."""
        market = self.client.markets.get(symbol)
        if market is None:
            raise ConfigError(f"{self.client.id} has no symbol {symbol}; names are like BTC/USDT:USDT")
        settles = {self.client.markets[each]["settle"] for each in self.symbols if each in self.client.markets}
        if not (market["swap"] and market["linear"]) or market["active"] is False or len(settles) > 1:
            raise ConfigError(f"{symbol}: only active linear perpetuals that settle in one currency can be traded")
        if self.client.precisionMode != self.errors.TICK_SIZE:
            raise ConfigError(f"{self.client.id} does not state its lots and ticks as sizes")
        size = Decimal(str(market["contractSize"] or 1))
        limits = market["limits"]
        smallest = max(_decimal(limits.get(kind, {}).get("min")) for kind in ("amount", "market"))
        self._sizes[symbol] = size
        return Instrument(
            symbol,
            lot=_decimal(market["precision"]["amount"]) * size,
            tick=_decimal(market["precision"]["price"]),
            min_quantity=smallest * size,
            min_notional=_decimal(limits["cost"].get("min")),
        )

    def _size(self, symbol: str) -> Decimal:
        """Base currency in one contract."""
        return self._sizes[symbol]

    def _lots(self, contracts: Any, symbol: str) -> Decimal:
        """A quantity in base currency; ccxt gives floats, so that the exact one is the nearest multiple of a lot. What
        is far from one was traded by a finer lot of the past."""
        lot = self._rules[symbol].lot
        quantity = _decimal(contracts) * self._size(symbol)
        nearest = (quantity / lot).to_integral_value(ROUND_HALF_EVEN) * lot
        return nearest if abs(quantity - nearest) <= ROUNDING * lot else quantity

    # --- requests -----------------------------------------------------------------------------------------------------

    def _read(self, request: Callable[..., Any], *given: Any) -> Any:
        """Ask; every failure is an unknown outcome, but for what the exchange does not know."""
        kinds = self.errors
        if self.clock.now() < self._quiet_until:
            raise OutcomeUnknown("the exchange has asked for a pause")
        try:
            return request(*given)
        except kinds.OrderNotFound:
            raise _NotFound from None
        except (kinds.DDoSProtection, kinds.RateLimitExceeded) as error:
            self._pause()
            raise OutcomeUnknown(self._reason(error)) from None
        except Exception as error:
            raise OutcomeUnknown(self._reason(error)) from None

    def _pause(self) -> float:
        """Ask nothing for as long as the exchange wants; returns the seconds."""
        headers = {name.lower(): value for name, value in (self.client.last_response_headers or {}).items()}
        asked = str(headers.get("retry-after", ""))
        seconds = float(asked) if asked.isdigit() else self.traits.wait_s
        self._quiet_until = self.clock.now() + round(1000 * seconds)
        return seconds

    @contextmanager
    def _understood(self, what: str) -> Iterator[None]:
        """An answer that does not have the fields it should have says nothing."""
        try:
            yield
        except (KeyError, TypeError, ValueError, ArithmeticError) as error:
            raise OutcomeUnknown(f"{what}: {self._reason(error)}") from None

    def _time_of_request(self) -> int:
        return self.clock.now() + self._offset if self._sent_ms is None else self._sent_ms

    def _reason(self, error: Exception) -> str:
        text = " ".join(self._hide(f"{type(error).__name__}: {error}").split())
        return text if len(text) <= LONGEST_REASON else f"{text[:LONGEST_REASON]} …"


class _NotFound(Exception):
    """The exchange does not know the order."""


def _decimal(value: Any) -> Decimal:
    """A number of ccxt, exactly as it is written; 0 where there is none."""
    return Decimal(0) if value is None else Decimal(str(value))
