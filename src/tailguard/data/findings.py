"""Results of the checks: the affected bars, their place in the user's file, and the remedy."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from datetime import datetime, timedelta
from typing import TYPE_CHECKING, Any, Literal

import polars as pl

if TYPE_CHECKING:
    from tailguard.data.calendars import Timetable

Level = Literal["ok", "skipped", "warning", "error"]
Row = dict[str, Any]

_SEVERITY: dict[Level, int] = {"ok": 0, "skipped": 1, "warning": 2, "error": 3}
CONTEXT = "context"
SHOWN = 3
"""Most rows that a check lists; the rest are counted."""


def names_in_short(names: Sequence[str]) -> str:
    """The names, or how many they are and the first of them."""
    if len(names) <= 2 * SHOWN:
        return ", ".join(names)
    return f"{', '.join(names[:SHOWN])} … ({len(names):,} in all)"


@dataclass(frozen=True)
class Offender:
    """One row of the user's data that fails a check."""

    file: str
    row: int
    """1-based data row in the file."""
    symbol: str
    time: datetime | None
    text: str
    """What is wrong there, with the values."""

    @property
    def place(self) -> str:
        """Row and time, as in `row 1041 (2021-02-13 09:00)`."""
        return f"row {self.row}" + (f" ({time_label(self.time)})" if self.time else "")

    def __str__(self) -> str:
        return f"{self.file}: {self.place}: {self.text}"


@dataclass(frozen=True)
class Check:
    """Result of one check."""

    name: str
    level: Level
    promise: str
    """Text shown when the check passes."""
    noun: str = "bar"
    """What is counted."""
    fault: str = ""
    """What is wrong with each."""
    count: int = 0
    offenders: tuple[Offender, ...] = ()
    """The first of them, at most `SHOWN`."""
    remedy: str = ""
    """What the user can do about it."""

    @property
    def summary(self) -> str:
        return f"{self.count:,} {self.noun}{'' if self.count == 1 else 's'} {self.fault}".rstrip()


@dataclass(frozen=True)
class Span:
    """Extent of one symbol's bars."""

    symbol: str
    first: datetime | None
    last: datetime | None
    bars: int
    missing: int
    """Number of bars missing between first and last."""


@dataclass(frozen=True)
class Report:
    """The checks of one source, all symbols together."""

    source: str
    frequency: timedelta
    spans: tuple[Span, ...]
    checks: tuple[Check, ...]
    ignored: tuple[str, ...] = ()
    """Columns of the files that are not used."""
    extra: tuple[str, ...] = ()
    """Numeric columns of the files that only custom features use."""
    notes: tuple[str, ...] = ()
    """Further notes for the user."""
    timetable: Timetable | None = None
    """The calendar of the bars."""

    @property
    def errors(self) -> tuple[Check, ...]:
        return tuple(check for check in self.checks if check.level == "error")

    @property
    def warnings(self) -> tuple[Check, ...]:
        return tuple(check for check in self.checks if check.level == "warning")


def number(value: float) -> str:
    """A price or volume as people write it: 46,800 and 0.0000123, never 4.68e4."""
    if 1e9 <= abs(value) < float("inf"):
        return f"{value:,.0f}"
    return f"{value:.12f}".rstrip("0") if 0 < abs(value) < 1e-4 else f"{value:,.10g}"


def time_label(time: datetime) -> str:
    return f"{time:%Y-%m-%d %H:%M:%S}" if time.second else f"{time:%Y-%m-%d %H:%M}"


def judge(
    name: str,
    promise: str,
    offending: pl.DataFrame,
    describe: Callable[[Row], str],
    *,
    noun: str = "bar",
    fault: str,
    remedy: str,
    level: Level = "error",
) -> Check:
    """The check's result from the rows that fail, if any.

    A column `context` marks rows that only provide context; they are checked with another piece.
    """
    if CONTEXT in offending.columns:
        offending = offending.filter(~pl.col(CONTEXT))
    if offending.is_empty():
        return Check(name, "ok", promise)
    offenders = tuple(
        Offender(row["file"], row["row"], row["symbol"], row["time"], describe(row))
        for row in offending.head(SHOWN).iter_rows(named=True)
    )
    return Check(name, level, promise, noun, fault, offending.height, offenders, remedy)


def skipped(name: str) -> Check:
    """A check that is not meaningful while the times are wrong."""
    return Check(name, "skipped", "not checked until the times are correct")


def merge(checks: Sequence[Check]) -> Check:
    """One check's outcomes for several symbols as one."""
    worst = max(checks, key=lambda check: (_SEVERITY[check.level], check.count > 0))
    offenders = tuple(offender for check in checks for offender in check.offenders)
    return replace(worst, count=sum(check.count for check in checks), offenders=offenders[:SHOWN])


def error_message(report: Report) -> str:
    """Failed checks: the first rows of each, the count of the rest, and the remedy."""
    return "\n".join(line for check in report.errors for line in _lines(check))


def warning_message(check: Check) -> str:
    """The warning of one check."""
    return "\n".join(_lines(check))


def _lines(check: Check) -> Iterator[str]:
    for offender in check.offenders:
        yield str(offender)
    rest = check.count - len(check.offenders)
    if rest:
        yield f"… and {rest:,} more: {check.summary} in all"
    if check.remedy:
        yield f"{check.name}: {check.remedy}"
