"""Read files of bars as tables: CSV, Parquet and Feather, compressed or not; files that do not fit are refused."""

from __future__ import annotations

import contextlib
import csv
import gzip
import io
import re
import zipfile
import zlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import IO, cast

import polars as pl

from tailguard.data.bars import REQUIRED
from tailguard.data.columns import POSITIONAL, positional_names
from tailguard.data.disk.arrays import MANIFEST
from tailguard.data.layouts import has_fields, rows_of_levels
from tailguard.errors import BarsError
from tailguard.memory_limits import format_bytes, free_memory

Paths = str | Path | Sequence[str | Path]

READING_ERRORS = (OSError, EOFError, UnicodeDecodeError, zipfile.BadZipFile, zlib.error, pl.exceptions.PolarsError)
COPIES = 2
"""Copies of the bars in memory during reading: as in the file, and as numbers."""
CHECKING = 64
"""Minimum bytes per bar that the checks need, in addition to the bars."""
IPC = (".feather", ".arrow", ".ipc")
SUFFIXES = (".csv", ".csv.gz", ".zip", ".parquet", *IPC)
BLOCK = 2**24
"""Bytes unpacked at a time."""
LONGEST_HEADER = 2**20
"""Bytes in which the lines of a header are looked for."""


def name_of(path: Paths) -> str:
    """The given paths, shortened for a message."""
    given = [path] if isinstance(path, str | Path) else list(path)
    if len(given) <= 3:
        return ", ".join(map(str, given))
    return f"{given[0]} … {given[-1]} ({len(given)} paths)"


def files_of(path: Paths) -> list[Path]:
    try:
        given = [Path(path)] if isinstance(path, str | Path) else [Path(one) for one in path]
    except TypeError:
        raise BarsError(
            f"bars come from files (a path, a folder, a list of paths) or a pandas or Polars frame, not from "
            f"{type(path).__name__}"
        ) from None
    files: list[Path] = []
    for one in given:
        if (one / MANIFEST).is_file():
            raise BarsError(
                f"{one}: a prepared market, not files of bars; train on it with --data, or open it with "
                "tailguard.open_market"
            )
        if one.is_dir():
            inside = sorted(file for file in one.iterdir() if file.name.lower().endswith(SUFFIXES))
            if not inside:
                raise BarsError(f"{one}: no bars in this folder; files of bars end in {', '.join(SUFFIXES)}")
            files += inside
        elif not one.exists():
            raise BarsError(f"{one}: no such file or folder")
        elif not one.name.lower().endswith(SUFFIXES):
            raise BarsError(f"{one}: not a format Tailguard reads; files of bars end in {', '.join(SUFFIXES)}")
        else:
            files.append(one)
    if not files:
        raise BarsError("no file of bars was given")
    return files


def read_file(path: Path) -> pl.DataFrame:
    """The file's table with columns named; tables without a header get standard names."""
    name = path.name.lower()
    try:
        if name.endswith(".parquet"):
            raw = pl.read_parquet(path, glob=False)
        elif name.endswith(IPC):
            raw = pl.read_ipc(path)
        else:
            with open_csv(path) as file:
                raw = read_csv(_unpacked(file, path), str(path))
    except READING_ERRORS as error:
        raise unreadable(path, error) from error
    return with_names(raw)


def unreadable(path: Path | str, error: Exception) -> BarsError:
    """The error in one line; further lines of a library's message are about its own options."""
    return BarsError(f"{path}: cannot be read: {(str(error).splitlines() or [type(error).__name__])[0]}")


def _unpacked(file: IO[bytes], path: Path) -> bytes:
    """The whole text, or an error once it is too large: the size stored in a compressed file is not reliable."""
    limit = free_memory() / COPIES
    blocks: list[bytes] = []
    size = 0
    while block := file.read(BLOCK):
        blocks.append(block)
        size += len(block)
        if size > limit:
            blocks.clear()
            raise too_large(str(path), COPIES * size)
    return b"".join(blocks)


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


def is_preamble(line: bytes) -> bool:
    """Whether a line before the header states the source of the file: a comment, or a web address alone."""
    text = line.decode("utf-8-sig", errors="replace").strip().strip(',;"')
    return text.startswith("#") or re.fullmatch(r"(https?://|www\.)\S+", text, re.IGNORECASE) is not None


def first_cells(line: bytes, file: str) -> tuple[list[str], str]:
    """The cells of a table's first line, and what separates them."""
    first = line.decode("utf-8-sig").rstrip("\r\n")
    separator = max(",;\t", key=first.count)
    try:
        cells = next(csv.reader(io.StringIO(first), delimiter=separator), [])
    except csv.Error as error:
        raise BarsError(f"{file}: not readable as CSV: {error}") from error
    if not cells:
        raise BarsError(f"{file}: the first line is empty; it must name the columns")
    return cells, separator


def read_csv(content: bytes, file: str) -> pl.DataFrame:
    """Every cell as text, so one bad cell is reported with its row instead of invalidating the column."""
    content = content.rstrip()
    while is_preamble(content[: content.find(b"\n") + 1 or None]):
        content = content[content.find(b"\n") + 1 :] if b"\n" in content else b""
    if not content:
        raise BarsError(f"{file}: empty")
    cells, separator = first_cells(content[: content.find(b"\n") + 1 or None], file)
    levels = header_of_levels(content[:LONGEST_HEADER].split(b"\n", 3)[:3], file)
    if levels:
        return _read_levels(content, levels, separator, file)
    names = None
    if is_data(cells):
        if len(cells) not in POSITIONAL:
            raise BarsError(
                f"{file}: no header, and {len(cells)} columns. Without a header 6 (ccxt) or 12 (Binance klines) "
                "columns are understood; add a first line that names them"
            )
        names = list(POSITIONAL[len(cells)])
    try:
        return pl.read_csv(
            content, separator=separator, infer_schema=False, has_header=names is None, new_columns=names
        )
    except pl.exceptions.PolarsError as error:
        raise _ragged(content, file, len(cells), separator) or unreadable(file, error) from error


