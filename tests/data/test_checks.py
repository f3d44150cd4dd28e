"""Each fault put into good bars at a random row is named with exactly that row, and nothing else is."""

from __future__ import annotations

from collections.abc import Callable
from datetime import UTC, datetime, timedelta

import polars as pl
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tailguard.data.calendars import around_the_clock
from tailguard.data.check_bars import validate
from tailguard.data.checks import check_duplicates, check_gaps, check_order, check_ranges, most_common_step
from tailguard.data.findings import error_message

HOUR = timedelta(hours=1)
Corrupt = Callable[[pl.DataFrame, int], pl.DataFrame]


def put(name: str, value: pl.Expr | float | None) -> Corrupt:
    """Replace the value of column `name` in one row."""

    def corrupt(bars: pl.DataFrame, index: int) -> pl.DataFrame:
        here = pl.int_range(pl.len()) == index
        return bars.with_columns(pl.when(here).then(value).otherwise(pl.col(name)).alias(name))

    return corrupt


def exchange_with_next(bars: pl.DataFrame, index: int) -> pl.DataFrame:
    rows = list(range(bars.height))
    rows[index - 1], rows[index] = rows[index], rows[index - 1]
    return bars[rows].with_columns(row=bars["row"])


FAULTS: dict[str, tuple[Corrupt, str, str]] = {
    "close missing": (put("close", None), "values", "no value for close"),
    "time missing": (put("time", None), "values", "no value for time"),
    "same time twice": (put("time", pl.col("time").shift()), "duplicates", "same time as row"),
    "out of order": (exchange_with_next, "order", "earlier than the previous bar"),
    "off the grid": (put("time", pl.col("time") + timedelta(minutes=7)), "frequency", "off the 1h grid"),
    "open zero": (put("open", 0.0), "prices", "open 0 is not a positive number"),
    "high infinite": (put("high", float("inf")), "prices", "high inf"),
    "low negative": (put("low", -pl.col("low")), "prices", "low -"),
    "close not a number": (put("close", float("nan")), "prices", "close nan"),
    "high below low": (put("high", pl.col("low") * 0.999), "ranges", "high "),
    "close above high": (put("close", pl.col("high") * 1.001), "ranges", "> high"),
    "open below low": (put("open", pl.col("low") * 0.999), "ranges", "< low"),
    "volume negative": (put("volume", -pl.col("volume")), "volume", "volume -"),
    "volume infinite": (put("volume", float("inf")), "volume", "volume inf"),
    "volume not a number": (put("volume", float("nan")), "volume", "volume nan"),
}


@pytest.mark.parametrize("fault", FAULTS)
@settings(max_examples=15, deadline=None)
@given(index=st.integers(1, 298), seed=st.integers(0, 1_000))
def test_a_fault_is_named_with_its_row_and_nothing_else_is(good_bars, fault: str, index: int, seed: int) -> None:
    corrupt, name, text = FAULTS[fault]
    bars = corrupt(good_bars(300, seed), index)

    report = validate(bars, "bars.parquet")

    assert [check.name for check in report.errors] == [name]
    assert report.warnings == ()
    (offender,) = report.errors[0].offenders
    assert (report.errors[0].count, offender.row, offender.time) == (1, index + 1, bars["time"][index])
    assert text in offender.text


@settings(max_examples=15, deadline=None)
@given(index=st.integers(1, 250), missing=st.integers(1, 40))
def test_a_gap_names_the_bar_after_it_and_counts_the_missing_ones(good_bars, index: int, missing: int) -> None:
    bars = good_bars(300)
    broken = pl.concat([bars[:index], bars[index + missing :]]).with_row_index("new", 1)

    report = validate(broken.with_columns(row=pl.col("new").cast(pl.Int64)), "bars.parquet")

    assert [check.name for check in report.errors] == ["gaps"]
    (offender,) = report.errors[0].offenders
    assert (offender.row, offender.time) == (index + 1, bars["time"][index + missing])
    assert offender.text == (
        f"{missing} bar{'s' if missing > 1 else ''} missing after {bars['time'][index - 1]:%Y-%m-%d %H:%M}"
    )
    assert report.spans[0].missing == missing


def test_the_message_has_file_row_time_values_and_a_way_out(good_bars) -> None:
    bars = good_bars(1_200, start=datetime(2021, 1, 1, 1, tzinfo=UTC))
    bars = put("high", 46_800.0)(put("low", 46_912.0)(bars, 1_040), 1_040)

    message = error_message(validate(bars, "bars.parquet"))

    first, *rest = message.splitlines()
    assert first == "bars.parquet: row 1041 (2021-02-13 09:00): high 46,800 < low 46,912"
    assert rest == ["ranges: Check the order of the columns, or correct these bars at the source."]


def test_the_first_three_are_named_and_the_rest_counted(good_bars) -> None:
    bars = good_bars(300)
    for index in (17, 40, 41, 99, 250):
        bars = put("volume", -1.0)(bars, index)

    check = validate(bars, "bars.parquet").errors[0]

    assert check.count == 5
    assert [offender.row for offender in check.offenders] == [18, 41, 42]
    assert "… and 2 more: 5 bars with an amount that is negative or not finite in all" in error_message(
        validate(bars, "bars.parquet")
    )


