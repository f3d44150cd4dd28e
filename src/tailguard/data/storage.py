"""Write bars atomically."""

from __future__ import annotations

import os
import re
from pathlib import Path

import polars as pl

from tailguard.errors import ConfigError

WRITABLE = (".parquet", ".csv", ".feather")


def check_writable(path: Path) -> None:
    """Raise unless the suffix is a supported format and the folder exists."""
    if path.suffix not in WRITABLE:
        raise ConfigError(f"{path}: cannot write {path.suffix or 'a name without suffix'}; use {', '.join(WRITABLE)}")
    if not path.parent.is_dir():
        raise ConfigError(f"{path}: the folder {path.parent} does not exist; create it first")


def write_frame(frame: pl.DataFrame, path: Path) -> None:
    """Write a frame in the format of the path's suffix; the file is replaced atomically.

    Raises OSError if the disk refuses it.
    """
    check_writable(path)
    # The process id keeps two writers apart; a leftover of a killed one is never read.
    partial = path.with_name(f".{path.name}.{os.getpid()}.partial")
    try:
        with partial.open("wb") as file:
            if path.suffix == ".parquet":
                frame.write_parquet(file)
            elif path.suffix == ".csv":
                frame.write_csv(file)
            else:
                frame.write_ipc(file)
            file.flush()
            os.fsync(file.fileno())
        os.replace(partial, path)
    except pl.exceptions.PolarsError as error:
        # Polars reports a full disk in an error of its own, by the system's number for it.
        system = re.search(r"\(os error (\d+)\)", str(error))
        if system is None:
            raise
        raise OSError(int(system[1]), os.strerror(int(system[1])), str(path)) from error
    finally:
        partial.unlink(missing_ok=True)
    folder = os.open(path.parent, os.O_RDONLY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)
