"""Splits of bars: by size, by date and walking forward, with what is traded never shared."""

from __future__ import annotations

from datetime import UTC, date, datetime, timedelta
from itertools import pairwise

import numpy as np
import polars as pl
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tailguard.data.bars import TIME_TYPE, Bars
from tailguard.data.features import compute_features, longest_warmup
from tailguard.data.splits import Fold, Split, split_bars, traded_times, walk_forward
from tailguard.errors import ConfigError

START = datetime(2021, 1, 1, tzinfo=UTC)
HOUR = timedelta(hours=1)


def bars_at(hours: dict[str, list[int]]) -> Bars:
    """Bars of each symbol at these hours after START; the close tells the hour."""
    frames = []
    segment = 0
    for symbol, at in hours.items():
        breaks = np.concatenate([[0], np.cumsum(np.diff(at) != 1)])
        price = np.array(at, dtype=np.float64) + 1.0
        frames.append(
            pl.DataFrame(
                {
                    "symbol": [symbol] * len(at),
                    "time": [START + hour * HOUR for hour in at],
                    **dict.fromkeys(("open", "high", "low", "close", "volume"), price),
                    "segment": (segment + breaks).astype(np.int32),
                },
                schema_overrides={"time": TIME_TYPE},
            )
        )
        segment += int(breaks[-1]) + 1
    return Bars(pl.concat(frames), HOUR, "made.parquet")


def hourly(count: int) -> Bars:
    return bars_at({"BTC": list(range(count))})


