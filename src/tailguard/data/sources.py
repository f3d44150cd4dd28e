"""Bars from files and data frames: one, several or a folder of them, one symbol or many; read, checked, sorted."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from dataclasses import dataclass, replace
from datetime import timedelta
from functools import reduce
from typing import Literal, get_args

import polars as pl

from tailguard.data.bars import OPTIONAL, REQUIRED, Bars, with_segments
from tailguard.data.calendars import AUTO, CalendarSource
from tailguard.data.check_bars import validate as validate_frame
from tailguard.data.checks import Gaps
from tailguard.data.columns import (
    column_label,
    extra_columns,
    read_numbers,
    read_times,
    recognise,
    symbol_column,
    symbol_of,
)
from tailguard.data.corporate_actions import Adjust, adjusted, dividend_note
from tailguard.data.findings import Report, error_message, warning_message
from tailguard.data.frames import Frame, frame_name, is_frame, read_frame
from tailguard.data.frequency import parse_frequency
from tailguard.data.layouts import check_prices_scaled, rows_of_wide, with_one_time
from tailguard.data.readers import Paths, check_memory, files_of, name_of, read_file, with_names
from tailguard.data.universe import universe_of
from tailguard.data.volume_unit import VolumeUnit, typical_price
from tailguard.errors import BarsError, BarsWarning
from tailguard.validate import check_choice

UniverseKind = Literal["common", "ragged"]


@dataclass(frozen=True)
class Source:
    """Content of the files as read: columns recognised, values as numbers and times, not yet checked."""

    name: str
    frame: pl.DataFrame
    """Laid out as `tailguard.data.checks` says; each symbol's files follow each other in the order of their times."""
    extra: tuple[str, ...]
    """Numeric columns that are not bars' fields, kept for custom features; they are not checked."""
    ignored: tuple[str, ...]
    """Other columns that are not bars' fields."""
    dropped: tuple[str, ...]
    """Optional fields that only some of the files have; they are dropped."""
    filled: tuple[str, ...] = ()
    """Fields that some of the files do not have: volume is 0 there, and all prices are the close."""
    adjust: Adjust = "none"
    """What the prices have been adjusted for here."""

    @property
    def notes(self) -> tuple[str, ...]:
        """What a user must know about the fields that were filled in."""
        closes = "closes only: open, high and low are the close, so orders fill at the next close"
        volume = (
            "no volume: orders cannot be limited or priced by it; trade with market.participation=inf and "
            "market.impact=0"
        )
        dividends = dividend_note(self.frame, self.adjust)
        return (
            *([closes] if "open" in self.filled else []),
            *([volume] if "volume" in self.filled else []),
            *([] if dividends is None else [dividends]),
        )


def load_bars(
    path: Paths | Frame,
    *,
    symbol: str | None = None,
    frequency: str | None = None,
    calendar: CalendarSource = AUTO,
    gaps: Gaps = "error",
    volume_unit: VolumeUnit = "base",
    adjust: Adjust = "none",
    events: Frame | Paths | None = None,
    universe: UniverseKind = "common",
    delistings: Mapping[str, float] | None = None,
    validate: bool = True,
) -> Bars:
    """Read bars and check them.

    Args:
        path: a CSV (also .csv.gz, or a .zip of one), Parquet or Feather file, a folder of them, or a list of files;
            or a pandas or Polars frame with the same columns. Times without a zone are UTC.
        symbol: the symbol to select if there are several, or its name if the files do not give one.
        frequency: the length the bars must have, like "1h"; None takes the most common difference of their times.
        calendar: when the market trades: "24/7"; "auto", inferred from the bars; "fx"; a name of exchange_calendars
            like "XNYS"; a list of sessions, each a date (also at midnight, as pandas has it) or a pair of datetimes,
            open and close; or a .csv or .parquet file of them. Bars are missing only where the calendar has them.
        gaps: "error" refuses missing bars; "split" keeps the bars and starts a new segment after each gap, which
            no episode crosses.
        volume_unit: "quote" says that the volume column counts quote units (dollars); it is divided by each bar's
            typical price, (high + low + close) / 3.
        adjust: "splits", "dividends" or "all": prices and volumes before them are adjusted, from the columns dividend
            and split of the bars or from `events`. "none": the prices are used as they are.
        events: a file or frame with the columns date, dividend, split and, for several symbols, symbol.
        universe: "common": a portfolio trades the times that all symbols have. "ragged": those that any has; members
            are listed, halted and delisted, and the weights of absent ones are 0.
        delistings: price of a symbol after its last bar, in a ragged universe; without one, its last close.
        validate: False checks the times only, not prices and volumes.

    Raises:
        BarsError: the files cannot be read, or a check failed; the message names file, row, time and values.

    Warns:
        BarsWarning: the bars are usable and look suspicious.
    """
    source = with_adjusted(read_source(path, symbol=symbol), adjust, events)
    report = check_source(
        source,
        frequency=frequency,
        calendar=calendar,
        gaps=gaps,
        volume_unit=volume_unit,
        times_only=not validate,
        universe=universe,
    )
    if report.errors:
        raise BarsError(error_message(report))
    if source.dropped:
        warnings.warn(
            f"{source.name}: left out because only some of the files have it: {', '.join(source.dropped)}",
            BarsWarning,
            stacklevel=2,
        )
    for check in report.warnings:
        warnings.warn(warning_message(check), BarsWarning, stacklevel=2)
    return bars_of(source, report, volume_unit, universe, delistings)


