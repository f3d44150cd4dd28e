"""Files that unpack to more than memory are refused before they are read; lines before the header are skipped."""

from __future__ import annotations

import gzip
import subprocess
import sys
import zipfile
from pathlib import Path

import polars as pl
import pytest

from tailguard.data.disk.read_pieces import read_pieces
from tailguard.data.sources import load_bars
from tailguard.errors import BarsError

ROWS = 1_500_000
ROOM = 100_000_000
LIMITED = """
import resource, sys
from pathlib import Path
from tailguard.data.sources import load_bars
from tailguard.errors import BarsError
from tailguard.memory_limits import _kilobytes
used = int(_kilobytes(Path("/proc/self/status"), "VmData"))
resource.setrlimit(resource.RLIMIT_DATA, (used + int(sys.argv[2]), -1))
try:
    load_bars(sys.argv[1])
except BarsError as error:
    print(error)
"""


def constant_bars(rows: int) -> pl.DataFrame:
    """Bars that compress to next to nothing."""
    time = pl.select(1_600_000_000_000 + 60_000 * pl.int_range(rows)).to_series()
    return pl.DataFrame({"time": time}).with_columns(
        *(pl.lit(100.0).alias(name) for name in ("open", "high", "low", "close")), volume=pl.lit(5.0)
    )


def write_parquet(path: Path) -> None:
    constant_bars(ROWS).write_parquet(path)


def write_feather(path: Path) -> None:
    constant_bars(ROWS).write_ipc(path, compression="zstd")


def write_gzip(path: Path) -> None:
    path.write_bytes(gzip.compress(constant_bars(ROWS).write_csv().encode(), 1))


def write_gzip_that_does_not_tell(path: Path) -> None:
    """Two members: the size at the end is that of the second one, which is small."""
    text = constant_bars(ROWS).write_csv().encode()
    path.write_bytes(gzip.compress(text[:-100], 1) + gzip.compress(text[-100:]))


def write_zip(path: Path) -> None:
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED, compresslevel=1) as archive:
        archive.writestr("bars.csv", constant_bars(ROWS).write_csv())


@pytest.mark.parametrize(
    ("name", "write"),
    [
        ("bars.parquet", write_parquet),
        ("bars.feather", write_feather),
        ("bars.csv.gz", write_gzip),
        ("members.csv.gz", write_gzip_that_does_not_tell),
        ("bars.zip", write_zip),
    ],
)
def test_a_small_file_of_many_bars_is_refused_before_memory_runs_out(tmp_path: Path, name: str, write) -> None:
    path = tmp_path / name
    write(path)
    assert 5 * path.stat().st_size < ROOM  # it looks as if it would fit

    done = subprocess.run(
        [sys.executable, "-c", LIMITED, str(path), str(ROOM)], capture_output=True, text=True, check=False
    )

    assert (done.returncode, done.stderr) == (0, "")
    assert f"{path}: these bars take at least " in done.stdout
    assert "tailguard data prepare" in done.stdout


def test_a_file_without_line_ends_is_refused_in_pieces(tmp_path: Path) -> None:
    (tmp_path / "bars.csv.gz").write_bytes(gzip.compress(b"time,open\n" + b"1" * 5_000_000))
    with pytest.raises(BarsError, match="a line is longer than 1,048,576 bytes"):
        list(read_pieces(tmp_path / "bars.csv.gz", 1_000))


PREAMBLES = ["https://www.CryptoDataDownload.com", "# from a vendor", "www.vendor.com,,,,,,", "#a\n#b"]


@pytest.mark.parametrize("preamble", PREAMBLES)
def test_lines_before_the_header_that_name_the_source_are_skipped(good_bars, tmp_path: Path, preamble: str) -> None:
    bars = good_bars(60).select("time", "open", "high", "low", "close", "volume")
    (tmp_path / "plain.csv").write_text(bars.write_csv())
    (tmp_path / "vendor.csv").write_text(f"{preamble}\n{bars.write_csv()}")

    expected = load_bars(tmp_path / "plain.csv", symbol="BTCUSDT").frame
    assert load_bars(tmp_path / "vendor.csv", symbol="BTCUSDT").frame.equals(expected)
    pieces = pl.concat([table.frame for table in read_pieces(tmp_path / "vendor.csv", 10)])
    assert pieces["close"].to_list() == expected["close"].to_list()
    assert pieces["row"].to_list() == list(range(1, 61))


def test_a_line_with_too_many_cells_is_named_and_no_option_of_another_library_is(tmp_path: Path) -> None:
    (tmp_path / "bars.csv").write_text("bars of my broker\ntime,open,high,low,close,volume\n1,2,3,4,5,6\n")
    with pytest.raises(BarsError) as refused:
        load_bars(tmp_path / "bars.csv")
    message = str(refused.value)
    assert "line 2 has 6 cells and the first line 1" in message
    assert "truncate" not in message
