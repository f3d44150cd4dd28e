"""Reconciliation: differences are explained or freeze increases, and what is not ours is never touched."""

from __future__ import annotations

from dataclasses import replace
from decimal import Decimal

import pytest

import tailguard as tg
from tailguard.live.faults import FaultRates, Faults
from tailguard.live.orders import PREFIX
from tailguard.live.reconcile import OVERLAP_MS, plain
from tailguard.live.session import Killed
from tailguard.live.session_state import DAY_MS, KEPT_MS, divide_position
from tailguard.live.simulation import RandomWeights
from tailguard.live.venue import OrderRequest

from .conftest import HOUR, WorldMaker


@pytest.mark.parametrize(
    ("found", "ours", "kept", "foreign"),
    [
        (9, 5, 5, 4),  # somebody bought 4 beside our 5
        (3, 5, 3, 0),  # somebody sold 2 of ours
        (-2, 5, 0, -2),  # sold all of ours and 2 more
        (0, 5, 0, 0),
        (4, 0, 0, 4),
        (-9, -5, -5, -4),
        (-3, -5, -3, 0),
        (2, -5, 0, 2),
    ],
)
def test_a_position_is_divided_into_ours_and_not_ours(found, ours, kept, foreign) -> None:
    assert divide_position(Decimal(found), Decimal(ours)) == (kept, foreign)


class Constant(RandomWeights):
    """Always the same weight."""

    def __init__(self, weight: float) -> None:
        super().__init__(1)
        self.weight = weight

    def weights_at(self, _: int) -> list[float]:
        return [self.weight]


def test_a_position_that_was_there_before_is_never_traded(paper_world: WorldMaker) -> None:
    """Three units of somebody else's: the session freezes at its start, and after the release trades beside them."""
    world = paper_world()
    symbol = world.bars.symbols[0]
    world.venue.trade_outside(symbol, Decimal(3))
    session = world.session()
    world.trade(session, 5)
    assert session.ledger.state.foreign[symbol] == 3
    assert "position" in session.ledger.state.frozen
    assert not world.venue.books.orders
    session.release("a person")
    world.trade(session, 20)
    state = session.ledger.state
    assert len(world.venue.books.orders) >= 15
    assert state.foreign[symbol] == 3
    assert world.venue.books.positions[symbol] == state.ours[symbol] + 3
    assert not state.frozen


def test_what_a_stranger_adds_is_left_alone_and_freezes_increases(paper_world: WorldMaker) -> None:
    world = paper_world(make_decider=lambda: Constant(0.5))
    session, symbol = world.session(), world.bars.symbols[0]
    world.trade(session, 5)
    ours = session.ledger.state.ours[symbol]
    world.venue.trade_outside(symbol, Decimal("0.7"))
    world.trade(session, 1)
    state = session.ledger.state
    assert (state.ours[symbol] <= ours, state.foreign[symbol]) == (True, Decimal("0.7"))
    assert "0.7 is not" in state.frozen["position"]
    # From here on orders of ours only reduce our own position.
    before = state.ours[symbol]
    world.trade(session, 30)
    sizes = [Decimal(record["quantity"]) for record in world.records("intent")[6:]]
    assert all(size < 0 for size in sizes)
    assert 0 <= state.ours[symbol] <= before
    assert world.venue.books.positions[symbol] == state.ours[symbol] + Decimal("0.7")


def test_a_strangers_order_is_left_where_it_is(paper_world: WorldMaker) -> None:
    """It rests through trading, a restart and a kill that closes everything of ours; what it fills is theirs."""
    world = paper_world(make_decider=lambda: Constant(0.5))
    session, symbol = world.session(), world.bars.symbols[0]
    world.trade(session, 3)
    price = Decimal(repr(world.venue.prices()[symbol]))
    limit = (price / 100).quantize(Decimal(1))
    bid = OrderRequest("web_by_hand", symbol, Decimal(1), limit, False, world.clock.now(), "resting")
    world.venue.place(bid)
    world.trade(session, 5)
    world.trade(world.session(), 5)
    world.kill.trip("sell everything", flatten=True)
    with pytest.raises(Killed, match="Positions of ours: none"):
        world.session().start()
    order = world.venue.books.orders["web_by_hand"]
    assert order["open"]
    assert not world.records("freeze")
    world.venue.fill_resting(order, Decimal("0.4"))
    session = world.session()
    with pytest.raises(Killed):
        session.start()
    session.release("a person")
    world.trade(world.session(), 1)
    assert Decimal(world.records("adopt")[-1]["foreign"]) == Decimal("0.4")
    assert order["open"]


def test_what_a_stranger_takes_is_no_longer_ours(paper_world: WorldMaker) -> None:
    world = paper_world(make_decider=lambda: Constant(0.5))
    session, symbol = world.session(), world.bars.symbols[0]
    world.trade(session, 5)
    world.venue.trade_outside(symbol, -2 * session.ledger.state.ours[symbol])
    foreign = world.venue.books.positions[symbol]
    assert foreign < 0
    world.trade(session, 10)
    state = session.ledger.state
    assert (state.ours[symbol], state.foreign[symbol]) == (0, foreign)
    assert world.venue.books.positions[symbol] == foreign


def test_an_order_with_our_mark_that_the_journal_does_not_know_freezes(paper_world: WorldMaker) -> None:
    """As when two machines trade one account."""
    world = paper_world()
    session, symbol = world.session(), world.bars.symbols[0]
    world.trade(session, 3)
    price = Decimal(repr(world.venue.prices()[symbol]))
    world.venue.place(OrderRequest(f"{PREFIX}other", symbol, Decimal(1), price * 2, False, world.clock.now()))
    world.trade(session, 1)
    assert "tgother is not in the journal" in session.ledger.state.frozen["unknown_order"]
    assert session.ledger.state.foreign[symbol] == 1


