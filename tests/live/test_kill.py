"""The kill switch: nothing is sent after it, it stays, and only a person goes on."""

from __future__ import annotations

import json
from decimal import Decimal
from itertools import pairwise
from pathlib import Path

import pytest

from tailguard.live.faults import FaultRates, Faults
from tailguard.live.kill import KillSwitch
from tailguard.live.orders import OrderConfig
from tailguard.live.reconcile import plain
from tailguard.live.session import Killed

from .conftest import HOUR, WorldMaker
from .test_journal import files_up_to
from .test_reconcile import Constant


def test_the_switch_is_a_file_that_stays(tmp_path: Path) -> None:
    switch = KillSwitch(tmp_path / "KILL")
    assert not switch.is_tripped()
    switch.trip("first")
    switch.trip("second")
    assert (switch.is_tripped(), switch.message(), switch.wants_flat()) == (True, "first", False)
    switch.trip("third", flatten=True)
    assert (switch.message(), switch.wants_flat()) == ("third", True)
    switch.release()
    assert not switch.is_tripped()
    for content in (b"", b"\xff{", b"[1]"):
        switch.path.write_bytes(content)
        assert switch.is_tripped()
        assert not switch.wants_flat()


def test_a_switch_that_cannot_be_read_is_tripped(tmp_path: Path) -> None:
    """Its folder is gone, or is no folder, or is a name that the system refuses."""
    folder = tmp_path / "live"
    switch = KillSwitch(folder / "KILL")
    assert switch.is_tripped()
    assert "cannot be read" in switch.message()
    folder.write_text("a file")
    assert switch.is_tripped()
    folder.unlink()
    folder.mkdir()
    assert not switch.is_tripped()
    folder.rename(tmp_path / "moved")
    assert switch.is_tripped()
    assert KillSwitch(tmp_path / ("x" * 300)).is_tripped()
    assert KillSwitch(tmp_path / "KILL", tmp_path / ("x" * 300)).is_tripped()


def test_a_folder_that_is_moved_away_ends_a_session_before_its_next_order(paper_world: WorldMaker) -> None:
    world = paper_world()
    session = world.session()
    world.trade(session, 5)
    moved = world.folder.with_name("moved")
    world.folder.rename(moved)
    with pytest.raises(Killed):
        world.trade(session, 5)
    assert len(world.venue.sends) == 5


def test_a_release_is_that_of_one_mode(tmp_path: Path) -> None:
    """The common file is passed on before it goes; a mode's own file is nobody else's matter."""
    modes = ("shadow", "paper", "live")
    own = {mode: tmp_path / f"KILL.{mode}" for mode in modes}
    shadow, paper, live = (
        KillSwitch(own[mode], tmp_path / "KILL", tuple(own[each] for each in modes if each != mode)) for mode in modes
    )
    shadow.trip("a drawdown in shadow")
    assert (shadow.is_tripped(), paper.is_tripped(), live.is_tripped()) == (True, False, False)
    (tmp_path / "KILL").write_text(json.dumps({"message": "all", "flatten": True}))
    assert live.is_tripped()
    paper.release()
    assert (shadow.is_tripped(), paper.is_tripped(), live.is_tripped()) == (True, False, True)
    assert (shadow.message(), live.message(), live.wants_flat()) == ("all", "all", True)
    live.release()
    assert not live.is_tripped()
    (tmp_path / "KILL").touch()
    assert paper.message() == f"{tmp_path / 'KILL'} is there"
    paper.release()
    assert (shadow.is_tripped(), paper.is_tripped(), live.is_tripped()) == (True, False, True)
    shadow.release()
    live.release()
    assert not list(tmp_path.iterdir())


def test_after_the_switch_nothing_is_sent_until_a_person_releases_it(paper_world: WorldMaker) -> None:
    world = paper_world()
    session = world.session()
    world.trade(session, 5)
    world.kill.trip("a person said so")
    for _ in range(3):  # a restart does not help
        with pytest.raises(Killed, match=r"a person said so.*--release"):
            world.trade(world.session(), 5)
    world.kill.path.unlink()  # nor does deleting the file
    with pytest.raises(Killed, match="a person said so"):
        world.trade(world.session(), 5)
    assert len(world.venue.sends) == 5
    session = world.session()
    session.release("a person")
    world.trade(session, 5)
    assert len(world.venue.sends) == 10
    assert world.records("release")[0]["by"] == "a person"


