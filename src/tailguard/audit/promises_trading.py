"""Checks of what trading promises: one code for decisions in backtests and sessions, and a market's own calendar."""

from __future__ import annotations

import tempfile
from dataclasses import replace
from datetime import UTC, date, datetime, timedelta
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import torch

from tailguard.algorithm.ensemble import Ensemble
from tailguard.algorithm.learner import Learner
from tailguard.algorithm.ppo import DistributionalPPO
from tailguard.audit.promises import FREE
from tailguard.audit.registry import Measurement, at_least, at_most, register_check, within, worst
from tailguard.audit.subject import Subject
from tailguard.data.bars import Bars
from tailguard.data.sources import load_bars
from tailguard.data.synthetic import make_market
from tailguard.envs.trading import TradingEnv
from tailguard.evaluate.backtest import BacktestResult, backtest
from tailguard.evaluate.baselines import HOLD, BuyAndHold, Moment
from tailguard.experiment.trained_run import TrainedRun
from tailguard.live.bar_history import BarHistory, ReplaySource
from tailguard.live.decide import LiveDecider
from tailguard.live.guards import GuardConfig
from tailguard.live.journal import Journal, read_records
from tailguard.live.kill import KillSwitch
from tailguard.live.orders import OrderConfig
from tailguard.live.session import Session, SessionConfig
from tailguard.live.shadow import SimulatedAccount
from tailguard.live.simulation import ReplayedMarket, World
from tailguard.live.venue import SimulatedClock
from tailguard.market import MarketConfig
from tailguard.risk.exposure import Exposure

HOUR_MS = 3_600_000
LOOSE = GuardConfig(
    order_notional=1e9, hour_notional=1e9, day_notional=1e9, turnover=1e6, drawdown=0.99, jump=10, slippage=0.5,
    price_difference=10, errors_per_hour=100_000,
)  # fmt: skip
"""Guards that never act: the decisions themselves are compared."""
WARM_UP = 176
"""Bars before the first decision: features, and volatility of a week, are defined by then."""
EPISODE, TRIES = 16, 8
OWN_BARS = 48
"""Last bars of a run's test part on which its session is compared with its backtest."""

# --- one code for decisions ------------------------------------------------------------------------------------------


def calibrated_agent(seed: int, limit: float = -0.001) -> Ensemble:
    """A small agent with a calibrated exposure, a throttle, and positions that are not tiny."""
    bars = make_market(400, seed=seed).bars
    # A fee of a percent: every window loses, and the throttle acts.
    env = TradingEnv(
        bars, MarketConfig(fee=0.01), num_envs=4, episode_length=EPISODE, features=("return_1", "return_24")
    )
    member = DistributionalPPO(env, n_steps=16, hidden=(8,), lstm_size=8, seed=seed, runtime="eager")
    member.learn(128)
    with torch.no_grad():
        member.policy.action_head.linear.weight.mul_(1000)
    return Ensemble([member], Exposure(0.8, limit, 0.05, 0.9, -0.01, limit, limit, 5.0), throttled=True)


