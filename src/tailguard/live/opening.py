"""A session of a finished run: its agent, its bars, its journal, and where both go on."""

from __future__ import annotations

import hashlib
import io
import secrets
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from datetime import timedelta
from pathlib import Path
from typing import Any, Literal, get_args

import numpy as np
import polars as pl
import torch

from tailguard.algorithm.ensemble import Ensemble
from tailguard.data.bars import Bars, with_segments
from tailguard.data.calendars import around_the_clock
from tailguard.data.exchange import Exchange, Retry
from tailguard.data.features import longest_warmup
from tailguard.data.sources import load_bars
from tailguard.errors import ConfigError
from tailguard.evaluate.backtest import backtest
from tailguard.experiment.layout import RunLayout
from tailguard.experiment.trained_run import load_run_agent, open_run, read_run_config
from tailguard.live.bar_history import BarHistory, BarSource, LiveBar, ReplaySource
from tailguard.live.ccxt_venue import RECEIVE_WINDOW_MS, CcxtVenue, make_client
from tailguard.live.decide import LiveDecider, WarmUpError
from tailguard.live.guards import GuardConfig
from tailguard.live.journal import Journal, read_records
from tailguard.live.kill import KillSwitch
from tailguard.live.orders import OrderConfig
from tailguard.live.paper import PaperVenue
from tailguard.live.paper_client import EXCHANGE, KEYS, PaperAddress, PaperClock
from tailguard.live.polling import PollingSource, fetch_lead_in
from tailguard.live.session import Session, SessionConfig
from tailguard.live.shadow import SimulatedAccount
from tailguard.live.stake import LiveTerms, Stake, stake_of
from tailguard.live.venue import Clock, SimulatedClock, SystemClock, Venue
from tailguard.market import MarketConfig, build_market
from tailguard.places import read_plain, replace_synced

Mode = Literal["shadow", "paper", "live"]
EXTRA_LEAD_IN = 64
"""Bars that are fetched beyond the longest warm-up."""


@dataclass(frozen=True)
class LiveSource:
    """Where the bars come from: a file or the run's test part to replay, an exchange, or a paper venue's address."""

    data: Path | None = None
    exchange: str | None = None
    symbols: tuple[str, ...] = ()
    """Symbols to trade; empty: those of the bars, or of the run."""
    seconds_per_bar: float = 0.0
    """Pace of a replay; 0: as fast as possible."""
    venue: str | None = None
    """Address of a paper venue in another process, which stands for the exchange."""

    def __post_init__(self) -> None:
        if self.venue is not None and self.exchange is None:
            object.__setattr__(self, "exchange", EXCHANGE)


@dataclass(frozen=True)
class OpenedSession:
    """A session that can be started, and the bars that follow."""

    session: Session
    source: BarSource
    terms: dict[str, Any]
    """What a person has to agree to before live trading; empty elsewhere."""


def open_session(
    run: Path,
    mode: Mode,
    where: LiveSource,
    guards: Mapping[str, float] | None = None,
    *,
    terms: LiveTerms | None = None,
    orders: OrderConfig | None = None,
    stop: Callable[[], bool] = lambda: False,
    trust_plugins: bool = False,
) -> OpenedSession:
    """Open the run's session in a mode, or begin one. `terms`: what live trading needs besides."""
    _check_mode(mode, where, terms)
    layout = RunLayout(run)
    config = read_run_config(run, trust_plugins=trust_plugins)
    agent = load_run_agent(run)
    spec = agent.spec
    if spec is None:
        raise ConfigError(f"{run}: its agent was not trained on a TradingEnv, so it cannot trade bars")
    if spec.sessions is not None:
        raise ConfigError(
            f"{run}: its agent was trained on a market with sessions. Which bar is a session's last is known here only "
            "afterwards, so that live sessions follow markets that trade around the clock; use tailguard backtest"
        )
    exchanges = _exchanges(where, spec.frequency_ms, tuple(config.data.symbols))
    limits = guard_config(guards or {}, agent)
    check_time_of_orders(orders or OrderConfig(), limits, spec.frequency_ms)
    bars = None if exchanges else bars_to_replay(run, where)
    journal = Journal(layout.journal_path(mode))
    try:
        began = _begin_or_go_on(run, mode, agent, journal, exchanges, bars)
        lead_in, first_ms = began.lead_in, began.first_ms
        spec.check_fits(lead_in.panel(spec.accounts))
        clock = _clock(where, int(journal.records[-1]["time"]) if journal.records else first_ms)
        decider = LiveDecider(agent, BarHistory(lead_in, first_ms))
        venue, budget = _venue(mode, where, terms, lead_in.symbols, clock, bars, spec.market, layout, journal)
        settings = SessionConfig(
            run=began.name,
            mode=mode,
            symbols=lead_in.symbols,
            capital=budget.capital,
            leverage=spec.market.leverage,
            bar_ms=spec.frequency_ms,
            window=spec.episode_length,
            guards=limits,
            orders=orders or OrderConfig(),
            ceiling=budget.ceiling,
        )
        about = {
            "first": first_ms,
            "agent": agent_digest(layout),
            "lead_in": _digest(layout.lead_in_path(mode)),
            "frequency": spec.frequency_ms,
            "source": str(where.venue or where.exchange or where.data or "test part"),
            **budget.about,
        }
        known = [record["bar"] for record in journal.records if record["kind"] == "bar"]
        after = known[-1] if known else first_ms - spec.frequency_ms
        session = Session(
            settings,
            decider,
            journal,
            clock,
            kill_switch(layout, mode),
            venue=venue,
            shadow=SimulatedAccount(decider) if venue is None else None,
            about=about,
            stop=stop,
        )
    except BaseException:
        journal.close()
        raise
    source = (
        _followed(session, exchanges, after, clock, stop)
        if bars is None
        else ReplaySource(bars, after, clock, where.seconds_per_bar)
    )
    return OpenedSession(session, source, _terms(where, terms, session, about))