@pytest.mark.parametrize("moment", ["before append", "torn append", "after append"])
def test_a_switch_tripped_at_any_moment_stops_the_next_send(paper_world: WorldMaker, moment: str) -> None:
    """Tripped while the n-th line is written, for every n of a bar: also between an intent and its order."""
    for number in range(40, 60):
        world = paper_world()
        world.journal_path.unlink(missing_ok=True)
        world.kill.release()
        reached, sent = 0, None

        def watch(name: str) -> None:
            nonlocal reached, sent
            reached += name == moment
            if reached == number and sent is None:  # noqa: B023 (called within the iteration)
                world.kill.trip("now")  # noqa: B023
                sent = len(world.venue.sends)  # noqa: B023

        world.crash_point = watch
        with pytest.raises(Killed):
            world.trade(world.session(), 30)
        assert sent is not None
        assert len(world.venue.sends) == sent
        assert not world.session().ledger.state.open_intents


@pytest.mark.parametrize("rates", [FaultRates(), FaultRates(partial_fill=0.7, reply_lost=0.2, rate_limited=0.2)])
def test_a_kill_that_asks_for_it_closes_our_positions_and_nothing_else(paper_world: WorldMaker, rates) -> None:
    world = paper_world(make_decider=lambda: Constant(0.8), faults=Faults(seed=5))
    symbol = world.bars.symbols[0]
    world.trade(world.session(), 5)
    world.venue.trade_outside(symbol, Decimal(2))
    world.faults.rates = rates
    world.kill.trip("sell everything", flatten=True)
    with pytest.raises(Killed, match="Positions of ours: none"):
        world.session().start()
    assert world.venue.books.positions[symbol] == 2
    flattening = [record for record in world.records("intent") if record["flatten"]]
    assert flattening
    assert all(record["reduce_only"] for record in flattening)
    assert len(world.records("flattened")) == 1
    with pytest.raises(Killed):
        world.session().start()
    assert len(world.records("flattened")) == 1
    assert len([record for record in world.records("intent") if record["flatten"]]) == len(flattening)


class PowerCut(BaseException):
    """The process is gone."""


@pytest.mark.parametrize("rates", [FaultRates(), FaultRates(partial_fill=0.7, reply_lost=0.3, request_late=0.3)])
def test_a_process_that_dies_while_it_flattens_closes_the_rest_and_never_more(paper_world: WorldMaker, rates) -> None:
    """Death at the n-th moment of a flattening, for every n, and again in the start after it. The position of a
    stranger stays, and what is ours never passes zero."""
    for number in range(1, 60):
        world = paper_world(make_decider=lambda: Constant(0.8), faults=Faults(seed=number))
        world.journal_path.unlink(missing_ok=True)
        world.kill.release()
        symbol, moments = world.bars.symbols[0], 0
        world.trade(world.session(), 3)
        world.venue.trade_outside(symbol, Decimal(2))
        held = [world.venue.books.positions[symbol]]
        world.venue.on_change = lambda _: held.append(world.venue.books.positions[symbol])  # noqa: B023
        world.faults.rates = rates
        world.kill.trip("sell everything", flatten=True)

        def dies(_: str) -> None:
            nonlocal moments
            moments += 1
            if moments in (number, 2 * number):  # noqa: B023 (called within the iteration)
                raise PowerCut

        world.crash_point = dies
        for _ in range(4):
            try:
                world.session().start()
            except PowerCut:
                world.clock.sleep(30)
            except Killed:
                break
        assert moments >= number or number > 20
        assert world.venue.books.positions[symbol] == 2
        assert all(before >= after >= 2 for before, after in pairwise(held))
        assert len(world.records("flattened")) == 1


