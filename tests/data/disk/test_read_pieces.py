"""A file read in pieces is the file."""

from __future__ import annotations

import gzip
import zipfile
from pathlib import Path

import polars as pl
import pytest

from tailguard.data.disk.read_pieces import CSV_ROW_BYTES, read_pieces
from tailguard.data.sources import read_source
from tailguard.data.synthetic import make_market
from tailguard.errors import BarsError


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("pieces")
    market = make_market(500, assets=2, seed=1)
    for name in ("a.parquet", "a.csv", "a.feather"):
        market.save(place / name)
    text = (place / "a.csv").read_bytes()
    (place / "a.csv.gz").write_bytes(gzip.compress(text))
    with zipfile.ZipFile(place / "a.zip", "w") as archive:
        archive.writestr("a.csv", text)
    one = market.bars.frame.filter(pl.col("symbol") == "SYN01")
    klines = one.select(pl.col("time").dt.epoch("ms"), "open", "high", "low", "close", "volume")
    klines.write_csv(place / "SYN01.csv", include_header=False)
    return place


@pytest.mark.parametrize("name", ["a.parquet", "a.csv", "a.feather", "a.csv.gz", "a.zip", "SYN01.csv"])
@pytest.mark.parametrize("rows", [7, 333, 10_000])
def test_pieces_put_together_are_what_is_read_at_once(folder: Path, name: str, rows: int) -> None:
    tables = list(read_pieces(folder / name, rows))
    whole = read_source(folder / name).frame
    together = pl.concat([table.frame for table in tables])
    assert together.sort("symbol", maintain_order=True).select(whole.columns).equals(whole)
    if rows * CSV_ROW_BYTES < 40_000:
        assert len(tables) > 1


def test_a_file_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    (tmp_path / "broken.parquet").write_bytes(b"no parquet")
    (tmp_path / "empty.csv").write_bytes(b"")
    (tmp_path / "header.csv").write_bytes(b"time,open,high,low,close,volume\n")
    (tmp_path / "cut.csv.gz").write_bytes(gzip.compress(b"time,open\n" * 5_000)[:-20])
    for name in ("broken.parquet", "empty.csv", "header.csv", "cut.csv.gz"):
        with pytest.raises(BarsError, match=name):
            list(read_pieces(tmp_path / name, 100))