def bars_of(
    source: Source,
    report: Report,
    volume_unit: VolumeUnit = "base",
    universe: UniverseKind = "common",
    delistings: Mapping[str, float] | None = None,
) -> Bars:
    """The bars of a source whose report has no errors."""
    check_choice("universe", universe, get_args(UniverseKind))
    frame = source.frame.drop("file", "row", "unreadable")
    if volume_unit == "quote":
        frame = frame.with_columns(pl.col("volume") / typical_price())
    timetable = report.timetable
    assert timetable is not None  # every check needs one
    sessions = timetable.pace if timetable.has_sessions else None
    if universe == "common":
        if delistings:
            raise BarsError(f"{source.name}: delistings need universe='ragged', in which symbols come and go")
        rows = with_segments(frame, timetable)
        return Bars(rows, report.frequency, source.name, sessions=sessions, daily_closes=timetable.daily_closes)
    frame = with_segments(frame, timetable, ragged=True)
    members = universe_of(frame, delistings or {}, source.name)
    return Bars(
        frame,
        report.frequency,
        source.name,
        sessions=sessions,
        universe=members,
        daily_closes=timetable.daily_closes,
    )


def with_adjusted(source: Source, adjust: Adjust, events: Frame | Paths | None = None) -> Source:
    """The source with its prices adjusted; see `load_bars`."""
    frame = adjusted(source.frame, source.name, adjust, events)
    return source if frame is source.frame else replace(source, frame=frame, adjust=adjust)


def check_source(
    source: Source,
    *,
    frequency: str | None = None,
    calendar: CalendarSource = AUTO,
    gaps: Gaps = "error",
    volume_unit: VolumeUnit = "base",
    times_only: bool = False,
    universe: UniverseKind = "common",
) -> Report:
    """Run every check, errors and warnings together; see `load_bars` for the arguments."""
    report = validate_frame(
        source.frame.drop(source.extra),
        source.name,
        frequency=parse_frequency(frequency) if frequency else None,
        calendar=calendar,
        gaps=gaps,
        volume_unit=volume_unit,
        times_only=times_only,
        ragged=universe == "ragged",
        ignored=(*map(column_label, source.ignored), *(f"{name} (not in every file)" for name in source.dropped)),
        extra=source.extra,
    )
    return replace(report, notes=(*report.notes, *source.notes))


def read_source(path: Paths | Frame, *, symbol: str | None = None) -> Source:
    """Read the files of `path`, or the frame, and put each symbol's bars together."""
    if is_frame(path):
        name = frame_name(path)
        tables = [Table.of(rows_of_wide(with_one_time(with_names(read_frame(path))), name), name, "bars")]
    else:
        files, name = files_of(path), name_of(path)
        check_memory(files, name)
        tables = [
            Table.of(rows_of_wide(with_one_time(read_file(file)), str(file)), str(file), symbol_of(file))
            for file in files
        ]
    has = [set(table.frame.columns) for table in tables]
    common, any_ = reduce(set.intersection, has), reduce(set.union, has)
    dropped = tuple(field for field in OPTIONAL if field in any_ - common)
    extra = tuple(column for column in tables[0].extra if column in common)
    fields = (*REQUIRED, *(field for field in OPTIONAL if field in common), *extra)
    frame = pl.concat([table.frame.select("file", "row", "unreadable", "symbol", "time", *fields) for table in tables])
    if symbol is not None:
        frame = _pick(frame, symbol, name, named=any(table.names_symbols for table in tables))
    if frame.is_empty():
        raise BarsError(f"{name}: no bars")
    if frame["symbol"].n_unique() > 1 or len(tables) > 1:
        # A stable sort: the rows of one file keep their order, which the checks inspect.
        begins = pl.col("time").drop_nulls().first().over("symbol", "file")
        frame = frame.sort("symbol", begins, maintain_order=True)
    ignored = dict.fromkeys(column for table in tables for column in table.ignored if column not in extra)
    filled = tuple(field for field in REQUIRED if any(field in table.filled for table in tables))
    return Source(name, frame, extra, tuple(ignored), dropped, filled)


