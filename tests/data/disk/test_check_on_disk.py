"""Large files are checked in pieces: the report is that of the bars in memory, and the memory is that of a piece."""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import polars as pl
import pytest
from backtesting.test import EURUSD

from tailguard.cli import data as command
from tailguard.cli import main
from tailguard.data.calendars import Timetable
from tailguard.data.disk.check_on_disk import check_on_disk
from tailguard.data.findings import Report
from tailguard.data.readiness import TrainingNeeds, ready_report
from tailguard.data.sources import bars_of, check_source, read_source
from tailguard.data.synthetic import make_market


def in_memory(path: Path, needs: TrainingNeeds, calendar: str, gaps: str) -> Report:
    source = read_source(path)
    report = check_source(source, calendar=calendar, gaps=gaps)  # type: ignore[arg-type]
    return report if report.errors else ready_report(report, bars_of(source, report), needs)


def same_calendar(first: Timetable | None, second: Timetable | None) -> bool:
    assert first is not None
    assert second is not None
    grids = (first.grid is None) == (second.grid is None) and (
        first.grid is None or second.grid is None or np.array_equal(first.grid, second.grid)
    )
    return grids and (first.pace, first.name, first.holidays) == (second.pace, second.name, second.holidays)


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two symbols of different ages with gaps, a suspicious price, and currencies."""
    place = tmp_path_factory.mktemp("files")
    frame = make_market(4_000, assets=2, seed=4).bars.frame.drop("segment")
    row = pl.int_range(pl.len()).over("symbol")
    kept = frame.filter(~((pl.col("symbol") == "SYN02") & (row.is_between(2_500, 2_520) | (row < 400))))
    spiked = (pl.col("symbol") == "SYN01") & (row == 1_999)
    kept.with_columns(low=pl.when(spiked).then(pl.col("low") / 4).otherwise("low")).write_csv(place / "two.csv")
    frame.filter((pl.col("symbol") == "SYN01") & ~row.is_in([700, 1_400])).write_parquet(place / "holes.parquet")
    frame.filter(pl.col("symbol") == "SYN01").with_columns(
        high=pl.when(row % 500 == 3).then(pl.col("low") / 2).otherwise("high")
    ).write_parquet(place / "wrong.parquet")
    EURUSD.to_csv(place / "eurusd.csv")
    return place


@pytest.mark.parametrize(
    ("name", "calendar", "gaps", "accounts", "features"),
    [
        ("two.csv", "auto", "split", "portfolio", None),
        ("two.csv", "24/7", "split", "per_symbol", ["return_4"]),
        ("holes.parquet", "auto", "split", "portfolio", ["atr_14"]),
        ("holes.parquet", "auto", "error", "portfolio", None),
        ("wrong.parquet", "auto", "error", "portfolio", None),
        ("eurusd.csv", "auto", "error", "portfolio", None),
        ("eurusd.csv", "fx", "error", "portfolio", ["bollinger_20"]),
    ],
)
@pytest.mark.parametrize("rows", [700, 100_000])
def test_the_report_is_that_of_the_bars_in_memory(
    files: Path, name: str, calendar: str, gaps: str, accounts: str, features: list[str] | None, rows: int
) -> None:
    needs = TrainingNeeds(0.15, 0.15, "7d", 100, features, accounts, 1e-4)  # type: ignore[arg-type]
    whole = in_memory(files / name, needs, calendar, gaps)
    options = {"calendar": calendar, "gaps": gaps, "volume_unit": "base"}
    pieces = check_on_disk(files / name, needs, rows=rows, **options)  # type: ignore[arg-type]
    for mine, theirs in zip(pieces.checks, whole.checks, strict=True):
        if rows == 100_000 or mine.name not in ("spikes", "returns", "sessions"):  # a bound and a share of a piece
            assert mine == theirs
    assert pieces.spans == whole.spans
    assert pieces.frequency == whole.frequency
    assert same_calendar(pieces.timetable, whole.timetable)
    assert [note for note in pieces.notes if not note.startswith("checked in pieces")] == list(whole.notes)


def test_the_command_takes_large_files_by_pieces(
    files: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    said = []
    for limit in (2**40, 0):
        monkeypatch.setattr(command, "HELD_IN_MEMORY", limit)
        monkeypatch.setattr(sys, "argv", ["tailguard", "data", "check", str(files / "two.csv"), "--gaps", "split"])
        with pytest.raises(SystemExit) as ended:
            main()
        assert ended.value.code == 0
        said.append(capsys.readouterr().out.splitlines())
    note = "checked in pieces: columns beyond those of bars are not looked at"
    assert note not in said[0]
    assert [line for line in said[1] if line != note] == said[0]


def test_files_that_only_the_whole_explains_are_held_in_memory(
    files: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Wide ones and those with the newest bars first."""
    frame = pl.read_parquet(files / "holes.parquet").select("time", "close").with_row_index()
    wide = frame.select("time", A=pl.col("close"), B=pl.when(pl.col("index") > 2_000).then(pl.col("close")))
    wide.with_columns(pl.col("time").dt.strftime("%Y-%m-%d %H:%M")).write_csv(tmp_path / "wide.csv")
    pl.read_parquet(files / "holes.parquet").reverse().write_parquet(tmp_path / "newest.parquet")
    EURUSD.to_csv(tmp_path / "clock.csv", date_format="%Y%m%d,%H%M%S", quoting=3, escapechar="|", index_label="x")
    text = (tmp_path / "clock.csv").read_text().replace("|", "").replace("x,Open", "<DATE>,<TIME>,Open")
    (tmp_path / "clock.csv").write_text(text)
    assert text.splitlines()[1].startswith("20170419,090000,1.0716,")
    monkeypatch.setattr(command, "HELD_IN_MEMORY", 0)
    cases = (
        ("wide.csv", False, "2 symbols"),
        ("newest.parquet", False, "3,998 bars"),
        ("clock.csv", True, "5,000 bars"),
    )
    for name, in_pieces, says in cases:
        monkeypatch.setattr(sys, "argv", ["tailguard", "data", "check", str(tmp_path / name), "--gaps", "split"])
        with pytest.raises(SystemExit):
            main()
        said = capsys.readouterr().out
        assert ("checked in pieces" in said) == in_pieces
        assert "✓ order" in said
        assert says in said
