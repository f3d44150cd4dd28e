"""A session of a finished run: its agent, its bars, its journal, and where both go on."""

from __future__ import annotations

import hashlib
import io
import secrets
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from datetime import timedelta
from pathlib import Path
from typing import Any, Literal

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
from tailguard.live.decide import LiveDecider, WarmUpError
from tailguard.live.guards import GuardConfig
from tailguard.live.journal import Journal, read_records
from tailguard.live.kill import KillSwitch
from tailguard.live.orders import OrderConfig
from tailguard.live.paper import PaperVenue
from tailguard.live.polling import PollingSource, fetch_lead_in
from tailguard.live.session import Session, SessionConfig
from tailguard.live.shadow import SimulatedAccount
from tailguard.live.venue import Clock, SimulatedClock, SystemClock
from tailguard.market import build_market
from tailguard.places import read_plain, replace_synced

Mode = Literal["shadow", "paper"]
EXTRA_LEAD_IN = 64
"""Bars that are fetched beyond the longest warm-up."""


@dataclass(frozen=True)
class LiveSource:
    """Where the bars come from: a file or the run's test part to replay, or an exchange."""

    data: Path | None = None
    exchange: str | None = None
    symbols: tuple[str, ...] = ()
    """Symbols to trade; empty: those of the bars, or of the run."""
    seconds_per_bar: float = 0.0
    """Pace of a replay; 0: as fast as possible."""


@dataclass(frozen=True)
class OpenedSession:
    """A session that can be started, and the bars that follow."""

    session: Session
    source: BarSource


def open_session(
    run: Path,
    mode: Mode,
    where: LiveSource,
    guards: Mapping[str, float] | None = None,
    *,
    stop: Callable[[], bool] = lambda: False,
    trust_plugins: bool = False,
) -> OpenedSession:
    """Open the run's session in a mode, or begin one."""
    if mode == "paper" and where.exchange is not None:
        raise ConfigError("--mode paper replays bars; leave out --exchange. An exchange is followed with --mode shadow")
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
    begun = layout.journal_path(mode).exists() and layout.journal_path(mode).stat().st_size > 0
    bars = None if exchanges else _bars_to_replay(run, where)
    journal = Journal(layout.journal_path(mode))
    try:
        first = next((record for record in journal.records if record["kind"] == "start"), None)
        digest = agent_digest(layout)
        if begun and first is not None:
            lead_in, first_ms, name = read_lead_in(layout, mode, first), int(first["first"]), str(first["run"])
            if first["agent"] != digest:
                raise ConfigError(
                    f"{run}: its agent has changed since the session began. Restore it, or move {journal.path.parent} "
                    "away to begin a new session"
                )
        else:
            lead_in = fetch_lead_in(exchanges, _needed(agent) + EXTRA_LEAD_IN) if bars is None else bars
            first_ms = _first_bar(lead_in, agent, replayed=bars is not None)
            name = f"{layout.path.resolve().name}:{mode}:{first_ms}:{secrets.token_hex(4)}"
            lead_in = BarHistory(lead_in, first_ms).bars
            _write_lead_in(layout.lead_in_path(mode), lead_in)
        spec.check_fits(lead_in.panel(spec.accounts))
        last_time = int(journal.records[-1]["time"]) if journal.records else first_ms
        clock: Clock = SystemClock() if exchanges else SimulatedClock(last_time)
        decider = LiveDecider(agent, BarHistory(lead_in, first_ms))
        settings = SessionConfig(
            run=name,
            mode=mode,
            symbols=lead_in.symbols,
            capital=spec.market.capital if mode == "paper" else 1.0,
            leverage=spec.market.leverage,
            bar_ms=spec.frequency_ms,
            window=spec.episode_length,
            guards=guard_config(guards or {}, agent),
            orders=OrderConfig(),
        )
        venue = None
        if mode == "paper":
            assert bars is not None
            panel = bars.panel()
            market = build_market(panel, spec.market, dtype=torch.float64)
            venue = PaperVenue(market, panel, clock, store=layout.paper_books_path(mode))
        about = {
            "first": first_ms,
            "agent": digest,
            "lead_in": _digest(layout.lead_in_path(mode)),
            "frequency": spec.frequency_ms,
            "source": str(where.exchange or where.data or "test part"),
        }
        known = [record["bar"] for record in journal.records if record["kind"] == "bar"]
        after = known[-1] if known else first_ms - spec.frequency_ms
        session = Session(
            settings,
            decider,
            journal,
            clock,
            KillSwitch(layout.kill_path),
            venue=venue,
            shadow=SimulatedAccount(decider) if venue is None else None,
            about=about,
        )
    except BaseException:
        journal.close()
        raise
    source: BarSource
    if bars is None:
        alarm = lambda message: session.ledger.record("alarm", guard="bars", message=message)  # noqa: E731
        source = PollingSource(exchanges, after, clock, lambda: stop() or session.kill.is_tripped(), alarm)
    else:
        source = ReplaySource(bars, after, clock, where.seconds_per_bar)
    return OpenedSession(session, source)


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
    if not symbols:
        raise ConfigError("--exchange needs --symbol: which market to follow, such as --symbol BTC/USDT:USDT")
    minutes = frequency_ms // 60_000
    timeframe = f"{minutes // 60}h" if minutes % 60 == 0 and minutes < 1440 else f"{minutes}m"
    timeframe = f"{minutes // 1440}d" if minutes % 1440 == 0 else timeframe
    return [Exchange.open(where.exchange, symbol, timeframe, Retry(), {}, lambda _: None) for symbol in sorted(symbols)]


def _bars_to_replay(run: Path, where: LiveSource) -> Bars:
    bars = open_run(run).part("test") if where.data is None else load_bars(where.data)
    return bars.select(*where.symbols) if where.symbols else bars


def _needed(agent: Any) -> int:
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
