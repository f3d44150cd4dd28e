"""The REST interface: what a request asks for, whether it is signed, and what the venue answers."""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Awaitable, Callable, Mapping
from decimal import Decimal, InvalidOperation
from typing import Any
from urllib.parse import parse_qsl

from aiohttp import web

from tailguard.live.paper_exchange import wire
from tailguard.live.paper_exchange.replayed_exchange import PaperExchange
from tailguard.live.venue import (
    DuplicateOrder,
    OrderRequest,
    OutcomeUnknown,
    RateLimited,
    Refused,
    ServerFailed,
    WrongClock,
)

LONGEST_WINDOW_MS = 60_000
MOST_BARS, MOST_ORDERS = 1_500, 1_000
Answer = Any
Handler = Callable[[PaperExchange, Mapping[str, str]], Answer]


class ApiError(Exception):
    """An answer that is an error, with its status and code."""

    def __init__(self, status: int, code: int, message: str, headers: Mapping[str, str] | None = None) -> None:
        super().__init__(message)
        self.status, self.code, self.message, self.headers = status, code, message, dict(headers or {})


# --- public -----------------------------------------------------------------------------------------------------------


def ping(_exchange: PaperExchange, _given: Mapping[str, str]) -> Answer:
    return {}


def server_time(exchange: PaperExchange, _given: Mapping[str, str]) -> Answer:
    return {"serverTime": exchange.venue.time()}


def exchange_info(exchange: PaperExchange, _given: Mapping[str, str]) -> Answer:
    rules = exchange.venue.instruments()
    return {
        "timezone": "UTC",
        "serverTime": exchange.clock.now(),
        "rateLimits": [],
        "exchangeFilters": [],
        "assets": [{"asset": exchange.quote, "marginAvailable": True}],
        "symbols": [wire.market(symbol, name, rules[symbol]) for symbol, name in exchange.ids.items()],
    }


def klines(exchange: PaperExchange, given: Mapping[str, str]) -> Answer:
    exchange.faults.before_read()
    if given.get("interval") != exchange.interval:
        raise ApiError(400, -1120, f"Invalid interval; the replayed bars have {exchange.interval}.")
    limit = min(_integer(given, "limit", 500), MOST_BARS)
    since, until = (_integer(given, name) for name in ("startTime", "endTime"))
    return exchange.klines(_symbol(exchange, given), since, until, limit)


def book_ticker(exchange: PaperExchange, given: Mapping[str, str]) -> Answer:
    prices, now = exchange.venue.prices(), exchange.clock.now()
    tickers = {
        symbol: wire.book_ticker(exchange.ids[symbol], price, exchange.half_spread, now)
        for symbol, price in prices.items()
    }
    return tickers[_symbol(exchange, given)] if "symbol" in given else list(tickers.values())


# --- signed -----------------------------------------------------------------------------------------------------------


def account(exchange: PaperExchange, _given: Mapping[str, str]) -> Answer:
    exchange.faults.before_read()
    return exchange.account()


def position_risk(exchange: PaperExchange, given: Mapping[str, str]) -> Answer:
    exchange.faults.before_read()
    held = exchange.positions(exchange.venue.shown_books())
    return [each for each in held if given.get("symbol", each["symbol"]) == each["symbol"]]


def leverage_bracket(exchange: PaperExchange, _given: Mapping[str, str]) -> Answer:
    rate = str(exchange.venue.market.config.maintenance_margin)
    bracket = {"bracket": 1, "initialLeverage": 100, "notionalCap": 10**12, "notionalFloor": 0, "cum": 0.0}
    return [{"symbol": each, "brackets": [bracket | {"maintMarginRatio": rate}]} for each in exchange.symbols]


def place(exchange: PaperExchange, given: Mapping[str, str]) -> Answer:
    symbol = _symbol(exchange, given)
    kind = wire.KINDS.get((given.get("type", ""), given.get("timeInForce", "")))
    if kind is None or given.get("side") not in ("BUY", "SELL") or not given.get("newClientOrderId"):
        raise ApiError(400, -1102, "Orders are MARKET, LIMIT with IOC or GTC, have a side and a newClientOrderId.")
    try:
        quantity, limit = Decimal(given["quantity"]), Decimal(given.get("price", "0"))
        if not (quantity.is_finite() and limit.is_finite() and quantity > 0):
            raise InvalidOperation
    except (InvalidOperation, KeyError):
        raise ApiError(400, -1102, "quantity and price must be numbers above 0.") from None
    request = OrderRequest(
        client_id=given["newClientOrderId"],
        symbol=symbol,
        quantity=quantity if given["side"] == "BUY" else -quantity,
        limit=limit,
        reduce_only=given.get("reduceOnly", "false").lower() == "true",
        sent_ms=_integer(given, "timestamp", 0),
        kind=kind,
    )
    exchange.venue.place(request)
    return _said(exchange, request.client_id)