def header_of_levels(lines: Sequence[bytes], file: str) -> list[list[str]]:
    """The cells of a header of two levels, as pandas and yfinance write it, with the line that names the index if there
    is one; empty where the first lines are no such header."""
    try:
        cells = [first_cells(line, file)[0] for line in lines if line.strip()]
    except (BarsError, UnicodeDecodeError):
        return []  # whoever reads the rows says what is wrong
    if len(cells) < 3 or len(cells[0]) < 2 or any(len(row) != len(cells[0]) for row in cells):
        return []
    first, second, third = cells
    if any(is_data(row) or not all(row[1:]) for row in (first, second)) or any(map(_is_value, second)):
        return []
    if has_fields(first[1:]) == has_fields(second[1:]):
        return []
    return [first, second, third] if third[0] and not any(third[1:]) and not _is_value(third[0]) else [first, second]


def _read_levels(content: bytes, header: list[list[str]], separator: str, file: str) -> pl.DataFrame:
    """Rows of a table whose header has two levels."""
    first, second = header[:2]
    body = content.split(b"\n", len(header))[-1]
    places = [str(place) for place in range(len(first))]
    try:
        table = pl.read_csv(body, separator=separator, infer_schema=False, has_header=False, new_columns=places)
    except pl.exceptions.PolarsError as error:
        raise unreadable(file, error) from error
    columns: dict[tuple[str, ...], pl.Series] = {
        names: table[place] for names, place in zip(zip(first, second, strict=True), places, strict=True)
    }
    index = columns.pop((first[0], second[0]))
    rows = rows_of_levels(columns, {header[2][0] if len(header) == 3 else "": index})
    assert rows is not None  # one of the levels has the fields
    return rows


def _ragged(content: bytes, file: str, width: int, separator: str) -> BarsError | None:
    """The first line with more cells than the first one, if there is one."""
    rows = csv.reader(io.TextIOWrapper(io.BytesIO(content), "utf-8-sig", errors="replace"), delimiter=separator)
    with contextlib.suppress(csv.Error):
        for row in rows:
            if len(row) > width:
                return BarsError(
                    f"{file}: cannot be read: line {rows.line_num} has {len(row)} cells and the first line {width}. "
                    "The first line must name the columns; remove everything above it"
                )
    return None


def is_data(cells: list[str]) -> bool:
    """Whether a table's first line is bars already: a time and numbers, and not 0, 1, 2 … for names."""
    if cells == [str(place) for place in range(len(cells))]:
        return False
    return _is_value(cells[0]) and all(map(_is_number, cells[1:])) and len(cells) > 1


def _is_number(cell: str) -> bool:
    return re.fullmatch(r"\s*[+-]?(\d+\.?\d*|\.\d+)([eE][+-]?\d+)?\s*", cell) is not None


def _is_value(cell: str) -> bool:
    """Whether a cell is a number or a time."""
    return _is_number(cell) or re.fullmatch(r"\s*\d{4}-\d\d-\d\d.*", cell) is not None


def check_memory(files: Sequence[Path], name: str) -> None:
    """Refuse files that cannot fit, before reading them; the estimate is a lower bound."""
    needed = least_memory(files)
    if needed > free_memory():
        raise too_large(name, needed)


def least_memory(files: Sequence[Path]) -> float:
    """Bytes that the bars of these files take in memory, at least."""
    return sum(map(_least_memory, files))


def too_large(name: str, needed: float) -> BarsError:
    return BarsError(
        f"{name}: these bars take at least {format_bytes(needed)} of memory, and {format_bytes(free_memory())} are "
        "free. Prepare them once and train from disk: tailguard data prepare"
    )


def _least_memory(path: Path) -> float:
    """Unpacked size of a file in bytes, from its metadata: a small file may hold very many bars."""
    name = path.name.lower()
    try:
        if name.endswith((".parquet", *IPC)):
            table = pl.scan_parquet(path, glob=False) if name.endswith(".parquet") else pl.scan_ipc(path, glob=False)
            # The number of rows and the columns are in the file's metadata; no values are read.
            rows = table.select(pl.len()).collect().item()
            width = sum(_cell(dtype) for dtype in table.collect_schema().dtypes())
            return float(rows * (width + 8 * (1 + len(REQUIRED)) + CHECKING))
        if name.endswith(".zip"):
            with zipfile.ZipFile(path) as archive:
                return float(COPIES * sum(entry.file_size for entry in archive.infolist()))
        if name.endswith(".gz"):
            with path.open("rb") as file:
                # The last four bytes: the size before compression, less multiples of 4 GiB.
                file.seek(max(0, path.stat().st_size - 4))
                return float(COPIES * int.from_bytes(file.read(4), "little"))
        return float(COPIES * path.stat().st_size)
    except READING_ERRORS as error:
        raise unreadable(path, error) from error


def _cell(dtype: pl.DataType) -> int:
    """Minimum bytes of a value in memory."""
    sizes: dict[type[pl.DataType], int] = {pl.Boolean: 0, pl.Null: 0, pl.Int8: 1, pl.UInt8: 1, pl.Int16: 2}
    sizes |= {pl.UInt16: 2, pl.Int32: 4, pl.UInt32: 4, pl.Float32: 4, pl.Date: 4, pl.Categorical: 4}
    return sizes.get(dtype.base_type(), 8)