def losing_agent(seed: int, limit: float = -0.001, length: int = 100) -> tuple[Ensemble, Bars, BacktestResult]:
    """An agent whose throttle acts on these bars, and its backtest of so many: one that earns has nothing to throttle.

    The first such one from the seed on; where the throttle never acts, the last one that was tried.
    """
    for number in range(TRIES):
        agent = calibrated_agent(seed + 1_000 * number, limit)
        bars = make_market(WARM_UP + length, seed=seed + 1_000 * number + 1).bars
        begin = datetime.fromtimestamp(int(bars.frame["time"].dt.epoch("ms")[WARM_UP]) / 1000, UTC)
        traded = backtest(agent, replace(bars, first=begin), progress_bar=False, warn_in_sample=False)
        if traded.throttle is not None and traded.throttle[: 3 * length // 4].min() < 1:
            break
    return agent, bars, traded


def shadow_decisions(
    agent: Ensemble | Learner, bars: Bars, first_ms: int, folder: Path, bar_ms: int = HOUR_MS
) -> list[dict[str, Any]]:
    """What a shadow session decides bar by bar."""
    clock, decider = SimulatedClock(first_ms), LiveDecider(agent, BarHistory(bars, first_ms))
    assert agent.spec is not None  # it was trained on bars
    config = SessionConfig(
        run="audit", mode="shadow", symbols=bars.symbols, capital=1.0, leverage=agent.spec.market.leverage,
        bar_ms=bar_ms, window=agent.spec.episode_length, guards=LOOSE, orders=OrderConfig(),
    )  # fmt: skip
    journal = Journal(folder / "decisions.jsonl", sync=False)
    session = Session(config, decider, journal, clock, KillSwitch(folder / "stop"), shadow=SimulatedAccount(decider))
    source = ReplaySource(bars, first_ms - 1, clock)
    session.start()
    while (bar := source.next_bar()) is not None:
        session.on_bar(bar)
    journal.close()
    return [record for record in read_records(folder / "decisions.jsonl") if record["kind"] == "decision"]


def paper_decisions(agent: Ensemble, bars: Bars, first_row: int, folder: Path) -> list[dict[str, Any]]:
    """What a session on the paper venue decides."""
    assert agent.spec is not None
    market = ReplayedMarket.of(bars, agent.spec.market, first_row)
    first_ms = market.live_bars[0].time_ms
    world = World(folder, market, lambda: LiveDecider(agent, BarHistory(bars, first_ms)), guards=LOOSE, window=EPISODE)
    world.trade(world.session())
    return [record for record in read_records(world.journal_path) if record["kind"] == "decision"]


@register_check(
    "P7",
    "Do calibrated exposure and throttle act by the same code in backtest, shadow and paper?",
    why="A session that decides differently from its backtest trades something that nobody has tested.",
    remedy="Decisions come from evaluate/decision.py alone; compare the journal with tailguard live --verify.",
    reads_run=True,
)
def decisions_are_the_same_everywhere(subject: Subject) -> Measurement:
    agent, bars, expected = losing_agent(subject.seed)
    first_ms = int(bars.frame["time"].dt.epoch("ms")[WARM_UP])
    assert expected.throttle is not None  # the agent has one
    found = []
    with tempfile.TemporaryDirectory() as place:
        shadow = shadow_decisions(agent, bars, first_ms, Path(place))
        targets = _gap(shadow, "target", expected.targets)
        found += [
            at_most("largest gap of a shadow session's targets to the backtest's", targets, 0.0),
            at_most("largest gap of its throttle", _gap(shadow, "throttle", expected.throttle), 0.0),
            at_most("lowest factor of the throttle, which must act", float(expected.throttle.min()), 0.95),
            at_least("mean size of a target", float(np.abs(expected.targets).mean()), 0.01),
        ]
    with tempfile.TemporaryDirectory() as place:
        paper = paper_decisions(agent, bars, WARM_UP, Path(place))
        found.append(at_most("largest gap of a paper session's targets to the backtest's, whose account has no lots",
                             _gap(paper, "target", expected.targets), 1e-3))  # fmt: skip
    if subject.run is not None:
        found += _of_run(subject.run)
    return worst(found)


def _of_run(run: TrainedRun) -> list[Measurement]:
    """The run's own agent on the last bars of its test part; of one symbol that trades around the clock."""
    spec, bars = run.agent.spec, run.part("test")
    panel = bars.panel()
    if spec is None or panel.assets > 1 or panel.pace.has_sessions or panel.rows <= 2 * OWN_BARS:
        return []
    first_ms = int(panel.time[-OWN_BARS])
    shown = replace(bars, first=datetime.fromtimestamp(first_ms / 1000, UTC))
    expected = backtest(run.agent, shown, progress_bar=False)
    with tempfile.TemporaryDirectory() as place:
        shadow = shadow_decisions(run.agent, bars, first_ms, Path(place), panel.frequency_ms)
    found = [at_most(f"the same for this run's agent on the last {OWN_BARS} bars of its test part",
                     _gap(shadow, "target", expected.targets), 0.0)]  # fmt: skip
    calibration = getattr(run.agent, "calibration", None)
    if calibration is not None:
        gap = abs(calibration.factor - run.agent.exposure)  # type: ignore[union-attr]  # an ensemble has one
        found.append(at_most("|exposure in force − the calibrated one| of this run's agent", gap, 0.0))
        throttled = run.config.risk.throttle and run.config.risk.measure == "episode"
        acts = expected.throttle is not None
        found.append(
            at_most("throttles that its settings ask for and that do not act", float(throttled and not acts), 0.0)
        )
    return found


def _gap(records: list[dict[str, Any]], name: str, expected: np.ndarray) -> float:
    """Infinite where one of the two decided at fewer bars; a session's last decision has no outcome yet."""
    made = np.array([record[name] for record in records[: len(expected)]], dtype=float)
    made = made.reshape(len(made), -1)
    wanted = np.asarray(expected, dtype=float).reshape(len(expected), -1)
    return float(np.abs(made - wanted).max()) if made.shape == wanted.shape else float("inf")


# --- the calendar ----------------------------------------------------------------------------------------------------


def weekday_bars(seed: int, years: int = 3) -> Bars:
    """Daily bars of a market that is open from Monday to Friday."""
    days = [date(2019, 1, 1) + timedelta(days=number) for number in range(round(365.25 * years))]
    open_days = [day for day in days if day.weekday() < 5]
    draw = np.random.default_rng(seed)
    close = 100 * np.exp(np.cumsum(0.01 * draw.normal(size=len(open_days))))
    opens = np.concatenate([[100.0], close[:-1]]) * np.exp(0.003 * draw.normal(size=len(open_days)))
    frame = pl.DataFrame(
        {
            "time": pl.Series(open_days).cast(pl.Datetime("ms", "UTC")),
            "open": opens, "close": close,
            "high": 1.001 * np.maximum(opens, close), "low": 0.999 * np.minimum(opens, close),
            "volume": np.full(len(close), 1e6),
        }
    )  # fmt: skip
    return load_bars(frame, calendar="auto", symbol="AUDIT")


def short_for_good(moment: Moment) -> np.ndarray:
    """Half of the equity short, never touched again."""
    return np.array([-0.5 if moment.first else HOLD])


@register_check(
    "P10",
    "Does the market's own calendar decide what is missing, what a year is and what is held over a gap?",
    why="Bars that are called missing at every weekend cut a position's life into weeks, lose every Monday's gap, and "
    "annualise with 365 days.",
    remedy="Name the calendar (data.calendar) and look at tailguard data check; see data/calendars.py.",
    fast=True,
)
def calendar_is_the_markets(subject: Subject) -> Measurement:
    bars = weekday_bars(subject.seed)
    panel = bars.panel()
    result = backtest(BuyAndHold(), bars, MarketConfig(**FREE), progress_bar=False)
    close, opens = panel.close[:, 0], panel.open[:, 0]
    prices = close[1:] / opens[1]
    gap = float(np.abs(result.equity[1:] / prices[: len(result.equity) - 1] - 1).max())
    found = [
        at_most("gap of buy and hold without costs to the prices, over every weekend", gap, 1e-9),
        within("bars in a year of a market that is open from Monday to Friday", result.bars_per_year, 259.0, 263.0),
        at_most("stretches that its bars are cut into, beyond the first", float(panel.segment.max()), 0.0),
    ]
    lent = backtest(short_for_good, bars, MarketConfig(**{**FREE, "borrow_rate": 0.1}), progress_bar=False)
    found.append(within("interest over a weekend in units of that of a night", _weekend_interest(lent), 2.9, 3.1))
    return worst(found)


def _weekend_interest(result: BacktestResult) -> float:
    """Interest of the bars before a weekend over that of the others, each per value that is short."""
    held = np.abs(result.weights[:, 0])
    rate = result.costs["borrow"][held > 0] / held[held > 0]
    weekday = np.array([datetime.fromtimestamp(time / 1000, UTC).weekday() for time in result.time[held > 0]])
    return float(np.median(rate[weekday == 4]) / np.median(rate[weekday < 4]))
