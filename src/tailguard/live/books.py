"""The books of a paper venue, and the file that keeps them."""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from decimal import Decimal
from pathlib import Path
from typing import Any

Order = dict[str, Any]
"""JSON-serialisable: id, number, symbol, quantity, limit, kind, reduce_only, filled, price, open, accepted, updated."""


@dataclass
class Books:
    """All that the venue knows: it survives the venue's restart."""

    cash: float
    positions: dict[str, Decimal]
    row: int
    """The bar that is forming, or the last one where the market is closed."""
    before: float
    """Equity at the last close: costs are shares of it."""
    used: dict[str, float]
    """Notional traded in this bar, by symbol: it counts against the bar's capacity."""
    orders: dict[str, Order] = field(default_factory=dict)
    """Orders by client id, in the order of acceptance."""
    forced: list[tuple[int, str, str, int]] = field(default_factory=list)
    """Liquidations: number, symbol, quantity and time."""
    closed: bool = False
    """Whether the bar has ended and none has followed: in a gap, and after the last bar."""
    entries: dict[str, float] = field(default_factory=dict)
    """Average price of each open position."""
    time: int = 0
    """The clock when the books were last written."""


ACCOUNT = tuple(item.name for item in fields(Books) if item.name not in ("orders", "forced"))
SCHEMA = """
CREATE TABLE IF NOT EXISTS account (name TEXT PRIMARY KEY, value TEXT NOT NULL);
CREATE TABLE IF NOT EXISTS orders (id TEXT PRIMARY KEY, number INTEGER NOT NULL, content TEXT NOT NULL);
CREATE TABLE IF NOT EXISTS forced (number INTEGER PRIMARY KEY, symbol TEXT, quantity TEXT, time INTEGER);
"""


class BookStore:
    """A SQLite file with the books. A write is one transaction: it is on disk, or it has not happened."""

    def __init__(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        # One thread at a time uses it, but a server may be made in one and run in another.
        self._file = sqlite3.connect(path, isolation_level=None, check_same_thread=False)
        self._file.execute("PRAGMA journal_mode = WAL")
        self._file.execute("PRAGMA synchronous = FULL")
        self._file.executescript(SCHEMA)

    def read(self) -> Books | None:
        """The books as they were last written; None in a new file."""
        account = {name: json.loads(value) for name, value in self._file.execute("SELECT name, value FROM account")}
        if not account:
            return None
        account["positions"] = {symbol: Decimal(size) for symbol, size in account["positions"].items()}
        orders = [
            json.loads(content) for (content,) in self._file.execute("SELECT content FROM orders ORDER BY number")
        ]
        forced = list(self._file.execute("SELECT number, symbol, quantity, time FROM forced ORDER BY number"))
        return Books(**account, orders={order["id"]: order for order in orders}, forced=forced)

    def write(self, books: Books, orders: Mapping[str, Order]) -> None:
        """Write the account, all liquidations, and the orders that have changed."""
        account = [(name, json.dumps(getattr(books, name), default=str)) for name in ACCOUNT]
        changed = [(each["id"], each["number"], json.dumps(each)) for each in orders.values()]
        self._file.execute("BEGIN IMMEDIATE")
        self._file.executemany("INSERT OR REPLACE INTO account VALUES (?, ?)", account)
        self._file.executemany("INSERT OR REPLACE INTO orders VALUES (?, ?, ?)", changed)
        self._file.executemany("INSERT OR IGNORE INTO forced VALUES (?, ?, ?, ?)", books.forced)
        self._file.execute("COMMIT")

    def close(self) -> None:
        self._file.close()