def query(exchange: PaperExchange, given: Mapping[str, str]) -> Answer:
    client_id = given.get("origClientOrderId", "")
    if exchange.venue.find(client_id, _symbol(exchange, given)) is None:
        raise ApiError(400, -2013, "Order does not exist.")
    return _said(exchange, client_id)


def cancel(exchange: PaperExchange, given: Mapping[str, str]) -> Answer:
    client_id, symbol = given.get("origClientOrderId", ""), _symbol(exchange, given)
    order = exchange.venue.books.orders.get(client_id)
    was_open = order is not None and order["open"]
    exchange.venue.cancel(client_id, symbol)
    if not was_open:
        raise ApiError(400, -2011, "Unknown order sent.")
    return _said(exchange, client_id)


def all_orders(exchange: PaperExchange, given: Mapping[str, str]) -> Answer:
    symbol, limit = _symbol(exchange, given), min(_integer(given, "limit", 500), MOST_ORDERS)
    reports = exchange.venue.orders(_integer(given, "startTime", 0))
    return [_said(exchange, each.client_id) for each in reports if each.symbol == symbol][:limit]


def open_orders(exchange: PaperExchange, given: Mapping[str, str]) -> Answer:
    exchange.faults.before_read()
    chosen = exchange.symbols.get(given.get("symbol", ""))
    return [_said(exchange, each["id"]) for each in exchange.venue.resting() if chosen in (None, each["symbol"])]


def forced_orders(exchange: PaperExchange, given: Mapping[str, str]) -> Answer:
    exchange.faults.before_read()
    chosen, since = exchange.symbols.get(given.get("symbol", "")), _integer(given, "startTime", 0)
    entries = [each for each in exchange.venue.books.forced if each[3] >= since and chosen in (None, each[1])]
    return [wire.forced_order(each, exchange.ids[each[1]]) for each in entries]


def listen_key(exchange: PaperExchange, _given: Mapping[str, str]) -> Answer:
    return {"listenKey": user_key(exchange)}


def user_key(exchange: PaperExchange) -> str:
    """Name of the user's stream: whoever does not know the secret cannot guess it."""
    return hmac.new(exchange.config.secret.encode(), b"user stream", hashlib.sha256).hexdigest()


# --- what only a paper exchange has -----------------------------------------------------------------------------------


def status(exchange: PaperExchange, _given: Mapping[str, str]) -> Answer:
    return {
        "now": exchange.clock.now(),
        "speed": exchange.config.speed,
        "receive_window": exchange.venue.receive_window_ms,
        "last_bar": int(exchange.panel.time[-1]),
        "ended": exchange.has_ended,
        "symbols": [wire.unified(symbol) for symbol in exchange.panel.symbols],
        "faults": exchange.faults.counts,
    }


def move_clock(exchange: PaperExchange, given: Mapping[str, str]) -> Answer:
    if exchange.config.speed:
        raise ApiError(400, -1102, "The clock runs by itself; start the venue with a speed of 0 to move it.")
    exchange.advance(_integer(given, "until", 0))
    return status(exchange, given)


PUBLIC: dict[tuple[str, str], Handler] = {
    ("GET", "/fapi/v1/ping"): ping,
    ("GET", "/fapi/v1/time"): server_time,
    ("GET", "/fapi/v1/exchangeInfo"): exchange_info,
    ("GET", "/fapi/v1/klines"): klines,
    ("GET", "/fapi/v1/ticker/bookTicker"): book_ticker,
    ("GET", "/paper/status"): status,
}
SIGNED: dict[tuple[str, str], Handler] = {
    ("GET", "/fapi/v3/account"): account,
    ("GET", "/fapi/v3/positionRisk"): position_risk,
    ("GET", "/fapi/v1/leverageBracket"): leverage_bracket,
    ("POST", "/fapi/v1/order"): place,
    ("GET", "/fapi/v1/order"): query,
    ("DELETE", "/fapi/v1/order"): cancel,
    ("GET", "/fapi/v1/allOrders"): all_orders,
    ("GET", "/fapi/v1/openOrders"): open_orders,
    ("GET", "/fapi/v1/forceOrders"): forced_orders,
}
WITH_KEY: dict[tuple[str, str], Handler] = {
    ("POST", "/fapi/v1/listenKey"): listen_key,
    ("PUT", "/fapi/v1/listenKey"): listen_key,
}
CONTROL: dict[tuple[str, str], Handler] = {("POST", "/paper/clock"): move_clock}
CONTROL_KEY = "paper"
"""The clock has a key that everybody knows: it keeps a page in a browser from moving it, which cannot send one."""