def traded_hours(bars: Bars) -> list[int]:
    return [(time - START) // HOUR for time in traded_times(bars)]


def all_hours(bars: Bars) -> list[int]:
    return sorted({(time - START) // HOUR for time in bars.frame["time"]})


def parts_of(split: Split | Fold) -> list[Bars]:
    return [part for part in (split.train, split.validation, split.test) if part is not None]


# --- one split -------------------------------------------------------------------------------------------------------


@settings(max_examples=60, deadline=None)
@given(
    count=st.integers(10, 400),
    cut=st.tuples(st.integers(1, 98), st.integers(1, 98)).filter(lambda cut: sum(cut) < 100),
    gap=st.integers(0, 20),
    lead_in=st.integers(0, 50),
)
def test_fractions_that_add_up_to_one_use_every_bar_but_the_embargo(
    count: int, cut: tuple[int, int], gap: int, lead_in: int
) -> None:
    validation, test = cut[0] / 100, cut[1] / 100
    train = 1 - validation - test
    usable = count - 2 * gap
    asked = [usable * cut[0] // 100, usable * cut[1] // 100]
    bars = hourly(count)
    if usable < 1 or min(asked) < 1:
        with pytest.raises(ConfigError):
            split_bars(bars, train=train, validation=validation, test=test, embargo=gap, lead_in=lead_in)
        return
    split = split_bars(bars, train=train, validation=validation, test=test, embargo=gap, lead_in=lead_in)
    hours = [traded_hours(part) for part in parts_of(split)]
    assert [len(part) for part in hours[1:]] == asked
    embargoed = [*range(hours[0][-1] + 1, hours[1][0]), *range(hours[1][-1] + 1, hours[2][0])]
    assert len(embargoed) == 2 * gap
    assert sorted(hours[0] + hours[1] + hours[2] + embargoed) == list(range(count))


@settings(max_examples=60, deadline=None)
@given(
    spare=st.integers(-3, 40),
    sizes=st.tuples(*[st.integers(1, 100)] * 3),
    gap=st.integers(0, 30),
)
def test_sizes_in_bars_are_exact_and_end_with_the_last_bar(spare: int, sizes: tuple[int, int, int], gap: int) -> None:
    needed = sum(sizes) + 2 * gap
    count = max(needed + spare, 1)
    arguments = dict(zip(("train", "validation", "test"), sizes, strict=True))
    if needed > count:
        with pytest.raises(ConfigError, match=f"need [0-9]+ bars; there are {count:,}"):
            split_bars(hourly(count), **arguments, embargo=gap)
        return
    hours = [traded_hours(part) for part in parts_of(split_bars(hourly(count), **arguments, embargo=gap))]
    first = count - needed
    assert hours[0] == list(range(first, first + sizes[0]))
    assert hours[1] == list(range(hours[0][-1] + 1 + gap, hours[0][-1] + 1 + gap + sizes[1]))
    assert hours[2] == list(range(hours[1][-1] + 1 + gap, count))


def test_a_fraction_that_is_a_whole_number_of_bars_but_for_rounding_is_that_number() -> None:
    assert 0.29 * 100 < 29
    split = split_bars(hourly(100), validation=0.29, test=0.29)
    assert [len(traded_times(part)) for part in parts_of(split)] == [42, 29, 29]


def test_durations_are_counted_in_bars() -> None:
    split = split_bars(hourly(1_000), train="2w", validation="3d", test="120m", embargo="1d")
    assert [len(traded_times(part)) for part in parts_of(split)] == [336, 72, 2]
    assert traded_times(split.validation)[0] - traded_times(split.train)[-1] == 25 * HOUR


def test_dates_start_the_parts_and_the_embargo_shortens_the_one_before() -> None:
    bars = hourly(24 * 30)
    split = split_bars(bars, validation="2021-01-11", test=date(2021, 1, 21), embargo="12h")
    hours = [traded_hours(part) for part in parts_of(split)]
    assert hours[0] == list(range(228))
    assert hours[1] == list(range(240, 468))
    assert hours[2] == list(range(480, 720))
    later = split_bars(
        bars, train=datetime(2021, 1, 2, 6), validation="2021-01-11T00:00+00:00", test="2021-01-21", embargo="12h"
    )
    assert traded_hours(later.train) == list(range(30, 228))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"validation": "2021-01-11", "test": "2021-01-05"}, "validation starting on 2021-01-11 00:00 has no bar left"),
        ({"validation": "2021-01-01", "test": "2021-01-05"}, "train starting on 2021-01-01 00:00 has no bar left"),
        ({"validation": "2021-01-02", "test": "2022-01-01"}, "test starting on 2022-01-01 00:00 has no bar left"),
        ({"validation": "2021-01-02", "test": "2021-01-03", "embargo": 24}, "train .* embargo of 24 bars apart"),
        ({"validation": "2021-01-02", "test": 0.2}, "test=0.2 is not a date; give the starts of all parts as dates"),
        ({"validation": "2021-01-02", "test": "9d"}, "test='9d' is not a date"),
        ({"validation": "2021-13-02", "test": "2021-01-03"}, "validation='2021-13-02' is not a date"),
    ],
)
def test_impossible_dates_are_refused(arguments: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        split_bars(hourly(24 * 20), **arguments)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"test": 1.0}, "test=1.0: a fraction lies between 0 and 1"),
        ({"test": -3}, "test=-3 is -3 bars"),
        ({"test": 0}, "test=0 is 0 bars of 100; at least 1"),
        ({"test": 0.001}, "test=0.001 is 0 bars of 100"),
        ({"test": True}, "test=True must be bars"),
        ({"test": "3 months"}, "test='3 months' is not a duration"),
        ({"test": "90m"}, "test='90m' is not a whole number of bars of 1:00:00"),
        (
            {"train": 0.9, "test": 0.2, "validation": 0.2},
            "90 training, 20 validation, 20 test .* need 130 bars; there are 100",
        ),
        ({"embargo": "-1d"}, "embargo='-1d' is not a duration"),
        ({"embargo": 60}, "2 × 60 bars left out and 3 parts of at least 1 bar need 123 bars; there are 100"),
    ],
)
def test_impossible_sizes_are_refused(arguments: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        split_bars(hourly(100), **arguments)  # type: ignore[arg-type]


def test_only_times_of_all_symbols_count() -> None:
    """A misses hours 40 to 49, B starts at hour 20: 70 common hours, 20 to 39 and 50 to 99."""
    bars = bars_at({"A": [*range(40), *range(50, 100)], "B": list(range(20, 100))})
    split = split_bars(bars, train=30, validation=20, test=10, embargo=5)
    assert traded_hours(split.train) == [*range(20, 40), *range(50, 60)]
    assert traded_hours(split.validation) == list(range(65, 85))
    assert traded_hours(split.test) == list(range(90, 100))


def test_symbols_that_never_meet_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"made.parquet: the symbols A, B have no traded time in common"):
        split_bars(bars_at({"A": [0, 1, 2], "B": [5, 6, 7]}))


