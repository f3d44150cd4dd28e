"""The synthetic market: stylised facts as numbers, exact reproducibility, a signal of the strength it claims."""

from __future__ import annotations

import math
from datetime import UTC, datetime, timedelta
from pathlib import Path

import numpy as np
import polars as pl
import pytest
from scipy import stats
from typer.testing import CliRunner

from tailguard.cli import app
from tailguard.data.panel import Float
from tailguard.data.sources import load_bars
from tailguard.data.synthetic import VOLATILITY, SyntheticMarket, describe, make_market
from tailguard.errors import ConfigError, TailguardError

HOURS_PER_YEAR = 8_766.0


def log_returns(market: SyntheticMarket) -> Float:
    return np.diff(np.log(market.bars.panel().close), axis=0)


def column(market: SyntheticMarket, name: str) -> Float:
    return market.bars.frame[name].to_numpy()


def autocorrelation(values: Float, lag: int) -> float:
    return float(np.corrcoef(values[:-lag], values[lag:])[0, 1])


@pytest.fixture(scope="module", params=[0, 1, 2])
def three_years(request: pytest.FixtureRequest) -> SyntheticMarket:
    return make_market(seed=request.param)


@pytest.fixture(scope="module")
def long() -> SyntheticMarket:
    return make_market(400_000, seed=7, signal=5)


@pytest.fixture(scope="module")
def traded() -> SyntheticMarket:
    return make_market(100_000, seed=7, signal=5)


@pytest.fixture(scope="module")
def oracle_growth(traded: SyntheticMarket) -> float:
    return realised_growth(traded, traded.oracle_weights()[:, 0])


def realised_growth(market: SyntheticMarket, orders: Float) -> float:
    """Log-growth per year of target weights filled at the next open, NaN: hold; the default costs."""
    panel = market.bars.panel()
    gaps = (panel.open[1:, 0] / panel.close[:-1, 0]).tolist()
    moves = (panel.close[1:, 0] / panel.open[1:, 0]).tolist()
    weight = growth = 0.0
    for order, gap, move in zip(orders.tolist(), gaps, moves, strict=False):
        before, at_open = weight * gap, 1 + weight * (gap - 1)
        held = before if math.isnan(order) else order * at_open
        equity = at_open - 0.0006 * abs(held - before) + held * (move - 1) - 0.0001 / 8 * abs(held * move)
        weight = held * move / equity
        growth += math.log(equity)
    return growth / len(moves) * HOURS_PER_YEAR


class TestStylisedFacts:
    def test_volatility_is_that_of_bitcoin(self, long: SyntheticMarket) -> None:
        assert log_returns(long).std() * np.sqrt(HOURS_PER_YEAR) == pytest.approx(VOLATILITY, rel=0.05)

    def test_tails_are_heavy(self, three_years: SyntheticMarket) -> None:
        returns = log_returns(three_years)[:, 0]
        assert 6 < stats.kurtosis(returns) < 100
        size = np.sort(np.abs(returns))[::-1]
        for share in (0.01, 0.02):
            k = int(share * len(size))
            hill = 1 / np.mean(np.log(size[:k] / size[k]))
            assert 2.5 < hill < 5

    def test_volatility_clusters_and_decays_slowly(self, three_years: SyntheticMarket) -> None:
        size = np.abs(log_returns(three_years)[:, 0])
        by_lag = np.array([autocorrelation(size, lag) for lag in range(1, 101)])
        noise = 1 / np.sqrt(len(size))
        assert (by_lag > 3 * noise).all()
        assert 0.15 < by_lag[0] < 0.35
        # A power law rather than an exponential: between lag 10 and lag 100 it does not even fall to a quarter.
        assert by_lag[90:].mean() > by_lag[5:15].mean() / 4

    def test_returns_themselves_are_not_predictable_from_returns(self, three_years: SyntheticMarket) -> None:
        returns = log_returns(three_years)[:, 0]
        by_lag = np.array([autocorrelation(returns, lag) for lag in range(1, 51)])
        # Clustering widens the usual band of 1/√n about threefold at short lags.
        assert np.abs(by_lag).max() < 0.05
        assert abs(by_lag.mean()) < 0.004

    def test_crises_are_rare_and_twice_as_violent(self, long: SyntheticMarket) -> None:
        assert long.crisis.mean() == pytest.approx(48 / 528, abs=0.02)
        returns = log_returns(long)[:, 0]
        calm, crisis = returns[~long.crisis[1:]], returns[long.crisis[1:]]
        assert crisis.std() / calm.std() == pytest.approx(2, rel=0.15)

    def test_shocks_are_heavy_tailed_at_any_volatility(self, long: SyntheticMarket) -> None:
        shock = np.abs(log_returns(long)[:, 0] / long.volatility[1:, 0])
        # Student's part: the middle against the 99th percentile, where jumps do not count yet.
        assert np.quantile(shock, 0.99) / np.median(shock) > 1.15 * stats.norm.isf(0.005) / stats.norm.isf(0.25)
        # Jumps: one every two weeks in the market and one in the asset, many of them beyond 6 deviations.
        assert np.mean(shock > 6) > 5e-4

    def test_the_day_has_a_shape(self, long: SyntheticMarket) -> None:
        hour = long.bars.frame["time"].dt.hour().to_numpy()[1:]
        size = np.abs(log_returns(long)[:, 0])
        assert size[hour == 14].mean() / size[hour == 2].mean() == pytest.approx(np.exp(0.4), rel=0.1)

    def test_volume_follows_volatility(self, three_years: SyntheticMarket) -> None:
        size = np.abs(log_returns(three_years)[:, 0])
        assert 0.35 < np.corrcoef(column(three_years, "quote_volume")[1:], size)[0, 1] < 0.8
        log_volume = np.log(column(three_years, "quote_volume"))
        assert 0.5 < autocorrelation(log_volume, 1) < 0.9
        assert autocorrelation(log_volume, 24) > 0.3

    def test_without_a_signal_buying_and_holding_earns_minus_half_the_variance(self) -> None:
        # A martingale: expected simple return 0, expected log-return −σ²/2.
        growth = [make_market(60_000, seed=seed, assets=4, correlation=0.0).bars.panel() for seed in range(3)]
        moves = np.concatenate([panel.close / panel.open - 1 for panel in growth], axis=1)
        per_year = moves.mean() * HOURS_PER_YEAR
        years = 60_000 / HOURS_PER_YEAR * 12
        assert abs(per_year) < 3 * VOLATILITY / np.sqrt(years)
        log_per_year = np.log1p(moves).mean() * HOURS_PER_YEAR
        assert log_per_year - per_year == pytest.approx(-(VOLATILITY**2) / 2, rel=0.15)


