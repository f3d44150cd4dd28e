"""An exchange as a venue: sessions that reach the paper exchange through ccxt's real client."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import replace
from decimal import Decimal
from pathlib import Path
from typing import Any

import ccxt
import numpy as np
import pytest

import tailguard as tg
from tailguard.errors import ConfigError
from tailguard.live.ccxt_venue import CcxtVenue, make_client
from tailguard.live.credentials import Credentials
from tailguard.live.faults import BarFaultRates, FaultRates
from tailguard.live.journal import read_records
from tailguard.live.paper_client import EXCHANGE, KEYS, PaperAddress, PaperClock
from tailguard.live.paper_exchange.replayed_exchange import ExchangeConfig, PaperExchange
from tailguard.live.session import Killed
from tailguard.live.venue import Instrument, OrderRequest, OutcomeUnknown, RateLimited, Refused, WrongClock
from tailguard.market import MarketConfig

from .conftest import HOUR, LOOSE
from .serving import opened_venue, served, trading
from .test_paper import targets_of

ONE = ("SYN01/USDT:USDT",)
TWO = ("SYN01/USDT:USDT", "SYN02/USDT:USDT")
Made = tuple[PaperExchange, PaperAddress]


@pytest.fixture
def make() -> Iterator[Callable[..., Made]]:
    """Start exchanges at row 10 of a synthetic market."""
    with ExitStack() as stack:

        def start(bars: int = 60, assets: int = 1, market: MarketConfig | None = None, **settings: Any) -> Made:
            panel = tg.make_market(bars, assets=assets, seed=3).bars.panel("portfolio")
            config = settings.pop("config", None) or ExchangeConfig()
            exchange = PaperExchange(panel, market or MarketConfig(), int(panel.time[10]), config, **settings)
            return exchange, stack.enter_context(served(exchange))

        yield start


def records_of(folder: Path, kind: str) -> list[dict[str, Any]]:
    return [record for record in read_records(folder / "journal.jsonl") if record["kind"] == kind]


CASES = {
    "one asset": (1, MarketConfig()),
    "two, leverage, borrow": (2, MarketConfig(leverage=3.0, borrow_rate=0.1, fee=0.001)),
    "capacity binds": (2, MarketConfig(participation=0.0004, capital=1e7)),
}


@pytest.mark.parametrize("case", CASES)
def test_equity_through_http_is_the_simulators(make, case: str, tmp_path: Path) -> None:
    """Lots and ticks of 1e-9, JSON, signatures and ccxt in between: 1e-9 of the capital, as in one process."""
    assets, config = CASES[case]
    _, address = make(90, assets, config)
    with trading(address, tmp_path, TWO[:assets], guards=LOOSE, capital=config.capital, gross=config.leverage) as (
        session,
        source,
    ):
        session.start()
        session.run(source)
    bars = tg.make_market(90, assets=assets, seed=3).bars
    expected = tg.backtest(targets_of(bars, 10, config.leverage), bars, config, progress_bar=False)
    paper = [record["equity"] for record in records_of(tmp_path, "decision")]
    assert len(paper) == 80
    np.testing.assert_allclose(paper, expected.equity[10:], rtol=0, atol=1e-9)
    assert np.ptp(expected.equity) > 0.01
    assert not records_of(tmp_path, "freeze")


FAULTS = {
    "reply_lost": FaultRates(reply_lost=0.5),
    "request_late": FaultRates(request_late=0.5),
    "unavailable": FaultRates(unavailable=0.5),
    "rate_limited": FaultRates(rate_limited=0.3),
    "partial_fill": FaultRates(partial_fill=0.5),
    "late_events": FaultRates(late_events=0.5, reply_lost=0.5, repeated_events=0.5),
    "disconnect": FaultRates(disconnect=0.01),
    "clock_jump": FaultRates(clock_jump=0.02),
    "stale_account": FaultRates(stale_account=1.0),
}


@pytest.mark.parametrize("kind", FAULTS)
def test_under_faults_no_order_is_doubled_and_books_are_the_venues(make, kind: str, tmp_path: Path) -> None:
    exchange, address = make(45, 1, config=ExchangeConfig(rates=FAULTS[kind], seed=1))
    for _ in range(3):
        with trading(address, tmp_path, ONE, guards=LOOSE) as (session, source):
            stop = source.stop
            ends = source.after_ms + 12 * HOUR
            source.stop = lambda stop=stop, source=source, ends=ends: stop() or source.after_ms >= ends
            session.start()
            session.run(source)
        exchange.faults.rates = FAULTS[kind]
    assert exchange.faults.counts[kind] > 1
    exchange.faults.stop()
    with trading(address, tmp_path, ONE, guards=LOOSE) as (session, _):
        session.clock.sleep(60)
        session.start()
        state = session.ledger.state
    accepted = exchange.venue.books.orders
    intents = {record["id"]: record for record in records_of(tmp_path, "intent")}
    outcomes = {record["id"]: record for record in records_of(tmp_path, "order")}
    sends = [name for _, name in exchange.venue.sends]
    assert len(set(sends)) == len(sends) > 20
    assert set(accepted) <= set(intents)
    assert max(Counter(intents[name]["bar"] for name in accepted).values()) == 1
    for name, order in accepted.items():
        assert Decimal(outcomes[name]["filled"]) == Decimal(order["filled"])
    assert not state.open_intents
    assert state.ours[ONE[0]] == exchange.venue.books.positions["SYN01"]
    assert not records_of(tmp_path, "adopt")


def test_strangers_and_liquidations_are_told_apart(make, tmp_path: Path) -> None:
    exchange, address = make(config=ExchangeConfig(bar_rates=BarFaultRates(external_trade=0.3), seed=1))
    with trading(address, tmp_path, ONE, guards=LOOSE) as (session, source):
        session.start()
        session.run(source)
        state = session.ledger.state
    assert exchange.faults.counts["external_trade"] > 5
    assert "position" in state.frozen
    assert state.ours[ONE[0]] + state.foreign[ONE[0]] == exchange.venue.books.positions["SYN01"]
    exchange, address = make(config=ExchangeConfig(bar_rates=BarFaultRates(liquidation=0.1), seed=1))
    with trading(address, tmp_path / "liquidated", ONE, guards=LOOSE) as (session, source):
        session.start()
        with pytest.raises(Killed, match="the venue liquidated"):
            session.run(source)
        forced = records_of(tmp_path / "liquidated", "forced")
        assert [Decimal(each["quantity"]) for each in forced] == [
            Decimal(size) for _, _, size, _ in exchange.venue.books.forced
        ]
        assert not session.ledger.state.ours[ONE[0]]


def test_a_liquidation_before_the_session_is_not_its_matter(make) -> None:
    exchange, address = make()
    venue = opened_venue(address, ONE)
    venue.place(order_of(venue))
    exchange.venue.liquidate_now()
    assert [trade.quantity for trade in venue.forced_trades(0)] == [Decimal("-0.5")]
    numbers = [trade.number for trade in venue.forced_trades(0)]
    assert venue.forced_trades(numbers[-1]) == []
    venue.since_ms = exchange.clock.now() + 1
    assert venue.forced_trades(0) == []


def order_of(venue: CcxtVenue, **changes: Any) -> OrderRequest:
    price = Decimal(repr(venue.prices()[ONE[0]]))
    base = {
        "client_id": "tg1",
        "symbol": ONE[0],
        "quantity": Decimal("0.5"),
        "limit": (price * Decimal("1.01")).quantize(Decimal("0.01")),
        "reduce_only": False,
        "sent_ms": venue.clock.now(),
    }
    return OrderRequest(**{**base, **changes})


RULES = Instrument("SYN01", Decimal("0.001"), Decimal("0.01"), Decimal("0.002"), Decimal(20))


def test_rules_of_the_exchange_are_those_of_ccxts_markets(make) -> None:
    _, address = make(instruments={"SYN01": RULES})
    venue = opened_venue(address, ONE)
    rules = venue.instruments()[ONE[0]]
    assert (rules.lot, rules.tick, rules.min_quantity, rules.min_notional) == (
        Decimal("0.001"),
        Decimal("0.01"),
        Decimal("0.002"),
        Decimal(20),
    )


def test_rules_that_the_exchange_changes_are_read_again(make, tmp_path: Path) -> None:
    """Lot, tick and minima grow while a session trades: one order is refused, and the next one keeps the new rules.
    What is held is reported to the old lot, although it is no multiple of the new one."""
    exchange, address = make(instruments={"SYN01": RULES})
    coarse = Instrument("SYN01", Decimal("0.05"), Decimal("0.25"), Decimal("0.1"), Decimal(100))
    with trading(address, tmp_path, ONE, guards=LOOSE) as (session, source):
        session.start()
        for number in range(12):
            if number == 4:
                exchange.venue.rules["SYN01"] = coarse
            session.on_bar(source.next_bar())
        state = session.ledger.state
    intents = records_of(tmp_path, "intent")
    outcomes = {record["id"]: record["outcome"] for record in records_of(tmp_path, "order")}
    refused = [each["id"] for each in intents if outcomes[each["id"]].startswith("refused")]
    assert refused == [intents[4]["id"]]
    assert len(exchange.venue.books.orders) == len(intents) - 1 >= 9
    later = intents[5:]
    assert all(Decimal(each["quantity"]) % coarse.lot == 0 == Decimal(each["limit"]) % coarse.tick for each in later)
    assert state.ours[ONE[0]] == exchange.venue.books.positions["SYN01"]
    assert state.ours[ONE[0]] % coarse.lot != 0
    assert not records_of(tmp_path, "freeze")
    assert [record["guard"] for record in records_of(tmp_path, "alarm")] == ["refused"]


def test_an_order_is_reported_exactly(make) -> None:
    exchange, address = make(instruments={"SYN01": RULES})
    venue = opened_venue(address, ONE)
    report = venue.place(order_of(venue, quantity=Decimal("12.345")))
    assert (report.client_id, report.quantity, report.filled, report.open) == (
        "tg1",
        Decimal("12.345"),
        Decimal("12.345"),
        False,
    )
    assert report.price == exchange.venue.books.orders["tg1"]["price"]
    assert venue.find("tg1", ONE[0]) == report
    assert venue.orders(0) == [report]
    assert venue.find("tg2", ONE[0]) is None
    venue.cancel("tg1", ONE[0])
    account = venue.account()
    assert account.positions == {ONE[0]: Decimal("12.345")}
    assert account.cash == pytest.approx(exchange.venue.books.cash, rel=1e-14)
    venue.reserve = 90_000.0
    assert venue.account().cash == pytest.approx(exchange.venue.books.cash - 90_000, rel=1e-12)
    sold = venue.place(order_of(venue, client_id="tg3", quantity=Decimal("-20"), kind="market"))
    assert (sold.filled, sold.open) == (Decimal(-20), False)
    assert venue.account().positions == {ONE[0]: Decimal("-7.655")}
    resting = venue.place(
        order_of(venue, client_id="tg4", quantity=Decimal(-1), limit=order_of(venue).limit, kind="resting")
    )
    assert (resting.filled, resting.open) == (0, True)
    venue.cancel("tg4", ONE[0])
    assert venue.find("tg4", ONE[0]).open is False


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"reduce_only": True}, Refused, "reduce-only"),
        ({"quantity": Decimal("0.002")}, Refused, "notional"),
        ({"quantity": Decimal("0.001")}, Refused, "filter"),
        ({"sent_ms": 0}, WrongClock, "recvWindow"),
    ],
)
def test_refusals_are_told_from_unknown_outcomes(make, changes, error, message: str) -> None:
    exchange, address = make(instruments={"SYN01": replace(RULES, min_notional=Decimal(1_000))})
    venue = opened_venue(address, ONE)
    assert 0.002 * venue.prices()[ONE[0]] < 1_000 < 0.5 * venue.prices()[ONE[0]]
    with pytest.raises(error, match=message):
        venue.place(order_of(venue, **changes))
    assert not exchange.venue.books.orders


def test_an_order_bears_the_time_of_its_intent(make) -> None:
    """What waits in a queue of ours for longer than the receive window is refused."""
    exchange, address = make()
    venue = opened_venue(address, ONE)
    early = order_of(venue)
    venue.clock.sleep(5.001)
    with pytest.raises(WrongClock):
        venue.place(early)
    venue.place(order_of(venue))
    assert list(exchange.venue.books.orders) == ["tg1"]


def test_an_answer_that_cannot_be_read_is_an_unknown_outcome(make, monkeypatch: pytest.MonkeyPatch) -> None:
    """The exchange has taken the order, and ccxt fails over its answer: it is asked for, not counted as refused."""
    exchange, address = make()
    venue = opened_venue(address, ONE)
    parse = venue.client.parse_order
    for broken in (lambda *_: 1 / 0, lambda *given: parse(*given) | {"status": None}):
        order = order_of(venue, client_id=f"tg{len(exchange.venue.books.orders)}")
        monkeypatch.setattr(venue.client, "parse_order", broken)
        with pytest.raises(OutcomeUnknown):
            venue.place(order)
        monkeypatch.setattr(venue.client, "parse_order", parse)
        assert venue.find(order.client_id, ONE[0]).filled == Decimal("0.5")


def test_after_too_many_requests_nothing_is_asked_until_the_pause_ends(make) -> None:
    exchange, address = make(config=ExchangeConfig(seed=1))
    venue = opened_venue(address, ONE)
    exchange.faults.rates = FaultRates(rate_limited=1.0)
    with pytest.raises(RateLimited) as limited:
        venue.place(order_of(venue))
    assert limited.value.seconds in (1, 2, 3)
    exchange.faults.stop()
    before = len(exchange.venue.sends)
    with pytest.raises(RateLimited):
        venue.place(OrderRequest("tg2", ONE[0], Decimal(1), Decimal(100), False, venue.clock.now()))
    with pytest.raises(OutcomeUnknown, match="pause"):
        venue.account()
    assert len(exchange.venue.sends) == before
    venue.clock.sleep(limited.value.seconds)
    assert venue.account().positions == {}


def test_the_clock_of_the_venue_may_be_far_from_ours(make) -> None:
    exchange, address = make()
    venue = opened_venue(address, ONE)
    exchange.faults.clock_skew_ms = 8_000
    with pytest.raises(OutcomeUnknown, match="InvalidNonce"):
        venue.account()
    assert venue.time() == venue.clock.now() + 8_000
    venue.account()
    venue.place(order_of(venue, sent_ms=venue.clock.now() + 8_000))


def test_what_cannot_be_traded_is_refused_at_the_start(make) -> None:
    _, address = make()
    with pytest.raises(ConfigError, match=r"no symbol BTC/USDT:USDT"):
        opened_venue(address, ("BTC/USDT:USDT",))
    other = Credentials("paper", "another secret")
    client = make_client(EXCHANGE, other, address.settings())
    venue = CcxtVenue(client, other, ONE, PaperClock(address), since_ms=0)
    with pytest.raises(ConfigError, match="binanceusdm cannot be used: AuthenticationError"):
        venue.check()
    with pytest.raises(ConfigError, match="--exchange kraken: orders are only sent to binanceusdm"):
        make_client("kraken", KEYS, {})


def test_an_account_in_hedge_mode_is_refused(make, monkeypatch: pytest.MonkeyPatch) -> None:
    _, address = make()
    venue = opened_venue(address, ONE)
    venue.place(order_of(venue))
    parse = venue.client.parse_position_risk
    monkeypatch.setattr(venue.client, "parse_position_risk", lambda *given: parse(*given) | {"hedged": True})
    with pytest.raises(OutcomeUnknown, match="one-way mode"):
        venue.account()


def test_ccxt_repeats_nothing_by_itself(make) -> None:
    exchange, address = make(config=ExchangeConfig(rates=FaultRates(request_lost=1.0)))
    venue = opened_venue(address, ONE)
    with pytest.raises(OutcomeUnknown):
        venue.place(order_of(venue))
    assert len(exchange.venue.sends) == 1
    assert issubclass(ccxt.DDoSProtection, ccxt.NetworkError)


def test_a_list_of_orders_that_is_longer_than_a_page_is_complete(make) -> None:
    """Seven orders a page, which shows the oldest first: the newest are on the last of them."""
    exchange, address = make()
    venue = opened_venue(address, ONE)
    venue.traits = replace(venue.traits, page=7)
    names = [f"tg{number}" for number in range(30)]
    for number, name in enumerate(names):
        quantity = Decimal("0.5") * (-1) ** number
        price = Decimal(repr(venue.prices()[ONE[0]])) * (1 + quantity.copy_sign(quantity) / 10)
        venue.place(order_of(venue, client_id=name, quantity=quantity, limit=price.quantize(Decimal("0.01"))))
        # Three orders share a moment, so that pages begin and end within one.
        if number % 3 == 2:
            venue.clock.sleep(5)
    assert [report.client_id for report in venue.orders(0)] == names
    since = exchange.venue.books.orders["tg12"]["accepted"]
    assert [report.client_id for report in venue.orders(since)] == names[12:]
    venue.traits = replace(venue.traits, page=3)
    with pytest.raises(OutcomeUnknown, match="more orders in one moment"):
        venue.orders(0)


def test_an_id_that_exists_is_an_unknown_outcome_that_is_asked_for(make, tmp_path: Path, monkeypatch) -> None:
    """The exchange says that the order is there already: it may be this one, as after a request that came twice."""
    exchange, address = make()
    venue = opened_venue(address, ONE)
    order = order_of(venue, client_id="somebody")
    placed = venue.place(order)
    with pytest.raises(OutcomeUnknown, match=r"-4116.*ClientOrderId is duplicated"):
        venue.place(order)
    assert venue.find(order.client_id, ONE[0]) == placed
    # A session asks, and takes in what has become of it.
    place = CcxtVenue.place

    def twice(self: CcxtVenue, request: OrderRequest) -> Any:
        place(self, request)
        return place(self, request)

    monkeypatch.setattr(CcxtVenue, "place", twice)
    with trading(address, tmp_path, ONE, guards=LOOSE) as (session, source):
        exchange.venue.trade_outside("SYN01", Decimal("-0.5"))
        session.start()
        session.on_bar(source.next_bar())
        state = session.ledger.state
    assert [record["outcome"] for record in records_of(tmp_path, "order")] == ["filled"]
    assert not state.open_intents
    assert state.ours[ONE[0]] == exchange.venue.books.positions["SYN01"] != 0
    assert not state.frozen