def test_a_part_can_be_split_again_without_its_lead_in_being_traded() -> None:
    outer = split_bars(hourly(300), validation=50, test=50, lead_in=20)
    inner = split_bars(outer.validation, validation=10, test=10, lead_in=30)
    assert traded_hours(inner.train) == list(range(200, 230))
    assert all_hours(inner.train) == list(range(180, 230))
    assert traded_hours(inner.test) == list(range(240, 250))


# --- lead-in ---------------------------------------------------------------------------------------------------------


def test_a_lead_in_reaches_back_over_the_embargo_into_the_past_and_is_never_traded() -> None:
    split = split_bars(hourly(500), validation=100, test=100, embargo=24, lead_in=60)
    assert all_hours(split.test) == list(range(400 - 60, 500))
    assert traded_hours(split.test) == list(range(400, 500))
    assert set(all_hours(split.test)) & set(traded_hours(split.validation)) == set(range(340, 376))
    panel = split.test.panel()
    assert panel.tradeable.sum() == 100
    assert panel.close[panel.tradeable][0, 0] == 401.0


def test_the_default_lead_in_lets_the_first_traded_bar_have_every_feature() -> None:
    bars = hourly(3_000)
    split = split_bars(bars, validation=500, test=500, embargo="7d")
    for part in (split.validation, split.test):
        valid, tradeable = compute_features(part).valid, part.panel().tradeable
        assert valid[tradeable].all()
    assert len(split.test) == 500 + longest_warmup(bars)


def test_features_of_a_part_are_those_of_the_whole() -> None:
    bars = hourly(2_000)
    whole, names = (
        compute_features(bars, ["trend_24", "bollinger_20", "return_4"]),
        ["trend_24", "bollinger_20", "return_4"],
    )
    part = split_bars(bars, validation=300, test=300).test
    np.testing.assert_allclose(compute_features(part, names).values[-300:], whole.values[-300:], rtol=0, atol=1e-9)


# --- walking forward -------------------------------------------------------------------------------------------------


@settings(max_examples=80, deadline=None)
@given(
    spare=st.integers(-3, 40),
    folds=st.integers(1, 6),
    train=st.integers(1, 150),
    test=st.integers(1, 60),
    validation=st.integers(0, 40),
    purge=st.integers(0, 15),
    embargo=st.integers(0, 15),
    expanding=st.booleans(),
)
def test_folds_hold_what_was_asked_for(
    spare: int, folds: int, train: int, test: int, validation: int, purge: int, embargo: int, expanding: bool
) -> None:
    arguments = {"folds": folds, "train": train, "test": test, "validation": validation, "purge": purge}
    gap = purge + embargo
    needed = train + gap + folds * test + (validation + gap if validation else 0)
    count = max(needed + spare, 1)
    if needed > count:
        with pytest.raises(ConfigError, match=f"need [0-9]+ bars; there are {count:,}"):
            walk_forward(hourly(count), **arguments, embargo=embargo, expanding=expanding)
        return
    walked = walk_forward(hourly(count), **arguments, embargo=embargo, expanding=expanding, lead_in=30)
    assert [fold.number for fold in walked] == list(range(1, folds + 1))
    tested = [hour for fold in walked for hour in traded_hours(fold.test)]
    assert tested == list(range(count - folds * test, count))  # tiles: in order, no hole, no overlap, to the last bar
    for fold in walked:
        hours = [traded_hours(part) for part in parts_of(fold)]
        grown = (fold.number - 1) * test if expanding else 0
        assert [len(part) for part in hours] == [size for size in (train + grown, validation, test) if size]
        for earlier, later in pairwise(hours):
            assert later[0] - earlier[-1] - 1 == gap
        for part in hours:
            assert part == list(range(part[0], part[-1] + 1))
    if expanding:
        assert {traded_hours(fold.train)[0] for fold in walked} == {count - needed}


