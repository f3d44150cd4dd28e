"""Trading calendars: which bars a market should have, and how many there are in a day, a week and a year.

A calendar is `24/7`; `auto`, inferred from the bars; `fx`, Sunday to Friday 17:00 New York; a name of
exchange_calendars such as XNYS; or sessions of one's own. On bars it becomes a `Timetable`: the open times that the
market should have. A bar is missing where the timetable has a time and the data has none.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, date, datetime, time, timedelta
from pathlib import Path
from typing import Any
from zoneinfo import ZoneInfo

import numpy as np
import polars as pl
from numpy.typing import NDArray

from tailguard.data.auto_calendar import inferred_grid
from tailguard.data.pace import DAY_MS, DAYS_PER_YEAR, Pace
from tailguard.errors import BarsError

Times = NDArray[np.int64]
"""Rising times in milliseconds since 1970-01-01 UTC."""
Session = tuple[datetime, datetime] | date
"""Open and close of a session (UTC where they name no zone), or its date, for daily bars."""
CalendarSource = str | Path | Sequence[Session]

ALWAYS, AUTO, FX = "24/7", "auto", "fx"
WEEK_MS = 7 * DAY_MS
MIDNIGHT = time()
MONDAY_MS = 4 * DAY_MS
"""1970-01-05 was a Monday."""


@dataclass(frozen=True)
class Sessions:
    """Open and close of each session, and the date it is named after."""

    opens: Times
    closes: Times
    dates: Times

    def dates_of(self, times: Times, zone: ZoneInfo | None) -> Times:
        """00:00 UTC of the date of each daily bar: its UTC date where all open at 00:00 UTC; else of the session that
        it opens in, which may have begun the evening before, or its local date."""
        days = times // DAY_MS * DAY_MS
        if (days == times).all():
            return days
        place = np.maximum(np.searchsorted(self.opens, times, side="right") - 1, 0)
        inside = (times >= self.opens[place]) & (times < self.closes[place])
        return np.where(inside, self.dates[place], dates_of(times, zone))

    def closes_of(self, dates: Times) -> Times:
        """The close of the last session of each date; 24 hours after 00:00 UTC where the date has none."""
        place = np.searchsorted(self.dates, dates, side="right") - 1
        found = self.dates[np.maximum(place, 0)] == dates
        return np.where(found, self.closes[np.maximum(place, 0)], dates + DAY_MS)


@dataclass(frozen=True)
class DailyCloses:
    """When the daily bars of a calendar close."""

    sessions: Sessions
    zone: ZoneInfo | None

    def __call__(self, times: Times) -> Times:
        """The close of each bar, ms, by its stamp."""
        return self.sessions.closes_of(self.sessions.dates_of(times, self.zone))


@dataclass(frozen=True)
class Timetable:
    """The bars of one length that a market should have."""

    name: str
    """As the user named it."""
    step: int
    """Length of a bar in milliseconds."""
    pace: Pace
    grid: Times | None = None
    """Open times of all bars from the first to the last; None: one bar after the other, around the clock."""
    zone: ZoneInfo | None = None
    """Where a daily bar that does not open at 00:00 UTC has its date."""
    holidays: int = 0
    """Days of the usual trading week on which no symbol has a bar, where the calendar was inferred."""
    sessions: Sessions | None = None
    """Of daily bars, where the calendar names them."""

    @property
    def daily_closes(self) -> DailyCloses | None:
        """When daily bars close; None: a bar's length after it opens."""
        return None if self.sessions is None else DailyCloses(self.sessions, self.zone)

    @property
    def has_sessions(self) -> bool:
        return self.grid is not None

    def missing_before(self, times: Times) -> Times:
        """Bars missing between each time and the one before it, [R]; 0 for the first."""
        if len(times) == 0:
            return np.zeros(0, np.int64)
        if self.grid is None:
            missing = np.diff(times) // self.step - 1
        else:
            keys = self.keys(times)
            missing = np.searchsorted(self.grid, keys[1:]) - np.searchsorted(self.grid, keys[:-1], side="right")
        return np.concatenate([np.zeros(1, np.int64), np.maximum(missing, 0)])

    def breaks(self, times: Times) -> NDArray[np.bool_]:
        """Whether a new segment starts at each time because bars are missing before it, [R]."""
        if self.grid is None:
            return np.concatenate([np.zeros(min(len(times), 1), bool), np.diff(times) != self.step])
        return self.missing_before(times) > 0

    def outside(self, times: Times) -> NDArray[np.bool_]:
        """Times that the timetable does not have, [R]; the check of the frequency names them around the clock."""
        if self.grid is None:
            return np.zeros(len(times), bool)
        keys = self.keys(times)
        place = np.minimum(np.searchsorted(self.grid, keys), len(self.grid) - 1)
        return np.asarray(self.grid[place] != keys)

    def keys(self, times: Times) -> Times:
        """The times as the grid has them: those of daily bars are dates."""
        if self.step != DAY_MS:
            return times
        return dates_of(times, self.zone) if self.sessions is None else self.sessions.dates_of(times, self.zone)

    def describe(self) -> str:
        """One sentence for people."""
        if not self.has_sessions:
            return "trades around the clock"
        text = f"{self.pace.per_week:g} bars a week, {self.pace.per_year:,.1f} a year"
        if self.name != AUTO:
            return f"{self.name}: {text}"
        taken = f"; {self.holidays:,} days without any bar taken for holidays" if self.holidays else ""
        return f"inferred from the bars: {text}{taken}"


