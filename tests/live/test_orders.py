"""Orders: exact sizes, one id for one order, and outcomes that are asked for and never guessed."""

from __future__ import annotations

from decimal import Decimal

import hypothesis
import numpy as np
import pytest
from hypothesis import strategies as st

from tailguard.live.faults import FaultRates, Faults
from tailguard.live.journal import read_records
from tailguard.live.orders import client_id, limit_price, size_order, to_lots
from tailguard.live.session import Killed
from tailguard.live.venue import Instrument, OrderRequest, OutcomeUnknown, RateLimited

from .conftest import WorldMaker

RULES = Instrument("BTC", Decimal("0.001"), Decimal("0.10"), Decimal("0.002"), Decimal(100))


def test_sizes_by_hand() -> None:
    """Equity 10,000, price 30,000: weight 0.5 is 0.16666… BTC, that is 166 lots of 0.001."""
    assert size_order(0.5, 10_000, Decimal(0), 30_000, RULES) == Decimal("0.166")
    assert size_order(-0.5, 10_000, Decimal(0), 30_000, RULES) == Decimal("-0.166")
    assert size_order(0.5, 10_000, Decimal("0.1"), 30_000, RULES) == Decimal("0.066")
    assert size_order(-0.5, 10_000, Decimal("0.1"), 30_000, RULES) == Decimal("-0.266")
    assert size_order(float("nan"), 10_000, Decimal("0.1"), 30_000, RULES) == 0
    # 0.003 BTC are 90, below the smallest notional of 100; 0.001 is below the smallest quantity.
    assert size_order(0.009, 10_000, Decimal(0), 30_000, RULES) == 0
    assert size_order(0.0035, 10_000, Decimal(0), 300_000, RULES) == 0


def test_frozen_sizes_only_reduce() -> None:
    def size(weight: float, held: str) -> Decimal:
        return size_order(weight, 10_000, Decimal(held), 30_000, RULES, reduce_only=True)

    assert size(0.9, "0.1") == 0
    assert size(0.9, "0") == 0
    assert size(0.15, "0.1") == Decimal("-0.050")
    assert size(-0.9, "0.1") == Decimal("-0.1")
    assert size(0.9, "-0.1") == Decimal("0.1")
    # A rest below the smallest notional can still be closed.
    assert size(0.0, "0.003") == Decimal("-0.003")


def test_limits_are_on_the_tick_within_the_slippage() -> None:
    assert limit_price(Decimal(1), 30_000.04, 0.01, Decimal("0.10")) == Decimal("30300.0")
    assert limit_price(Decimal(-1), 30_000.04, 0.01, Decimal("0.10")) == Decimal("29700.1")


@hypothesis.given(
    weight=st.floats(-3, 3),
    equity=st.floats(1, 1e9),
    price=st.floats(1e-4, 1e6),
    held=st.decimals(-1000, 1000, places=3),
    lot=st.sampled_from(["0.001", "1", "1e-8", "0.25"]),
    reduce_only=st.booleans(),
)
def test_an_order_is_whole_lots_and_never_passes_its_target(weight, equity, price, held, lot, reduce_only) -> None:
    held = to_lots(held, Decimal(lot))
    rules = Instrument("X", Decimal(lot), Decimal("0.01"))
    quantity = size_order(weight, equity, held, price, rules, reduce_only=reduce_only)
    assert quantity % Decimal(lot) == 0
    wanted = Decimal(repr(weight * equity / price)) - held
    assert abs(quantity) <= abs(wanted)
    assert quantity * wanted >= 0
    after = held + quantity
    if reduce_only:
        assert abs(after) <= abs(held)
        assert after * held >= 0
    else:
        assert abs(wanted - quantity) < Decimal(lot)


def test_an_id_is_one_orders_own() -> None:
    ids = {
        client_id(run, bar, symbol, attempt, flatten=flatten)
        for run in ("a", "b")
        for bar in (0, 1)
        for symbol in ("X", "Y")
        for attempt in (0, 1)
        for flatten in (False, True)
    }
    assert len(ids) == 32
    assert all(len(each) <= 36 and each.isalnum() for each in ids)
    assert client_id("a", 0, "X", 0) == client_id("a", 0, "X", 0)


