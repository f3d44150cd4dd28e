"""Bars from files: CSV, Parquet and Feather, one file, several or a folder, one symbol or many."""

from __future__ import annotations

import contextlib
import csv
import gzip
import io
import re
import warnings
import zipfile
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import reduce
from pathlib import Path
from typing import IO, cast

import polars as pl

from tailguard.data.bars import OPTIONAL, REQUIRED, Bars, with_segments
from tailguard.data.checks import Gaps
from tailguard.data.columns import (
    POSITIONAL,
    column_label,
    positional_names,
    read_numbers,
    read_times,
    recognise,
    symbol_of,
)
from tailguard.data.findings import Report, error_message, warning_message
from tailguard.data.frequency import parse_frequency
from tailguard.data.mapped import MANIFEST
from tailguard.data.validation import validate as validate_frame
from tailguard.data.volume_unit import VolumeUnit, typical_price
from tailguard.errors import BarsError, BarsWarning
from tailguard.memory import free_memory, in_words

Paths = str | Path | Sequence[str | Path]

READING_ERRORS = (OSError, EOFError, UnicodeDecodeError, zipfile.BadZipFile, zlib.error, pl.exceptions.PolarsError)
COPIES = 2
"""Times that the bars are in memory while they are read: as the file has them, and as numbers."""
_SUFFIXES = (".csv", ".csv.gz", ".zip", ".parquet", ".feather", ".arrow", ".ipc")


@dataclass(frozen=True)
class Source:
    """What the files hold, as read: columns recognised, values as numbers and times, nothing checked."""

    name: str
    frame: pl.DataFrame
    """Laid out as `tailguard.data.checks` says; each symbol's files follow each other in the order of their times."""
    ignored: tuple[str, ...]
    """Columns that are not bars' fields."""
    dropped: tuple[str, ...]
    """Optional fields that some files have and others do not, so that none is kept."""


def load_bars(
    path: Paths,
    *,
    symbol: str | None = None,
    frequency: str | None = None,
    gaps: Gaps = "error",
    volume_unit: VolumeUnit = "base",
    validate: bool = True,
) -> Bars:
    """Read bars and make sure that they can be trusted.

    Args:
        path: a CSV (also .csv.gz, or a .zip of one), Parquet or Feather file, a folder of them, or a list of files.
        symbol: the symbol to pick where there are several, or the name to give where the files tell none.
        frequency: the length the bars must have, like "1h"; None takes the most common difference of their times.
        gaps: "error" refuses missing bars; "split" keeps what there is and starts a new segment after each gap, which
            no episode crosses.
        volume_unit: "quote" says that the volume column counts quote units (dollars); it is divided by each bar's
            typical price, (high + low + close) / 3.
        validate: False checks the times only, not prices and volumes.

    Raises:
        BarsError: the files cannot be read, or a check failed; the message names file, row, time and values.

    Warns:
        BarsWarning: the bars are usable and look suspicious.
    """
    source = read_source(path, symbol=symbol)
    report = check_source(source, frequency=frequency, gaps=gaps, volume_unit=volume_unit, times_only=not validate)
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
    frame = source.frame.drop("file", "row", "unreadable")
    if volume_unit == "quote":
        frame = frame.with_columns(pl.col("volume") / typical_price())
    return Bars(with_segments(frame, report.frequency), report.frequency, source.name)


def check_source(
    source: Source,
    *,
    frequency: str | None = None,
    gaps: Gaps = "error",
    volume_unit: VolumeUnit = "base",
    times_only: bool = False,
) -> Report:
    """Every check on what was read, errors and warnings together; see `load_bars` for the arguments."""
    return validate_frame(
        source.frame,
        source.name,
        frequency=parse_frequency(frequency) if frequency else None,
        gaps=gaps,
        volume_unit=volume_unit,
        times_only=times_only,
        ignored=(*map(column_label, source.ignored), *(f"{name} (not in every file)" for name in source.dropped)),
    )