def test_a_repeated_time_names_the_row_and_file_it_repeats(good_bars) -> None:
    bars = good_bars(10)
    joined = pl.concat([bars, bars[8:].with_columns(file=pl.lit("more.csv"), row=pl.int_range(1, 3, dtype=pl.Int64))])

    check = check_duplicates(joined)

    assert check_order(joined).level == "ok"
    assert [(offender.file, offender.row, offender.text) for offender in check.offenders] == [
        ("more.csv", 1, "same time as row 9 of bars.parquet"),
        ("more.csv", 2, "same time as row 10 of bars.parquet"),
    ]


def test_newest_first_is_said_once(good_bars) -> None:
    (check,) = validate(good_bars(200).reverse(), "bars.parquet").errors

    assert check.summary == "199 bars earlier than the previous one: the newest come first"


@pytest.mark.parametrize("fault", ["same time twice", "out of order"])
def test_what_depends_on_the_times_is_not_judged_until_they_are_right(good_bars, fault: str) -> None:
    report = validate(FAULTS[fault][0](good_bars(200), 50), "bars.parquet")

    assert {check.name for check in report.checks if check.level == "skipped"} == {
        *("frequency", "gaps", "sessions", "volume unit", "stale", "zero volume", "spikes", "returns")
    }


def test_split_gaps_are_counted_and_no_fault(good_bars) -> None:
    bars = good_bars(100)

    check = check_gaps(pl.concat([bars[:30], bars[35:60], bars[61:]]), around_the_clock(HOUR), "split")

    assert (check.level, check.count) == ("ok", 2)


def test_the_frequency_asked_for_must_be_the_one_of_the_bars(good_bars) -> None:
    for asked in (timedelta(minutes=30), timedelta(hours=4)):
        report = validate(good_bars(100), "bars.parquet", frequency=asked, gaps="split")

        assert [check.name for check in report.errors] == ["frequency"]
        assert report.errors[0].count == 99


def test_symbols_of_different_frequencies_are_refused(good_bars) -> None:
    slow = good_bars(60, symbol="ETHUSDT", frequency=4 * HOUR)

    report = validate(pl.concat([good_bars(300), slow]), "bars", gaps="split")

    assert report.frequency == HOUR
    assert [check.name for check in report.errors] == ["frequency"]
    assert {offender.symbol for offender in report.errors[0].offenders} == {"ETHUSDT"}


def test_bars_may_start_off_the_full_hour_if_all_do(good_bars) -> None:
    bars = good_bars(100, start=datetime(2021, 1, 1, 0, 30, tzinfo=UTC))

    assert validate(bars, "bars.parquet").errors == ()


@pytest.mark.parametrize(("excess", "faults"), [(1e-12, 0), (1e-6, 1)])
def test_a_close_above_the_high_by_rounding_only_is_no_fault(good_bars, excess: float, faults: int) -> None:
    bars = put("close", pl.col("high") * (1 + excess))(good_bars(50), 20)

    assert check_ranges(bars).count == faults


@settings(max_examples=50, deadline=None)
@given(steps=st.lists(st.integers(1, 4), min_size=1, max_size=60))
def test_the_most_common_step_is_the_mode_and_the_shortest_of_several(steps: list[int]) -> None:
    times = [datetime(2021, 1, 1, tzinfo=UTC)]
    for step in steps:
        times.append(times[-1] + step * HOUR)
    expected = min(set(steps), key=lambda step: (-steps.count(step), step))

    assert most_common_step(pl.Series(times)) == expected * HOUR
    assert most_common_step(pl.Series(times).reverse()) == expected * HOUR


def test_optional_columns_are_checked_too_and_only_funding_may_be_negative(good_bars) -> None:
    bars = good_bars(60).with_columns(trades=pl.lit(5.0), funding_rate=pl.lit(-0.0001))
    assert validate(bars, "bars.parquet").errors == ()

    broken = put("trades", -1.0)(put("funding_rate", float("nan"))(bars, 7), 9)
    check = validate(broken, "bars.parquet").errors[0]
    assert [(offender.row, offender.text) for offender in check.offenders] == [
        (8, "funding_rate nan is not finite"),
        (10, "trades -1 is not zero or a positive number"),
    ]


@pytest.mark.parametrize(("frequency", "early"), [(HOUR, 1), (timedelta(days=1), 1), (HOUR, 1_000)])
def test_bars_stamped_with_their_close_are_refused_with_the_shift(good_bars, frequency: timedelta, early: int) -> None:
    bars = good_bars(300, frequency=frequency)
    shift = frequency - timedelta(milliseconds=early)
    closed = bars.with_columns(time=pl.col("time") + shift)

    (check,) = validate(closed, "bars.parquet").errors

    assert (check.name, check.count) == ("frequency", 300)
    assert f"subtract {shift} from every time" in check.remedy
    assert "is the close time of a bar, not its open time" in check.offenders[0].text
    # The way out that is named leads out.
    assert validate(closed.with_columns(time=pl.col("time") - shift), "bars.parquet").errors == ()


def test_bars_of_a_second_that_open_on_the_second_are_not_taken_for_closes(good_bars) -> None:
    assert validate(good_bars(300, frequency=timedelta(seconds=1)), "bars.parquet").errors == ()
