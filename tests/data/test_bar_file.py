"""Which bars a file still lacks."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from tailguard.data.bar_file import Gap, missing_ranges


def test_gaps_by_hand() -> None:
    times = np.array([30, 40, 70], dtype=np.int64)
    assert missing_ranges(times, 10, 100, 10) == [Gap(10, 30, 10), Gap(50, 70, 10), Gap(80, 100, 10)]
    # Limits between two bars: the first bar is at 40, the last before 65 at 60.
    assert missing_ranges(times, 35, 65, 10) == [Gap(50, 70, 10)]


def test_nothing_is_missing_from_a_full_file() -> None:
    assert missing_ranges(np.arange(0, 100, 10), 20, 80, 10) == []


def test_bars_may_open_off_the_grid_of_the_clock() -> None:
    # Weeks that open on Mondays, while 1970 began on a Thursday.
    assert missing_ranges(np.array([4, 11], dtype=np.int64), 0, 26, 7) == [Gap(18, 32, 7)]


@given(
    present=st.sets(st.integers(0, 60)),
    start=st.integers(-50, 700),
    length=st.integers(1, 700),
    step=st.sampled_from([1, 7, 10]),
)
def test_gaps_and_bars_together_are_the_period(present: set[int], start: int, length: int, step: int) -> None:
    times = np.array(sorted(present), dtype=np.int64) * step
    stop = start + length
    missing = [
        moment for gap in missing_ranges(times, start, stop, step) for moment in range(gap.start, gap.stop, step)
    ]
    wanted = {moment for moment in range(-60 * step, 1_500, step) if start <= moment < stop}
    assert sorted(wanted - set(times.tolist())) == missing
