"""Faulty feeds on real bars: which features move, for how long, and that the market trades on as it was."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import polars as pl
import pytest
import torch
from polars.testing import assert_frame_equal

import tailguard as tg
from tailguard.config import load_config
from tailguard.data.bars import Bars
from tailguard.data.features import FEATURES
from tailguard.data.indicators import ema_warmup
from tailguard.data.prepare import PreparedBars, prepare
from tailguard.errors import ConfigError
from tailguard.experiment.build import prepare_training
from tailguard.experiment.faulty_feed import market_config, market_panel, prepare_under, randomised_feeds, seen_bars
from tailguard.market import MarketConfig, build_market
from tailguard.market.tables import COLUMNS
from tailguard.robust.feed import KINDS, Feed, parse_feed

MARKET = MarketConfig()
CLOCK = [name for name, entry in FEATURES.items() if entry.market_wide and not entry.needs]
VOLUME = ["volume_168", "trades_168", "taker_imbalance_1", "taker_imbalance_6", "taker_imbalance_24"]


@pytest.fixture(scope="module")
def bars() -> Bars:
    return tg.make_market(1_600, seed=3, signal=20).bars


@pytest.fixture(scope="module")
def clean(bars: Bars) -> PreparedBars:
    return prepare(bars)


def under(text: str, bars: Bars, clean: PreparedBars, seed: int = 0) -> PreparedBars:
    return prepare_under(parse_feed(text, seed), bars, clean.scaler, MARKET, "portfolio")


def moved(faulty: PreparedBars, clean: PreparedBars) -> dict[str, np.ndarray]:
    """Rows at which each feature differs, of those on which all are defined."""
    return {
        name: np.flatnonzero(clean.usable & (faulty.features[:, column] != clean.features[:, column]))
        for column, name in enumerate(clean.names)
    }


@pytest.mark.parametrize("delay", [1, 2, 3])
def test_a_late_feed_shows_the_features_of_earlier_bars(bars: Bars, clean: PreparedBars, delay: int) -> None:
    """All but the clock, which the agent has itself."""
    late = under(f"late:{delay}", bars, clean)
    first = int(np.flatnonzero(clean.usable)[0]) + delay
    rows = np.arange(first, clean.panel.rows)
    for column, name in enumerate(clean.names):
        shown = clean.features[rows if name in CLOCK else rows - delay, column]
        # Exponential averages keep a millionth of the repeated first bar.
        np.testing.assert_allclose(late.features[rows, column], shown, atol=2e-5, err_msg=name)
    np.testing.assert_array_equal(late.seen_panel.close[delay:], clean.panel.close[:-delay])


@pytest.mark.parametrize("kind", [name for name, kind in KINDS.items() if not kind.market])
def test_the_market_trades_true_prices_whatever_the_feed_shows(kind: str, bars: Bars, clean: PreparedBars) -> None:
    faulty = under(kind, bars, clean)
    for name in ("time", "open", "high", "low", "close", "volume", "segment", "tradeable"):
        np.testing.assert_array_equal(getattr(faulty.panel, name), getattr(clean.panel, name))
    np.testing.assert_array_equal(faulty.usable, clean.usable)
    assert np.abs(faulty.features - clean.features)[clean.usable].mean() > 0.01
    tables = [build_market(each.panel, MARKET).table for each in (clean, faulty)]
    assert torch.equal(*tables)


def test_a_bad_tick_moves_the_features_that_read_it_for_exactly_their_windows(bars: Bars, clean: PreparedBars) -> None:
    """One tick: the first and last row that each window includes it, and nothing else."""
    shown, tick = _single_tick(bars)
    frame = bars.frame.with_row_index()
    size = shown.frame["close"][tick] / bars.frame["close"][tick]
    assert abs(size - 1) == pytest.approx(0.05)
    close = pl.when(pl.col("index") == tick).then(pl.col("close") * size).otherwise(pl.col("close"))
    wrong = frame.with_columns(close=close, high=pl.max_horizontal("high", close), low=pl.min_horizontal("low", close))
    assert_frame_equal(shown.frame, wrong.drop("index"))
    faulty = prepare(shown, scaler=clean.scaler)
    rows = moved(faulty, clean)
    # A return of h bars reads the closes t and t − h, and its scale the returns of the last 168 bars, of which the tick
    # is in two: until row tick + 168.
    for horizon in (1, 4, 12, 24, 72, 168):
        np.testing.assert_array_equal(rows[f"return_{horizon}"], np.arange(tick, tick + 169))
    np.testing.assert_array_equal(rows["trend_24"], np.arange(tick, tick + 25))
    np.testing.assert_array_equal(rows["trend_168"], np.arange(tick, tick + 169))
    np.testing.assert_array_equal(rows["bollinger_20"], np.arange(tick, tick + 20))
    for name in (*VOLUME, *CLOCK):
        assert rows[name].size == 0, name
    for name in ("atr_14", "rsi_14", "macd"):
        assert rows[name][0] == tick
        assert rows[name][-1] < tick + 2 * ema_warmup(1 / 14)


def _single_tick(bars: Bars) -> tuple[Bars, int]:
    """Bars with a single bad tick, and its row: the first seed that draws just one, far from both ends."""
    for seed in range(1_000):
        shown = seen_bars(bars, parse_feed(f"bad_tick:0.05@{1 / len(bars)}", seed))
        (hit,) = np.nonzero(shown.frame["close"].to_numpy() != bars.frame["close"].to_numpy())
        if len(hit) == 1 and 800 < hit[0] < 1_200:
            return shown, int(hit[0])
    raise AssertionError("no seed draws a single tick there")


def test_spoofed_volume_changes_features_of_volume_only(bars: Bars, clean: PreparedBars) -> None:
    rows = moved(under("volume:20@0.02", bars, clean), clean)
    assert {name for name, where in rows.items() if where.size} == set(VOLUME)


def test_a_missing_bar_makes_one_return_of_two(bars: Bars) -> None:
    """The log returns of the seen closes add up to the true ones once a bar has arrived again."""
    shown = seen_bars(bars, parse_feed("missing:1@0.05"))
    gone = (shown.frame["volume"] == 0).to_numpy()
    assert 40 < gone.sum() < 130
    close, true = (np.log(each.frame["close"].to_numpy()) for each in (shown, bars))
    assert (np.diff(close)[gone[1:]] == 0).all()
    after = np.flatnonzero(gone[:-1] & ~gone[1:]) + 1
    single = after[~gone[after - 2]]
    np.testing.assert_allclose(close[single] - close[single - 2], true[single] - true[single - 2], atol=1e-12)


def test_no_feature_leaks_the_future_through_a_faulty_feed(bars: Bars, clean: PreparedBars) -> None:
    """Later bars replaced by those of another market: the features seen until then stay, bit for bit."""
    other = tg.make_market(1_600, seed=9, signal=20).bars
    feed = "late:1+bad_tick:0.05@0.02+frozen:6@0.02+volume+drift+missing+funding"
    truth = under(feed, bars, clean)
    for cut in (900, 1_200, 1_599):
        mixed = replace(bars, frame=pl.concat([bars.frame.head(cut), other.frame.slice(cut)]))
        shown = under(feed, mixed, clean)
        np.testing.assert_array_equal(
            shown.features[:cut][clean.usable[:cut]], truth.features[:cut][clean.usable[:cut]]
        )
        np.testing.assert_array_equal(shown.seen_panel.close[:cut], truth.seen_panel.close[:cut])


def test_symbols_have_faults_of_their_own_and_the_same_alone_as_together() -> None:
    both = tg.make_market(900, assets=2, seed=5).bars
    feed = parse_feed("bad_tick:0.05@0.02")
    shown = seen_bars(both, feed)
    for symbol in both.symbols:
        alone = seen_bars(both.select(symbol), feed)
        assert_frame_equal(alone.frame, shown.frame.filter(pl.col("symbol") == symbol))
    hit = [
        np.flatnonzero(shown.select(symbol).frame["close"].to_numpy() != both.select(symbol).frame["close"].to_numpy())
        for symbol in both.symbols
    ]
    assert hit[0].tolist() != hit[1].tolist()
    scaler = prepare(both, ["return_24"]).scaler
    assert prepare_under(feed, both, scaler, MARKET, "portfolio").features.shape == (900, 2)


def test_a_funding_spike_is_charged_by_the_market_observed_or_assumed(bars: Bars) -> None:
    feed, funding = parse_feed("funding:0.004@0.01"), COLUMNS.index("funding")

    def column(given: Bars, text: Feed | None) -> np.ndarray:
        panel = given.panel() if text is None else market_panel(given, text, MARKET, "portfolio")
        return build_market(panel, MARKET, dtype=torch.float64).table[funding, :, 0].numpy()

    spiked = feed.funding_spikes(np.zeros(len(bars), np.int32), bars.symbols[0]) > 0
    assert "funding_rate" not in bars.frame.columns
    due = (bars.panel().time // 3_600_000 + 1) % 8 == 0
    assumed = column(bars, feed) - column(bars, None)
    np.testing.assert_allclose(assumed, np.where(spiked & due, 0.004, 0.0), atol=1e-15)
    assert assumed.any()
    observed = replace(
        bars,
        frame=bars.frame.with_columns(funding_rate=pl.lit(-0.0002)).select(
            *[name for name in bars.frame.columns if name != "segment"], "funding_rate", "segment"
        ),
    )
    np.testing.assert_allclose(
        column(observed, feed) - column(observed, None), np.where(spiked & due, -0.004, 0.0), atol=1e-15
    )
    # The agent sees an observed spike: the feed reports it as it is.
    seen = seen_bars(observed, feed).frame["funding_rate"].to_numpy()
    np.testing.assert_allclose(seen, np.where(spiked, -0.0042, -0.0002), atol=1e-15)


def test_a_fee_is_multiplied_and_a_fee_beyond_its_range_is_named() -> None:
    assert market_config(parse_feed("fee:3"), MARKET).fee == pytest.approx(3 * MARKET.fee)
    assert market_config(parse_feed("late:2"), MARKET) is MARKET
    with pytest.raises(ConfigError, match=r"feed: fee:100: market.fee.*Choose a smaller factor"):
        market_config(parse_feed("fee:100"), replace(MARKET, fee=0.01))


def test_fees_of_single_symbols_are_multiplied_too(bars: Bars) -> None:
    """In the books of the same position: three times the fee of the symbol, and nothing else of it."""
    own = {bars.symbols[0]: {"fee": 0.002, "half_spread": 0.001}}
    config = MarketConfig(per_symbol=own)
    assert market_config(parse_feed("fee:3"), config).per_symbol == {
        bars.symbols[0]: {"fee": pytest.approx(0.006), "half_spread": 0.001}
    }
    targets = np.where(np.arange(len(bars)) % 50 < 25, 0.5, 0.0)[:, None]
    result = tg.backtest(targets, bars, config, feed="fee:3")
    assert result.turnover.sum() > 1
    np.testing.assert_allclose(result.costs["fee"], 0.006 * result.turnover, rtol=1e-9)
    np.testing.assert_allclose(result.costs["spread"], 0.001 * result.turnover, rtol=1e-9)
    with pytest.raises(ConfigError, match=r"feed: fee:30: market.per_symbol.*fee.*Choose a smaller factor"):
        market_config(parse_feed("fee:30"), config)


def test_a_spike_is_added_to_the_rate_of_each_symbol() -> None:
    """0.2 % for the one, the market's own for the other; a symbol without funding has no spikes."""
    both = tg.make_market(900, assets=2, seed=5).bars
    first, second = both.symbols
    feed, funding = parse_feed("funding:0.004@0.01"), COLUMNS.index("funding")
    due = (both.panel("portfolio").time // 3_600_000 + 1) % 8 == 0
    for others in (0.0001, 0.0):
        config = MarketConfig(per_symbol={first: {"funding_rate": 0.002}}, funding_rate=others)
        panel = market_panel(both, feed, config, "portfolio")
        charged = build_market(panel, config, dtype=torch.float64).table[funding].numpy()
        for asset, (symbol, rate) in enumerate(((first, 0.002), (second, others))):
            spikes = feed.funding_spikes(np.zeros(900, np.int32), symbol) * (rate > 0)
            np.testing.assert_allclose(charged[:, asset], np.where(due, rate + spikes, 0.0), atol=1e-15)
        assert (charged[:, 0] > 0.005).any()


@pytest.mark.parametrize("preset", ["crypto_spot", "equity", "futures"])
def test_a_market_without_funding_has_no_spikes(preset: Any, bars: Bars) -> None:
    """Asked for, it is an error that says so; whatever the bars carry, as such a market does not use it."""
    config = MarketConfig.for_market(preset)
    observed = replace(bars, frame=bars.frame.with_columns(funding_rate=pl.lit(0.0002)))
    for given in (bars, observed):
        with pytest.raises(ConfigError, match=r"funding:0\.004@0\.01: this market charges no funding"):
            tg.backtest(np.full((len(bars), 1), 0.5), given, config, feed="late:1+funding:0.004@0.01")


# --- training bars under several feeds --------------------------------------------------------------------------------

SMALL = ("data.features=[return_24, taker_imbalance_6]", "risk.limit=-0.04", "env.episode_length=32", "env.num_envs=4")


def test_training_bars_hold_the_clean_ones_first_and_then_each_feed(bars: Bars) -> None:
    config = load_config(overrides=[*SMALL, "robust.feed=[late:2, bad_tick]", "robust.feed_tables=3"])
    clean = prepare(bars, config.data.features)
    mixed = prepare_training(config, bars)
    assert mixed.feeds == 4  # type: ignore[attr-defined]  # late:2 has nothing to draw, bad ticks three times
    expected = [clean, under("late:2", bars, clean), *(under("bad_tick", bars, clean, seed) for seed in (1, 2, 3))]
    for number, copy in enumerate(expected):
        rows = slice(number * 1_600, (number + 1) * 1_600)
        np.testing.assert_array_equal(mixed.features[rows], copy.features)
        np.testing.assert_array_equal(mixed.seen_panel.close[rows], copy.seen_panel.close)
        np.testing.assert_array_equal(mixed.panel.close[rows], clean.panel.close)
    assert len(np.unique(mixed.panel.segment)) == 5
    assert mixed.scaler.digest() == clean.scaler.digest()


def test_without_feeds_the_training_bars_are_as_they_were(bars: Bars) -> None:
    mixed = prepare_training(load_config(overrides=SMALL), bars)
    assert type(mixed) is PreparedBars
    assert mixed.seen_close is None
    assert mixed.seen_panel is mixed.panel


def test_a_spike_in_one_feed_leaves_the_assumed_funding_of_the_others(bars: Bars) -> None:
    config = load_config(overrides=[*SMALL, "robust.feed=[late:1, funding:0.004@0.01]", "robust.feed_tables=1"])
    mixed = randomised_feeds(config, bars, prepare(bars, config.data.features))
    rates = mixed.panel.assumed_funding
    assert rates is not None
    clean, late, spiked = np.split(rates[:, 0], 3)
    assert (clean == config.market.funding_rate).all()
    assert (late == config.market.funding_rate).all()
    assert set(np.round(spiked, 6)) == {0.0001, 0.0041}
    funding = build_market(mixed.panel, config.market, dtype=torch.float64).table[COLUMNS.index("funding"), :1_600]
    alone = build_market(bars.panel(), config.market, dtype=torch.float64).table[COLUMNS.index("funding")]
    torch.testing.assert_close(funding, alone)


def test_copies_without_a_spike_keep_the_funding_of_each_symbol() -> None:
    both = tg.make_market(900, assets=2, seed=5).bars
    own = f"market.per_symbol={{{both.symbols[0]}: {{funding_rate: 0.002}}}}"
    feeds = ("robust.feed=[late:1, funding:0.004@0.01]", "robust.feed_tables=1", "env.accounts=portfolio")
    config = load_config(overrides=[*SMALL, own, *feeds])
    rates = randomised_feeds(config, both, prepare(both, config.data.features)).panel.assumed_funding
    assert rates is not None
    clean, late, spiked = np.split(rates, 3)
    for copy in (clean, late):
        np.testing.assert_array_equal(copy, np.broadcast_to([0.002, 0.0001], copy.shape))
    assert set(np.round(spiked[:, 0], 6)) == {0.002, 0.006}
