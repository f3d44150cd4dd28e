"""Chaos: seeded schedules find nothing wrong, and do find what is broken on purpose."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import time
from collections import Counter
from decimal import Decimal
from pathlib import Path

import pytest

import tailguard as tg
from tailguard.live.books import BookStore
from tailguard.live.chaos import Chaos, CrashingVenue, Outcome
from tailguard.live.journal import Journal, _digest, read_records
from tailguard.live.kill import KillSwitch
from tailguard.live.killed_chaos import KilledChaos
from tailguard.live.orders import OrderDesk
from tailguard.live.paper import PaperVenue
from tailguard.live.session_state import Intent
from tailguard.live.simulation import ReplayedMarket
from tailguard.live.venue import OrderRequest
from tailguard.market import MarketConfig


@pytest.fixture(scope="module")
def replayed() -> ReplayedMarket:
    return ReplayedMarket.of(tg.make_market(40, assets=2, seed=3).bars, MarketConfig(), 10)


@pytest.fixture(scope="module")
def short() -> ReplayedMarket:
    return ReplayedMarket.of(tg.make_market(30, assets=2, seed=3).bars, MarketConfig(), 10)


def schedules(replayed: ReplayedMarket, folder: Path, seeds: range) -> list[Outcome]:
    outcomes = []
    for seed in seeds:
        place = folder / str(seed)
        place.mkdir(parents=True)
        outcomes.append(Chaos(seed, replayed, place).run())
    return outcomes


def test_no_schedule_doubles_an_order_loses_a_position_or_sends_after_a_kill(replayed, tmp_path: Path) -> None:
    outcomes = schedules(replayed, tmp_path, range(12))
    assert [outcome.wrong for outcome in outcomes] == [[]] * 12
    total = sum((outcome.counts for outcome in outcomes), Counter())
    assert total["accepted orders"] > 300
    assert sum(outcome.crashes for outcome in outcomes) > 50
    assert sum(outcome.kills for outcome in outcomes) > 5


def killed_schedules(replayed: ReplayedMarket, folder: Path, seeds: range) -> list[Outcome]:
    outcomes = []
    for seed in seeds:
        place = folder / str(seed)
        place.mkdir(parents=True)
        outcomes.append(KilledChaos(seed, replayed, place).run())
    return outcomes


def test_a_process_that_the_system_kills_at_any_moment_trades_as_one(short, tmp_path: Path) -> None:
    """The session in a process of its own, killed by SIGKILL; the venue and its faults live on."""
    outcomes = killed_schedules(short, tmp_path, range(4))
    assert [outcome.wrong for outcome in outcomes] == [[]] * 4
    assert sum(outcome.crashes for outcome in outcomes) > 20
    assert sum(outcome.kills for outcome in outcomes) > 0
    assert sum((outcome.counts for outcome in outcomes), Counter())["accepted orders"] > 100


def test_an_intent_that_only_the_process_remembers_is_found(short, tmp_path: Path, monkeypatch) -> None:
    """Intents wait in the process's own buffer for the next line: exceptions do not lose them, a kill does."""

    held: dict[Journal, bytes] = {}

    def flush(self: Journal) -> None:
        self._file.write(held.pop(self, b""))

    def buffered(self: Journal, kind: str, time_ms: int, **content):
        record = {"kind": kind, "time": time_ms, **content, "previous": self.head}
        record["hash"] = self.head = _digest(record)
        held[self] = held.get(self, b"") + json.dumps(record).encode() + b"\n"
        if kind != "intent":
            flush(self)
        self.crash_point("after append")
        return record

    def close(self: Journal) -> None:
        flush(self)
        self._file.close()

    monkeypatch.setattr(Journal, "append", buffered)
    monkeypatch.setattr(Journal, "close", close)
    assert not [outcome.wrong for outcome in schedules(short, tmp_path / "exceptions", range(2)) if outcome.wrong]

    def under_kills() -> list[list[str]]:
        return [outcome.wrong for outcome in killed_schedules(short, tmp_path / "processes", range(12))]

    with pytest.raises((KeyError, AssertionError)):  # the books meet an order that they have no intent of
        assert under_kills() == [[]] * 12


@pytest.mark.slow
def test_two_thousand_schedules_find_nothing_wrong(replayed, tmp_path: Path) -> None:
    outcomes = schedules(replayed, tmp_path, range(2_000))
    assert not [(outcome.seed, outcome.wrong) for outcome in outcomes if outcome.wrong]
    total = sum((outcome.counts for outcome in outcomes), Counter())
    print(json.dumps({"crashes": sum(each.crashes for each in outcomes), **dict(total)}))


def found(replayed, folder: Path) -> set[str]:
    return {message for outcome in schedules(replayed, folder, range(12)) for message in outcome.wrong}