def add_routes(app: web.Application, exchange: PaperExchange) -> None:
    """Serve every route of the tables above."""
    own = exchange.config.key
    tables = ((PUBLIC, None, False), (SIGNED, own, True), (WITH_KEY, own, False), (CONTROL, CONTROL_KEY, False))
    for table, key, signed in tables:
        for (method, path), handler in table.items():
            app.router.add_route(method, path, _served(exchange, handler, key=key, signed=signed))


def _served(
    exchange: PaperExchange, handler: Handler, *, key: str | None, signed: bool
) -> Callable[[web.Request], Awaitable[web.StreamResponse]]:
    async def serve(request: web.Request) -> web.StreamResponse:
        body = (await request.read()).decode()
        exchange.advance()
        try:
            if key is not None:
                _check_key(request, key)
            text = "&".join(each for each in (request.query_string, body) if each)
            given = dict(parse_qsl(text, keep_blank_values=True))
            if signed:
                _check_signature(exchange, text, given)
            answer = handler(exchange, given)
        except ApiError as error:
            return _failure(error)
        except WrongClock as error:
            return _failure(ApiError(400, -1021, f"Timestamp for this request is outside of the recvWindow: {error}"))
        except RateLimited as error:
            wait = {"Retry-After": f"{error.seconds:.0f}"}
            return _failure(ApiError(429, -1003, f"Too many requests: {error}", wait))
        except Refused as error:
            return _failure(ApiError(400, -2010, f"Order rejected: {error}"))
        except DuplicateOrder:
            return _failure(ApiError(400, -4116, "ClientOrderId is duplicated."))
        except ServerFailed as error:
            return _failure(ApiError(503, -1000, str(error)))
        except OutcomeUnknown:
            # The connection ends without an answer, as it does where a network fails.
            if request.transport is not None:
                request.transport.abort()
            return web.Response(status=500)
        finally:
            exchange.tell_orders()
        return web.json_response(answer)

    return serve


def _failure(error: ApiError) -> web.Response:
    return web.json_response({"code": error.code, "msg": error.message}, status=error.status, headers=error.headers)


def _check_key(request: web.Request, key: str) -> None:
    given = request.headers.get("X-MBX-APIKEY", "")
    if not hmac.compare_digest(given.encode(), key.encode()):
        raise ApiError(401, -2015, "Invalid API-key, IP, or permissions for action.")


def _check_signature(exchange: PaperExchange, text: str, given: Mapping[str, str]) -> None:
    """The signature is the last parameter, over all that stands before it; then the time of the request."""
    signed, _, signature = text.rpartition("&signature=")
    expected = hmac.new(exchange.config.secret.encode(), signed.encode(), hashlib.sha256).hexdigest()
    if not hmac.compare_digest(signature.encode(), expected.encode()):
        raise ApiError(400, -1022, "Signature for this request is not valid.")
    venue = exchange.venue
    longest = max(LONGEST_WINDOW_MS, venue.receive_window_ms)
    window = min(_integer(given, "recvWindow", venue.receive_window_ms), longest)
    late = exchange.clock.now() + exchange.faults.clock_skew_ms - _integer(given, "timestamp", 0)
    if not -venue.lead_ms <= late <= window:
        raise WrongClock(f"it is {late} ms old, and {window} ms are allowed")


def _symbol(exchange: PaperExchange, given: Mapping[str, str]) -> str:
    symbol = exchange.symbols.get(given.get("symbol", ""))
    if symbol is None:
        raise ApiError(400, -1121, "Invalid symbol.")
    return symbol


def _integer(given: Mapping[str, str], name: str, otherwise: Any = None) -> Any:
    """A whole number of the request, or what stands in for it."""
    text = given.get(name)
    if text is None:
        return otherwise
    try:
        return int(text)
    except ValueError:
        raise ApiError(400, -1102, f"{name} must be a whole number.") from None


def _said(exchange: PaperExchange, client_id: str) -> wire.Json:
    record = exchange.venue.books.orders[client_id]
    return wire.order(record, exchange.ids[record["symbol"]])
