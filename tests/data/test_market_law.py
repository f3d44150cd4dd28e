"""A market made under a law has that law's volatility, tails and regimes, and its optimum follows them."""

from __future__ import annotations

import math

import numpy as np
import pytest
from scipy import integrate, linalg, stats

from tailguard.data.panel import Float
from tailguard.data.planted import follow
from tailguard.data.synthetic import MarketLaw, SyntheticMarket, make_market
from tailguard.errors import ConfigError

HOURS_PER_YEAR = 8_766.0
HEAVY = MarketLaw(volatility=0.3, tail_index=3.0, crisis_factor=4.0, calm_hours=200.0, crisis_hours=40.0)
COST, HOLDING = 0.0006, 0.0001 / 8
CLOSES = (30008.58101812275, 39871.562448295255, 47292.94936154776)


def moves(market: SyntheticMarket) -> Float:
    panel = market.bars.panel()
    return (panel.close / panel.open - 1)[:, 0]


@pytest.fixture(scope="module")
def heavy() -> SyntheticMarket:
    """One asset alone (correlation 0), so that its shock is a single Student t with jumps."""
    return make_market(600_000, seed=3, signal=5, correlation=0.0, law=HEAVY)


def beyond(size: float, tail_index: float) -> float:
    """P(|shock| > size) of an hourly shock: a unit-variance t, and with a jump every 336 h another N(0, 5²), scaled."""
    rate = 1 - math.exp(-1 / 336)
    student = stats.t(tail_index, scale=math.sqrt((tail_index - 2) / tail_index))
    edge = size * math.sqrt(1 + 25 * rate)

    def with_jump(jump: float) -> float:
        return float((student.sf(edge - jump) + student.cdf(-edge - jump)) * stats.norm.pdf(jump, scale=5))

    jumped = integrate.quad(with_jump, -60, 60, points=(-edge, edge), limit=200)[0]
    return float((1 - rate) * 2 * student.sf(edge) + rate * jumped)


class TestVolatility:
    def test_returns_have_the_volatility_of_the_law(self, heavy: SyntheticMarket) -> None:
        assert moves(heavy).std() * math.sqrt(HOURS_PER_YEAR) == pytest.approx(0.3, rel=0.04)

    def test_it_scales_every_return(self) -> None:
        usual, low = make_market(3_000, seed=1), make_market(3_000, seed=1, law=MarketLaw(volatility=0.2))
        np.testing.assert_allclose(moves(low), moves(usual) * 0.2 / 0.65, rtol=1e-9, atol=1e-13)
        volume = [market.bars.frame["quote_volume"].to_numpy() for market in (usual, low)]
        np.testing.assert_allclose(volume[1], volume[0], rtol=1e-9)

    def test_the_signal_stays_a_sharpe_ratio(self, heavy: SyntheticMarket) -> None:
        plain, planted = (make_market(3_000, seed=6, signal=signal, law=HEAVY) for signal in (0.0, 5.0))
        added = (moves(planted) - moves(plain))[1:]
        np.testing.assert_allclose(added, 5 * 0.3 / HOURS_PER_YEAR * planted.state[:-1, 0], atol=1e-12)
        earned = heavy.state[:-1, 0] * moves(heavy)[1:]
        sharpe = earned.mean() / earned.std() * math.sqrt(HOURS_PER_YEAR)
        assert sharpe == pytest.approx(5, abs=3 * math.sqrt(HOURS_PER_YEAR / 600_000))


class TestTails:
    @pytest.mark.parametrize("tail_index", [3.0, 5.0, 50.0])
    def test_large_shocks_are_as_frequent_as_in_the_student_mixture(self, tail_index: float) -> None:
        market = make_market(400_000, seed=5, correlation=0.0, law=MarketLaw(tail_index=tail_index))
        shock = np.abs(moves(market) / market.volatility[:, 0])
        for size in (2, 4, 6, 10, 20):
            expected = beyond(size, tail_index)
            error = math.sqrt(expected / len(shock))
            assert np.mean(shock > size) == pytest.approx(expected, abs=3 * error)


class TestRegimes:
    def test_they_last_as_long_as_the_law_says(self, heavy: SyntheticMarket) -> None:
        # A continuous-time chain seen once an hour stays with the diagonal of its transition matrix.
        stay = linalg.expm(np.array([[-1 / 200, 1 / 200], [1 / 40, -1 / 40]])).diagonal()
        changes = np.flatnonzero(np.diff(heavy.crisis.astype(int))) + 1
        runs, in_crisis = np.diff(changes), heavy.crisis[changes[:-1]]
        for crisis, expected in ((False, 1 / (1 - stay[0])), (True, 1 / (1 - stay[1]))):
            lengths = runs[in_crisis == crisis]
            assert lengths.mean() == pytest.approx(expected, abs=3 * expected / math.sqrt(len(lengths)))
        assert heavy.crisis.mean() == pytest.approx(40 / 240, abs=0.01)

    def test_a_crisis_multiplies_volatility_and_leaves_its_mean_square(self, heavy: SyntheticMarket) -> None:
        returns = moves(heavy)
        assert returns[heavy.crisis].std() / returns[~heavy.crisis].std() == pytest.approx(4, rel=0.08)
        one, four = (make_market(3_000, seed=2, law=MarketLaw(crisis_factor=factor)) for factor in (1.0, 4.0))
        assert one.crisis.any()
        # The mean of the squared factor is 1 + 48 / 528 · (4² − 1); the level falls by its root.
        level = 1 / math.sqrt(1 + 15 / 11)
        np.testing.assert_allclose(four.volatility / one.volatility, np.where(one.crisis, 4, 1)[:, None] * level)


