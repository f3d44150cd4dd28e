"""Files are written whole or not at all."""

from __future__ import annotations

from pathlib import Path

import polars as pl
import pytest

from tailguard.data.storage import write_frame
from tailguard.errors import ConfigError

FRAME = pl.DataFrame({"a": [1, 2, 3], "b": [0.1, 0.2, 0.3]})


@pytest.mark.parametrize(
    ("suffix", "read"), [(".parquet", pl.read_parquet), (".csv", pl.read_csv), (".feather", pl.read_ipc)]
)
def test_the_suffix_chooses_the_format(tmp_path: Path, suffix: str, read: object) -> None:
    path = tmp_path / f"bars{suffix}"
    write_frame(FRAME, path)
    assert callable(read)
    assert read(path).equals(FRAME)
    assert list(tmp_path.iterdir()) == [path]


def test_a_failed_write_leaves_the_old_file_and_nothing_else(tmp_path: Path) -> None:
    path = tmp_path / "bars.csv"
    write_frame(FRAME, path)
    before = path.read_bytes()
    nested = pl.DataFrame({"a": [[1, 2], [3]]})  # CSV cannot hold lists
    with pytest.raises(pl.exceptions.PolarsError):
        write_frame(nested, path)
    assert path.read_bytes() == before
    assert list(tmp_path.iterdir()) == [path]


def test_unknown_formats_and_missing_folders_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"cannot write \.xlsx; use \.parquet, \.csv, \.feather"):
        write_frame(FRAME, tmp_path / "bars.xlsx")
    with pytest.raises(ConfigError, match="does not exist"):
        write_frame(FRAME, tmp_path / "none" / "bars.csv")