class TestBars:
    def test_prices_are_consistent(self, three_years: SyntheticMarket) -> None:
        panel = three_years.bars.panel()
        assert (panel.low > 0).all()
        assert (panel.high >= np.maximum(panel.open, panel.close)).all()
        assert (panel.low <= np.minimum(panel.open, panel.close)).all()
        assert np.isfinite(panel.high).all()

    def test_a_bar_opens_where_the_last_one_closed(self, three_years: SyntheticMarket) -> None:
        panel = three_years.bars.panel()
        gap = np.log(panel.open[1:] / panel.close[:-1])
        assert gap.std() == pytest.approx(1e-5, rel=0.05)

    def test_the_range_is_twice_the_body(self, long: SyntheticMarket) -> None:
        # A Brownian bar has E[range] / E[|body|] = 2; the heavy tails of the body leave it near.
        panel = long.bars.panel()
        ratio = np.log(panel.high / panel.low).mean() / np.abs(np.log(panel.close / panel.open)).mean()
        assert 1.9 < ratio < 2.4

    def test_takers_buy_part_of_the_volume(self, three_years: SyntheticMarket) -> None:
        share = column(three_years, "taker_buy_base") / column(three_years, "volume")
        assert share.min() > 0
        assert share.max() < 1
        assert share.mean() == pytest.approx(0.5, abs=0.002)
        average = column(three_years, "quote_volume") / column(three_years, "volume")
        panel = three_years.bars.panel()
        assert (average >= panel.low[:, 0] * (1 - 1e-12)).all()
        assert (average <= panel.high[:, 0] * (1 + 1e-12)).all()
        assert (column(three_years, "trades") >= 1).all()
        np.testing.assert_allclose(
            column(three_years, "taker_buy_quote"), share * column(three_years, "quote_volume"), rtol=1e-12
        )

    def test_assets_correlate_as_asked(self) -> None:
        for asked in (0.0, 0.3, 0.8):
            market = make_market(60_000, seed=3, assets=3, correlation=asked)
            found = np.corrcoef(log_returns(market).T)[np.triu_indices(3, 1)]
            assert found == pytest.approx(asked, abs=0.05)

    def test_assets_share_their_volatility(self) -> None:
        market = make_market(50_000, seed=3, assets=2, correlation=0.0)
        assert np.corrcoef(np.log(market.volatility).T)[0, 1] > 0.8

    def test_the_same_law_at_every_bar_length(self) -> None:
        for frequency, per_year in (("15m", 35_064), ("1d", 365.25)):
            market = make_market(150_000 if frequency == "15m" else 20_000, seed=1, frequency=frequency)
            assert log_returns(market).std() * np.sqrt(per_year) == pytest.approx(VOLATILITY, rel=0.12)
            assert market.bars.frequency == (timedelta(minutes=15) if frequency == "15m" else timedelta(days=1))

    def test_times_begin_at_start_and_have_no_gaps(self) -> None:
        market = make_market(100, frequency="15m", start=datetime(2019, 5, 1, tzinfo=UTC))
        panel = market.bars.panel()
        assert panel.time[0] == datetime(2019, 5, 1, tzinfo=UTC).timestamp() * 1000
        assert (np.diff(panel.time) == 900_000).all()