class TestOptimum:
    def test_the_law_of_returns_is_that_of_the_bars(self, heavy: SyntheticMarket) -> None:
        law, shock = heavy.law(), moves(heavy)[1:] - 5 * 0.3 / HOURS_PER_YEAR * heavy.state[:-1, 0]
        points = law.returns.mean(0)
        np.testing.assert_allclose(law.returns[1] - points, 5 * 0.3 / HOURS_PER_YEAR, rtol=1e-9)
        assert law.probability @ points**2 == pytest.approx(0.3**2 / HOURS_PER_YEAR, rel=1e-9)
        # Sixteen points a side average over the far tail; the exact variance then lifts the other points by 5 %.
        size = law.probability @ np.abs(points)
        assert size == pytest.approx(np.abs(shock).mean(), rel=0.06)
        # The default law has lighter tails, and so larger typical moves at the same volatility.
        usual = make_market(2).law()
        assert size / 0.3 < 0.8 * (usual.probability @ np.abs(usual.returns[0])) / 0.65

    def test_its_policy_earns_the_optimum_on_the_bars(self) -> None:
        market = make_market(150_000, seed=4, signal=5, law=HEAVY)
        optimum, move = market.optimum(), moves(market)
        orders = follow(
            optimum, (market.state > 0).astype(int), np.zeros((150_000, 1)), move[:, None], cost=COST, holding=HOLDING
        )[:, 0]
        weight, growth, held_weights = 0.0, 0.0, []
        for order, moved in zip(orders[:-1].tolist(), move[1:].tolist(), strict=True):
            held = weight if math.isnan(order) else order
            equity = 1 - COST * abs(held - weight) + held * moved - HOLDING * abs(held * (1 + moved))
            weight = held * (1 + moved) / equity
            growth += math.log(equity)
            held_weights.append(held)
        # The part of the returns with mean zero is luck, and most of the sampling error.
        drift = 5 * 0.3 / HOURS_PER_YEAR
        luck = np.array(held_weights) * (move[1:] - drift * market.state[:-1, 0])
        per_year = (growth / len(luck) - luck.mean()) * HOURS_PER_YEAR
        assert optimum.log_growth_per_year == pytest.approx(per_year, abs=0.015)
        # Full weight at all times: the drift, less half the variance, funding and two units of weight at every flip.
        flips = HOURS_PER_YEAR * (1 - math.exp(-2 / 72)) / 2
        rebalancing = (HOURS_PER_YEAR - flips) * np.abs(move).mean()
        paid = COST * (2 * flips + rebalancing) + HOLDING * HOURS_PER_YEAR
        assert optimum.log_growth_per_year == pytest.approx(5 * 0.3 - 0.3**2 / 2 - paid, abs=0.01)


class TestDefault:
    def test_the_default_law_is_the_market_without_a_law(self) -> None:
        plain, given = make_market(1_000, seed=2, signal=3), make_market(1_000, seed=2, signal=3, law=MarketLaw())
        assert given.bars.frame.equals(plain.bars.frame)
        assert given.bars.source == plain.bars.source == "synthetic market (seed 2, signal 3)"
        assert plain.market_law == MarketLaw(0.65, 5.0, 2.0, 480.0, 48.0)

    def test_bars_keep_their_values(self) -> None:
        # Written down from the generator with these numbers as constants.
        close = make_market(2_000, seed=3, signal=5).bars.frame["close"].to_numpy()
        np.testing.assert_allclose(close[[1, 500, 1_999]], CLOSES, rtol=1e-12)

    def test_the_source_names_what_differs(self) -> None:
        market = make_market(10, law=MarketLaw(volatility=0.3, tail_index=3))
        assert market.bars.source == "synthetic market (seed 0, signal 0, volatility 0.3, tail_index 3)"
        assert market.market_law.tail_index == 3


class TestRefusals:
    @pytest.mark.parametrize(
        ("name", "value", "message"),
        [
            ("volatility", 0.0, "volatility: 0 is out of range; it must be more than 0 and at most 5"),
            ("volatility", 65.0, "volatility: 65 is out of range"),
            ("tail_index", 2.0, "tail_index: 2 is out of range; it must be more than 2"),
            ("tail_index", math.inf, "tail_index: inf is out of range"),
            ("tail_index", math.nan, "tail_index: nan is out of range"),
            ("crisis_factor", 0.5, "crisis_factor: 0.5 is out of range; it must be at least 1"),
            ("calm_hours", 0.0, "calm_hours: 0 is out of range; it must be more than 0"),
            ("crisis_hours", -1.0, "crisis_hours: -1 is out of range; it must be more than 0"),
            ("crisis_hours", "48", "crisis_hours: '48' is not a number"),
        ],
    )
    def test_bad_parameters(self, name: str, value: float, message: str) -> None:
        with pytest.raises(ConfigError, match=message):
            MarketLaw(**{name: value})

    def test_something_else_than_a_law(self) -> None:
        with pytest.raises(ConfigError, match=r"law: .*3.* is not a MarketLaw; import it from"):
            make_market(10, law={"tail_index": 3})  # type: ignore[arg-type]

    def test_a_drift_that_could_lose_more_than_everything(self) -> None:
        with pytest.raises(ConfigError, match="signal: 50 at volatility 4 is a drift of 55% per bar of 1d"):
            make_market(10, frequency="1d", signal=50, law=MarketLaw(volatility=4))

    def test_a_price_that_leaves_the_range_of_numbers(self) -> None:
        with pytest.raises(ConfigError, match="bars: the price of a market this volatile"):
            make_market(40_000, frequency="1d", law=MarketLaw(volatility=5))