FAULTS = {
    "reply_lost": FaultRates(reply_lost=1.0),
    "request_lost": FaultRates(request_lost=1.0),
    "request_late": FaultRates(request_late=1.0),
    "unavailable": FaultRates(unavailable=1.0),
    "rate_limited": FaultRates(rate_limited=0.5),
    "rejected": FaultRates(rejected=0.5),
    "partial_fill": FaultRates(partial_fill=1.0),
    "read_fails": FaultRates(read_fails=0.3),
    "late_events": FaultRates(late_events=1.0, reply_lost=0.5),
    "repeated_events": FaultRates(repeated_events=1.0),
    "disconnect": FaultRates(disconnect=0.02),
    "clock_jump": FaultRates(clock_jump=0.05),
}


@pytest.mark.parametrize("kind", FAULTS)
def test_under_every_fault_books_are_the_venues_and_no_order_is_doubled(paper_world: WorldMaker, kind: str) -> None:
    world = paper_world(faults=Faults(FAULTS[kind], seed=1))
    session = world.session()
    world.trade(session, 60)
    assert world.faults.counts[kind] > 3
    check_books(world)


def check_books(world) -> None:
    """Venue and books agree on every order; one accepted order a bar and symbol; each send follows its intent."""
    world.venue.faults.rates = FaultRates()
    world.clock.sleep(60)
    session = world.session()
    session.start()
    state = session.ledger.state
    accepted = world.venue.books.orders
    intents = {record["id"]: record for record in world.records("intent")}
    assert set(accepted) <= set(intents)
    assert len({(intents[name]["bar"], intents[name]["symbol"]) for name in accepted}) == len(accepted)
    assert len({name for _, name in world.venue.sends}) == len(world.venue.sends)
    outcomes = {record["id"]: record for record in world.records("order")}
    for name, order in accepted.items():
        assert Decimal(outcomes[name]["filled"]) == Decimal(order["filled"])
    assert not state.open_intents
    assert state.ours == world.venue.books.positions
    assert not any(state.foreign.values())
    assert "position" not in state.frozen


def test_orders_that_were_lost_are_not_sent_again_and_the_next_bar_makes_up_for_them(paper_world: WorldMaker) -> None:
    world = paper_world(faults=Faults(FaultRates(request_lost=1.0)))
    session = world.session()
    world.trade(session, 5)
    assert len(world.venue.sends) == 5
    assert not world.venue.books.orders
    assert {record["outcome"] for record in world.records("order")} == {"lost: the venue never took it"}
    world.faults.rates = FaultRates()
    world.trade(session, 1)
    held = session.ledger.state.ours[world.bars.symbols[0]]
    last = world.records("decision")[-1]
    price = world.venue.prices()[world.bars.symbols[0]]
    # Cash alone was the equity when the order was sized.
    assert float(held) * price == pytest.approx(last["target"][0] * world.config.capital, rel=1e-9)


def test_an_order_that_was_accepted_late_is_found(paper_world: WorldMaker) -> None:
    """Requests arrive up to five seconds after their time-out. None is taken for lost and counted out."""
    world = paper_world(faults=Faults(FaultRates(request_late=1.0, late_events=1.0), seed=4))
    session = world.session()
    world.trade(session, 40)
    assert len(world.venue.books.orders) == 40
    assert {record["outcome"] for record in world.records("order")} == {"filled"}


def test_refused_orders_are_tried_again_as_another_attempt_with_another_id(paper_world: WorldMaker) -> None:
    world = paper_world(faults=Faults(FaultRates(rate_limited=0.5), seed=2))
    session = world.session()
    world.trade(session, 40)
    attempts = [record["attempt"] for record in world.records("intent")]
    assert max(attempts) == 2
    refused = [record for record in world.records("order") if record["outcome"].startswith("refused: 429")]
    assert len(refused) == world.faults.counts["rate_limited"]
    check_books(world)


