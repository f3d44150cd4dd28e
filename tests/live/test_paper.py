"""The paper venue books what the simulator books, and keeps an exchange's rules."""

from __future__ import annotations

from dataclasses import replace
from decimal import Decimal

import numpy as np
import polars as pl
import pytest
import torch

import tailguard as tg
from tailguard.live.bar_history import BarHistory
from tailguard.live.decide import LiveDecider
from tailguard.live.paper import PaperVenue
from tailguard.live.session import Killed
from tailguard.live.simulation import RandomWeights
from tailguard.live.venue import DuplicateOrder, Instrument, OrderRequest, Refused, SimulatedClock, WrongClock
from tailguard.market import MarketConfig, build_market
from tailguard.market.costs import Cost, register_cost, turnover_cost, unregister_cost

from .conftest import HOUR, WorldMaker, open_time


def targets_of(bars, first_row: int, gross: float = 1.0) -> np.ndarray:
    """The rule's weights as an array for a backtest, flat before the first bar of the session."""
    rule, panel = RandomWeights(len(bars.symbols), gross), bars.panel()
    targets = np.array([rule.weights_at(int(moment)) for moment in panel.time])
    targets[:first_row] = 0.0
    return targets


CASES = {
    "defaults": MarketConfig(),
    "borrow, leverage": MarketConfig(leverage=3.0, borrow_rate=0.1, fee=0.001),
    "capacity binds": MarketConfig(participation=0.0004, capital=1e7),
    "impact": MarketConfig(impact=3.0, capital=1e6),
}


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("assets", [1, 2])
def test_paper_equity_is_the_simulators(paper_world: WorldMaker, case: str, assets: int) -> None:
    config = CASES[case]
    bars = tg.make_market(300, assets=assets, seed=3).bars
    world = paper_world(bars, config=config, make_decider=lambda: RandomWeights(assets, config.leverage))
    world.trade(world.session())
    expected = tg.backtest(targets_of(bars, 10, config.leverage), bars, config, progress_bar=False)
    paper = [record["equity"] for record in world.records("decision")]
    assert len(paper) == 290
    np.testing.assert_allclose(paper, expected.equity[10:], rtol=0, atol=1e-9)
    if case == "capacity binds":
        assert (expected.unfilled[10:] > 0).mean() > 0.2
        assert {record["outcome"] for record in world.records("order")} >= {"filled", "partly filled"}
    assert not world.records("freeze")


def test_an_agents_paper_equity_is_its_backtests(agent, paper_world: WorldMaker) -> None:
    """The agent sees its own account at the venue: positions in lots, cash and fills, and decides the same."""
    bars = tg.make_market(500, seed=8).bars
    first = open_time(bars, 200)
    world = paper_world(
        bars,
        first_row=200,
        make_decider=lambda: LiveDecider(agent, BarHistory(bars, first)),
        config=agent.spec.market,
    )
    world.trade(world.session())
    begin = pl.Series([first]).cast(pl.Datetime("ms", "UTC"))[0]
    expected = tg.backtest(agent, replace(bars, first=begin), progress_bar=False)
    decisions = world.records("decision")
    np.testing.assert_allclose([each["equity"] for each in decisions], expected.equity, rtol=0, atol=1e-9)
    np.testing.assert_allclose([each["target"] for each in decisions[:-1]], expected.targets, rtol=0, atol=1e-6)


def test_a_cost_of_ones_own_is_charged_on_paper_too(paper_world: WorldMaker) -> None:
    """A cost that has only a formula in tensors."""
    register_cost(Cost("toll", lambda rate, fill: turnover_cost(rate, fill) * 2, "order", rate=0.001))
    try:
        config = MarketConfig()
        world = paper_world(config=config)
        world.trade(world.session())
        expected = tg.backtest(targets_of(world.bars, 10), world.bars, config, progress_bar=False)
        assert expected.costs["toll"].sum() > 0.01
        paper = [record["equity"] for record in world.records("decision")]
        np.testing.assert_allclose(paper, expected.equity[10:], rtol=0, atol=1e-9)
    finally:
        unregister_cost("toll")


@pytest.mark.parametrize("moment", ["inside the bar", "at the open"])
def test_a_liquidation_leaves_what_the_simulator_leaves_and_ends_trading(paper_world: WorldMaker, moment: str) -> None:
    """At leverage 10 a fall of 30 % takes the margin. The session ends killed, and stays so after a restart."""
    config = MarketConfig(leverage=10.0)
    bars = tg.make_market(60, seed=3).bars
    fall = pl.when(pl.int_range(pl.len()) > 40).then(0.7).otherwise(1.0)
    last = pl.int_range(pl.len()) == 40
    names = ("open", "high", "low", "close")
    frame = bars.frame.with_columns([pl.col(name) * fall for name in names])
    if moment == "inside the bar":
        # Within the bar of row 40, whose low and close are those of a crash.
        frame = frame.with_columns(
            low=pl.when(last).then(pl.col("low") * 0.69).otherwise(pl.col("low")),
            close=pl.when(last).then(pl.col("close") * 0.7).otherwise(pl.col("close")),
        )
    bars = replace(bars, frame=frame)

    class Long(RandomWeights):
        def weights_at(self, _: int) -> list[float]:
            return [9.0]

    world = paper_world(bars, config=config, make_decider=lambda: Long(1))
    with pytest.raises(Killed, match="liquidated"):
        world.trade(world.session())
    targets = np.full((60, 1), 9.0)
    targets[:10] = 0.0
    expected = tg.backtest(targets, bars, config, progress_bar=False)
    assert expected.liquidated
    assert world.venue.equity() / config.capital == pytest.approx(expected.equity[-1], abs=1e-9)
    assert world.venue.equity() < 0.5 * config.capital
    assert not any(world.venue.books.positions.values())
    with pytest.raises(Killed, match="--release"):
        world.session().start()