@dataclass(frozen=True)
class Table:
    """One file, a piece of one, or a frame, as read: laid out as `Source.frame`."""

    frame: pl.DataFrame
    extra: tuple[str, ...]
    """Numeric columns of the frame that are not bars' fields."""
    ignored: tuple[str, ...]
    """All columns that are not bars' fields."""
    names_symbols: bool
    filled: tuple[str, ...] = ()
    """Fields that the table does not have."""

    @staticmethod
    def of(raw: pl.DataFrame, path: str, symbol: str, first_row: int = 1) -> Table:
        """Recognise the columns of `raw`, whose first row is the file's `first_row`; `symbol` if no column names it."""
        recognised = recognise(raw.columns, path, table_symbol(raw, symbol))
        fields = recognised.fields
        check_prices_scaled(raw, fields["close"], path)
        columns = {name: read_numbers(raw[fields[name]]) for name in (*REQUIRED, *OPTIONAL) if name in fields}
        try:
            columns["time"] = read_times(raw[fields["time"]])
        except BarsError as error:
            raise BarsError(f"{path}: {error}") from None
        if raw.height and columns["time"].count() == 0:
            raise BarsError(
                f"{path}: no value of column {column_label(fields['time'])!r} is a time (the first is "
                f"{raw[fields['time']][0]!r}); write ISO like 2021-02-13 09:00, or seconds or milliseconds since 1970"
            )
        unreadable = _unreadable(raw, fields, columns)
        for name in recognised.filled:
            columns[name] = columns["close"] * 0.0 if name == "volume" else columns["close"]
        extra = extra_columns(raw, recognised.ignored)
        columns |= extra
        symbols = raw[fields["symbol"]].cast(pl.String) if "symbol" in fields else pl.lit(symbol)
        frame = pl.DataFrame({name: column.rename(name) for name, column in columns.items()}).select(
            file=pl.lit(path),
            row=pl.int_range(first_row, pl.len() + first_row, dtype=pl.Int64),
            unreadable=unreadable,
            symbol=symbols,
            **{name: pl.col(name) for name in columns},
        )
        return Table(newest_last(frame), tuple(extra), recognised.ignored, "symbol" in fields, recognised.filled)


def newest_last(frame: pl.DataFrame) -> pl.DataFrame:
    """The rows in reverse where every symbol's newest come first, as some vendors write them; else as they are."""
    falls = frame.select((pl.col("time").diff() < timedelta(0)).over("symbol").drop_nulls()).to_series()
    return frame.reverse() if len(falls) and falls.all() else frame


def table_symbol(raw: pl.DataFrame, otherwise: str) -> str:
    """The symbol of the first row, where a column names it."""
    column = symbol_column(raw.columns)
    return str(raw[column][0]) if column is not None and raw.height else otherwise


def _unreadable(raw: pl.DataFrame, fields: dict[str, str], columns: dict[str, pl.Series]) -> pl.Series:
    """Description of the unreadable values of each row; null if there are none."""
    words = pl.Series("unreadable", [None], dtype=pl.String).new_from_index(0, raw.height)
    for name, column in columns.items():
        before = raw[fields[name]]
        lost = column.is_null() & before.is_not_null()
        if lost.any():
            kind = "time" if name == "time" else "number"
            said = pl.format(
                f"{column_label(fields[name])} '{{}}' cannot be read as a {kind}", before.cast(pl.String, strict=False)
            )
            words = pl.select(pl.when(lost & words.is_null()).then(said).otherwise(words)).to_series()
    return words


def _pick(frame: pl.DataFrame, symbol: str, source: str, *, named: bool) -> pl.DataFrame:
    """The rows of `symbol`; where no column names symbols and the files agree on one, it is renamed."""
    there = frame["symbol"].unique().drop_nulls().sort().to_list()
    if symbol in there:
        return frame.filter(pl.col("symbol") == symbol)
    if named or len(there) > 1:
        raise BarsError(f"{source}: no symbol {symbol!r}; there are {', '.join(there)}")
    return frame.with_columns(symbol=pl.lit(symbol))
