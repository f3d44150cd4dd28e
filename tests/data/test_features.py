"""The table of features: alignment, warm-up, gaps, causality, and a user's own features."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path

import numpy as np
import polars as pl
import pytest

from tailguard.data import features, indicators
from tailguard.data.bars import TIME_TYPE, Bars
from tailguard.data.features import (
    FEATURES,
    FeatureError,
    available_features,
    compute_features,
    feature,
    leaking_features,
    longest_warmup,
)
from tailguard.data.scaling import Scaler
from tailguard.data.session_columns import SESSION_COLUMNS
from tailguard.errors import ConfigError

START = datetime(2021, 1, 1, tzinfo=UTC)
HOUR = timedelta(hours=1)
AROUND_THE_CLOCK = [name for name, entry in FEATURES.items() if not set(entry.needs) & set(SESSION_COLUMNS)]
"""Features of every market; tests/data/test_session_columns.py has those of markets that close."""
EXPONENTIAL = {"atr_14", "rsi_14", "macd", "macd_histogram"}


def symbol_frame(symbol: str, hours: np.ndarray, first_segment: int = 0, seed: int = 0) -> pl.DataFrame:
    """Bars at these hours after START with every optional column; a new segment after each missing hour."""
    generator, count = np.random.default_rng(seed), len(hours)
    close = 100.0 * np.exp(np.cumsum(0.01 * generator.standard_t(4, count)))
    opening = np.concatenate([[100.0], close[:-1]]) * np.exp(0.001 * generator.normal(size=count))
    volume = np.exp(generator.normal(3.0, 1.0, count))
    bought = volume * generator.uniform(size=count)
    breaks = np.concatenate([[0], np.cumsum(np.diff(hours) != 1)])
    return pl.DataFrame(
        {
            "symbol": [symbol] * count,
            "time": [START + int(hour) * HOUR for hour in hours],
            "open": opening,
            "high": np.maximum(opening, close) * np.exp(np.abs(0.003 * generator.normal(size=count))),
            "low": np.minimum(opening, close) * np.exp(-np.abs(0.003 * generator.normal(size=count))),
            "close": close,
            "volume": volume,
            "quote_volume": volume * close,
            "trades": np.floor(100 * volume).astype(np.int64),
            "taker_buy_base": bought,
            "taker_buy_quote": bought * close,
            "funding_rate": 1e-4 * generator.normal(size=count),
            "segment": (first_segment + breaks).astype(np.int32),
        },
        schema_overrides={"time": TIME_TYPE},
    )


def one_symbol(count: int, seed: int = 0) -> Bars:
    return Bars(symbol_frame("BTC", np.arange(count), seed=seed), HOUR, "btc.parquet")


def two_symbols() -> Bars:
    """BTC misses hours 900 to 909, ETH starts 50 hours later and misses none."""
    bitcoin = symbol_frame("BTC", np.concatenate([np.arange(900), np.arange(910, 1_900)]), seed=1)
    ether = symbol_frame("ETH", np.arange(50, 1_900), first_segment=2, seed=2)
    return Bars(pl.concat([bitcoin, ether]), HOUR, "pair.parquet")


@pytest.fixture(autouse=True)
def restored_registry() -> Iterator[None]:
    """What a test registers is gone after it."""
    before = dict(FEATURES)
    yield
    FEATURES.clear()
    FEATURES.update(before)


def register_own() -> None:
    @feature("own_drawdown", warmup=167, needs=("quote_volume",))
    def own_drawdown() -> pl.Expr:
        quiet = pl.col("quote_volume") / pl.col("quote_volume").rolling_max(24)
        return pl.col("close") / pl.col("high").rolling_max(168) - 1 + 0.0 * quiet


# --- alignment -------------------------------------------------------------------------------------------------------


def test_rows_of_a_portfolio_are_those_of_the_panel_with_a_column_a_symbol() -> None:
    @feature("own_close")
    def own_close() -> pl.Expr:
        return pl.col("close")

    bars = two_symbols()
    table = compute_features(bars, ["time_of_day_sin", "own_close", "funding"], accounts="portfolio")
    panel = bars.panel("portfolio")
    assert table.names == ("own_close:BTC", "funding:BTC", "own_close:ETH", "funding:ETH", "time_of_day_sin")
    np.testing.assert_array_equal(table.values[:, [0, 2]], panel.close)
    assert panel.funding is not None
    np.testing.assert_array_equal(table.values[:, [1, 3]], panel.funding)
    hour = (panel.time / 3_600_000) % 24
    np.testing.assert_allclose(table.values[:, 4], np.sin(2 * np.pi * hour / 24), atol=1e-12)


def test_rows_of_separate_accounts_are_those_of_the_panel_one_symbol_after_the_other() -> None:
    @feature("own_close")
    def own_close() -> pl.Expr:
        return pl.col("close")

    bars = two_symbols()
    table = compute_features(bars, ["own_close", "time_of_week_cos"], accounts="per_symbol")
    panel = bars.panel("per_symbol")
    assert table.names == ("own_close", "time_of_week_cos")
    np.testing.assert_array_equal(table.values[:, :1], panel.close)


def test_a_portfolio_of_one_symbol_keeps_plain_names() -> None:
    table = compute_features(one_symbol(50), ["bollinger_20"])
    assert table.names == ("bollinger_20",)
    assert table.values.shape == (50, 1)


def test_a_symbol_has_the_same_values_alone_and_in_a_portfolio() -> None:
    bars = two_symbols()
    together = compute_features(bars)
    alone = compute_features(bars.select("ETH"))
    times = bars.panel("portfolio").time
    rows = np.isin(bars.select("ETH").panel().time, times)
    ether = [column for column, name in enumerate(together.names) if name.endswith(":ETH")]
    names = [together.names[column].removesuffix(":ETH") for column in ether]
    np.testing.assert_array_equal(
        together.values[:, ether], alone.values[rows][:, [alone.names.index(n) for n in names]]
    )


# --- warm-up and gaps ------------------------------------------------------------------------------------------------


def test_a_row_is_valid_when_the_slowest_feature_of_its_stretch_is_defined() -> None:
    bars = two_symbols()
    table = compute_features(bars, ["return_24", "bollinger_20"], accounts="per_symbol")
    position = bars.frame.select(pl.int_range(pl.len()).over("segment")).to_series().to_numpy()
    np.testing.assert_array_equal(table.valid, position >= 168)
    assert np.isnan(table.values[position < 168][:, 0]).all()
    assert np.isnan(table.values[position < 19][:, 1]).all()
    assert longest_warmup(bars, ["return_24", "bollinger_20"]) == 168


def test_a_declared_warmup_hides_values_that_are_there_but_not_settled() -> None:
    feature("own_settling", warmup=7)(lambda: pl.col("close").ewm_mean(span=3))
    table = compute_features(one_symbol(50), ["own_settling"])
    np.testing.assert_array_equal(np.isnan(table.values[:, 0]), np.arange(50) < 7)
    np.testing.assert_array_equal(table.valid, np.arange(50) >= 7)


def test_a_portfolio_row_is_valid_when_all_symbols_are() -> None:
    bars = two_symbols()
    valid = compute_features(bars, ["trend_24"]).valid
    hours = (bars.panel("portfolio").time - int(START.timestamp() * 1000)) // 3_600_000
    # ETH starts at hour 50; BTC starts again at hour 910.
    np.testing.assert_array_equal(valid, ((hours >= 74) & (hours < 900)) | (hours >= 934))


def test_nothing_crosses_a_gap_or_a_symbol() -> None:
    """Each stretch has the values it has when computed from nothing but itself, bit for bit."""
    register_own()
    bars = two_symbols()
    table = compute_features(bars, accounts="per_symbol")
    for segment in bars.frame["segment"].unique():
        rows = (bars.frame["segment"] == segment).to_numpy()
        alone = Bars(bars.frame.filter(pl.col("segment") == segment), HOUR, "stretch")
        np.testing.assert_array_equal(table.values[rows], compute_features(alone).values)
    assert table.valid.sum() > 500


@pytest.mark.parametrize("name", AROUND_THE_CLOCK)
def test_warmup_is_exactly_as_long_as_the_value_is_missing(name: str) -> None:
    entry, frame = FEATURES[name], one_symbol(900).frame
    raw = frame.select(entry.expression().cast(pl.Float64).alias("raw"))["raw"]
    if name in EXPONENTIAL:
        assert raw[2:].null_count() == 0
        assert entry.warmup in (187, 188)  # ln 1e-6 / ln(13/14), and one for the change of price
    else:
        assert raw[: entry.warmup].null_count() == entry.warmup
        assert raw[entry.warmup :].null_count() == 0


@pytest.mark.parametrize("name", AROUND_THE_CLOCK)
def test_history_before_the_warmup_does_not_matter(name: str) -> None:
    """Exponential averages remember a millionth of what came before: 1e-4 in their own units; the others nothing."""
    entry, bars = FEATURES[name], one_symbol(1_600)
    table = compute_features(bars, [name])
    for start in (1, 57, 800):
        later = compute_features(bars.between(START + start * HOUR, START + 1_600 * HOUR), [name])
        ours, theirs = later.values[entry.warmup :, 0], table.values[start + entry.warmup :, 0]
        assert len(ours) > 50
        tolerance = 1e-4 * np.abs(theirs).max() if name in EXPONENTIAL else 1e-10 * max(1.0, np.abs(theirs).max())
        assert np.abs(ours - theirs).max() <= tolerance


def test_a_lead_in_of_the_longest_warmup_makes_every_traded_row_valid() -> None:
    bars = one_symbol(1_500)
    for lead_in, invalid in ((longest_warmup(bars), 0), (longest_warmup(bars) - 1, 1)):
        part = bars.between(START + 900 * HOUR, START + 1_200 * HOUR, lead_in=lead_in)
        assert (part.panel().tradeable & ~compute_features(part).valid).sum() == invalid


def test_a_value_missing_after_its_warmup_is_an_error_with_its_place() -> None:
    @feature("own_hasty", warmup=5)
    def own_hasty() -> pl.Expr:
        return pl.col("close").rolling_mean(10)

    @feature("own_careless")
    def own_careless() -> pl.Expr:
        return pl.col("volume") / (pl.col("trades") - pl.col("trades"))

    with pytest.raises(
        FeatureError,
        match=r"btc.parquet: feature 'own_hasty' is None for BTC at 2021-01-01 05:00, bar 6 of its .* on 4 bars",
    ):
        compute_features(one_symbol(50), ["own_hasty"])
    with pytest.raises(FeatureError, match="reads the column 'trades'; declare it: needs="):
        compute_features(one_symbol(50), ["own_careless"])
    feature("own_careless", needs=("trades",), replace=True)(own_careless)
    with pytest.raises(
        FeatureError, match=r"'own_careless' is inf for BTC .* on 50 bars .* ratio\(a, b, otherwise=0.0\)"
    ):
        compute_features(one_symbol(50), ["own_careless"])


# --- causality -------------------------------------------------------------------------------------------------------


def test_no_registered_feature_sees_the_future() -> None:
    register_own()
    assert "own_drawdown" in FEATURES
    for bars in (one_symbol(1_200), two_symbols()):
        assert set(available_features(bars)) == {*AROUND_THE_CLOCK, "own_drawdown"}
        assert leaking_features(bars, probes=12, seed=1) == []


def test_past_values_keep_every_bit_when_single_later_bars_change() -> None:
    """The same by other means: one wild bar at a time, in the table a simulator sees."""
    bars, generator = one_symbol(1_000), np.random.default_rng(5)
    before = compute_features(bars).values
    for row in generator.integers(800, 1_000, size=6):
        frame = bars.frame.with_row_index("row").with_columns(
            pl.when(pl.col("row") == row).then(pl.col(column) * 1_000).otherwise(pl.col(column)).alias(column)
            for column in ("open", "high", "low", "close", "volume", "taker_buy_base", "funding_rate")
        )
        after = compute_features(Bars(frame.drop("row"), HOUR, "wild")).values
        assert after[:row].tobytes() == before[:row].tobytes()
        assert (after[row] != before[row]).sum() > 10


def centred_mean() -> pl.Expr:
    return pl.col("close").rolling_mean(3, center=True)


def whole_sample_zscore() -> pl.Expr:
    return (pl.col("close") - pl.col("close").mean()) / pl.col("close").std()


def next_bar_volume() -> pl.Expr:
    return pl.col("volume").shift(-1).fill_null(0.0)


def backward_filled() -> pl.Expr:
    crossed = pl.when(pl.col("close") > pl.col("open").shift(1) * 1.02).then(1.0)
    return crossed.backward_fill().fill_null(0.0)


def share_of_stretch() -> pl.Expr:
    return pl.int_range(pl.len()) / pl.len()


@pytest.mark.parametrize(
    "leak", [centred_mean, whole_sample_zscore, next_bar_volume, backward_filled, share_of_stretch]
)
def test_a_feature_that_looks_ahead_is_reported(leak: Callable[[], pl.Expr]) -> None:
    feature("own_leak", warmup=1)(leak)
    feature("own_honest", warmup=2)(lambda: pl.col("close").rolling_mean(3))
    found = leaking_features(one_symbol(300), ["own_honest", "own_leak"], probes=8, seed=0)
    assert [leak.feature for leak in found] == ["own_leak"]
    assert found[0].time <= found[0].cut
    assert found[0].before != found[0].after
    assert "feature 'own_leak' sees the future: BTC at 2021-01-" in str(found[0])


def test_a_leak_in_one_symbol_only_is_reported() -> None:
    @feature("own_leak")
    def own_leak() -> pl.Expr:
        # Looks ahead only in stretches of exactly 990 bars: BTC's after its gap.
        return pl.when(pl.len() == 990).then(pl.col("close").shift(-1).fill_null(0.0)).otherwise(pl.col("close"))

    found = leaking_features(two_symbols(), ["own_leak"], probes=20, seed=0)
    assert [leak.symbol for leak in found] == ["BTC"]


def test_leaks_cannot_be_looked_for_inside_a_warmup() -> None:
    with pytest.raises(ConfigError, match=r"btc.parquet: .*needs 170 bars without a gap"):
        leaking_features(one_symbol(169), ["return_1"])
    assert leaking_features(one_symbol(170), ["return_1"]) == []


# --- registry --------------------------------------------------------------------------------------------------------


def test_features_without_their_columns_are_left_out_unless_asked_for() -> None:
    bars = one_symbol(800)
    lean = Bars(bars.frame.drop("taker_buy_base", "trades", "funding_rate"), HOUR, "lean.csv")
    missing = set(AROUND_THE_CLOCK) - set(available_features(lean))
    assert missing == {"taker_imbalance_1", "taker_imbalance_6", "taker_imbalance_24", "trades_168", "funding"}
    assert set(compute_features(lean).names) == set(AROUND_THE_CLOCK) - missing
    with pytest.raises(
        ConfigError, match=r"feature 'funding' needs the column 'funding_rate', which lean.csv does not have"
    ):
        compute_features(lean, ["funding"])


@pytest.mark.parametrize(
    ("names", "message"),
    [
        (["return_42"], "feature 'return_42': no such feature. Did you mean 'return_"),
        (["zzzzzz"], "There are return_1, "),
        (["macd", "macd"], "feature 'macd' is requested twice"),
        ([], "no feature is requested"),
        ("macd", r"names='macd' must be a list of feature names: \['macd'\]"),
    ],
)
def test_wrong_names_are_refused_with_the_way_out(names: list[str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        compute_features(one_symbol(30), names)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"name": "macd"}, "'macd' is registered already; choose another name, or pass replace=True"),
        ({"name": "Own Feature"}, "'Own Feature': use lower case"),
        ({"name": "own:x"}, "'own:x': use lower case"),
        ({"name": "own", "warmup": -1}, "warmup=-1"),
        ({"name": "own", "warmup": 2.5}, "warmup=2.5"),
        ({"name": "own", "needs": "trades"}, r"needs=\('trades',\)"),
        ({"name": "own", "needs": ("tades",)}, "'own' needs 'tades'; did you mean 'trades'"),
    ],
)
def test_wrong_registrations_are_refused(arguments: dict[str, object], message: str) -> None:
    before = dict(FEATURES)
    with pytest.raises(ConfigError, match=message):
        feature(**arguments)  # type: ignore[arg-type]
    assert before == FEATURES


@pytest.mark.parametrize(
    ("build", "market_wide", "message"),
    [
        (lambda: 3.0, False, "'own' returned float; it must return a pl.Expr"),
        (lambda: pl.col("closse"), False, "'own' reads the column 'closse'; bars have time, open"),
        (lambda: pl.col("close"), True, "'own' reads the column 'close'; a market-wide feature reads the time only"),
        (lambda: pl.col("close").head(3), False, "'own' cannot be computed: "),
        (lambda: pl.col("close").cast(pl.String) + "x", False, "'own' cannot be computed: "),
    ],
)
def test_wrong_expressions_are_named(build: Callable[[], pl.Expr], market_wide: bool, message: str) -> None:
    feature("own", market_wide=market_wide)(build)
    with pytest.raises(FeatureError, match=message):
        compute_features(one_symbol(30), ["macd", "own"])


# --- definitions -----------------------------------------------------------------------------------------------------


def definition_of(build: Callable[[], pl.Expr], warmup: int = 20) -> str:
    feature("own", warmup=warmup, replace=True)(build)
    return compute_features(one_symbol(30), ["own"]).definitions[0]


def test_a_definition_is_what_the_feature_computes_not_how_it_is_written() -> None:
    close = pl.col("close")
    plain = definition_of(lambda: close / close.rolling_mean(20) - 1)
    assert definition_of(lambda: (close - close.rolling_mean(20)) / close.rolling_mean(20)) == plain
    others = [
        definition_of(lambda: close / close.rolling_mean(21) - 1),
        definition_of(lambda: 1.00001 * (close / close.rolling_mean(20) - 1)),
        definition_of(lambda: close / close.ewm_mean(span=20) - 1),
        definition_of(lambda: close / close.rolling_mean(20) - 1, warmup=21),
        definition_of(lambda: pl.when(pl.col("volume") == 0).then(1e-3).otherwise(close / close.rolling_mean(20) - 1)),
    ]
    assert len({plain, *others}) == 6


def test_definitions_do_not_depend_on_the_bars_or_on_the_company() -> None:
    table = compute_features(two_symbols())
    expected = dict(zip(table.names, table.definitions, strict=True))
    alone = compute_features(one_symbol(40), ["bollinger_20"]).definitions[0]
    assert expected["bollinger_20:BTC"] == expected["bollinger_20:ETH"] == alone
    assert len(set(table.definitions)) == len(AROUND_THE_CLOCK)


def test_a_scaler_refuses_a_feature_that_was_redefined() -> None:
    bars = one_symbol(100)
    feature("own", warmup=9)(lambda: pl.col("close") / pl.col("close").rolling_mean(10))
    table = compute_features(bars, ["own"])
    scaler = Scaler.fit(table, np.ones(100, dtype=bool))
    feature("own", warmup=9, replace=True)(lambda: pl.col("close") / pl.col("open").rolling_mean(10))
    with pytest.raises(ConfigError, match="feature 'own' has another definition"):
        scaler.transform(compute_features(bars, ["own"]))


def test_the_documentation_lists_every_built_in_feature_with_its_warmup() -> None:
    page = (Path(__file__).parents[2] / "docs" / "features.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| `([a-z0-9_]+)` \| (\d+) \|", page, flags=re.MULTILINE)
    assert {name: int(warmup) for name, warmup in rows} == {name: entry.warmup for name, entry in FEATURES.items()}


def test_built_in_features_are_there_without_importing_them() -> None:
    assert features.FEATURES["rsi_14"].build is indicators.rsi_14