def test_a_switch_can_be_tripped_on_a_full_disk(tmp_path: Path) -> None:
    """An empty file needs no room. What cannot be written down, as a wish to flatten, is an error that says so."""
    switch = KillSwitch(tmp_path / "KILL")
    with files_up_to(0):
        switch.trip("enough")
    assert switch.is_tripped()
    assert not switch.wants_flat()
    switch.release()
    with files_up_to(0), pytest.raises(OSError, match="too large"):
        switch.trip("enough", flatten=True)
    assert switch.is_tripped()


def test_a_flattening_kill_outlasts_an_outage_of_the_venue(paper_world: WorldMaker) -> None:
    """The venue is gone for ten minutes when the kill comes. 32 questions at most, as the pauses grow to a minute."""
    world = paper_world(make_decider=lambda: Constant(0.8))
    session, symbol = world.session(), world.bars.symbols[0]
    world.trade(session, 5)
    began = world.clock.now()
    world.clock.observers.append(lambda now: world.faults.stop() if now > began + 600_000 else None)
    world.faults.rates = FaultRates(read_fails=1.0)
    world.kill.trip("sell everything", flatten=True)
    with pytest.raises(Killed, match="Positions of ours: none"):
        session.obey_kill()
    assert world.venue.books.positions[symbol] == 0
    assert 600_000 < world.clock.now() - began < 700_000
    assert len(world.records("error")) < 32


def test_positions_that_cannot_be_closed_are_an_alarm_and_stay_due(paper_world: WorldMaker) -> None:
    world = paper_world(make_decider=lambda: Constant(0.8))
    session, symbol = world.session(), world.bars.symbols[0]
    world.trade(session, 5)
    world.faults.rates = FaultRates(rejected=1.0)
    world.kill.trip("sell everything", flatten=True)
    with pytest.raises(Killed):
        session.obey_kill()
    held = session.ledger.state.ours[symbol]
    alarms = [record["message"] for record in world.records("alarm") if record["guard"] == "flatten"]
    assert alarms == [f"not flat: {symbol} {plain(held)} is left; it is tried again at the next start"]
    world.faults.stop()
    with pytest.raises(Killed, match="Positions of ours: none"):
        world.session().start()


def test_a_person_can_end_a_flattening_that_waits_for_the_venue(paper_world: WorldMaker) -> None:
    world = paper_world(make_decider=lambda: Constant(0.8))
    session = world.session()
    world.trade(session, 5)
    began = world.clock.now()
    session.stop = lambda: world.clock.now() > began + 100_000
    world.faults.rates = FaultRates(read_fails=1.0)
    world.kill.trip("sell everything", flatten=True)
    with pytest.raises(Killed):
        session.obey_kill()
    assert world.clock.now() < began + 200_000
    assert [record["guard"] for record in world.records("alarm")] == ["flatten"]
    # It ends the wait alone: at a venue that answers positions are closed, whatever else was asked for.
    world.faults.stop()
    with pytest.raises(Killed, match="Positions of ours: none"):
        session.obey_kill()


def test_what_became_of_orders_and_positions_is_in_the_journal(paper_world: WorldMaker) -> None:
    """An order rests at its limit when the switch is tripped: it is withdrawn, and the position is what it was."""
    world = paper_world(make_decider=lambda: Constant(0.5), orders=OrderConfig("limit_then_market", spread_s=60.0))
    session, symbol = world.session(), world.bars.symbols[0]
    world.trade(session, 3)
    held = world.venue.books.positions[symbol]
    session.decider.weight = 0.9
    sends = len(world.venue.sends)
    fillable = world.venue._fillable  # nothing is filled at once from here on
    world.venue._fillable = lambda symbol, _, price: fillable(symbol, Decimal(0), price)
    later = world.clock.now() + HOUR - 30_000  # half a minute after the next close
    world.clock.observers.append(lambda now: world.kill.trip("enough") if now > later else None)
    with pytest.raises(Killed):
        world.trade(session, 1)
    assert len(world.venue.sends) == sends + 1
    settled = world.records("settled")[-1]
    assert (settled["cancelled"], settled["in_flight"], settled["simulated"]) == (1, 0, False)
    assert settled["positions"] == {symbol: f"{held.normalize():+f}"}
    assert world.venue.books.positions[symbol] == held
