from __future__ import annotations

from datetime import UTC, datetime

import pytest

from tailguard.data.findings import Check, Offender, merge, number, warning_message

PLACE = Offender("btc.csv", 8441, "BTCUSDT", datetime(2019, 5, 1, 17, tzinfo=UTC), "low 1,800 against 5,300 around it")


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (46_800.0, "46,800"),
        (46_912.5, "46,912.5"),
        (0.0, "0"),
        (-1.0, "-1"),
        (0.0000123, "0.0000123"),
        (12_345_678_901.0, "12,345,678,901"),
        (float("nan"), "nan"),
        (float("inf"), "inf"),
    ],
)
def test_numbers_are_written_as_people_write_them(value: float, text: str) -> None:
    assert number(value) == text


def test_a_place_has_file_row_time_and_values() -> None:
    assert str(PLACE) == "btc.csv: row 8441 (2019-05-01 17:00): low 1,800 against 5,300 around it"


def test_a_message_names_the_first_and_counts_the_rest() -> None:
    check = Check("spikes", "warning", "none", "bar", "that spikes", 4, (PLACE,), "Compare with another source.")

    assert warning_message(check).splitlines() == [
        str(PLACE),
        "… and 3 more: 4 bars that spikes in all",
        "spikes: Compare with another source.",
    ]


def test_the_worst_level_stands_for_all_symbols_and_counts_add_up() -> None:
    fine = Check("spikes", "ok", "none")
    bad = Check("spikes", "warning", "none", "bar", "that spikes", 2, (PLACE,) * 2)

    merged = merge([fine, bad, fine, bad])

    assert (merged.level, merged.count, len(merged.offenders)) == ("warning", 4, 3)
    assert merge([fine, fine]) == fine
