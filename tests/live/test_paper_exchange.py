"""The paper exchange over HTTP and WebSocket: ccxt's real clients talk to it."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import aiohttp
import ccxt
import ccxt.pro
import numpy as np
import pytest

import tailguard as tg
from tailguard.errors import ConfigError
from tailguard.live.faults import BarFaultRates, FaultRates
from tailguard.live.paper_client import KEYS, PaperAddress, PaperClock
from tailguard.live.paper_exchange import wire
from tailguard.live.paper_exchange.replayed_exchange import ExchangeConfig, PaperExchange
from tailguard.market import MarketConfig

from .conftest import HOUR
from .serving import plain_client, served

SYMBOLS = ("SYN01/USDT:USDT", "SYN02/USDT:USDT")
Made = tuple[PaperExchange, PaperAddress]


@pytest.fixture
def make() -> Iterator[Callable[..., Made]]:
    """Start exchanges that replay 60 bars of two symbols, at row 10 unless it says otherwise."""
    with ExitStack() as stack:

        def start(config: ExchangeConfig | None = None, row: int = 10, **settings: Any) -> Made:
            panel = tg.make_market(60, assets=2, seed=3).bars.panel("portfolio")
            exchange = PaperExchange(
                panel, MarketConfig(), int(panel.time[row]), config or ExchangeConfig(), **settings
            )
            return exchange, stack.enter_context(served(exchange))

        yield start


def client_at(exchange: PaperExchange, address: PaperAddress) -> Any:
    client = plain_client(address)
    client.nonce = exchange.clock.now
    return client


def test_ccxt_reads_markets_bars_and_prices(make) -> None:
    exchange, address = make()
    client = client_at(exchange, address)
    markets = client.load_markets()
    assert tuple(sorted(markets)) == SYMBOLS
    market = markets[SYMBOLS[0]]
    assert (market["swap"], market["linear"], market["settle"]) == (True, True, "USDT")
    assert (market["precision"]["amount"], market["precision"]["price"]) == (1e-9, 1e-9)
    panel = exchange.panel
    assert client.fetch_time() == panel.time[10]
    bars = client.fetch_ohlcv(SYMBOLS[1], "1h", int(panel.time[2]), 100)
    assert [bar[0] for bar in bars] == panel.time[2:11].tolist()
    expected = np.stack([getattr(panel, name)[2:10, 1] for name in ("open", "high", "low", "close", "volume")], 1)
    np.testing.assert_array_equal([bar[1:] for bar in bars[:-1]], expected)
    # Of the forming bar nobody knows more than its open.
    assert bars[-1][1:] == [panel.open[10, 1]] * 4 + [0.0]
    ticker = client.fetch_bids_asks([SYMBOLS[1]])[SYMBOLS[1]]
    assert (ticker["bid"] + ticker["ask"]) / 2 == pytest.approx(panel.open[10, 1], rel=1e-15)
    assert ticker["ask"] / ticker["bid"] == pytest.approx(1.0001 / 0.9999, rel=1e-12)


def test_an_order_of_ccxt_is_filled_at_the_simulators_costs(make) -> None:
    """Notional 10,000 of an account of 100,000: 5 basis points of fee, 1 of spread, and the impact."""
    exchange, address = make()
    client = client_at(exchange, address)
    price = exchange.panel.open[10, 0]
    amount = 10_000 / price
    order = client.create_order(
        SYMBOLS[0], "limit", "buy", amount, price * 1.01, {"timeInForce": "IOC", "clientOrderId": "tg1"}
    )
    assert (order["status"], order["clientOrderId"]) == ("closed", "tg1")
    bought = order["filled"]
    assert bought == pytest.approx(amount, abs=1e-9)
    bar = exchange.venue._bar()
    impact = bar[4][0] * np.sqrt(bought * price / 100_000)
    assert order["average"] == pytest.approx(price * (1 + 0.0001 + impact), rel=1e-12)
    positions = client.fetch_positions()
    assert [(each["symbol"], each["side"], each["contracts"]) for each in positions] == [(SYMBOLS[0], "long", bought)]
    assert positions[0]["entryPrice"] == order["average"]
    balance = client.fetch_balance()
    wallet = float(balance["info"]["assets"][0]["walletBalance"])
    assert wallet == pytest.approx(100_000 - 0.0005 * bought * price, rel=1e-12)
    assert balance["USDT"]["total"] == pytest.approx(wallet - bought * (order["average"] - price), rel=1e-12)
    assert client.fetch_order(None, SYMBOLS[0], {"clientOrderId": "tg1"})["filled"] == bought
    assert [each["clientOrderId"] for each in client.fetch_orders(SYMBOLS[0])] == ["tg1"]
    assert client.fetch_orders(SYMBOLS[1]) == []


@pytest.mark.parametrize(
    ("order", "error"),
    [
        (("limit", "buy", 1.0, 200.0, {"timeInForce": "IOC", "reduceOnly": True}), ccxt.InvalidOrder),
        (("limit", "buy", 1.0, 200.0, {"timeInForce": "FOK"}), ccxt.BadRequest),
        (("limit", "buy", 1e-9, 200.0, {"timeInForce": "IOC", "timestamp": 1}), ccxt.InvalidNonce),
    ],
)
def test_what_the_venue_refuses_is_an_error_of_ccxt(make, order, error) -> None:
    exchange, address = make()
    client = client_at(exchange, address)
    with pytest.raises(error):
        client.create_order(SYMBOLS[0], *order)
    assert not exchange.venue.books.orders


def test_who_does_not_know_the_keys_learns_and_moves_nothing(make) -> None:
    exchange, address = make()
    for change in ({"secret": "other"}, {"apiKey": "other"}):
        client = plain_client(address, **change)
        client.nonce = exchange.clock.now
        with pytest.raises(ccxt.AuthenticationError):
            client.fetch_balance()
        with pytest.raises(ccxt.AuthenticationError):
            client.create_order(SYMBOLS[0], "market", "buy", 1.0)
    before = exchange.clock.now()
    import http.client

    connection = http.client.HTTPConnection(address.host, address.port)
    connection.request("POST", "/paper/clock", f"until={before + HOUR}")
    assert connection.getresponse().status == 401
    connection.close()
    assert exchange.clock.now() == before
    assert not exchange.venue.books.orders


def test_the_clock_moves_when_a_client_waits_or_by_itself(make) -> None:
    exchange, address = make()
    clock = PaperClock(address)
    clock.sleep(2 * 3600 + 5)
    assert exchange.clock.now() == clock.now() == exchange.panel.time[12] + 5_000
    assert exchange.venue.books.row == 12
    running, fast = make(ExchangeConfig(speed=36_000.0))
    clock = PaperClock(fast)
    clock.wait_until(int(running.panel.time[14]))
    assert clock.now() >= running.panel.time[14]
    assert PaperClock(fast).now() >= running.panel.time[14]
    assert running.venue.books.row >= 14


def test_a_resting_order_is_filled_when_a_bar_trades_through_it(make) -> None:
    """Halfway between open and low of the bar: filled at the limit, with a fee and no spread; cancelled, it is not."""
    exchange, address = make()
    client = client_at(exchange, address)
    panel = exchange.panel
    limit = round((panel.open[10, 0] + panel.low[10, 0]) / 2, 6)
    far = round(panel.low[10:13, 0].min() * 0.9, 6)
    assert panel.low[10, 0] < limit < panel.open[10, 0]
    for name, price in (("near", limit), ("far", far), ("gone", limit)):
        order = client.create_order(SYMBOLS[0], "limit", "buy", 2.0, price, {"clientOrderId": name})
        assert (order["status"], order["filled"]) == ("open", 0)
    assert len(client.fetch_open_orders(SYMBOLS[0])) == 3
    assert client.cancel_order(None, SYMBOLS[0], {"clientOrderId": "gone"})["status"] == "canceled"
    PaperClock(address).wait_until(int(panel.time[12]))
    orders = {each["clientOrderId"]: each for each in client.fetch_orders(SYMBOLS[0])}
    assert {name: (each["status"], each["filled"]) for name, each in orders.items()} == {
        "near": ("closed", 2.0),
        "far": ("open", 0.0),
        "gone": ("canceled", 0.0),
    }
    assert orders["near"]["average"] == limit
    books = exchange.venue.books
    # The charge of two bars of funding is not a part of the wallet's fee.
    assert books.entries["SYN01"] == limit
    with pytest.raises(ccxt.OrderNotFound):
        client.cancel_order(None, SYMBOLS[0], {"clientOrderId": "near"})


FAULTS = {
    "reply_lost": (FaultRates(reply_lost=1.0), ccxt.NetworkError, True),
    "request_lost": (FaultRates(request_lost=1.0), ccxt.NetworkError, False),
    "rate_limited": (FaultRates(rate_limited=1.0), ccxt.DDoSProtection, False),
    "rejected": (FaultRates(rejected=1.0), ccxt.InvalidOrder, False),
    "unavailable": (FaultRates(unavailable=1.0), ccxt.OperationFailed, None),
    "disconnect": (FaultRates(disconnect=1.0), ccxt.NetworkError, False),
}


@pytest.mark.parametrize("kind", FAULTS)
def test_faults_reach_ccxt_as_those_of_a_network(make, kind: str) -> None:
    rates, error, taken = FAULTS[kind]
    exchange, address = make()
    client = client_at(exchange, address)
    client.load_markets()
    exchange.faults.rates = rates
    with pytest.raises(error):
        client.create_order(SYMBOLS[0], "market", "buy", 1.0, None, {"clientOrderId": "tg1"})
    assert exchange.faults.counts[kind] >= 1
    exchange.faults.stop()
    if taken is None:
        assert len(exchange.venue.books.orders) in (0, 1)
    elif taken:
        assert client.fetch_order(None, SYMBOLS[0], {"clientOrderId": "tg1"})["filled"] == 1.0
    else:
        with pytest.raises(ccxt.OrderNotFound):
            client.fetch_order(None, SYMBOLS[0], {"clientOrderId": "tg1"})


def test_faults_of_bars_are_drawn_from_the_seed(make) -> None:
    """A third of the bars is missing, strangers trade, and liquidations close what is held."""
    rates = BarFaultRates(bar_gap=0.3, external_trade=0.3, liquidation=0.2)

    def replayed() -> tuple[list[int], list[Any], dict[str, Any]]:
        exchange, address = make(ExchangeConfig(bar_rates=rates, seed=5))
        PaperClock(address).wait_until(int(exchange.panel.time[50]))
        client = client_at(exchange, address)
        shown = [bar[0] for bar in client.fetch_ohlcv(SYMBOLS[0], "1h", int(exchange.panel.time[0]), 100)]
        liquidated = client.fetch_my_liquidations(SYMBOLS[0])
        return shown, [(each["side"], each["contracts"]) for each in liquidated], exchange.faults.counts

    shown, liquidated, counts = replayed()
    assert 25 <= len(shown) <= 45
    assert liquidated
    assert counts["external_trade"] > 3
    assert replayed() == (shown, liquidated, counts)


def test_the_account_survives_the_process(make, tmp_path: Path) -> None:
    store = tmp_path / "books.sqlite"
    exchange, address = make(store=store)
    client = client_at(exchange, address)
    client.create_order(SYMBOLS[1], "market", "sell", 3.0, None, {"clientOrderId": "tg1"})
    PaperClock(address).wait_until(int(exchange.panel.time[20]))
    again, there = make(store=store)
    assert again.clock.now() == exchange.panel.time[20]
    assert again.venue.books == exchange.venue.books
    assert client_at(again, there).fetch_positions()[0]["contracts"] == 3.0
    other = tg.make_market(60, assets=1, seed=3).bars.panel("portfolio")
    with pytest.raises(ConfigError, match="the books are those of other bars"):
        PaperExchange(other, MarketConfig(), int(other.time[10]), ExchangeConfig(), store=store)


def test_ccxts_websocket_client_follows_bars_and_orders(make) -> None:
    exchange, address = make()
    expected = exchange.panel.close[10:14, 0].tolist()

    async def follow() -> tuple[list[float], dict[str, Any]]:
        settings = address.settings()
        settings["urls"]["api"]["ws"] = {"linear": f"ws://{address.host}:{address.port}/ws"}
        client = ccxt.pro.binanceusdm({"apiKey": KEYS.key, "secret": KEYS.secret, "newUpdates": True, **settings})
        client.nonce = exchange.clock.now
        clock = PaperClock(address)
        try:
            await client.load_markets()
            orders = asyncio.ensure_future(client.watch_orders(SYMBOLS[0]))
            bars = asyncio.ensure_future(client.watch_ohlcv(SYMBOLS[0], "1h"))
            closes: list[float] = []
            await _subscribed(client, 2)
            for row in range(11, 15):
                await asyncio.to_thread(clock.wait_until, int(exchange.panel.time[row]))
                closes.append((await bars)[-1][4])
                bars = asyncio.ensure_future(client.watch_ohlcv(SYMBOLS[0], "1h"))
            bars.cancel()
            await client.create_order(SYMBOLS[0], "market", "buy", 1.5, None, {"clientOrderId": "tg9"})
            return closes, (await orders)[-1]
        finally:
            await client.close()

    async def _subscribed(client: Any, count: int) -> None:
        while len([each for each in client.clients.values() if each.connected.done()]) < count:
            await asyncio.sleep(0.02)
        # The subscription itself is a message that the server has to read.
        await asyncio.sleep(0.2)

    closes, order = asyncio.run(asyncio.wait_for(follow(), 120))
    assert closes == expected
    assert (order["clientOrderId"], order["filled"], order["status"]) == ("tg9", 1.5, "closed")


def test_events_come_twice_and_late_and_a_disconnection_ends_the_stream(make) -> None:
    exchange, address = make(ExchangeConfig(rates=FaultRates(late_events=0.3, repeated_events=0.5), seed=2))

    async def follow() -> list[int]:
        clock = PaperClock(address)
        async with aiohttp.ClientSession() as session:
            url = f"http://{address.host}:{address.port}/stream?streams=syn01usdt@kline_1h"
            async with session.ws_connect(url) as socket:
                await asyncio.to_thread(clock.wait_until, int(exchange.panel.time[40]))
                exchange.faults.rates = FaultRates(disconnect=1.0)
                await asyncio.to_thread(clock.sleep, 3600)
                await asyncio.to_thread(plain_time, address)
                await asyncio.to_thread(clock.sleep, 3600)
                return [json.loads(message.data)["data"]["k"]["t"] async for message in socket]

    times = asyncio.run(asyncio.wait_for(follow(), 120))
    assert times != sorted(times)
    assert len(times) > len(set(times))
    assert set(times) <= set(exchange.panel.time.tolist())


def plain_time(address: PaperAddress) -> None:
    with pytest.raises(ccxt.NetworkError):
        plain_client(address).fetch_time()


def test_the_users_stream_needs_its_secret_name(make) -> None:
    exchange, address = make()

    async def listen() -> list[str]:
        async with aiohttp.ClientSession() as session:
            base = f"http://{address.host}:{address.port}"
            async with session.ws_connect(f"{base}/ws/user") as guessed, session.ws_connect(f"{base}/ws") as asked:
                await asked.send_json({"method": "SUBSCRIBE", "params": ["user"], "id": 1})
                assert (await asked.receive_json())["id"] == 1
                await asked.send_json({"method": "SUBSCRIBE", "params": ["syn01usdt@bookTicker"], "id": 2})
                await asked.receive_json()
                await asyncio.to_thread(client_at(exchange, address).create_order, SYMBOLS[0], "market", "buy", 1.0)
                await asyncio.to_thread(PaperClock(address).sleep, 3600)
                first = await asked.receive_json()
                await guessed.close()
                return [first["e"], *[message.data async for message in guessed]]

    assert asyncio.run(asyncio.wait_for(listen(), 120)) == ["bookTicker"]


def test_names_of_symbols() -> None:
    assert wire.market_ids(("BTC/USDT:USDT", "ETH/USDT", "SOLUSDT", "SYN01")) == {
        "BTC/USDT:USDT": "BTCUSDT",
        "ETH/USDT": "ETHUSDT",
        "SOLUSDT": "SOLUSDT",
        "SYN01": "SYN01USDT",
    }
    with pytest.raises(ConfigError, match="one quote currency"):
        wire.market_ids(("BTC/USDT", "ETH/USDC"))
    with pytest.raises(ConfigError, match="letters and digits"):
        wire.market_ids(("BRK-B",))
    assert wire.number(1e-7) == "0.0000001"
    assert wire.number(-0.1) == "-0.1"
