"""The journal: what is written is on disk, a torn line is dropped, and every change is seen."""

from __future__ import annotations

import hashlib
import json
import os
import resource
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path

import pytest

from tailguard.live.journal import GENESIS, Journal, JournalError, read_records

from .conftest import WorldMaker


def write(path: Path, count: int) -> list[dict]:
    with Journal(path) as journal:
        return [journal.append("bar", 1_000 * number, price=0.1 * number) for number in range(count)]


def test_records_come_back_as_they_were_written_bit_for_bit(tmp_path: Path) -> None:
    written = write(tmp_path / "journal.jsonl", 20)
    with Journal(tmp_path / "journal.jsonl") as journal:
        assert journal.records == written
        assert journal.head == written[-1]["hash"]
        assert journal.dropped == 0


def test_a_hash_is_that_of_the_line_and_of_the_line_before(tmp_path: Path) -> None:
    """Worked out beside the code: SHA-256 of the sorted, compact JSON without its hash."""
    first, second = write(tmp_path / "journal.jsonl", 2)
    text = f'{{"kind":"bar","previous":"{GENESIS}","price":0.0,"time":0}}'
    assert first["hash"] == hashlib.sha256(text.encode()).hexdigest()
    text = f'{{"kind":"bar","previous":"{first["hash"]}","price":0.1,"time":1000}}'
    assert second["hash"] == hashlib.sha256(text.encode()).hexdigest()


def test_every_line_that_is_changed_removed_or_moved_is_found(tmp_path: Path) -> None:
    path = tmp_path / "journal.jsonl"
    write(path, 5)
    lines = path.read_text().splitlines(keepends=True)
    for number in range(5):
        content = json.loads(lines[number])
        content["price"] += 1e-9
        changed = json.dumps(content, separators=(",", ":")) + "\n"
        path.write_text("".join([*lines[:number], changed, *lines[number + 1 :]]))
        with pytest.raises(JournalError, match=f"line {number + 1} was changed"):
            list(read_records(path))
    for number in range(4):
        path.write_text("".join([*lines[:number], *lines[number + 1 :]]))
        with pytest.raises(JournalError, match=f"line {number + 1} does not follow"):
            list(read_records(path))
    path.write_text("".join([lines[1], lines[0], *lines[2:]]))
    with pytest.raises(JournalError, match="line 1 does not follow"):
        list(read_records(path))
    path.write_text("".join([*lines[:2], "{}\n", *lines[2:]]))
    with pytest.raises(JournalError, match="line 3 is not a record"):
        list(read_records(path))


def test_a_line_torn_at_any_byte_is_dropped_and_the_chain_goes_on(tmp_path: Path) -> None:
    path = tmp_path / "journal.jsonl"
    write(path, 3)
    whole = path.read_bytes()
    start = whole[:-1].rindex(b"\n") + 1
    for end in range(start, len(whole)):
        path.write_bytes(whole[:end])
        with Journal(path) as journal:
            assert journal.dropped == end - start
            assert len(journal.records) == 2
            journal.append("bar", 9)
        assert [record["time"] for record in read_records(path)] == [0, 1_000, 9]


def test_two_processes_cannot_write_one_journal(tmp_path: Path) -> None:
    path = tmp_path / "journal.jsonl"
    with Journal(path):
        code = f"from pathlib import Path\nfrom tailguard.live.journal import Journal\nJournal(Path({str(path)!r}))"
        run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert run.returncode == 1
    assert "another process is trading with this journal" in run.stderr


def test_a_record_is_flushed_to_disk_before_append_returns(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The system is asked for the flush once a record, after all its bytes are written."""
    flushed: list[int] = []
    sync = os.fsync
    path = tmp_path / "journal.jsonl"
    with Journal(path) as journal:

        def watched(descriptor: int) -> None:
            flushed.append(path.stat().st_size)
            sync(descriptor)

        monkeypatch.setattr(os, "fsync", watched)
        for number in range(3):
            journal.append("bar", number)
            assert flushed[-1] == path.stat().st_size
            assert len(flushed) == number + 1


@contextmanager
def files_up_to(size: int) -> Iterator[None]:
    """No file of this process grows beyond it: a write fails in the middle of a line, as on a full disk."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        signal.signal(signal.SIGXFSZ, handler)


@pytest.mark.parametrize("beyond", [0, 1, 60, 120, 190])
def test_a_line_that_does_not_fit_on_the_disk_leaves_the_chain_whole(tmp_path: Path, beyond: int) -> None:
    path = tmp_path / "journal.jsonl"
    with Journal(path) as journal:
        written = [journal.append("bar", number, price=0.1) for number in range(3)]
        good = path.stat().st_size
        with files_up_to(good + beyond), pytest.raises(JournalError, match=r"a line could not be written.*start again"):
            journal.append("bar", 3, text="x" * 200)
        assert path.stat().st_size == good
        # Nobody knows what the disk has kept: this process writes nothing more, although there is room again.
        with pytest.raises(JournalError, match="could not be written"):
            journal.append("bar", 4)
    assert list(read_records(path)) == written
    with Journal(path) as journal:
        assert journal.dropped == 0
        journal.append("bar", 5)
    assert [record["time"] for record in read_records(path)] == [0, 1, 2, 5]


def test_a_flush_that_fails_ends_the_journal(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "journal.jsonl"
    with Journal(path) as journal:
        journal.append("bar", 0)

        def fails(_: int) -> None:
            raise OSError(5, "Input/output error")

        monkeypatch.setattr(os, "fsync", fails)
        for _ in range(2):
            with pytest.raises(JournalError, match="Input/output error"):
                journal.append("bar", 1)
        monkeypatch.undo()
        with pytest.raises(JournalError):
            journal.append("bar", 2)
    assert [record["time"] for record in read_records(path)] == [0]


def test_an_order_whose_intent_does_not_fit_on_the_disk_is_not_sent(paper_world: WorldMaker) -> None:
    world = paper_world()
    session = world.session()
    world.trade(session, 5)
    record = session.ledger.record

    def full(kind: str, **content) -> None:
        with files_up_to(world.journal_path.stat().st_size + 10) if kind == "intent" else nullcontext():
            record(kind, **content)

    session.ledger.record = full
    with pytest.raises(JournalError, match="could not be written"):
        world.trade(session, 1)
    assert len(world.venue.sends) == 5
    world.trade(world.session(), 5)
    assert len(world.venue.sends) == 11
    assert not world.records("freeze")
