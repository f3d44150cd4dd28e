"""Features of markets that close: what they read about their session, by hand."""

from __future__ import annotations

import math
from datetime import UTC, datetime, timedelta

import numpy as np
import polars as pl
import pytest

from tailguard.data.bars import Bars
from tailguard.data.features import FEATURES, available_features, compute_features, leaking_features
from tailguard.data.session_columns import SESSION_COLUMNS, feature_frame
from tailguard.data.sources import load_bars

HOUR = timedelta(hours=1)
MONDAY = datetime(2021, 1, 4, 14, 30, tzinfo=UTC)
SESSION = [name for name, entry in FEATURES.items() if set(entry.needs) & set(SESSION_COLUMNS)]


def exchange(weeks: int = 10, bars: int = 7, step: timedelta = HOUR, seed: int = 0) -> Bars:
    """Sessions of seven hourly bars from 14:30, Monday to Friday."""
    times = [
        MONDAY + timedelta(days=7 * week + day) + bar * step
        for week in range(weeks)
        for day in range(5)
        for bar in range(bars)
    ]
    generator = np.random.default_rng(seed)
    close = 100 * np.exp(np.cumsum(generator.normal(0, 0.01, len(times))))
    opened = np.concatenate([[100.0], close[:-1]]) * np.exp(generator.normal(0, 0.002, len(times)))
    frame = pl.DataFrame(
        {
            "time": times,
            "open": opened,
            "high": np.maximum(opened, close) * 1.001,
            "low": np.minimum(opened, close) * 0.999,
            "close": close,
            "volume": generator.uniform(1e3, 2e3, len(times)),
        }
    )
    return load_bars(frame)


def test_a_session_is_numbered_from_its_first_bar_and_knows_the_closure_before_it() -> None:
    frame = feature_frame(exchange())

    assert frame["session_bar"].to_list()[:15] == [*range(7), *range(7), 0.0]
    assert frame["session_start"].sum() == 50
    # 14:30 to 21:30 is traded: a night is 17 h, a weekend 2 days more.
    closed = frame.filter(pl.col("session_start") == 1)["closed_hours"].to_list()
    assert closed[:6] == [0.0, 17.0, 17.0, 17.0, 17.0, 65.0]
    assert frame["closed_hours"].to_list()[7:14] == [17.0] * 7


def test_session_features_are_the_numbers_of_their_definition() -> None:
    bars = exchange()
    frame = bars.frame
    table = compute_features(bars, ["closure", "session_bars", "opening_gap", "session_return"])
    row = 180  # the sixth bar of its session (25 · 7 = 175), after a weekend
    opened, before = frame["open"][175], frame["close"][174]
    returns = np.diff(np.log(frame["close"].to_numpy()))[row - 168 : row]
    volatility = math.sqrt(np.mean(returns**2))

    found = {name: table.values[row, column] for column, name in enumerate(table.names)}
    assert found["closure"] == pytest.approx(math.log(66), abs=1e-12)
    assert found["session_bars"] == pytest.approx(math.log(6), abs=1e-12)
    assert found["opening_gap"] == pytest.approx(math.log(opened / before) / volatility, rel=1e-9)
    assert found["session_return"] == pytest.approx(math.log(frame["close"][row] / opened) / volatility, rel=1e-9)


def test_session_features_see_no_future_and_need_no_more_history_than_they_say() -> None:
    bars = exchange(weeks=30)
    assert set(SESSION) <= set(available_features(bars))
    assert leaking_features(bars, SESSION, probes=12) == []
    whole = compute_features(bars, SESSION)
    later = bars.between(bars.frame["time"][245], bars.frame["time"][-1] + HOUR)  # from the start of a session
    theirs = compute_features(later, SESSION).values
    for column, name in enumerate(whole.names):
        begin = FEATURES[name.split(":")[0]].warmup + 7
        assert np.abs(theirs[begin:, column] - whole.values[245 + begin :, column]).max() < 1e-9


def test_daily_bars_have_no_bars_within_a_session_and_other_markets_have_no_sessions() -> None:
    daily = exchange(weeks=60, bars=1, step=timedelta(days=1))
    assert daily.frequency == timedelta(days=1)
    assert set(available_features(daily)) & set(SESSION) == {"closure", "opening_gap"}
    assert feature_frame(daily)["closed_hours"].to_list()[:6] == [0.0, 0.0, 0.0, 0.0, 0.0, 48.0]

    open_always = Bars(daily.frame, daily.frequency, "bars", sessions=None)
    assert not set(available_features(open_always)) & set(SESSION)