class TestReproducibility:
    def test_the_same_seed_makes_the_same_bars(self) -> None:
        first, second = make_market(2_000, seed=4, signal=3), make_market(2_000, seed=4, signal=3)
        assert first.bars.frame.equals(second.bars.frame)

    def test_another_seed_makes_other_bars(self) -> None:
        first, second = make_market(2_000, seed=4), make_market(2_000, seed=5)
        assert abs(np.corrcoef(log_returns(first)[:, 0], log_returns(second)[:, 0])[0, 1]) < 0.1

    def test_a_longer_market_begins_with_the_shorter_one(self) -> None:
        short, long = make_market(1_237, seed=4, signal=3), make_market(9_001, seed=4, signal=3)
        assert long.bars.frame.head(1_237).equals(short.bars.frame)
        np.testing.assert_array_equal(long.state[:1_237], short.state)

    def test_an_asset_is_the_same_beside_others(self) -> None:
        alone, beside = make_market(1_000, seed=4, signal=3), make_market(1_000, seed=4, signal=3, assets=3)
        assert beside.bars.select("SYN01").frame.equals(alone.bars.frame)


class TestPlantedSignal:
    def test_the_state_at_a_close_moves_the_next_bar_and_nothing_else(self) -> None:
        plain, planted = make_market(5_000, seed=6), make_market(5_000, seed=6, signal=5)
        moves = [market.bars.panel().close / market.bars.panel().open - 1 for market in (plain, planted)]
        added = moves[1] - moves[0]
        drift = 5 * VOLATILITY / HOURS_PER_YEAR
        np.testing.assert_allclose(added[1:], drift * planted.state[:-1], atol=1e-12)
        np.testing.assert_allclose(added[0], 0, atol=1e-12)
        assert (plain.state == 0).all()

    def test_its_strength_is_the_yearly_sharpe_ratio_of_holding_it(self, long: SyntheticMarket) -> None:
        panel = long.bars.panel()
        earned = long.state[:-1, 0] * (panel.close / panel.open - 1)[1:, 0]
        sharpe = earned.mean() / earned.std() * np.sqrt(HOURS_PER_YEAR)
        assert sharpe == pytest.approx(5, abs=3 * np.sqrt(HOURS_PER_YEAR / 400_000))

    def test_it_lasts_three_days(self, long: SyntheticMarket) -> None:
        flips = np.mean(long.state[1:] != long.state[:-1])
        assert 1 / flips == pytest.approx(73, rel=0.05)  # of a process seen once an hour
        assert np.mean(long.state > 0) == pytest.approx(0.5, abs=0.03)

    def test_order_flow_shows_it_well_but_not_perfectly(self, long: SyntheticMarket) -> None:
        imbalance = column(long, "taker_buy_base") / column(long, "volume") - 0.5
        for hours, accuracy in ((1, 0.817), (8, 0.951), (24, 0.873)):
            mean = np.convolve(imbalance, np.ones(hours) / hours)[: len(imbalance)]
            assert np.mean(np.sign(mean) == long.state[:, 0]) == pytest.approx(accuracy, abs=0.008)

    def test_prices_alone_do_not_show_it(self, long: SyntheticMarket) -> None:
        returns = np.concatenate([[0.0], log_returns(long)[:, 0]])
        mean = np.convolve(returns, np.ones(24) / 24)[: len(returns)]
        assert np.mean(np.sign(mean) == long.state[:, 0]) < 0.65


