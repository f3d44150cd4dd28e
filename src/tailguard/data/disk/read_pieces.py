"""Files of bars in pieces that fit in memory, however large the files are."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import polars as pl

from tailguard.data.columns import recognise, symbol_of
from tailguard.data.layouts import rows_of_wide, with_one_time
from tailguard.data.readers import (
    IPC,
    READING_ERRORS,
    first_cells,
    header_of_levels,
    is_data,
    is_preamble,
    open_csv,
    read_csv,
    read_file,
    unreadable,
    with_names,
)
from tailguard.data.sources import Table, table_symbol
from tailguard.errors import BarsError

CSV_ROW_BYTES = 100
"""Approximate size of a bar in a CSV file; converts rows per piece into bytes per piece."""
LONGEST_LINE = 2**20
"""Bytes; a longer line is not a row of bars, and would be read into memory as a whole."""


def read_pieces(path: Path, rows: int) -> Iterator[Table]:
    """The file's bars, about `rows` at a time, in its own order."""
    first = 1
    try:
        for raw in map(with_one_time, _raw_pieces(path, rows)):
            yield Table.of(raw, str(path), symbol_of(path), first)
            first += raw.height
    except READING_ERRORS as error:
        raise unreadable(path, error) from error
    if first == 1:
        raise BarsError(f"{path}: no bars")


def fields_of(path: Path) -> set[str]:
    """The fields of bars that the file has, by its columns alone."""
    raw = _first_rows(path)
    if rows_of_wide(raw, str(path)) is not raw:
        raise BarsError(
            f"{path}: a wide table, with a column of closes for each symbol, which cannot be read in pieces. Write "
            "rows of symbol, time and close (melt in pandas, unpivot in Polars), or load it into memory"
        )
    return set(recognise(raw.columns, str(path), table_symbol(raw, symbol_of(path))).fields)


def readable_in_pieces(path: Path) -> bool:
    """Whether a piece of the file can be understood without the others: it is neither wide nor newest first."""
    raw = _first_rows(path)
    if rows_of_wide(raw, str(path)) is not raw:
        return False
    return int(Table.of(raw, str(path), symbol_of(path)).frame["row"][0]) == 1


def _first_rows(path: Path) -> pl.DataFrame:
    try:
        raw = next(_raw_pieces(path, 1_000), None)
    except READING_ERRORS as error:
        raise unreadable(path, error) from error
    if raw is None or raw.is_empty():
        raise BarsError(f"{path}: no bars")
    return with_one_time(raw)


def _raw_pieces(path: Path, rows: int) -> Iterator[pl.DataFrame]:
    name = path.name.lower()
    if name.endswith(".parquet"):
        yield from _slices(pl.scan_parquet(path, glob=False), rows)
    elif name.endswith(IPC):
        yield from _slices(pl.scan_ipc(path, glob=False), rows)
    elif _has_levels(path):
        # Rows of the first symbol come first: the table is turned as a whole.
        yield read_file(path)
    else:
        for content in _csv_pieces(path, rows * CSV_ROW_BYTES):
            yield with_names(read_csv(content, str(path)))


def _has_levels(path: Path) -> bool:
    with open_csv(path) as file:
        lines = [file.readline(LONGEST_LINE)]
        while is_preamble(lines[0]):
            lines = [file.readline(LONGEST_LINE)]
        lines += [file.readline(LONGEST_LINE) for _ in range(2)]
    return bool(header_of_levels(lines, str(path)))


def _slices(table: pl.LazyFrame, rows: int) -> Iterator[pl.DataFrame]:
    count = table.select(pl.len()).collect().item()
    for start in range(0, count, rows):
        yield with_names(table.slice(start, rows).collect())


def _csv_pieces(path: Path, size: int) -> Iterator[bytes]:
    """The text split between lines, with the header in front of each piece."""
    with open_csv(path) as file:
        first = file.readline(LONGEST_LINE)
        while is_preamble(first):
            first = file.readline(LONGEST_LINE)
        cells, _ = first_cells(first, str(path))
        header = b"" if is_data(cells) else first
        rest = first if not header else b""
        while True:
            block = file.read(size)
            if not block:
                break
            whole, line_end, cut = (rest + block).rpartition(b"\n")
            if line_end and whole.strip():
                yield header + whole
                rest = cut
            else:
                rest += block
            if len(rest) > LONGEST_LINE:
                raise BarsError(f"{path}: cannot be read: a line is longer than {LONGEST_LINE:,} bytes")
        if rest.strip():
            yield header + rest
