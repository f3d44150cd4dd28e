from __future__ import annotations

from datetime import timedelta

import polars as pl
import pytest

from tailguard.data.check_bars import validate
from tailguard.errors import BarsError

HOUR = timedelta(hours=1)


def negative_volume(bars: pl.DataFrame, *rows: int) -> pl.DataFrame:
    there = pl.col("row").is_in(rows)
    return bars.with_columns(volume=pl.when(there).then(-1.0).otherwise("volume"))


def test_every_check_reports_even_when_nothing_is_wrong(good_bars) -> None:
    report = validate(good_bars(300), "bars.parquet")

    assert [(check.name, check.level) for check in report.checks] == [
        (name, "ok")
        for name in (
            *("values", "order", "duplicates", "frequency", "gaps", "sessions", "prices", "ranges", "volume"),
            *("volume unit", "stale", "zero volume", "spikes", "returns"),
        )
    ]
    assert report.frequency == HOUR


def test_faults_of_several_symbols_are_counted_together_and_named_apart(good_bars) -> None:
    first = negative_volume(good_bars(100), 7, 9)
    second = negative_volume(good_bars(100, symbol="ETHUSDT"), 11, 12)

    check = validate(pl.concat([first, second]), "bars").errors[0]

    assert check.count == 4
    assert [(offender.symbol, offender.row) for offender in check.offenders] == [
        ("BTCUSDT", 7),
        ("BTCUSDT", 9),
        ("ETHUSDT", 11),
    ]


@pytest.mark.parametrize("broken", [0, 1, 2])
def test_one_faulty_symbol_among_good_ones_is_enough(good_bars, broken: int) -> None:
    parts = [good_bars(100, symbol=name) for name in ("ADAUSDT", "BTCUSDT", "ETHUSDT")]
    parts[broken] = negative_volume(parts[broken], 7)

    (check,) = validate(pl.concat(parts), "bars").errors

    assert (check.name, check.count, check.fault) == ("volume", 1, "with an amount that is negative or not finite")


def test_a_symbol_is_not_judged_by_the_bars_of_another(good_bars) -> None:
    """Prices, volumes and times jump from one symbol to the next; none of it is a fault."""
    cheap = good_bars(200, price=0.01, symbol="DOGEUSDT", start=good_bars(1)["time"][0] - 500 * HOUR)

    report = validate(pl.concat([good_bars(200), cheap]), "bars")

    assert [check.name for check in report.checks if check.level != "ok"] == []


def test_spans_count_what_is_missing_between_first_and_last(good_bars) -> None:
    bars = good_bars(100)
    holes = pl.concat([bars[:20], bars[25:70], bars[71:]])

    (span,) = validate(holes, "bars", gaps="split").spans

    assert (span.symbol, span.bars, span.missing) == ("BTCUSDT", 94, 6)
    assert (span.first, span.last) == (bars["time"][0], bars["time"][99])


def test_times_only_leaves_prices_and_volumes_alone(good_bars) -> None:
    bars = negative_volume(good_bars(100), 5)

    report = validate(bars, "bars", times_only=True)
    assert report.errors == ()
    assert {check.name for check in report.checks} == {"values", "order", "duplicates", "frequency", "gaps", "sessions"}

    assert [check.name for check in validate(bars.reverse(), "bars", times_only=True).errors] == ["order"]


def test_one_bar_has_no_frequency(good_bars) -> None:
    with pytest.raises(BarsError, match="one bar is too few to infer the frequency"):
        validate(good_bars(1), "bars")
    assert validate(good_bars(1), "bars", frequency=HOUR).errors == ()
