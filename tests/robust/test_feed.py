"""Faults of a feed on plain arrays: what each changes, by how much, and that none knows the future."""

from __future__ import annotations

import numpy as np
import pytest
from numpy.typing import NDArray

from tailguard.errors import ConfigError
from tailguard.robust.feed import (
    DRIFT_BARS,
    KINDS,
    PRICES,
    VOLUMES,
    Feed,
    describe_kinds,
    parse_feed,
    price_error_bp,
)

Float = NDArray[np.float64]
ROWS = 3_000
LYING = [name for name, kind in KINDS.items() if not kind.market]


def market(rows: int = ROWS, seed: int = 0) -> dict[str, Float]:
    """Consistent bars with every column a source may have."""
    draw = np.random.default_rng(seed)
    close = 100 * np.exp(np.cumsum(0.01 * draw.normal(size=rows)))
    opened = np.concatenate([[100.0], close[:-1]])
    volume = np.exp(draw.normal(3, 1, rows))
    bought = draw.random(rows)
    return {
        "open": opened,
        "high": np.maximum(opened, close) * 1.002,
        "low": np.minimum(opened, close) * 0.998,
        "close": close,
        "volume": volume,
        "quote_volume": volume * close,
        "trades": np.floor(100 * volume) + 1,
        "taker_buy_base": bought * volume,
        "taker_buy_quote": bought * volume * close,
        "funding_rate": 1e-4 * draw.normal(size=rows),
        "sentiment": draw.normal(size=rows),
    }


@pytest.fixture(scope="module")
def bars() -> dict[str, Float]:
    return market()