def kill_switch(layout: RunLayout, mode: Mode) -> KillSwitch:
    """The switch of the run's session in a mode."""
    others = tuple(layout.mode_kill_path(each) for each in get_args(Mode) if each != mode)
    return KillSwitch(layout.mode_kill_path(mode), layout.kill_path, others)


def _terms(where: LiveSource, terms: LiveTerms | None, session: Session, about: Mapping[str, Any]) -> dict[str, Any]:
    if terms is None:
        return {}
    return {
        "exchange": where.exchange,
        "venue": where.venue or "the exchange itself",
        "account": terms.credentials.fingerprint,
        "budget": terms.budget,
        "leverage": session.config.leverage,
        "symbols": list(session.config.symbols),
        "agent": about["agent"][:12],
    }


def _check_mode(mode: Mode, where: LiveSource, terms: LiveTerms | None) -> None:
    if mode == "paper" and where.exchange is not None and where.venue is None:
        raise ConfigError(
            f"--mode paper --exchange {where.exchange}: nobody knows how an order would have traded at an exchange "
            "that never got it. Follow the exchange without orders: --mode shadow. Or rehearse orders on past bars: "
            "tailguard venue RUN in another terminal, and here --mode paper --venue with the address that it prints; "
            "tailguard data fetch gets such bars of the exchange, and --data replays them"
        )
    if where.venue is not None and where.exchange != EXCHANGE:
        raise ConfigError(f"--venue stands for {EXCHANGE}; leave out --exchange")
    if where.venue is not None:
        PaperAddress.parse(where.venue)
    if where.exchange is not None and where.data is not None:
        raise ConfigError("--data replays bars and an exchange has its own; leave one of them out")
    if mode == "live" and (where.exchange is None or terms is None):
        raise ConfigError("--mode live needs --exchange and --budget")


@dataclass(frozen=True)
class _Began:
    """What a session has had since its first start."""

    lead_in: Bars
    first_ms: int
    name: str


def _begin_or_go_on(
    run: Path, mode: Mode, agent: Any, journal: Journal, exchanges: Sequence[Exchange], bars: Bars | None
) -> _Began:
    layout = RunLayout(run)
    first = next((record for record in journal.records if record["kind"] == "start"), None)
    if first is not None:
        if first["agent"] != agent_digest(layout):
            raise ConfigError(
                f"{run}: its agent has changed since the session began. Restore it, or move {journal.path.parent} "
                "away to begin a new session"
            )
        return _Began(read_lead_in(layout, mode, first), int(first["first"]), str(first["run"]))
    lead_in = fetch_lead_in(exchanges, bars_needed(agent) + EXTRA_LEAD_IN) if bars is None else bars
    first_ms = _first_bar(lead_in, agent, replayed=bars is not None)
    name = f"{layout.path.resolve().name}:{mode}:{first_ms}:{secrets.token_hex(4)}"
    lead_in = BarHistory(lead_in, first_ms).bars
    _write_lead_in(layout.lead_in_path(mode), lead_in)
    return _Began(lead_in, first_ms, name)