class TestOptimum:
    def test_the_demo_signal_is_worth_what_the_docs_say(self) -> None:
        best = make_market(10, signal=5).optimum()
        assert best.log_growth_per_year == pytest.approx(2.761, abs=0.002)
        assert best.sharpe == pytest.approx(4.57, abs=0.02)

    def test_growth_is_drift_minus_variance_minus_costs(self) -> None:
        # Full weight always: m − σ²/2 and funding, less 2 units of weight at every flip and, where a short goes on
        # (it drifts by w·(1 − w)·R = −2R), 2·|R| to bring it back.
        market = make_market(10, signal=5)
        flips = HOURS_PER_YEAR * (1 - np.exp(-2 / 72)) / 2
        drifted = (HOURS_PER_YEAR - flips) / 2 * 2 * float(market.law().probability @ np.abs(market.law().returns[0]))
        paid = 0.0006 * (2 * flips + drifted) + 0.0001 * HOURS_PER_YEAR / 8
        expected = 5 * VOLATILITY - VOLATILITY**2 / 2 - paid
        assert market.optimum(0.0006, funding=0.0001).log_growth_per_year == pytest.approx(expected, abs=0.002)

    def test_nothing_planted_nothing_to_earn(self) -> None:
        assert make_market(10).optimum().log_growth_per_year == pytest.approx(0, abs=1e-8)

    def test_the_oracle_earns_it_on_the_bars(self, traded: SyntheticMarket, oracle_growth: float) -> None:
        error = VOLATILITY / np.sqrt(len(traded.bars) / HOURS_PER_YEAR)
        assert oracle_growth == pytest.approx(traded.optimum().log_growth_per_year, abs=2 * error)
        assert oracle_growth > 6 * error

    def test_a_moving_average_of_order_flow_earns_most_of_it(
        self, traded: SyntheticMarket, oracle_growth: float
    ) -> None:
        imbalance = column(traded, "taker_buy_base") / column(traded, "volume") - 0.5
        mean = np.convolve(imbalance, np.ones(8) / 8)[: len(imbalance)]
        clear = np.where(np.abs(mean) > 0.0125, np.sign(mean), 0)
        last = np.maximum.accumulate(np.where(clear != 0, np.arange(len(clear)), 0))
        wanted = clear[last]
        orders = np.where(np.diff(wanted, prepend=0) != 0, wanted, np.nan)
        assert 0.75 < realised_growth(traded, orders) / oracle_growth < 0.95

    def test_several_assets_share_the_leverage(self) -> None:
        market = make_market(500, seed=2, assets=4, signal=5)
        weights = market.oracle_weights(leverage=2.0)
        assert weights.shape == (500, 4)
        traded = weights[~np.isnan(weights)]
        assert np.abs(traded).max() == pytest.approx(0.5)
        np.testing.assert_array_equal(np.sign(weights[0]), market.state[0])


class TestFiles:
    @pytest.mark.parametrize("suffix", [".parquet", ".csv", ".feather"])
    def test_a_written_market_reads_back_the_same(self, tmp_path: Path, suffix: str) -> None:
        market = make_market(500, seed=1, assets=2, signal=5)
        market.save(tmp_path / f"market{suffix}")
        read = load_bars(tmp_path / f"market{suffix}")
        assert read.frequency == market.bars.frequency
        columns = [name for name in market.bars.frame.columns if name != "segment"]
        assert read.frame.select(columns).equals(market.bars.frame.select(columns))

    def test_the_file_has_the_names_of_exchange_dumps(self, tmp_path: Path) -> None:
        make_market(5).save(tmp_path / "market.parquet")
        schema = pl.read_parquet_schema(tmp_path / "market.parquet")
        assert list(schema) == [
            "symbol", "open_time", "open", "high", "low", "close", "volume", "quote_volume", "number_of_trades",
            "taker_buy_base", "taker_buy_quote",
        ]  # fmt: skip
        assert schema["open_time"] == pl.Datetime("ms", "UTC")

    def test_the_command_writes_and_says_what_is_achievable(self, tmp_path: Path) -> None:
        out = tmp_path / "market.parquet"
        result = CliRunner().invoke(app, ["data", "make", str(out), "--bars", "300", "--signal", "5", "--seed", "3"])
        assert result.exit_code == 0, result.output
        assert "300 bars × 1 asset" in result.output
        assert "+2.76 per year" in result.output
        assert (
            load_bars(out).frame["close"].to_list() == make_market(300, seed=3, signal=5).bars.frame["close"].to_list()
        )
        assert "no signal planted" in describe(make_market(10))

    def test_the_command_refuses_a_folder_that_is_not_there(self, tmp_path: Path) -> None:
        result = CliRunner().invoke(app, ["data", "make", str(tmp_path / "nowhere" / "market.parquet")])
        assert isinstance(result.exception, TailguardError)
        assert "nowhere does not exist" in str(result.exception)


@pytest.mark.parametrize(
    ("settings", "named"),
    [
        ({"bars": 1}, "bars"),
        ({"assets": 0}, "assets"),
        ({"signal": -1.0}, "signal"),
        ({"correlation": 0.99}, "correlation"),
        ({"seed": -1}, "seed"),
    ],
)
def test_settings_out_of_range_are_refused(settings: dict[str, float], named: str) -> None:
    with pytest.raises(ConfigError, match=named):
        make_market(**settings)  # type: ignore[arg-type]


def test_an_unknown_frequency_is_refused() -> None:
    with pytest.raises(TailguardError, match="1 hour"):
        make_market(10, frequency="1 hour")
