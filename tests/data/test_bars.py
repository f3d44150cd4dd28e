from __future__ import annotations

from dataclasses import replace
from datetime import UTC, datetime, timedelta

import numpy as np
import polars as pl
import pytest

from tailguard.data.bars import Bars, with_segments
from tailguard.data.calendars import around_the_clock
from tailguard.data.synthetic import make_market
from tailguard.errors import BarsError

HOUR = timedelta(hours=1)
START = datetime(2021, 1, 1, tzinfo=UTC)


def bars_of(hours: dict[str, list[int]], **columns: float) -> Bars:
    """Bars of symbols at hours after START; a close is the hour, plus 1,000 for the second symbol, and so on."""
    rows = [
        {"symbol": symbol, "time": START + hour * HOUR, "close": 1_000.0 * place + hour}
        for place, (symbol, there) in enumerate(sorted(hours.items()))
        for hour in there
    ]
    frame = pl.DataFrame(rows).with_columns(
        pl.col("time").cast(pl.Datetime("ms", "UTC")),
        *(pl.col("close").alias(name) for name in ("open", "high", "low", "volume")),
        **{name: pl.lit(value) for name, value in columns.items()},
    )
    return Bars(with_segments(frame, around_the_clock(HOUR)), HOUR, "bars.parquet")


def test_segments_begin_after_every_gap_and_with_every_symbol() -> None:
    bars = bars_of({"A": [0, 1, 2, 5, 6], "B": [7, 8, 10]})

    assert bars.frame["segment"].to_list() == [0, 0, 0, 1, 1, 2, 2, 3]
    assert bars.frame["segment"].dtype == pl.Int32


def test_a_portfolio_has_the_times_that_all_symbols_share() -> None:
    """A has 0-5 and 7-9, B has 3-9 less 8: together 3 4 5, then 7, then 9, three stretches."""
    panel = bars_of({"A": [0, 1, 2, 3, 4, 5, 7, 8, 9], "B": [3, 4, 5, 6, 7, 9]}).panel("portfolio")

    assert ((panel.time - START.timestamp() * 1_000) // 3_600_000).tolist() == [3, 4, 5, 7, 9]
    assert panel.close.tolist() == [[hour, 1_000 + hour] for hour in (3, 4, 5, 7, 9)]
    assert panel.segment.tolist() == [0, 0, 0, 1, 2]
    assert panel.symbols == ("A", "B")
    assert panel.frequency_ms == 3_600_000


def test_a_gap_of_one_symbol_at_times_the_other_never_had_still_ends_the_segment() -> None:
    panel = bars_of({"A": [0, 1, 4, 5], "B": [0, 1, 4, 5]}).panel("portfolio")

    assert panel.segment.tolist() == [0, 0, 1, 1]


def test_separate_accounts_have_all_rows_of_each_symbol_one_after_the_other() -> None:
    panel = bars_of({"A": [0, 1, 2], "B": [5, 6]}).panel("per_symbol")

    assert panel.close.tolist() == [[0], [1], [2], [1_005], [1_006]]
    assert panel.segment.tolist() == [0, 0, 0, 1, 1]
    assert panel.symbols == ("A", "B")


def test_symbols_without_a_common_time_cannot_be_one_portfolio() -> None:
    with pytest.raises(BarsError, match="no time in common"):
        bars_of({"A": [0, 1], "B": [2, 3]}).panel("portfolio")


def test_between_keeps_the_lead_in_and_marks_it_as_not_tradeable() -> None:
    part = bars_of({"A": list(range(10))}).between(START + 4 * HOUR, START + 7 * HOUR, lead_in=3)
    panel = part.panel()

    assert panel.close[:, 0].tolist() == [1, 2, 3, 4, 5, 6]
    assert panel.tradeable.tolist() == [False, False, False, True, True, True]
    assert part.start == START + 4 * HOUR


def test_a_lead_in_is_as_long_as_there_are_bars() -> None:
    part = bars_of({"A": list(range(10))}).between(START + 2 * HOUR, START + 4 * HOUR, lead_in=50)

    assert len(part) == 4


def test_between_times_without_bars_is_refused() -> None:
    with pytest.raises(BarsError, match="no bars from 2022"):
        bars_of({"A": [0, 1]}).between(datetime(2022, 1, 1, tzinfo=UTC), datetime(2022, 2, 1, tzinfo=UTC))


def test_select_keeps_the_symbols_asked_for_and_refuses_others() -> None:
    bars = bars_of({"A": [0, 1], "B": [0, 1], "C": [0, 1]})

    assert bars.select("C", "A").symbols == ("A", "C")
    with pytest.raises(BarsError, match="no symbol 'D'; there are A, B, C"):
        bars.select("D")


def test_funding_is_in_the_panel_when_it_was_observed() -> None:
    assert bars_of({"A": [0, 1]}).panel().funding is None
    funding = bars_of({"A": [0, 1]}, funding_rate=0.0001).panel().funding
    assert funding is not None
    np.testing.assert_array_equal(funding, [[0.0001], [0.0001]])


def test_the_summary_of_many_symbols_is_short() -> None:
    few, many = make_market(60, assets=2).bars, make_market(60, assets=60).bars
    assert repr(few).startswith("Bars(SYN01, SYN02: 120 of 1h, 2021-01-01 00:00 to 2021-01-03 11:00, from ")
    assert len(repr(many)) < 150
    assert "SYN01, SYN02, SYN03 … (60 in all)" in repr(many)
    assert "0 of 1h, none" in repr(replace(few, frame=few.frame.head(0)))
