"""Every guard is tripped once, by the amount that its limit says."""

from __future__ import annotations

import copy
from dataclasses import replace
from decimal import Decimal

import numpy as np
import polars as pl
import pytest
import torch

import tailguard as tg
from tailguard.errors import ConfigError
from tailguard.live.bar_history import LiveBar, ReplaySource, bars_of
from tailguard.live.faults import FaultRates, Faults
from tailguard.live.guards import GuardConfig, Guards
from tailguard.live.orders import OrderConfig
from tailguard.live.session import Killed
from tailguard.live.session_state import DAY_MS, HOUR_MS, LiveState
from tailguard.live.simulation import RandomWeights
from tailguard.live.venue import OutcomeUnknown, SimulatedClock
from tailguard.market import MarketConfig

from .conftest import HOUR, LOOSE, ShadowMaker, WorldMaker, open_time
from .test_reconcile import Constant

CAPITAL = 100_000.0


class Swing(RandomWeights):
    """Full long and full short in turn: an order of twice the equity at every bar."""

    def weights_at(self, time_ms: int) -> list[float]:
        return [1.0 if time_ms // HOUR % 2 else -1.0]


def frozen_after(world) -> tuple[dict[str, str], list[float]]:
    """What froze, and the notional of each order."""
    session = world.session()
    world.trade(session, 40)
    notionals = [abs(float(record["quantity"])) * record["price"] for record in world.records("intent")]
    return dict(session.ledger.state.frozen), notionals


def test_an_order_above_its_limit_is_not_sent(paper_world: WorldMaker) -> None:
    """0.4 of the capital may be ordered at once: 0.5 is not, and nothing else is while frozen."""
    world = paper_world(guards=replace(LOOSE, order_notional=0.4), make_decider=lambda: Constant(0.5))
    frozen, notionals = frozen_after(world)
    assert not notionals
    assert "50,000.00 would be traded; guards.order_notional allows 40,000.00" in frozen["order_notional"]


def test_traded_notional_within_an_hour_is_limited(paper_world: WorldMaker) -> None:
    """The first order trades 1 and passes; the next would trade 2, and only closes the position instead."""
    world = paper_world(guards=replace(LOOSE, hour_notional=1.5), make_decider=lambda: Swing(1))
    frozen, notionals = frozen_after(world)
    assert notionals == pytest.approx([CAPITAL, CAPITAL], rel=0.05)
    assert "hour_notional" in frozen
    assert world.venue.books.positions[world.bars.symbols[0]] == 0


def test_traded_notional_within_a_day_is_limited(paper_world: WorldMaker) -> None:
    """Orders of 1, 2, 2, … times the capital, while it lasts: those that fit into 12.5, and one that closes."""
    world = paper_world(guards=replace(LOOSE, day_notional=12.5), make_decider=lambda: Swing(1))
    frozen, notionals = frozen_after(world)
    assert sum(notionals[:-1]) <= 12.5 * CAPITAL < sum(notionals[:-1]) + 2 * notionals[-1]
    assert len(notionals) == 7
    assert "day_notional" in frozen
    assert world.venue.books.positions[world.bars.symbols[0]] == 0


def test_turnover_is_limited_as_a_multiple_of_equity(paper_world: WorldMaker) -> None:
    world = paper_world(guards=replace(LOOSE, turnover=6.5), make_decider=lambda: Swing(1))
    frozen, notionals = frozen_after(world)
    assert "turnover" in frozen
    assert sum(notionals[:3]) < 6.5 * CAPITAL < sum(notionals[:3]) + 2.5 * CAPITAL


class Spread(RandomWeights):
    """Half the equity in each symbol, in turn long and short."""

    def weights_at(self, _: int) -> list[float]:
        return [0.5 * (-1) ** place for place in range(self.assets)]


@pytest.mark.parametrize("guard", ["hour_notional", "day_notional", "turnover"])
def test_limits_of_notional_count_all_symbols_of_a_bar(paper_world: WorldMaker, guard: str) -> None:
    """Four orders of 50,000, none beyond the limit by itself: 0.3 x 100,000 x leverage 2 = 60,000 may be traded."""
    bars = tg.make_market(60, assets=4, seed=3).bars
    settings = {"bars": bars, "config": MarketConfig(leverage=2.0), "make_decider": lambda: Spread(4)}
    world = paper_world(guards=replace(LOOSE, **{guard: 0.3}), **settings)
    frozen, notionals = frozen_after(world)
    assert sum(notionals) <= 0.3 * CAPITAL * 2.0
    assert "guards." + guard in frozen[guard]


def test_an_order_whose_outcome_is_unknown_counts_against_the_limits(paper_world: WorldMaker) -> None:
    """The first symbol's order may have traded 50,000; another 50,000 would pass the limit of 80,000."""
    bars = tg.make_market(60, assets=2, seed=3).bars
    guards = replace(LOOSE, hour_notional=0.4)
    settings = {"bars": bars, "config": MarketConfig(leverage=2.0), "make_decider": lambda: Spread(2)}
    world = paper_world(guards=guards, orders=OrderConfig(patience_s=1.0), **settings)
    session = world.session()
    session.decider.weights_at = lambda _: [0.5, 0.0]
    place = world.venue.place

    def lost(order):
        place(order)
        world.faults.rates = FaultRates(late_events=1.0)  # it is hidden for two seconds
        raise OutcomeUnknown("timed out")

    world.venue.place = lost
    world.trade(session, 1)
    assert len(session.ledger.state.open_intents) == 1
    breach = session.guards.order(50_000, CAPITAL, session.ledger.state, world.clock.now())
    assert breach.guard == "hour_notional"


def test_the_windows_of_notional_slide() -> None:
    """Limits count the last hour and the last day, not clock hours."""
    guards = Guards(GuardConfig(order_notional=10, hour_notional=2, day_notional=3, turnover=9), 100.0, 1.0, HOUR)
    state = LiveState()
    state.traded.extend([(0, 150.0), (1, 40.0)])
    assert guards.order(11, 100, state, 2).guard == "hour_notional"
    assert guards.order(11, 100, state, HOUR_MS) is None
    assert guards.order(111, 100, state, HOUR_MS + 1).guard == "day_notional"
    assert guards.order(111, 100, state, DAY_MS) is None
    assert guards.order(111, 10, state, DAY_MS).guard == "turnover"


def test_a_drawdown_beyond_its_limit_kills(paper_world: WorldMaker) -> None:
    """The prices fall by 1 % a bar and the position is 1: after about eleven bars 10 % are lost."""
    bars = tg.make_market(60, seed=3).bars
    fall = 0.99 ** pl.int_range(pl.len())
    frame = bars.frame.with_columns([pl.lit(100.0).mul(fall).alias(name) for name in ("open", "high", "low", "close")])
    world = paper_world(
        replace(bars, frame=frame), guards=replace(LOOSE, drawdown=0.1), make_decider=lambda: Constant(1.0)
    )
    session = world.session()
    with pytest.raises(Killed, match=r"drawdown: equity is 10\.\d % below its peak|drawdown: equity is 10\.\d%"):
        world.trade(session)
    equities = [record["equity"] for record in world.records("decision")]
    assert equities[-1] < 0.9 <= equities[-2]
    assert len(world.venue.sends) == len(equities) - 1


def test_the_account_s_cvar_budget_kills_once_there_are_enough_windows() -> None:
    """20 windows at alpha 0.1: the mean of the worst two, worked out by sorting."""
    guards = Guards(replace(LOOSE, cvar_limit=-0.04, cvar_alpha=0.1), 1.0, 1.0, HOUR)
    outcomes = np.random.default_rng(0).normal(0, 0.02, 20)
    state = LiveState(peak_equity=1.0)
    state.outcomes.extend(outcomes[:9])
    assert guards.tail(state) is None
    state.outcomes.extend(outcomes[9:])
    worst = np.sort(outcomes)[:2].mean()
    assert guards.tail(state) == pytest.approx(worst, abs=1e-15)
    assert (guards.account(1.0, state) is not None) == (worst < -0.04)
    state.outcomes.append(-0.2)
    assert guards.account(1.0, state).guard == "cvar"


def test_a_session_kills_itself_when_the_budget_is_spent(paper_world: WorldMaker) -> None:
    """Windows of 2 bars, half of them in the tail: the guard looks at the mean of the worse half."""
    world = paper_world(guards=replace(LOOSE, cvar_limit=-0.0005, cvar_alpha=0.5), window=2)
    session = world.session()
    with pytest.raises(Killed, match="cvar: the worst 50% of"):
        world.trade(session)
    equities = np.array([record["equity"] for record in world.records("decision")])[::2]
    outcomes = np.sort(equities[1:] / equities[:-1] - 1)
    state = session.ledger.state
    assert sorted(state.outcomes) == pytest.approx(outcomes.tolist(), abs=1e-12)


@pytest.mark.parametrize(
    ("changes", "fault"),
    [
        ({"close": float("nan")}, "close is nan"),
        ({"close": None}, "close is None"),
        ({"open": 0.0}, "open is 0"),
        ({"low": 1e9}, "do not fit together"),
        ({"volume": -1.0}, "volume is -1"),
    ],
)
def test_an_inconsistent_bar_is_not_used_and_freezes(paper_world: WorldMaker, changes, fault: str) -> None:
    world = paper_world()
    session = world.session()
    world.trade(session, 3)
    bar = next(bars_of(world.bars, session.ledger.state.bars[-1].time_ms + 1))
    symbol = world.bars.symbols[0]
    world.clock.wait_until(bar.close_ms(HOUR))
    session.on_bar(LiveBar(bar.time_ms, {symbol: {**bar.values[symbol], **changes}}))
    assert fault in session.ledger.state.frozen["inconsistent_bar"]
    assert len(world.records("bar")) == 3
    assert len(session.ledger.state.bars) == 1  # the others are the decider's
    assert len(world.venue.sends) == 3


def test_a_jump_that_is_not_believed_freezes(paper_world: WorldMaker) -> None:
    world = paper_world(guards=replace(LOOSE, jump=0.3))
    session = world.session()
    world.trade(session, 3)
    bar = next(bars_of(world.bars, session.ledger.state.bars[-1].time_ms + 1))
    symbol = world.bars.symbols[0]
    world.clock.wait_until(bar.close_ms(HOUR))
    prices = {name: 2 * value for name, value in bar.values[symbol].items() if name in ("open", "high", "low", "close")}
    session.on_bar(LiveBar(bar.time_ms, {symbol: {**bar.values[symbol], **prices}}))
    assert "guards.jump allows 30%" in session.ledger.state.frozen["jump"]


def test_a_stale_bar_is_decided_on_but_not_traded(paper_world: WorldMaker) -> None:
    """A tenth of an hour is allowed: 6 minutes."""
    world = paper_world()
    session = world.session()
    session.start()
    bars = list(bars_of(world.bars, world.first_ms))[:3]
    for bar, delay in zip(bars, (0, 360, 361), strict=True):
        world.clock.wait_until(bar.close_ms(HOUR) + 1_000 * delay)
        session.on_bar(bar)
    assert len(world.records("decision")) == 3
    assert len(world.venue.sends) == 2


@pytest.mark.parametrize(("ahead_s", "sends"), [(359, 6), (361, 3)])
def test_a_bar_is_stale_by_the_venues_clock_too(paper_world: WorldMaker, ahead_s: int, sends: int) -> None:
    """Our clock is set back: by it every bar has just closed, and by the venue's it closed minutes ago."""
    world = paper_world()
    session = world.session()
    world.trade(session, 3)
    world.faults.clock_skew_ms = 1_000 * ahead_s
    world.trade(session, 3)
    assert len(world.venue.sends) == sends
    assert len(world.records("decision")) == 6
    told = {record["guard"]: record["message"] for record in world.records("alarm")}
    assert f"the venue's clock is +{ahead_s}.0 s from ours" in told["clock"]
    assert ("bar_age" in told) == (ahead_s > 360)
    assert "s ago by the venue's clock" in told.get("bar_age", "s ago by the venue's clock")


class Undecided(RandomWeights):
    """A policy whose network gives no number."""

    def weights_at(self, _: int) -> list[float]:
        return [float("nan")]


def test_a_decision_that_is_no_number_kills_and_holds(paper_world: WorldMaker) -> None:
    world = paper_world()
    session, symbol = world.session(), world.bars.symbols[0]
    world.trade(session, 3)
    held, good = session.ledger.state.ours[symbol], session.decider.weights_at
    session.decider.weights_at = Undecided(1).weights_at
    with pytest.raises(Killed, match=r"decision: the target weights are \[nan\]"):
        world.trade(session, 1)
    assert session.ledger.state.ours[symbol] == held != 0
    assert len(world.venue.sends) == len(world.records("decision")) == 3
    # Whoever releases it with a policy that decides again goes on at this very bar.
    session.decider.weights_at = good
    session = world.session()
    session.release("a person")
    world.trade(session, 1)
    assert len(world.records("decision")) == 5
    assert len(world.venue.sends) == 5


def test_a_network_without_numbers_kills_a_session(agent, shadow_session: ShadowMaker) -> None:
    """The real policy after its weights have become NaN, as by a broken file."""
    bars = tg.make_market(230, seed=8).bars
    first = open_time(bars, 200)
    clock = SimulatedClock(first)
    broken = copy.deepcopy(agent)
    session = shadow_session(broken, bars, first, clock)
    session.start()
    source = ReplaySource(bars, first - 1, clock)
    for _ in range(5):
        session.on_bar(source.next_bar())
    assert not session.ledger.state.frozen
    with torch.no_grad():
        broken.members[0].policy.action_head.linear.weight.fill_(float("nan"))
    with pytest.raises(Killed, match=r"decision: .*the agent's action is not a number"):
        session.on_bar(source.next_bar())
    assert session.ledger.state.killed is not None


def test_an_account_without_numbers_kills(paper_world: WorldMaker) -> None:
    """Equity that is no number is above no limit and below none: no guard on the account would ever trip again."""
    world = paper_world()
    session = world.session()
    world.trade(session, 3)
    world.venue.books.cash = float("nan")
    with pytest.raises(Killed, match="equity: it is nan"):
        world.trade(session, 1)
    assert len(world.venue.sends) == 3
    assert session.ledger.state.peak_equity > 0
    assert np.isfinite(session.ledger.state.equities).all()


@pytest.mark.parametrize("kind", ["between two bars", "another symbol", "a symbol is missing"])
def test_a_bar_that_does_not_continue_the_history_is_not_used(paper_world: WorldMaker, kind: str) -> None:
    """In the journal it would end every later start."""
    world = paper_world(tg.make_market(60, assets=2, seed=3).bars)
    session = world.session()
    world.trade(session, 3)
    bar = next(bars_of(world.bars, session.ledger.state.bars[-1].time_ms + 1))
    values, second = dict(bar.values), world.bars.symbols[1]
    if kind == "another symbol":
        values["OTHER"] = values.pop(second)
    elif kind == "a symbol is missing":
        del values[second]
    wrong = LiveBar(bar.time_ms + (HOUR // 2 if kind == "between two bars" else 0), values)
    session.on_bar(wrong)
    assert "inconsistent_bar" in session.ledger.state.frozen
    assert len(world.records("bar")) == 3
    world.trade(world.session(), 3)
    assert len(world.records("bar")) == 6


def test_a_venue_whose_price_is_not_that_of_the_bars_freezes(paper_world: WorldMaker) -> None:
    world = paper_world(guards=replace(LOOSE, price_difference=0.03))
    session = world.session()
    world.trade(session, 3)
    prices = world.venue.prices
    world.venue.prices = lambda: {symbol: 1.05 * price for symbol, price in prices().items()}
    world.trade(session, 1)
    assert "the venue's price is" in session.ledger.state.frozen["price_difference"]


def test_a_fill_far_from_its_price_freezes(paper_world: WorldMaker) -> None:
    """The venue fills at its own worse price, whatever the limit said."""
    world = paper_world(guards=replace(LOOSE, slippage=0.01))
    session = world.session()
    place = world.venue.place
    world.venue.place = lambda order: replace(place(order), price=1.02 * world.venue.prices()[order.symbol])
    world.trade(session, 1)
    assert "filled at" in session.ledger.state.frozen["slippage"]


def test_too_many_errors_kill(paper_world: WorldMaker) -> None:
    world = paper_world(guards=replace(LOOSE, errors_per_hour=5), faults=Faults(seed=1))
    session = world.session()
    world.trade(session, 2)
    world.faults.rates = FaultRates(read_fails=0.9)
    with pytest.raises(Killed, match=r"errors: \d+ errors within an hour"):
        world.trade(session, 10)
    assert len(world.records("error")) > 5


def test_an_outage_of_a_minute_is_a_few_errors_and_not_the_end(paper_world: WorldMaker) -> None:
    """40 s without an answer, at every hour of a day: pauses double, and the default of 30 errors is not reached."""
    world = paper_world(guards=replace(LOOSE, errors_per_hour=GuardConfig().errors_per_hour))
    session = world.session()
    world.trade(session, 2)
    silent_until = 0
    read = world.faults.before_read

    def before_read() -> None:
        if world.clock.now() < silent_until:
            raise OutcomeUnknown("network is unreachable")
        read()

    world.faults.before_read = before_read
    for number in range(24):
        silent_until = session.ledger.state.bars[-1].close_ms(2 * HOUR) + 40_000
        world.trade(session, 1)
        assert len(world.records("error")) <= 7 * (number + 1)
    assert session.ledger.state.killed is None
    assert len(world.venue.sends) == 26


def test_a_stale_bar_is_an_alarm_once_until_a_fresh_one_comes(paper_world: WorldMaker) -> None:
    world = paper_world()
    session = world.session()
    session.start()
    bars = list(bars_of(world.bars, world.first_ms))[:7]
    for bar, delay in zip(bars, (0, 400, 500, 600, 0, 700, 0), strict=True):
        world.clock.wait_until(bar.close_ms(HOUR) + 1_000 * delay)
        session.on_bar(bar)
    assert [record["message"] for record in world.records("alarm")] == [
        "no orders: the bar closed 400 s ago, and guards.bar_age allows 360 s",
        "no orders: the bar closed 700 s ago, and guards.bar_age allows 360 s",
    ]
    assert {record["guard"] for record in world.records("alarm")} == {"bar_age"}
    assert len(session.ledger.state.alarms) == 2


def test_a_venue_that_does_not_answer_is_an_alarm_once(paper_world: WorldMaker) -> None:
    world = paper_world()
    session = world.session()
    world.trade(session, 2)
    world.faults.rates = FaultRates(read_fails=1.0)
    world.trade(session, 3)
    world.faults.stop()
    world.trade(session, 2)
    assert [(record["guard"], record["message"][:10]) for record in world.records("alarm")] == [("venue", "no orders:")]
    assert len(world.venue.sends) == 4


def test_reductions_pass_the_guards_of_notional(paper_world: WorldMaker) -> None:
    """A guard must not keep a position from being closed: 0.9 are bought, 1 may be traded a day, and 0.9 are sold."""
    world = paper_world(guards=replace(LOOSE, day_notional=1.0), make_decider=lambda: Constant(0.9))
    session = world.session()
    world.trade(session, 1)
    session.decider.weight = 0.0
    world.trade(session, 1)
    assert world.venue.books.positions[world.bars.symbols[0]] == Decimal(0)
    assert not session.ledger.state.frozen


def test_limits_that_make_no_sense_are_refused() -> None:
    for name, value in (("drawdown", 0), ("order_notional", -1), ("cvar_limit", 0.1), ("slippage", 0.9)):
        with pytest.raises(ConfigError, match=f"guards.{name}"):
            GuardConfig(**{name: value})