def read_source(path: Paths, *, symbol: str | None = None) -> Source:
    """Read the files of `path` and put each symbol's bars together."""
    files = files_of(path)
    _check_memory(files, name_of(path))
    tables = [Table.of(_read(file), file) for file in files]
    has = [set(table.frame.columns) for table in tables]
    common, any_ = reduce(set.intersection, has), reduce(set.union, has)
    dropped = tuple(name for name in OPTIONAL if name in any_ - common)
    order = ["file", "row", "unreadable", "symbol", "time", *REQUIRED, *(name for name in OPTIONAL if name in common)]
    frame = pl.concat([table.frame.select(order) for table in tables])
    name = name_of(path)
    if symbol is not None:
        frame = _pick(frame, symbol, name, named=any(table.names_symbols for table in tables))
    if frame.is_empty():
        raise BarsError(f"{name}: no bars")
    if frame["symbol"].n_unique() > 1 or len(files) > 1:
        # A stable sort: the rows of one file keep their order, which the checks judge.
        begins = pl.col("time").drop_nulls().first().over("symbol", "file")
        frame = frame.sort("symbol", begins, maintain_order=True)
    ignored = dict.fromkeys(column for table in tables for column in table.ignored)
    return Source(name, frame, tuple(ignored), dropped)


def _check_memory(files: Sequence[Path], name: str) -> None:
    """Refuse files that cannot fit, before a byte of them is read; the estimate is below what they really take."""
    needed, free = 0.0, free_memory()
    for file in files:
        size = file.stat().st_size
        if 20 * size < free / len(files):  # too small to be worth a look inside
            continue
        try:
            columns = 1 + len(REQUIRED)
            if file.name.lower().endswith(".parquet"):
                needed += 8 * columns * COPIES * pl.scan_parquet(file, glob=False).select(pl.len()).collect().item()
            else:
                needed += COPIES * size
        except pl.exceptions.PolarsError as error:
            raise BarsError(f"{file}: cannot be read: {error}") from error
    if needed > free:
        raise BarsError(
            f"{name}: these bars take at least {in_words(needed)} of memory, and {in_words(free)} are free. Prepare "
            "them once and train from disk: tailguard data prepare"
        )


@dataclass(frozen=True)
class Table:
    """One file, or a piece of one, as read: laid out as `Source.frame`."""

    frame: pl.DataFrame
    ignored: tuple[str, ...]
    names_symbols: bool

    @staticmethod
    def of(raw: pl.DataFrame, path: Path, first_row: int = 1) -> Table:
        """Recognise the columns of `raw`, whose first row is the file's `first_row`."""
        recognised = recognise(raw.columns, str(path))
        fields = recognised.fields
        columns = {name: read_numbers(raw[fields[name]]) for name in (*REQUIRED, *OPTIONAL) if name in fields}
        columns["time"] = read_times(raw[fields["time"]])
        if raw.height and columns["time"].count() == 0:
            raise BarsError(
                f"{path}: no value of column {column_label(fields['time'])!r} is a time (the first is "
                f"{raw[fields['time']][0]!r}); write ISO like 2021-02-13 09:00, or seconds or milliseconds since 1970"
            )
        unreadable = _unreadable(raw, fields, columns)
        symbols = raw[fields["symbol"]].cast(pl.String) if "symbol" in fields else pl.lit(symbol_of(path))
        frame = pl.DataFrame({name: column.rename(name) for name, column in columns.items()}).select(
            file=pl.lit(str(path)),
            row=pl.int_range(first_row, pl.len() + first_row, dtype=pl.Int64),
            unreadable=unreadable,
            symbol=symbols,
            **{name: pl.col(name) for name in columns},
        )
        return Table(frame, recognised.ignored, "symbol" in fields)


def _unreadable(raw: pl.DataFrame, fields: dict[str, str], columns: dict[str, pl.Series]) -> pl.Series:
    """For each row what could not be read, in words; null where all was."""
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


def name_of(path: Paths) -> str:
    """What was given, short enough for a message."""
    given = [path] if isinstance(path, str | Path) else list(path)
    if len(given) <= 3:
        return ", ".join(map(str, given))
    return f"{given[0]} … {given[-1]} ({len(given)} paths)"


