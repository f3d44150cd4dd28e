"""The journal: an append-only, hash-chained record of everything that must survive a crash.

One JSON object a line. Each has the SHA-256 of itself and of the line before, so a changed, removed or inserted line
breaks the chain. A line is on disk before `append` returns. A process killed in the middle of a line leaves a torn last
line, which is removed when the journal is opened again: nothing was done that it describes, because actions follow
their line. Where the disk refuses a line, its beginning is removed and the journal takes no other: nobody knows then
what the disk has kept.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, Self

from tailguard.errors import TailguardError
from tailguard.places import lock, sync_folder

GENESIS = "0" * 64
"""The hash before the first line."""
Record = Mapping[str, Any]


class JournalError(TailguardError):
    """A journal that was changed, that another process is writing, or that the disk refuses."""


def nowhere(_: str) -> None:
    """No crash point."""


class Journal:
    """The journal of one session, open for appending by one process alone.

    `crash_point`: called with the name of each moment at which a crash leaves something different on the disk.
    `sync`: flush every line to disk. Only simulations of many crashes switch it off.
    """

    def __init__(self, path: Path, *, crash_point: Callable[[str], None] = nowhere, sync: bool = True) -> None:
        self.path, self.sync, self.crash_point = path, sync, crash_point
        path.parent.mkdir(parents=True, exist_ok=True)
        is_new = not path.exists()
        # Unbuffered: what a failed write leaves in a buffer would be written later.
        self._file = path.open("ab", buffering=0)
        self._failure: OSError | None = None
        if not lock(self._file.fileno()):
            self._file.close()
            raise JournalError(f"{path}: another process is trading with this journal; stop it first")
        self.dropped = _drop_torn_line(path)
        self.records, self.head = [], GENESIS
        try:
            for record in read_records(path):
                self.records.append(record)
                self.head = str(record["hash"])
        except JournalError:
            self._file.close()
            raise
        self._size = os.fstat(self._file.fileno()).st_size
        """Bytes of whole lines."""
        if is_new and sync:
            sync_folder(path.parent)

    records: list[Record]
    """Lines that were there when it was opened; those appended later are not kept."""
    head: str
    """Hash of the last line."""

    def append(self, kind: str, time_ms: int, **content: Any) -> dict[str, Any]:
        """Write a line and return it once it is on disk."""
        self.crash_point("before append")
        record: dict[str, Any] = {"kind": kind, "time": time_ms, **content, "previous": self.head}
        record["hash"] = _digest(record)
        line = json.dumps(record, separators=(",", ":")).encode() + b"\n"
        half = len(line) // 2
        with self._whole_or_nothing():
            self._write(line[:half])
        self.crash_point("torn append")
        with self._whole_or_nothing():
            self._write(line[half:])
            if self.sync:
                os.fsync(self._file.fileno())
        self._size += len(line)
        self.head = record["hash"]
        self.crash_point("after append")
        return record

    def _write(self, content: bytes) -> None:
        while content:
            content = content[self._file.write(content) :]

    @contextmanager
    def _whole_or_nothing(self) -> Iterator[None]:
        """Remove the beginning of a line that the disk refuses, and take no other line."""
        if self._failure is None:
            try:
                yield
                return
            except OSError as error:
                self._failure = error
                with suppress(OSError):
                    os.ftruncate(self._file.fileno(), self._size)
        raise JournalError(
            f"{self.path}: a line could not be written: {self._failure}. Trading has ended, and nothing was done that "
            "is not in the journal. Make room on a disk that works and start again"
        )

    def close(self) -> None:
        self._file.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def read_records(path: Path, *, may_be_torn: bool = False) -> Iterator[dict[str, Any]]:
    """Every line in order; raises `JournalError` at the first that breaks the chain.

    `may_be_torn`: leave out a last line without its end, as another process may be writing it.
    """
    previous = GENESIS
    with path.open("rb") as file:
        for number, line in enumerate(file, 1):
            if may_be_torn and not line.endswith(b"\n"):
                return
            try:
                record = json.loads(line)
                stated = record["hash"]
            except (ValueError, TypeError, KeyError) as error:
                raise JournalError(f"{path}: line {number} is not a record of a journal") from error
            if record.get("previous") != previous:
                raise JournalError(
                    f"{path}: line {number} does not follow line {number - 1}: a line was removed or added"
                )
            if stated != _digest({key: value for key, value in record.items() if key != "hash"}):
                raise JournalError(f"{path}: line {number} was changed: its content does not match its hash")
            previous = stated
            yield record


def _digest(record: Record) -> str:
    return hashlib.sha256(json.dumps(record, sort_keys=True, separators=(",", ":")).encode()).hexdigest()


def _drop_torn_line(path: Path) -> int:
    """Remove what follows the last line end; returns the number of bytes."""
    with path.open("r+b") as file:
        size = file.seek(0, os.SEEK_END)
        # A line is short, except one with many symbols: read backwards in blocks.
        end = size
        while end:
            start = max(0, end - 65_536)
            file.seek(start)
            found = file.read(end - start).rfind(b"\n")
            if found >= 0:
                end = start + found + 1
                break
            end = start
        if end < size:
            file.truncate(end)
            os.fsync(file.fileno())
        return size - end