def around_the_clock(frequency: timedelta) -> Timetable:
    """The timetable of a market that never closes."""
    step = frequency // timedelta(milliseconds=1)
    return Timetable(ALWAYS, step, Pace.of_frequency(step))


def timetable_of(calendar: CalendarSource, times: Iterable[Times], step: int) -> Timetable:
    """The timetable of a calendar for these times, one array for each symbol, and bars of `step` milliseconds."""
    calendar = calendar if isinstance(calendar, str | Path) else list(calendar)
    every = _union(times)
    always = around_the_clock(timedelta(milliseconds=step))
    if calendar == ALWAYS or len(every) == 0:
        return always
    if calendar == AUTO:
        inferred = inferred_grid(dates_of(every, None) if step == DAY_MS else every, step)
        if inferred is None:
            return always
        grid, holidays = inferred
        return Timetable(AUTO, step, _pace(grid, _yearly_by_weeks(grid)), grid, holidays=holidays)
    if step > DAY_MS:
        raise BarsError(f"calendar {_name(calendar)!r}: bars longer than a day have no sessions; use calendar='24/7'")
    name, sessions, zone, years = _sessions(calendar, every)
    grid = _grid(sessions, every, step)
    per_year = len(grid) / years if years else _yearly_by_weeks(grid)
    daily = sessions if step == DAY_MS else None
    timetable = Timetable(name, step, _pace(grid, per_year), grid, zone, sessions=daily)
    first, last = timetable.keys(every[[0, -1]])
    return replace(timetable, grid=grid[(grid >= first) & (grid <= last)])


def dates_of(times: Times, zone: ZoneInfo | None) -> Times:
    """00:00 UTC of the day of each daily bar: of its UTC date, or of its local date if it opens at another time."""
    days = times // DAY_MS * DAY_MS
    if zone is None or (days == times).all():
        return days
    local = np.array(
        [round(datetime.fromtimestamp(ms / 1000, zone).replace(tzinfo=UTC).timestamp() * 1000) for ms in times],
        np.int64,
    )
    return local // DAY_MS * DAY_MS


def _union(times: Iterable[Times]) -> Times:
    found = np.zeros(0, np.int64)
    for each in times:
        own = np.unique(np.asarray(each, np.int64))
        found = own if len(found) == 0 else found if np.array_equal(found, own) else np.union1d(found, own)
    return found


