from __future__ import annotations

from datetime import timedelta

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tailguard.data.frequency import frequency_label, parse_frequency
from tailguard.errors import BarsError


@pytest.mark.parametrize(
    ("text", "seconds"), [("1s", 1), ("15m", 900), ("1h", 3_600), ("4h", 14_400), ("1d", 86_400), ("1w", 604_800)]
)
def test_a_frequency_is_read_and_written_as_people_write_it(text: str, seconds: int) -> None:
    assert parse_frequency(text) == timedelta(seconds=seconds)
    assert frequency_label(timedelta(seconds=seconds)) == text


@given(st.integers(1, 10_000_000))
def test_every_label_is_read_back(seconds: int) -> None:
    assert parse_frequency(frequency_label(timedelta(seconds=seconds))) == timedelta(seconds=seconds)


def test_below_a_second_the_label_counts_milliseconds() -> None:
    assert frequency_label(timedelta(milliseconds=250)) == "250ms"


@pytest.mark.parametrize("text", ["", "h", "1", "0h", "1M", "1.5h", "-1h", "hour"])
def test_what_is_no_bar_length_is_refused_by_name(text: str) -> None:
    with pytest.raises(BarsError, match="is not a bar length"):
        parse_frequency(text)
