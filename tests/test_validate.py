"""Range checks name the setting, its value and what is allowed."""

from __future__ import annotations

import math

import pytest

from tailguard.errors import ConfigError
from tailguard.validate import check_choice, check_count, check_range


@pytest.mark.parametrize(
    ("value", "bounds", "message"),
    [
        (1.5, {"low": 0, "high": 1}, "x: 1.5 is out of range; it must be at least 0 and at most 1"),
        (0, {"low": 0, "low_open": True}, "x: 0 is out of range; it must be more than 0"),
        (1, {"high": 1, "high_open": True}, "x: 1 is out of range; it must be less than 1"),
        (math.nan, {"low": 0}, "x: nan is out of range"),
        ("1", {}, "x: '1' is not a number"),
        (True, {}, "x: True is not a number"),
    ],
)
def test_a_value_out_of_range_is_named(value, bounds, message) -> None:
    with pytest.raises(ConfigError) as caught:
        check_range("x", value, **bounds)
    assert str(caught.value).startswith(message)


def test_values_inside_pass() -> None:
    check_range("x", 0, low=0, high=1)
    check_range("x", 1.0, low=0, high=1)
    check_count("n", 1)
    check_choice("c", "a", ("a", "b"))


def test_counts_and_choices() -> None:
    for bad in (0, 2.0, True):
        with pytest.raises(ConfigError, match="n: "):
            check_count("n", bad)
    with pytest.raises(ConfigError, match="c: 'z' is not one of a, b"):
        check_choice("c", "z", ("a", "b"))