def files_of(path: Paths) -> list[Path]:
    given = [Path(path)] if isinstance(path, str | Path) else [Path(one) for one in path]
    files: list[Path] = []
    for one in given:
        if (one / MANIFEST).is_file():
            raise BarsError(
                f"{one}: a prepared market, not files of bars; train on it with --data, or open it with "
                "tailguard.open_market"
            )
        if one.is_dir():
            inside = sorted(file for file in one.iterdir() if file.name.lower().endswith(_SUFFIXES))
            if not inside:
                raise BarsError(f"{one}: no bars in this folder; files of bars end in {', '.join(_SUFFIXES)}")
            files += inside
        elif not one.exists():
            raise BarsError(f"{one}: no such file or folder")
        elif not one.name.lower().endswith(_SUFFIXES):
            raise BarsError(f"{one}: not a format Tailguard reads; files of bars end in {', '.join(_SUFFIXES)}")
        else:
            files.append(one)
    if not files:
        raise BarsError("no file of bars was given")
    return files


def _read(path: Path) -> pl.DataFrame:
    """The file's table with columns named; header-less tables get the names of their kind."""
    name = path.name.lower()
    try:
        if name.endswith(".parquet"):
            raw = pl.read_parquet(path, glob=False)
        elif name.endswith((".feather", ".arrow", ".ipc")):
            raw = pl.read_ipc(path)
        else:
            with open_csv(path) as file:
                raw = read_csv(file.read(), str(path))
    except READING_ERRORS as error:
        raise BarsError(f"{path}: cannot be read: {error}") from error
    return with_names(raw)


def with_names(raw: pl.DataFrame) -> pl.DataFrame:
    """The table with its columns named, where they are numbered."""
    names = positional_names(raw.columns)
    return raw if names is None else raw.rename(dict(zip(raw.columns, names, strict=True)))


@contextlib.contextmanager
def open_csv(path: Path) -> Iterator[IO[bytes]]:
    """The text of a CSV file, unpacked."""
    if path.name.lower().endswith(".gz"):
        with gzip.open(path) as text:
            yield cast(IO[bytes], text)
    elif path.name.lower().endswith(".zip"):
        with zipfile.ZipFile(path) as archive:
            inside = [entry for entry in archive.namelist() if entry.lower().endswith(".csv")]
            if len(inside) != 1:
                raise BarsError(f"{path}: holds {len(inside)} CSV files, not one; unpack it and give the folder")
            with archive.open(inside[0]) as unpacked:
                yield unpacked
    else:
        with path.open("rb") as file:
            yield file


def read_csv(content: bytes, file: str) -> pl.DataFrame:
    """Every cell as text, so that one bad cell is reported with its row instead of spoiling the column."""
    content = content.rstrip()
    if not content:
        raise BarsError(f"{file}: empty")
    first = content.split(b"\n", 1)[0].decode("utf-8-sig").rstrip("\r")
    separator = max(",;\t", key=first.count)
    try:
        cells = next(csv.reader(io.StringIO(first), delimiter=separator), [])
    except csv.Error as error:
        raise BarsError(f"{file}: not readable as CSV: {error}") from error
    if not cells:
        raise BarsError(f"{file}: the first line is empty; it must name the columns")
    if not is_data(cells):
        return pl.read_csv(content, separator=separator, infer_schema=False)
    if len(cells) not in POSITIONAL:
        raise BarsError(
            f"{file}: no header, and {len(cells)} columns. Without a header 6 (ccxt) or 12 (Binance klines) columns "
            "are understood; add a first line that names them"
        )
    names = list(POSITIONAL[len(cells)])
    return pl.read_csv(content, separator=separator, infer_schema=False, has_header=False, new_columns=names)


def is_data(cells: list[str]) -> bool:
    """Whether a table's first line is bars already: a time and numbers, and not 0, 1, 2 … for names."""
    if cells == [str(place) for place in range(len(cells))]:
        return False
    is_number = re.compile(r"\s*[+-]?(\d+\.?\d*|\.\d+)([eE][+-]?\d+)?\s*").fullmatch
    is_time = re.compile(r"\s*\d{4}-\d\d-\d\d.*").fullmatch
    return bool(is_number(cells[0]) or is_time(cells[0])) and all(map(is_number, cells[1:])) and len(cells) > 1
