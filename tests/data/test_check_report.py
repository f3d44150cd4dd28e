from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import polars as pl
import pytest

from tailguard import cli
from tailguard.data.check_bars import validate
from tailguard.data.check_report import report_lines
from tailguard.data.volume_unit import typical_price


def lines_of(bars: pl.DataFrame, width: int | None = None, **options: str) -> list[str]:
    return [line.plain for line in report_lines(validate(bars, "btc.csv", **options), width)]


def faulty(bars: pl.DataFrame) -> pl.DataFrame:
    """Money for volume up to row 180 and coins after, and a low far below the others in row 60."""
    row = pl.col("row")
    return bars.with_columns(
        volume=pl.col("volume") * pl.when(row <= 180).then(typical_price()).otherwise(1.0),
        low=pl.when(row == 60).then(13_000.0).otherwise("low"),
    )


def test_the_table_of_good_bars(good_bars) -> None:
    assert lines_of(good_bars(300)) == [
        "btc.csv · BTCUSDT · 1h · 2021-01-01 → 2021-01-13 · 300 bars · none missing",
        " ✓ values       all present, all numeric     ✓ order        oldest first",
        " ✓ duplicates   no duplicate times           ✓ frequency    all on the 1h grid",
        " ✓ gaps         no bar missing               ✓ sessions     trades around the clock",
        " ✓ prices       finite, positive             ✓ ranges       low ≤ open, close ≤ high",
        " ✓ volume       finite, not negative         ✓ volume unit  one unit throughout",
        " ✓ stale        no run of identical bars     ✓ zero volume  never 5 bars in a row",
        " ✓ spikes       no jump that fully reverts   ✓ returns      none beyond 25 robust σ",
        "0 errors, 0 warnings. The bars can be used.",
    ]


def test_what_is_wrong_comes_first_with_its_place_and_the_way_out_last(good_bars) -> None:
    lines = lines_of(faulty(good_bars(400)))

    assert lines[1].startswith(" ✗ volume unit  1 change of the volume's unit: row 181 (2021-01-08 12:00) median")
    assert lines[2].startswith(" ! spikes       1 bar whose price jumps and reverts one bar later: row 60 (2021")
    assert "low 13,000 against " in lines[2]
    assert lines[-1] == "1 error, 1 warning. Convert the volume column to one unit, preferably that of the base asset."


def test_a_terminal_folds_long_lines_under_their_beginning(good_bars) -> None:
    bars = faulty(good_bars(400))

    folded = lines_of(bars, width=70)

    assert max(map(len, folded[1:5])) <= 70
    assert folded[2].startswith(" " * 16)
    assert " ".join(" ".join(folded).split()) == " ".join(" ".join(lines_of(bars)).split())


def test_gaps_that_split_are_counted_among_what_is_right(good_bars) -> None:
    bars = good_bars(2_000)

    lines = lines_of(pl.concat([bars[:500], bars[510:]]), gaps="split")

    assert lines[0].endswith("· 1,990 bars · 0.50 % missing")
    assert any("✓ gaps         1 gap kept: a new segment starts after each" in line for line in lines)


def test_after_three_places_the_rest_are_only_counted(good_bars) -> None:
    broken = good_bars(100).with_columns(volume=pl.when(pl.col("row") % 20 == 0).then(-1.0).otherwise("volume"))

    line = lines_of(broken)[1]

    assert line.startswith(" ✗ volume       5 bars with an amount that is negative or not finite: row 20 (")
    assert line.count("row ") == 3
    assert line.endswith("volume -1 is not zero or a positive number; …")


def test_several_symbols_have_a_line_each(good_bars) -> None:
    bars = pl.concat([good_bars(100), good_bars(50, symbol="ETHUSDT")])

    assert lines_of(bars)[:3] == [
        "btc.csv · 2 symbols · 1h · 150 bars",
        "   BTCUSDT · 2021-01-01 → 2021-01-05 · 100 bars · none missing",
        "   ETHUSDT · 2021-01-01 → 2021-01-03 · 50 bars · none missing",
    ]


def run(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> int:
    monkeypatch.setattr(sys, "argv", ["tailguard", "data", "check", *arguments])
    with pytest.raises(SystemExit) as ended:
        cli.main()
    return int(ended.value.code or 0)


def test_the_exit_status_tells_sound_faulty_and_unusable_files_apart(
    good_bars, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    bars = good_bars(2_400).drop("file", "row", "unreadable")
    bars.write_parquet(tmp_path / "good.parquet")
    pl.concat([bars[:50], bars[60:]]).write_parquet(tmp_path / "gap.parquet")
    bars.drop("close").write_parquet(tmp_path / "columns.parquet")

    assert run(monkeypatch, str(tmp_path / "good.parquet")) == 0
    assert "The bars can be used." in capsys.readouterr().out
    assert run(monkeypatch, str(tmp_path / "gap.parquet")) == 1
    assert "row 51 (2021-01-03 12:00) 10 bars missing after 2021-01-03 01:00" in capsys.readouterr().out
    assert run(monkeypatch, "--gaps", "split", str(tmp_path / "gap.parquet")) == 0
    assert run(monkeypatch, "--frequency", "5m", str(tmp_path / "good.parquet")) == 1
    capsys.readouterr()
    assert run(monkeypatch, str(tmp_path / "columns.parquet")) == 2
    assert "columns.parquet: no column for close" in capsys.readouterr().err
    assert run(monkeypatch, str(tmp_path / "missing.parquet")) == 2
    assert "no such file or folder" in capsys.readouterr().err


def test_several_files_are_checked_as_one_set(
    good_bars, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    bars = good_bars(100).drop("file", "row", "unreadable").with_columns(note=pl.lit("x"))
    bars[:50].write_csv(tmp_path / "a.csv")
    bars[51:].write_csv(tmp_path / "b.csv")

    assert run(monkeypatch, str(tmp_path / "a.csv"), str(tmp_path / "b.csv")) == 1
    output = capsys.readouterr().out
    assert "row 1 (2021-01-03 03:00) 1 bar missing after 2021-01-03 01:00" in output
    assert "columns not used: note" in output


def test_a_pipe_gets_plain_unfolded_lines(good_bars, tmp_path: Path) -> None:
    faulty(good_bars(400)).drop("file", "row", "unreadable").write_parquet(tmp_path / "bars.parquet")

    done = subprocess.run(
        [sys.executable, "-c", "from tailguard.cli import main; main()", "data", "check", tmp_path / "bars.parquet"],
        capture_output=True,
        encoding="utf-8",
        env={**os.environ, "PYTHONUTF8": "1"},
        check=False,
    )

    assert (done.returncode, done.stderr) == (1, "")
    assert "\x1b" not in done.stdout
    assert [line[:16] for line in done.stdout.splitlines()[1:3]] == [" ✗ volume unit  ", " ! spikes       "]
