"""Arrays on disk that are written once, row by row, and read by memory mapping: only accessed pages are loaded.

A file holds the numbers and nothing else, little-endian, in C order. Their type, shape and SHA-256 are in the
manifest of the folder. Such a file contains nothing executable.
"""

from __future__ import annotations

import hashlib
import math
import os
import stat
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tailguard.errors import BarsError

MANIFEST = "market.json"
"""Describes the arrays of a prepared market; its presence marks a folder as one."""
BLOCK = 2**24
"""Bytes read at a time when a file is verified."""
DTYPES = ("<f4", "<f8", "<i4", "<i8", "<u2", "|b1")
"""`<u2` holds the bits of a bfloat16."""


class ArrayWriter:
    """An array of `planes` equal planes, [P, R, …], or of one, [R, …], filled along R.

    The planes lie one after the other in the file, so the number of rows must be known where there are several. No file
    stays open between two calls: a market has thousands. `kept`: False for a temporary file, without a SHA-256.
    """

    def __init__(
        self,
        path: Path,
        dtype: str,
        row_shape: tuple[int, ...] = (),
        planes: int = 1,
        rows: int = 0,
        *,
        kept: bool = True,
    ) -> None:
        self.path, self.dtype, self.row_shape, self.kept = path, np.dtype(dtype), row_shape, kept
        self.planes, self.promised, self.rows = planes, rows, 0
        self._row_bytes = self.dtype.itemsize * math.prod(row_shape)
        self._digests = [hashlib.sha256() for _ in range(planes)]
        path.open("xb").close()

    def append(self, rows: NDArray[Any]) -> None:
        """Add rows: [r, …], or [P, r, …] where there are several planes."""
        blocks = rows if self.planes > 1 else rows[None]
        with self.path.open("r+b") as file:
            for plane, block in enumerate(np.ascontiguousarray(blocks, dtype=self.dtype)):
                data = memoryview(block.reshape(-1).view(np.uint8))
                if self.kept:
                    self._digests[plane].update(data)
                file.seek((plane * self.promised + self.rows) * self._row_bytes)
                file.write(data)
        self.rows += blocks.shape[1]

    def close(self) -> dict[str, Any]:
        """Flush the file to disk; returns its entry in the manifest."""
        if self.planes > 1 and self.rows != self.promised:
            raise ValueError(f"{self.path}: {self.rows} rows were written, {self.promised} were expected")
        if self.kept:
            with self.path.open("rb") as file:
                os.fsync(file.fileno())
        planes = (self.planes,) if self.planes > 1 else ()
        return {
            "dtype": self.dtype.str,
            "shape": [*planes, self.rows, *self.row_shape],
            "sha256": [digest.hexdigest() for digest in self._digests],
        }


def read_rows(path: Path, dtype: str, start: int, count: int, width: int = 1) -> NDArray[Any]:
    """Rows of `width` numbers of a file of them, [count, width], or [count] where there is one in a row."""
    kind = np.dtype(dtype)
    values = np.fromfile(path, kind, count * width, offset=start * width * kind.itemsize)
    return values if width == 1 else values.reshape(count, width)


def map_array(path: Path, entry: Mapping[str, Any]) -> NDArray[Any]:
    """The array of a manifest's entry, read-only; only its size is checked, not its content."""
    shape, dtype = _described(path, entry)
    try:
        status = os.lstat(path)
    except OSError as error:
        raise BarsError(f"{path}: cannot be read: {error.strerror}") from error
    if not stat.S_ISREG(status.st_mode):
        raise BarsError(f"{path}: not a plain file; links are not followed")
    size = dtype.itemsize * math.prod(shape)
    if status.st_size != size:
        raise BarsError(f"{path}: {status.st_size:,} bytes long; {size:,} were written")
    if size == 0:
        return np.empty(shape, dtype)
    return np.memmap(path, dtype, "r", shape=shape)


def verify_array(path: Path, entry: Mapping[str, Any]) -> None:
    """Raise `BarsError` unless every byte is as it was written; reads the whole file."""
    size = map_array(path, entry).nbytes
    parts = entry["sha256"]
    with path.open("rb") as file:
        for expected in parts:
            digest, left = hashlib.sha256(), size // len(parts)
            while left:
                data = file.read(min(left, BLOCK))
                if not data:
                    raise BarsError(f"{path}: is truncated")
                digest.update(data)
                left -= len(data)
            if digest.hexdigest() != expected:
                raise BarsError(
                    f"{path}: its SHA-256 differs from the manifest; the file has changed since it was written"
                )


def _described(path: Path, entry: Mapping[str, Any]) -> tuple[tuple[int, ...], np.dtype[Any]]:
    """Validated shape and type of an entry."""
    shape, dtype, digests = entry.get("shape"), entry.get("dtype"), entry.get("sha256")
    is_shape = isinstance(shape, list) and all(type(size) is int and 0 <= size < 2**48 for size in shape)
    is_hashed = isinstance(digests, list) and digests and all(isinstance(digest, str) for digest in digests)
    if not is_shape or dtype not in DTYPES or not is_hashed or set(entry) != {"shape", "dtype", "sha256"}:
        raise BarsError(f"{path}: its entry in the manifest was not written by Tailguard")
    assert isinstance(shape, list)
    return tuple(shape), np.dtype(dtype)