def _clock(where: LiveSource, last_ms: int) -> Clock:
    if where.venue is not None:
        return PaperClock(PaperAddress.parse(where.venue))
    return SimulatedClock(last_ms) if where.exchange is None else SystemClock()


def _venue(
    mode: Mode,
    where: LiveSource,
    terms: LiveTerms | None,
    symbols: tuple[str, ...],
    clock: Clock,
    bars: Bars | None,
    market: MarketConfig,
    layout: RunLayout,
    journal: Journal,
) -> tuple[Venue | None, Stake]:
    """Where a session's orders go, and the money that it trades with."""
    if mode == "shadow":
        return None, Stake(1.0)
    if bars is not None:
        panel = bars.panel()
        tables = build_market(panel, market, dtype=torch.float64)
        return PaperVenue(tables, panel, clock, store=layout.paper_books_path(mode)), Stake(market.capital)
    assert where.exchange is not None
    first = next((record for record in journal.records if record["kind"] == "start"), None)
    keys = KEYS if terms is None else terms.credentials
    window, settings = RECEIVE_WINDOW_MS, dict[str, Any]()
    if where.venue is not None:
        settings = PaperAddress.parse(where.venue).settings()
        assert isinstance(clock, PaperClock)
        window = clock.receive_window_ms
    client = make_client(where.exchange, keys, settings)
    since = clock.now() if first is None else int(first["time"])
    venue = CcxtVenue(client, keys, symbols, clock, since_ms=since, receive_window_ms=window)
    venue.check()
    if terms is None:
        return venue, Stake(market.capital)
    budget = stake_of(terms, venue, first)
    venue.reserve = budget.reserve
    return venue, budget


def _followed(
    session: Session, exchanges: Sequence[Exchange], after: int, clock: Clock, stop: Callable[[], bool]
) -> PollingSource:
    """The bars of an exchange as they close; those of a paper venue end."""

    def alarm(message: str) -> None:
        session.ledger.record("alarm", guard="bars", message=message)

    def has_ended() -> bool:
        if not isinstance(clock, PaperClock):
            return False
        last = clock.last_bar_ms
        return source.after_ms >= last or clock.now() > last + 4 * session.config.bar_ms

    source = PollingSource(exchanges, after, clock, lambda: stop() or session.kill.is_tripped() or has_ended(), alarm)
    if isinstance(clock, PaperClock):
        # Where time moves only while the session waits, a long wait costs nothing.
        source.nap_s, source.poll_s = (1e9, session.config.bar_ms / 10_000) if not clock.speed else (
            clock.speed / 10, max(1.0, clock.speed / 20)
        )  # fmt: skip
    return source


def guard_config(changes: Mapping[str, float], agent: Any) -> GuardConfig:
    """The default limits with changes; the CVaR budget is the one that the agent was calibrated to."""
    known = [item.name for item in fields(GuardConfig)]
    for name in changes:
        if name not in known:
            raise ConfigError(f"--guard {name}: unknown; there are {', '.join(known)}")
    calibration = agent.calibration if isinstance(agent, Ensemble) else None
    base = GuardConfig()
    if calibration is not None:
        base = replace(base, cvar_limit=calibration.limit, cvar_alpha=calibration.alpha)
    chosen: dict[str, Any] = dict(changes)
    return replace(base, **chosen)


def check_time_of_orders(orders: OrderConfig, guards: GuardConfig, bar_ms: int) -> None:
    """Orders that take longer than a bar is fresh would never be sent to their end."""
    fresh_s = guards.bar_age * bar_ms / 1000
    if orders.style in ("limit_then_market", "twap") and orders.spread_s >= fresh_s:
        raise ConfigError(
            f"--spread {orders.spread_s:g}: a bar is fresh for {fresh_s:g} s (guards.bar_age is {guards.bar_age:g}); "
            "choose less"
        )


def agent_digest(layout: RunLayout) -> str:
    """A hash of the agent: of its manifest, which holds those of all its files."""
    manifests = sorted(layout.agent_path.glob("*.json"))
    return hashlib.sha256(b"".join(read_plain(path) for path in manifests)).hexdigest()


def read_lead_in(layout: RunLayout, mode: str, start: Mapping[str, Any]) -> Bars:
    """The bars before the session's first one, as they were written at its start."""
    path = layout.lead_in_path(mode)
    if _digest(path) != start["lead_in"]:
        raise ConfigError(f"{path}: changed since the session began; restore it")
    frequency = timedelta(milliseconds=int(start["frequency"]))
    frame = pl.read_parquet(io.BytesIO(read_plain(path)))
    return Bars(with_segments(frame.drop("segment"), around_the_clock(frequency)), frequency, str(path))