@pytest.fixture
def venue() -> PaperVenue:
    bars = tg.make_market(50, seed=3).bars
    panel = bars.panel()
    rules = {
        symbol: Instrument(symbol, Decimal("0.001"), Decimal("0.01"), Decimal("0.002"), Decimal(5))
        for symbol in panel.symbols
    }
    return PaperVenue(
        build_market(panel, MarketConfig(), dtype=torch.float64),
        panel,
        SimulatedClock(int(panel.time[10]) + 1),
        instruments=rules,
    )


def order_at(venue: PaperVenue, **changes) -> OrderRequest:
    price = Decimal(repr(venue.prices()[venue.panel.symbols[0]]))
    base = OrderRequest(
        "tg1", venue.panel.symbols[0], Decimal("0.5"), (price * Decimal("1.01")).quantize(Decimal("0.01")), False,
        venue.clock.now(),
    )  # fmt: skip
    return replace(base, **changes)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"quantity": Decimal("0.0005")}, "filter"),
        ({"quantity": Decimal("0.001")}, "filter"),
        ({"limit": Decimal("100.001")}, "filter"),
        ({"reduce_only": True}, "reduce-only"),
        ({"symbol": "OTHER"}, "unknown symbol"),
    ],
)
def test_orders_that_break_a_rule_are_refused(venue: PaperVenue, changes, message: str) -> None:
    with pytest.raises(Refused, match=message):
        venue.place(order_at(venue, **changes))
    assert venue.account().cash == 100_000


def test_an_order_below_the_smallest_notional_is_refused(venue: PaperVenue) -> None:
    smallest = Decimal("0.002")
    price = venue.prices()[venue.panel.symbols[0]]
    venue.rules = {symbol: replace(rule, min_notional=Decimal(1000)) for symbol, rule in venue.rules.items()}
    assert float(smallest) * price < 1000
    with pytest.raises(Refused, match="notional"):
        venue.place(order_at(venue, quantity=smallest))


def test_late_orders_and_known_ids_are_refused(venue: PaperVenue) -> None:
    with pytest.raises(WrongClock):
        venue.place(order_at(venue, sent_ms=venue.clock.now() - 5_001))
    with pytest.raises(WrongClock):
        venue.place(order_at(venue, sent_ms=venue.clock.now() + 1_001))
    assert venue.place(order_at(venue)).filled == Decimal("0.5")
    with pytest.raises(DuplicateOrder, match="duplicate"):
        venue.place(order_at(venue))


def test_a_fill_costs_its_fee_spread_and_impact_by_hand(venue: PaperVenue) -> None:
    """Half a unit: fee 5 and spread 1 basis points of the notional; impact Y·σ·√(notional / daily notional)."""
    report = venue.place(order_at(venue))
    symbol = venue.panel.symbols[0]
    price, coefficient = venue.prices()[symbol], venue._bars[10][4][0]
    notional = 0.5 * price
    impact = notional * coefficient * np.sqrt(notional / 100_000)
    assert 100_000 - venue.account().cash == pytest.approx(notional * 1.0006 + impact, rel=1e-12)
    assert report.price == pytest.approx(price * 1.0001 + impact / 0.5, rel=1e-12)


def test_an_order_beyond_its_limit_expires(venue: PaperVenue) -> None:
    price = Decimal(repr(venue.prices()[venue.panel.symbols[0]])).quantize(Decimal("0.01"))
    report = venue.place(order_at(venue, limit=price - 1))
    assert (report.filled, report.open) == (0, False)
    assert venue.account().cash == 100_000


def test_the_books_survive_a_restart_of_the_venue(venue: PaperVenue, tmp_path) -> None:
    store = tmp_path / "venue.sqlite"
    first = PaperVenue(venue.market, venue.panel, SimulatedClock(venue.clock.now()), store=store)
    first.place(order_at(first))
    first.clock.wait_until(first.clock.now() + 3 * HOUR)
    again = PaperVenue(venue.market, venue.panel, SimulatedClock(first.clock.now()), store=store)
    assert again.books == first.books
    assert again.equity() == first.equity()
    assert again.find("tg1", venue.panel.symbols[0]).filled == Decimal("0.5")