@pytest.fixture(scope="module")
def segment() -> NDArray[np.int32]:
    """Three stretches without a gap."""
    return np.repeat([0, 1, 2], ROWS // 3).astype(np.int32)


def changed_rows(before: dict[str, Float], after: dict[str, Float], *names: str) -> NDArray[np.int64]:
    return np.flatnonzero(np.any([before[name] != after[name] for name in names], axis=0))


def test_late_bars_are_those_of_earlier_rows_and_never_of_another_stretch(
    bars: dict[str, Float], segment: NDArray[np.int32]
) -> None:
    for delay in (1, 2, 3):
        seen = parse_feed(f"late:{delay}").seen_bars(bars, segment, "A")
        for name in bars:
            for begin in (0, 1_000, 2_000):
                own = slice(begin + delay, begin + 1_000)
                np.testing.assert_array_equal(seen[name][own], bars[name][begin : begin + 1_000 - delay])
                assert (seen[name][begin : begin + delay] == bars[name][begin]).all()


def test_a_bad_tick_moves_close_and_range_of_its_bar_by_its_size(
    bars: dict[str, Float], segment: NDArray[np.int32]
) -> None:
    seen = parse_feed("bad_tick:0.03@0.05").seen_bars(bars, segment, "A")
    hit = changed_rows(bars, seen, "close")
    # 3,000 bars of which 5 % are hit: 150 ± 4 standard deviations of 12.
    assert 100 < len(hit) < 200
    np.testing.assert_allclose(np.abs(seen["close"][hit] / bars["close"][hit] - 1), 0.03, rtol=1e-12)
    up = seen["close"][hit] > bars["close"][hit]
    assert 0.3 < up.mean() < 0.7
    np.testing.assert_array_equal(seen["high"], np.maximum(bars["high"], seen["close"]))
    np.testing.assert_array_equal(seen["low"], np.minimum(bars["low"], seen["close"]))
    for name in bars.keys() - {"close", "high", "low"}:
        assert seen[name] is bars[name]
    # Both sides of the size: 3 % of 5 % of the bars are 15 basis points on average.
    assert price_error_bp(seen["close"], bars["close"]) == pytest.approx(1e4 * 0.03 * len(hit) / ROWS, rel=1e-9)


def test_a_frozen_feed_repeats_its_last_bar_and_then_jumps(bars: dict[str, Float], segment: NDArray[np.int32]) -> None:
    feed = parse_feed("frozen:5@0.01")
    seen = feed.seen_bars(bars, segment, "A")
    held = changed_rows(bars, seen, "close")
    begins = held[np.diff(held, prepend=-2) > 1]
    # 1 % of 3,000 bars, some of which fall into a freeze that has begun.
    assert 15 < len(begins) < 45
    for begin in begins:
        length = 0
        while begin + length in set(held.tolist()):
            for name in bars:
                assert seen[name][begin + length] == bars[name][begin - 1]
            length += 1
        assert length >= 5 or segment[begin] != segment[begin + length]
    assert not set(held.tolist()) & {0, 1_000, 2_000}


def test_a_missing_bar_is_flat_at_the_last_close_and_empty(bars: dict[str, Float], segment: NDArray[np.int32]) -> None:
    seen = parse_feed("missing:2@0.02").seen_bars(bars, segment, "A")
    gone = np.flatnonzero(seen["volume"] == 0)
    assert 70 < len(gone) < 170  # two bars for each of 60 ± 31 events, fewer where they overlap
    present = np.setdiff1d(np.arange(ROWS), gone)
    for name in bars:
        np.testing.assert_array_equal(seen[name][present], bars[name][present])
    last = present[np.searchsorted(present, gone) - 1]
    for name in PRICES:
        np.testing.assert_array_equal(seen[name][gone], bars["close"][last])
    for name in VOLUMES:
        assert not seen[name][gone].any()
    np.testing.assert_array_equal(seen["funding_rate"][gone], bars["funding_rate"][last])


def test_spoofed_volume_multiplies_volume_and_all_fake_trades_are_on_one_side(
    bars: dict[str, Float], segment: NDArray[np.int32]
) -> None:
    seen = parse_feed("volume:8@0.1").seen_bars(bars, segment, "A")
    hit = changed_rows(bars, seen, "volume")
    assert 230 < len(hit) < 370
    for name in ("volume", "trades"):
        np.testing.assert_allclose(seen[name][hit], 8 * bars[name][hit], rtol=1e-12)
    fake = 7 * bars["volume"][hit]
    np.testing.assert_allclose(
        seen["quote_volume"][hit] - bars["quote_volume"][hit], fake * bars["close"][hit], rtol=1e-9
    )
    bought = (seen["taker_buy_base"] - bars["taker_buy_base"])[hit]
    assert set(np.round(bought / fake, 9).tolist()) == {0.0, 1.0}
    assert (seen["taker_buy_base"] <= seen["volume"]).all()
    for name in (*PRICES, "funding_rate", "sentiment"):
        assert seen[name] is bars[name]


def test_a_drift_is_slow_bounded_and_keeps_bars_consistent(bars: dict[str, Float], segment: NDArray[np.int32]) -> None:
    seen = parse_feed("drift:0.1").seen_bars(bars, segment, "A")
    logs = {name: np.log(seen[name] / bars[name]) for name in ("open", "high", "low", "close", "volume", "sentiment")}
    for log in logs.values():
        assert np.abs(log).max() == pytest.approx(0.1, rel=1e-4)
        # A swing of ±0.1 in 720 bars moves by no more than 0.1·2π/720 from one bar to the next.
        assert np.abs(np.diff(log)).max() < 0.1 * 2 * np.pi / DRIFT_BARS * 1.001
    np.testing.assert_allclose(logs["open"], logs["close"], atol=1e-12)
    assert np.abs(logs["volume"] - logs["close"]).max() > 0.01
    assert (seen["taker_buy_base"] <= seen["volume"]).all()


def test_the_funding_rate_spikes_in_the_market_and_the_feed_says_so(
    bars: dict[str, Float], segment: NDArray[np.int32]
) -> None:
    feed = parse_feed("funding:0.002@0.005")
    true, seen = feed.true_bars(bars, segment, "A"), feed.seen_bars(bars, segment, "A")
    np.testing.assert_array_equal(true["funding_rate"], seen["funding_rate"])
    spiked = changed_rows(bars, true, "funding_rate")
    np.testing.assert_allclose(np.abs(true["funding_rate"] - bars["funding_rate"])[spiked], 0.002, rtol=1e-9)
    assert (np.abs(true["funding_rate"]) >= np.abs(bars["funding_rate"])).all()
    np.testing.assert_array_equal(np.flatnonzero(feed.funding_spikes(segment, "A")), spiked)
    # The feed may be late about it; the market is not.
    late = parse_feed("late:2+funding:0.002@0.005")
    np.testing.assert_array_equal(late.true_bars(bars, segment, "A")["funding_rate"], true["funding_rate"])
    np.testing.assert_array_equal(late.seen_bars(bars, segment, "A")["funding_rate"][2:900], true["funding_rate"][:898])


def test_faults_of_the_feed_leave_the_market_alone(bars: dict[str, Float], segment: NDArray[np.int32]) -> None:
    for kind in LYING:
        feed = parse_feed(kind)
        true = feed.true_bars(bars, segment, "A")
        assert all(true[name] is bars[name] for name in bars)
        assert feed.lies
    assert parse_feed("fee:3+fee:2").fee_factor == 6
    assert not parse_feed("fee:3").lies
    assert parse_feed("late:2").fee_factor == 1


def test_faults_act_from_left_to_right(bars: dict[str, Float], segment: NDArray[np.int32]) -> None:
    """Late and then bad ticks: the tick is in the bar that arrives; the other way round it arrives late as well."""
    ticks = changed_rows(bars, parse_feed("bad_tick:0.05@0.02").seen_bars(bars, segment, "A"), "close")
    late = parse_feed("late:2").seen_bars(bars, segment, "A")
    after = parse_feed("late:2+bad_tick:0.05@0.02").seen_bars(bars, segment, "A")
    np.testing.assert_array_equal(changed_rows(late, after, "close"), ticks)
    before = parse_feed("bad_tick:0.05@0.02+late:2").seen_bars(bars, segment, "A")
    inside = ticks[(ticks % 1_000) < 998]
    np.testing.assert_array_equal(changed_rows(late, before, "close"), inside + 2)


def test_seeds_and_symbols_draw_different_faults_and_equal_ones_the_same(
    bars: dict[str, Float], segment: NDArray[np.int32]
) -> None:
    def hit(feed: Feed, symbol: str = "A") -> list[int]:
        return changed_rows(bars, feed.seen_bars(bars, segment, symbol), "close").tolist()

    first = hit(parse_feed("bad_tick"))
    assert hit(parse_feed("bad_tick")) == first
    assert hit(parse_feed("bad_tick", seed=1)) != first
    assert hit(parse_feed("bad_tick"), "B") != first
    assert hit(parse_feed("volume+bad_tick")) == first
    assert len(hit(parse_feed("bad_tick+bad_tick"))) > 1.5 * len(first)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("combined", ["", "+late:2", "+frozen:6@0.05"])
def test_no_fault_knows_the_future(kind: str, combined: str, segment: NDArray[np.int32]) -> None:
    """Change or remove all later bars: what was seen until then stays, bit for bit."""
    bars, feed = market(), parse_feed(f"{kind}{combined}")
    other = market(seed=1)
    truth = feed.seen_bars(bars, segment, "A")
    for cut in (1, 500, 1_000, 1_001, 2_345):
        wild = {name: np.concatenate([bars[name][:cut], other[name][cut:]]) for name in bars}
        short = {name: values[:cut] for name, values in bars.items()}
        for future, numbers in ((wild, segment), (short, segment[:cut])):
            seen = feed.seen_bars(future, numbers, "A")
            for name in bars:
                np.testing.assert_array_equal(seen[name][:cut], truth[name][:cut])


@pytest.mark.parametrize("kind", LYING)
def test_what_is_seen_are_possible_bars(kind: str, bars: dict[str, Float], segment: NDArray[np.int32]) -> None:
    seen = parse_feed(f"{kind}+bad_tick:0.3@0.1+volume:50").seen_bars(bars, segment, "A")
    assert (seen["low"] <= np.minimum(seen["open"], seen["close"])).all()
    assert (seen["high"] >= np.maximum(seen["open"], seen["close"])).all()
    assert (seen["low"] > 0).all()
    assert (seen["taker_buy_base"] <= seen["volume"] * (1 + 1e-12)).all()
    assert all(np.isfinite(values).all() for values in seen.values())


@pytest.mark.parametrize("kind", [name for name, entry in KINDS.items() if entry.rate is not None])
def test_a_fault_that_never_begins_changes_nothing(
    kind: str, bars: dict[str, Float], segment: NDArray[np.int32]
) -> None:
    size = int(KINDS[kind].size) if KINDS[kind].whole else KINDS[kind].size
    seen = parse_feed(f"{kind}:{size}@0").seen_bars(bars, segment, "A")
    for name in bars:
        np.testing.assert_array_equal(seen[name], bars[name])


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("lat:2", "no fault 'lat'. Did you mean late"),
        ("", "There are bad_tick, late, missing, frozen, volume, drift, fee, funding"),
        ("late:2+", "no fault ''"),
        ("late:4", r"4 is out of range \(1 to 3\)"),
        ("late:1.5", "must be a whole number of bars"),
        ("late:2@0.5", "acts at all bars, so it has no rate '0.5'"),
        ("bad_tick:", "gives no size. Write bad_tick:0.05@0.01"),
        ("bad_tick:much", "'much' is not a number"),
        ("bad_tick:0.05@2", r"2 is out of range \(0 to 1\)"),
        ("bad_tick:nan", "nan is out of range"),
    ],
)
def test_mistakes_in_a_text_are_named_with_the_way_out(text: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        parse_feed(text)


def test_a_feed_is_written_as_it_is_read() -> None:
    for text in ("late:2", "bad_tick:0.05@0.01", "late:2+frozen:12@0.01+fee:3"):
        assert str(parse_feed(text)) == text
    assert str(parse_feed("late")) == "late:1"
    assert str(parse_feed(" late:2 + fee ")) == "late:2+fee:3"
    assert [line.split(":")[0] for line in describe_kinds()] == list(KINDS)