def verify_session(run: Path, mode: Mode, *, trust_plugins: bool = False) -> tuple[int, str]:
    """Check the journal's chain and replay every decision in it; returns their number and the hash of the last line.

    A shadow session without a gap is compared with a backtest of its bars, too. Raises an error that names the first
    thing that is wrong.
    """
    layout = RunLayout(run)
    path = layout.journal_path(mode)
    if not path.exists():
        raise ConfigError(f"{run}: no session in the mode {mode}: {path} is missing")
    read_run_config(run, trust_plugins=trust_plugins)
    records = list(read_records(path))
    start = next(record for record in records if record["kind"] == "start")
    decisions = [record for record in records if record["kind"] == "decision" and not record["flat"]]
    bars = [LiveBar.from_dict(record) for record in records if record["kind"] == "bar"]
    agent = load_run_agent(run)
    history = BarHistory(read_lead_in(layout, mode, start), int(start["first"]))
    decider = LiveDecider(agent, history)
    if bars:
        decider.read(*bars)
        decider.restore(decisions)
    if mode == "shadow" and len(decisions) > 1 and len(set(decider.panel.segment.tolist())) == 1:
        expected = backtest(agent, history.bars, progress_bar=False, warn_in_sample=False).targets
        made = np.array([record["target"] for record in decisions])[: len(expected)]
        if not np.array_equal(made, expected[: len(made)]):
            row = int(np.flatnonzero((made != expected[: len(made)]).any(1))[0])
            raise WarmUpError(
                f"{path}: the decision at the bar {decisions[row]['bar']} is {made[row].tolist()}; a backtest decides "
                f"{expected[row].tolist()}"
            )
    return len(decisions), str(records[-1]["hash"])


def _exchanges(where: LiveSource, frequency_ms: int, of_run: Sequence[str]) -> list[Exchange]:
    if where.exchange is None:
        return []
    symbols = where.symbols or tuple(of_run)
    if where.venue is not None:
        symbols = where.symbols or tuple(PaperAddress.parse(where.venue).status()["symbols"])
    if not symbols:
        raise ConfigError("--exchange needs --symbol: which market to follow, such as --symbol BTC/USDT:USDT")
    minutes = frequency_ms // 60_000
    timeframe = f"{minutes // 60}h" if minutes % 60 == 0 and minutes < 1440 else f"{minutes}m"
    timeframe = f"{minutes // 1440}d" if minutes % 1440 == 0 else timeframe
    retry, settings = Retry(), dict[str, Any]()
    if where.venue is not None:
        # On localhost nothing is gained by waiting.
        retry, settings = Retry(attempts=4, wait=0.05), PaperAddress.parse(where.venue).settings()
    return [
        Exchange.open(where.exchange, symbol, timeframe, retry, settings, lambda _: None) for symbol in sorted(symbols)
    ]


def bars_to_replay(run: Path, where: LiveSource) -> Bars:
    bars = open_run(run).part("test") if where.data is None else load_bars(where.data)
    return bars.select(*where.symbols) if where.symbols else bars


def bars_needed(agent: Any) -> int:
    """Bars of history before all features are defined."""
    from tailguard.data.registry import find_features

    names = dict.fromkeys(name.split(":")[0] for name in agent.spec.scaler.names)
    return max(entry.warmup for entry in find_features(list(names)))


def _first_bar(lead_in: Bars, agent: Any, *, replayed: bool) -> int:
    """Open time of the first bar at whose close is decided."""
    frequency_ms = round(lead_in.frequency.total_seconds() * 1000)
    begin, end = (round(moment.timestamp() * 1000) for moment in lead_in.end_points)
    if not replayed:
        return end + frequency_ms
    if lead_in.first is not None:
        return round(lead_in.first.timestamp() * 1000)
    names = dict.fromkeys(name.split(":")[0] for name in agent.spec.scaler.names)
    return begin + longest_warmup(lead_in, list(names)) * frequency_ms


def _write_lead_in(path: Path, bars: Bars) -> None:
    buffer = io.BytesIO()
    bars.frame.write_parquet(buffer)
    path.parent.mkdir(parents=True, exist_ok=True)
    replace_synced(path, buffer.getvalue())


def _digest(path: Path) -> str:
    return hashlib.sha256(read_plain(path)).hexdigest()