def test_a_desk_that_sends_again_what_is_unknown_is_found(replayed, tmp_path: Path, monkeypatch) -> None:
    def send_again(self: OrderDesk, intent: Intent) -> None:
        request = OrderRequest(intent.client_id, intent.symbol, intent.quantity, Decimal(10**9), False, intent.sent_ms)
        try:
            self.report(intent, self.venue.place(request))
        except Exception:
            settle(self, intent)

    settle = OrderDesk.settle
    monkeypatch.setattr(OrderDesk, "settle", send_again)
    assert "an order was sent twice" in found(replayed, tmp_path)


def test_a_desk_that_takes_an_unknown_outcome_for_a_loss_is_found(replayed, tmp_path: Path, monkeypatch) -> None:
    """It sends slices again that were taken. The next reconciliation heals its books by the venue's list of orders;
    without that list they are wrong, too."""
    monkeypatch.setattr(OrderDesk, "settle", lambda self, intent: self._close(intent, "lost"))
    assert found(replayed, tmp_path / "with list") == {"a bar has traded more than was decided"}
    monkeypatch.setattr(PaperVenue, "orders", lambda *_: [])
    assert "a position was not explained although nobody else traded" in found(replayed, tmp_path / "without")


def test_a_desk_that_asks_too_early_is_found(replayed, tmp_path: Path, monkeypatch) -> None:
    """It takes the first answer without the order for proof, while the request is still under way."""
    monkeypatch.setattr(PaperVenue, "orders", lambda *_: [])
    assert not found(replayed, tmp_path / "patient")
    monkeypatch.setattr(CrashingVenue, "receive_window_ms", -100_000)
    assert "a position was not explained although nobody else traded" in found(replayed, tmp_path / "hasty")


def test_a_desk_that_does_not_look_at_the_switch_is_found(replayed, tmp_path: Path, monkeypatch) -> None:
    class Blind(KillSwitch):
        def is_tripped(self) -> bool:
            return False

    def blind(self: OrderDesk, *arguments, **settings) -> None:
        kill, self.kill = self.kill, Blind(self.kill.path)
        try:
            send(self, *arguments, **settings)
        finally:
            self.kill = kill

    send = OrderDesk.send
    monkeypatch.setattr(OrderDesk, "send", blind)
    assert "an order was sent after the kill switch" in found(replayed, tmp_path)


def test_a_journal_that_comes_after_the_order_is_found(replayed, tmp_path: Path, monkeypatch) -> None:
    """Records are kept in memory and written with the next one: a crash loses the last."""
    waiting: list = []

    def late(self: Journal, kind: str, time_ms: int, **content):
        if kind == "intent":
            waiting.append((self, kind, time_ms, content))
            record = {"kind": kind, "time": time_ms, **content}
            return {**record, "previous": self.head, "hash": self.head}
        held, waiting[:] = list(waiting), []
        for journal, *rest, inside in held:
            if journal is self:
                append(self, *rest, **inside)
        return append(self, kind, time_ms, **content)

    append = Journal.append
    monkeypatch.setattr(Journal, "append", late)
    try:
        messages = found(replayed, tmp_path)
    except KeyError:  # the books meet an order that they have no intent of
        return
    assert "an order was sent before its intent was on disk" in messages


WORKER = Path(__file__).with_name("killed_worker.py")


@pytest.mark.slow
def test_a_process_killed_again_and_again_by_the_system_trades_as_one(tmp_path: Path) -> None:
    """SIGKILL after a random fraction of a second, until all bars are traded: with real files and real flushes."""
    draw = random.Random(0)
    kills = 0
    for _ in range(200):
        worker = subprocess.Popen([sys.executable, str(WORKER), str(tmp_path)], stdout=subprocess.PIPE, text=True)
        assert worker.stdout is not None
        assert worker.stdout.readline() == "trading\n"
        if (tmp_path / "journal.jsonl").read_bytes().count(b'{"kind":"decision"') == 60:
            worker.wait(300)  # a loaded machine needs longer to end a process than it is given to trade
            break
        time.sleep(draw.uniform(0.0, 0.5))
        os.kill(worker.pid, signal.SIGKILL)
        worker.wait()
        kills += 1
    else:
        pytest.fail("the worker never finished")
    assert worker.returncode == 0
    assert kills >= 3
    records = list(read_records(tmp_path / "journal.jsonl"))
    decided = [record["bar"] for record in records if record["kind"] == "decision"]
    assert len(set(decided)) == len(decided) == 60
    intents = {record["id"]: record for record in records if record["kind"] == "intent"}
    books = BookStore(tmp_path / "venue.sqlite").read()
    taken = Counter((intents[name]["bar"], intents[name]["symbol"]) for name in books.orders)
    assert max(taken.values()) == 1
    filled = Counter()
    for order in books.orders.values():
        filled[order["symbol"]] += Decimal(order["filled"])
    outcomes = {record["id"]: Decimal(record["filled"]) for record in records if record["kind"] == "order"}
    for symbol, position in books.positions.items():
        assert position == filled[symbol]
        assert filled[symbol] == sum(size for name, size in outcomes.items() if intents[name]["symbol"] == symbol)
    assert not [record for record in records if record["kind"] in ("adopt", "freeze", "kill")]
    print(json.dumps({"kills": kills, "orders": len(books.orders)}))