def _pace(grid: Times, per_year: float) -> Pace:
    """Usual day and week: the most common number of bars among those that have any."""

    def usual(length: int) -> float:
        counts = np.unique((grid - MONDAY_MS) // length, return_counts=True)[1]
        sizes, times = np.unique(counts, return_counts=True)
        return float(sizes[::-1][np.argmax(times[::-1])])

    return Pace(per_year, usual(DAY_MS), usual(WEEK_MS), has_sessions=True)


def _yearly_by_weeks(grid: Times) -> float:
    """Bars a year, counted over the whole weeks that end with the last bar."""
    weeks = max(1, int(grid[-1] - grid[0]) // WEEK_MS)
    return float(np.count_nonzero(grid > grid[-1] - weeks * WEEK_MS) / (7 * weeks) * DAYS_PER_YEAR)


def _sessions(calendar: CalendarSource, times: Times) -> tuple[str, Sessions, ZoneInfo | None, int]:
    """Name, sessions, zone, and the whole years that the sessions cover; 0: only those of the record."""
    if isinstance(calendar, Path) or (isinstance(calendar, str) and calendar.lower().endswith((".csv", ".parquet"))):
        return str(calendar), _listed(_read_sessions(Path(calendar)), str(calendar)), None, 0
    if not isinstance(calendar, str):
        return "custom", _listed(list(calendar), "calendar"), None, 0
    first, last = (datetime.fromtimestamp(int(ms) / 1000, UTC).year for ms in times[[0, -1]])
    if calendar == FX:
        return calendar, _fx_sessions(first, last), ZoneInfo("America/New_York"), last - first + 1
    return _exchange_sessions(calendar, first, last)


def _exchange_sessions(name: str, first: int, last: int) -> tuple[str, Sessions, ZoneInfo, int]:
    """Sessions of a calendar of exchange_calendars from 1 January of the first year to 31 December of the last."""
    try:
        import exchange_calendars
    except ImportError:
        raise BarsError(
            f"calendar {name!r} comes from exchange_calendars, which is not installed: pip install "
            "'tailguard[calendars]'. Without it there are 24/7, auto, fx and sessions of your own"
        ) from None
    if name not in exchange_calendars.get_calendar_names():
        raise BarsError(
            f"calendar {name!r}: neither 24/7, auto, fx, a .csv or .parquet file of sessions, nor a name of "
            "exchange_calendars, such as XNYS (New York), XLON (London), XTKS (Tokyo), CMES (CME futures), 24/5"
        )
    try:
        found = exchange_calendars.get_calendar(name, start=f"{first}-01-01", end=f"{last}-12-31")
    except ValueError as error:
        raise BarsError(f"calendar {name!r} does not cover {first} to {last}: {error}") from error
    table = found.schedule
    columns = {name: table[name].dt.tz_localize(None).to_numpy().astype("datetime64[ms]") for name in table.columns}
    opens, closes, breaks, resumes = (
        columns[name].astype(np.int64) for name in ("open", "close", "break_start", "break_end")
    )
    dates = table.index.to_numpy().astype("datetime64[ms]").astype(np.int64)
    paused = ~np.isnat(columns["break_start"])
    # A lunch break makes two sessions of one date.
    sessions = Sessions(
        np.concatenate([opens, resumes[paused]]),
        np.concatenate([np.where(paused, breaks, closes), closes[paused]]),
        np.concatenate([dates, dates[paused]]),
    )
    order = np.argsort(sessions.opens, kind="stable")
    return (
        name,
        Sessions(sessions.opens[order], sessions.closes[order], sessions.dates[order]),
        ZoneInfo(str(found.tz)),
        last - first + 1,
    )


def _fx_sessions(first: int, last: int) -> Sessions:
    """Foreign exchange: five days from 17:00 to 17:00 New York, less Christmas and New Year's Day."""
    zone = ZoneInfo("America/New_York")
    opens, closes, dates = [], [], []
    day = date(first, 1, 1)
    while day <= date(last, 12, 31):
        if day.weekday() < 5 and (day.month, day.day) not in ((1, 1), (12, 25)):
            close = datetime(day.year, day.month, day.day, 17, tzinfo=zone)
            before = day - timedelta(days=1)
            opens.append(_ms(datetime(before.year, before.month, before.day, 17, tzinfo=zone)))
            closes.append(_ms(close))
            dates.append(_ms(datetime(day.year, day.month, day.day, tzinfo=UTC)))
        day += timedelta(days=1)
    return Sessions(*(np.array(values, np.int64) for values in (opens, closes, dates)))


def _listed(sessions: list[Any], name: str) -> Sessions:
    """Sessions that the user lists: dates, or pairs of open and close."""
    opens: list[int] = []
    closes: list[int] = []
    dates: list[int] = []
    for session in sessions:
        if isinstance(session, np.datetime64):
            session = session.astype("datetime64[us]").item()
        if isinstance(session, date) and (not isinstance(session, datetime) or session.time() == MIDNIGHT):
            # pandas has no dates: a list of Timestamps at midnight is one.
            start = datetime(session.year, session.month, session.day, tzinfo=UTC)
            pair = (start, start + timedelta(days=1))
        elif isinstance(session, tuple | list) and len(session) == 2 and all(isinstance(t, datetime) for t in session):
            pair = (_utc(session[0]), _utc(session[1]))
        else:
            raise BarsError(f"{name}: session {session!r} is neither a date nor a pair of datetimes, open and close")
        if pair[1] <= pair[0] or (opens and _ms(pair[0]) < closes[-1]):
            raise BarsError(f"{name}: session {pair[0]} to {pair[1]} is empty, or starts before the previous one ends")
        opens.append(_ms(pair[0]))
        closes.append(_ms(pair[1]))
        dates.append(_ms(pair[0]) // DAY_MS * DAY_MS)
    if not opens:
        raise BarsError(f"{name}: no session is listed")
    return Sessions(*(np.array(values, np.int64) for values in (opens, closes, dates)))


def _read_sessions(path: Path) -> list[Any]:
    """A file with the columns `open` and `close`, or `date`."""
    from tailguard.data.columns import read_times
    from tailguard.data.readers import read_file

    table = read_file(path)
    if {"open", "close"} <= set(table.columns):
        opens, closes = (read_times(table[name]) for name in ("open", "close"))
        return list(zip(opens.to_list(), closes.to_list(), strict=True))
    if "date" in table.columns:
        return list(read_times(table["date"]).cast(pl.Date).to_list())
    raise BarsError(f"{path}: a calendar has the columns open and close, or date; found: {', '.join(table.columns)}")


def _grid(sessions: Sessions, times: Times, step: int) -> Times:
    """Open times of the bars of these sessions. Daily bars: the sessions' dates.

    Bars of a session start with it, or at whole multiples of their length (an hour from 9:00 holds trades since 9:30):
    the grid is the one that more of the bars lie on.
    """
    if step == DAY_MS:
        return np.unique(sessions.dates)
    phase = int(np.bincount(((times % step) // 1_000).astype(np.int64)).argmax()) * 1_000
    from_open = _slots(sessions.opens, sessions.closes, step)
    by_clock = np.unique(_slots((sessions.opens - phase) // step * step + phase, sessions.closes, step))
    hits = [np.isin(times, grid, assume_unique=True).sum() for grid in (from_open, by_clock)]
    return by_clock if hits[1] > hits[0] else np.unique(from_open)


def _slots(starts: Times, closes: Times, step: int) -> Times:
    """start, start + step, … below the close of each session."""
    counts = -((starts - closes) // step)
    ends = np.cumsum(counts)
    place = np.arange(int(ends[-1])) - np.repeat(ends - counts, counts)
    return np.asarray(np.repeat(starts, counts) + place * step)


def _utc(moment: datetime) -> datetime:
    return moment.replace(tzinfo=UTC) if moment.tzinfo is None else moment.astimezone(UTC)


def _ms(moment: datetime) -> int:
    return round(moment.timestamp() * 1000)


def _name(calendar: CalendarSource) -> str:
    return str(calendar) if isinstance(calendar, str | Path) else "custom"