@settings(max_examples=40, deadline=None)
@given(
    count=st.integers(60, 400),
    folds=st.integers(1, 6),
    size=st.integers(1, 40),
    gap=st.integers(0, 10),
    sized=st.sampled_from(["train", "test"]),
)
def test_the_size_left_open_takes_what_is_left(count: int, folds: int, size: int, gap: int, sized: str) -> None:
    if size * (folds if sized == "test" else 1) + gap + folds > count:
        return
    walked = walk_forward(hourly(count), folds=folds, embargo=gap, **{sized: size})
    used = len(traded_times(walked[0].train)) + gap + sum(len(traded_times(fold.test)) for fold in walked)
    if sized == "test":
        assert used == count  # training takes everything before
    else:
        assert count - folds < used <= count  # equal test windows leave less than one bar each
        assert len({len(traded_times(fold.test)) for fold in walked}) == 1


def test_no_training_episode_of_the_purged_length_reaches_the_test_window() -> None:
    horizon = 12
    for fold in walk_forward(hourly(500), folds=4, test=50, purge=horizon):
        reached = {hour + step for hour in traded_hours(fold.train) for step in range(horizon + 1)}
        assert reached.isdisjoint(traded_hours(fold.test))
        assert max(reached) + 1 == traded_hours(fold.test)[0]


def test_fractions_of_a_walk_are_of_the_bars_that_the_gaps_leave() -> None:
    walked = walk_forward(hourly(1_020), folds=5, train=0.5, test=0.08, validation=0.1, purge=6, embargo=4)
    assert [len(traded_times(part)) for part in parts_of(walked[0])] == [500, 100, 80]
    assert traded_hours(walked[0].train)[0] == 0


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"folds": 0, "test": 10}, "folds=0 must be a whole number"),
        ({"folds": 3}, "give the size of train or of test"),
        ({"folds": 3, "test": "1w"}, "3 folds of at least 1 training, 168 test with 0 between the parts need 505 bars"),
        ({"folds": 3, "train": 90, "purge": 8}, "90 training, at least 1 test with 8 .* need 101 bars; there are 100"),
        ({"folds": 3, "test": 10, "purge": -1}, "purge=-1"),
        ({"folds": 3, "test": 0.1, "purge": 50, "embargo": 49}, "1 × 99 bars left out and 4 parts .* need 103 bars"),
    ],
)
def test_impossible_walks_are_refused(arguments: dict[str, int], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        walk_forward(hourly(100), **arguments)


def test_describe_tells_periods_sizes_and_gaps() -> None:
    fold = walk_forward(hourly(24 * 40), folds=2, train="10d", test="5d", validation="3d", purge=36, embargo=12)[0]
    assert fold.describe() == (
        "fold 1: train 2021-01-14 00:00 to 2021-01-24 00:00, 240 bars │ 2 d │ "
        "validation 2021-01-26 00:00 to 2021-01-29 00:00, 72 bars │ 2 d │ "
        "test 2021-01-31 00:00 to 2021-02-05 00:00, 120 bars"
    )
    assert split_bars(hourly(200), validation=10, test=10, embargo=53).describe() == (
        "train 2021-01-01 00:00 to 2021-01-04 02:00, 74 bars │ 2 d 5 h │ "
        "validation 2021-01-06 07:00 to 2021-01-06 17:00, 10 bars │ 2 d 5 h │ "
        "test 2021-01-08 22:00 to 2021-01-09 08:00, 10 bars"
    )
    without = split_bars(hourly(50), validation=10, test=10).describe()
    assert without.count("│") == 2


def test_a_request_that_does_not_fit_says_how_many_bars_it_needs_and_fits_with_them() -> None:
    for count, needed in ((399, 400), (50, 400)):
        with pytest.raises(
            ConfigError, match=f"4 folds of 160 training, 40 validation, 40 test .* need {needed} bars; there"
        ):
            walk_forward(hourly(count), folds=4, train=160, test=40, validation=40, purge=15, embargo=5)
    assert len(walk_forward(hourly(400), folds=4, train=160, test=40, validation=40, purge=15, embargo=5)) == 4