def test_a_liquidation_by_the_venue_is_taken_in_and_kills(paper_world: WorldMaker) -> None:
    world = paper_world(make_decider=lambda: Constant(0.5))
    session, symbol = world.session(), world.bars.symbols[0]
    world.trade(session, 5)
    held = session.ledger.state.ours[symbol]
    world.venue.liquidate_now()
    sends = len(world.venue.sends)
    with pytest.raises(Killed, match=f"liquidated {plain(held)}"):
        world.trade(session, 1)
    assert session.ledger.state.ours[symbol] == 0
    assert "position" not in session.ledger.state.frozen
    assert len(world.venue.sends) == sends


def test_a_liquidation_takes_what_is_not_ours_too(paper_world: WorldMaker) -> None:
    world = paper_world(make_decider=lambda: Constant(0.5))
    session, symbol = world.session(), world.bars.symbols[0]
    world.trade(session, 5)
    world.venue.trade_outside(symbol, Decimal(2))
    world.trade(session, 1)
    assert session.ledger.state.foreign[symbol] == 2
    world.venue.liquidate_now()
    with pytest.raises(Killed):
        world.trade(session, 1)
    assert (session.ledger.state.ours[symbol], session.ledger.state.foreign[symbol]) == (0, 0)


def test_a_day_of_minutes_with_an_order_each_is_never_taken_for_somebody_elses(paper_world: WorldMaker) -> None:
    """1,440 orders and then some: each is still known while the venue's list can show it."""
    world = paper_world(bars=tg.make_market(1_520, frequency="1m", seed=3).bars)
    session = world.session()
    world.trade(session)
    assert len(world.venue.books.orders) > 1_440
    assert not session.ledger.state.frozen
    # A restart lists a whole day.
    world.trade(world.session())
    assert not world.records("freeze")
    # What the list cannot show any more is forgotten.
    kept = session.ledger.state.intents.values()
    assert max(each.sent_ms for each in kept) - min(each.sent_ms for each in kept) <= KEPT_MS


def test_a_reconciliation_lists_only_what_can_still_change(paper_world: WorldMaker, monkeypatch) -> None:
    world = paper_world()
    asked: list[int] = []
    orders = world.venue.orders
    monkeypatch.setattr(world.venue, "orders", lambda since: asked.append(world.clock.now() - since) or orders(since))
    world.trade(world.session(), 40)
    assert max(asked[30:]) <= HOUR + OVERLAP_MS
    world.trade(world.session(), 1)
    # A new process does not know when the last one asked.
    assert max(asked[40:]) == DAY_MS


def test_a_position_that_the_venue_shows_a_moment_late_is_ours(paper_world: WorldMaker) -> None:
    """A new process asks at once after a fill, and the venue still shows the account of before: it is asked again."""
    world = paper_world(make_decider=lambda: Constant(0.5), faults=Faults(FaultRates(stale_account=1.0)))
    symbol = world.bars.symbols[0]
    world.trade(world.session(), 1)
    held = world.venue.books.positions[symbol]
    assert world.venue.account().positions[symbol] == 0 < held
    session = world.session()
    session.start()
    assert (session.ledger.state.ours[symbol], session.ledger.state.foreign[symbol]) == (held, 0)
    assert not world.records("freeze")
    assert not world.records("adopt")
    assert world.faults.counts["stale_account"] >= 2


def test_a_position_that_the_venue_shows_again_is_ours_again(paper_world: WorldMaker) -> None:
    """For a bar the venue shows an empty account. Increases are frozen, and when the position is back it is ours:
    as somebody else's it would be left alone, and the next decision would buy it a second time."""
    world = paper_world(make_decider=lambda: Constant(0.5))
    session, symbol = world.session(), world.bars.symbols[0]
    world.trade(session, 3)
    state, held = session.ledger.state, world.venue.books.positions[symbol]
    empty = replace(world.venue.books, cash=100_000.0, positions={symbol: Decimal(0)})
    world.venue.shown_books = lambda: empty
    world.trade(session, 1)
    assert (state.ours[symbol], state.foreign[symbol]) == (0, 0)
    assert "the venue has 0" in state.frozen["position"]
    assert world.venue.books.positions[symbol] == held
    del world.venue.shown_books
    world.trade(session, 1)
    assert (state.ours[symbol], state.foreign[symbol]) == (world.venue.books.positions[symbol], 0)
    assert 0 < state.ours[symbol] <= held
    assert "position" in state.frozen
    session.release("a person")
    world.trade(world.session(), 5)
    weight = float(world.venue.books.positions[symbol]) * world.venue.prices()[symbol] / world.venue.equity()
    assert weight == pytest.approx(0.5, abs=0.02)


def test_what_a_person_has_accepted_is_not_ours_again(paper_world: WorldMaker) -> None:
    """Somebody sells our position, a person releases the session, and somebody buys as much: it is theirs."""
    world = paper_world(make_decider=lambda: Constant(0.5))
    session, symbol = world.session(), world.bars.symbols[0]
    world.trade(session, 3)
    held = session.ledger.state.ours[symbol]
    world.venue.trade_outside(symbol, -held)
    world.trade(session, 1)
    assert session.ledger.state.ours[symbol] == 0
    session.release("a person")
    world.trade(session, 1)
    ours = session.ledger.state.ours[symbol]
    assert ours > 0
    world.venue.trade_outside(symbol, held)
    world.trade(session, 1)
    assert session.ledger.state.foreign[symbol] == held
    assert session.ledger.state.ours[symbol] <= ours