def test_refused_orders_are_an_alarm_once_until_one_is_taken(paper_world: WorldMaker) -> None:
    """An account without margin trades nothing for hours: somebody has to know, and not at every bar."""
    world = paper_world(faults=Faults(FaultRates(rejected=1.0)))
    session, symbol = world.session(), world.bars.symbols[0]
    world.trade(session, 3)
    world.faults.rates = FaultRates()
    world.trade(session, 2)
    world.faults.rates = FaultRates(rejected=1.0)
    world.trade(session, 3)
    alarms = [(record["guard"], record["message"]) for record in world.records("alarm")]
    assert alarms == [("refused", f"{symbol}: the venue refuses our orders: margin is insufficient")] * 2
    assert len(world.venue.books.orders) == 2


def test_a_ban_of_days_is_not_slept_through(paper_world: WorldMaker) -> None:
    """Three attempts, a minute apart, and a kill switch that ends the wait within five seconds."""
    world = paper_world()
    sent = []

    def banned(_: OrderRequest):
        sent.append(world.clock.now())
        raise RateLimited("418", 259_200.0)

    world.venue.place = banned
    world.trade(world.session(), 1)
    assert [moment - sent[0] for moment in sent] == [0, 60_000, 120_000]
    ends = []

    def trip(now: int) -> None:
        if len(sent) == 4 and now >= sent[3] + 10_000 and not ends:
            ends.append(now)
            world.kill.trip("a person")

    world.clock.observers.append(trip)
    with pytest.raises(Killed):
        world.trade(world.session(), 1)
    assert len(sent) == 4
    assert world.clock.now() - ends[0] <= 5_000


def test_a_clock_that_drifts_is_measured_and_orders_go_through(paper_world: WorldMaker) -> None:
    """The venue is 8 s ahead: the first order after the jump is refused for its time, the second is taken."""
    world = paper_world()
    session = world.session()
    world.trade(session, 3)
    world.faults.clock_skew_ms = 8_000
    world.trade(session, 3)
    assert session.desk.clock_offset == 8_000
    assert [record["guard"] for record in world.records("alarm")] == ["clock"]
    assert len(world.venue.books.orders) == 6


def test_the_intent_is_on_disk_when_the_order_reaches_the_venue(paper_world: WorldMaker) -> None:
    world = paper_world()
    place, seen = world.venue.place, []

    def looking(order: OrderRequest):
        on_disk = [record for record in read_records(world.journal_path) if record["kind"] == "intent"]
        seen.append(on_disk[-1]["id"] == order.client_id and on_disk[-1]["quantity"] == str(order.quantity))
        return place(order)

    world.venue.place = looking
    world.trade(world.session(), 10)
    assert seen == [True] * 10


def test_while_an_outcome_is_unknown_the_symbol_gets_no_other_order(paper_world: WorldMaker) -> None:
    """The venue takes an order and then answers nothing for hours: one send, and none until it is known again."""
    world = paper_world()
    session = world.session()
    world.trade(session, 2)
    place = world.venue.place
    world.venue.place = lambda order: (place(order), _raise())[0]
    find, orders = world.venue.find, world.venue.orders
    world.venue.find, world.venue.orders = lambda *_: _raise(), lambda _: []
    world.trade(session, 3)
    assert len(world.venue.sends) == 3
    assert len(session.ledger.state.open_intents) == 1
    world.venue.place, world.venue.find, world.venue.orders = place, find, orders
    world.trade(session, 1)
    assert len(world.venue.sends) == 4
    check_books(world)


def _raise():
    raise OutcomeUnknown("no answer")


def test_positions_under_partial_fills_follow_the_targets(paper_world: WorldMaker) -> None:
    """Half of all orders fill in part; each next order is sized from what is held, so books and venue stay equal."""
    world = paper_world(faults=Faults(FaultRates(partial_fill=0.5), seed=3))
    session = world.session()
    world.trade(session, 60)
    outcomes = [record["outcome"] for record in world.records("order")]
    assert 15 < outcomes.count("partly filled") < 45
    weights = np.array([record["weights"][0] for record in world.records("decision")][1:])
    targets = np.array([record["target"][0] for record in world.records("decision")][:-1])
    filled = np.array(outcomes[: len(targets)]) == "filled"
    # A bar moves a weight by a few percent of it.
    assert np.abs(weights - targets)[filled].max() < 0.1 < np.abs(weights - targets)[~filled].max()
    check_books(world)
