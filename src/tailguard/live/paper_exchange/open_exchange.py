"""A paper exchange that replays the bars of a finished run, at the run's costs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from difflib import get_close_matches
from pathlib import Path

from tailguard.errors import ConfigError
from tailguard.experiment.layout import RunLayout
from tailguard.experiment.trained_run import load_run_agent, read_run_config
from tailguard.live.faults import BarFaultRates, FaultRates
from tailguard.live.opening import EXTRA_LEAD_IN, LiveSource, bars_needed, bars_to_replay
from tailguard.live.paper_exchange.replayed_exchange import ExchangeConfig, PaperExchange
from tailguard.validate import check_range


@dataclass(frozen=True)
class ExchangeOptions:
    """What a person chooses for a paper exchange."""

    speed: float = 0.0
    faults: Mapping[str, float] = field(default_factory=dict)
    """Probabilities by the name of the fault."""
    seed: int = 0
    books: Path | None = None
    """The file of its account. None: that of the run."""


def open_exchange(
    run: Path, where: LiveSource, options: ExchangeOptions, *, trust_plugins: bool = False
) -> PaperExchange:
    """The exchange, at the first moment at which the run's agent has all the history that it needs."""
    check_range("speed", options.speed, low=0)
    rates, bar_rates = fault_rates(options.faults)
    layout = RunLayout(run)
    read_run_config(run, trust_plugins=trust_plugins)
    agent = load_run_agent(run)
    if agent.spec is None:
        raise ConfigError(f"{run}: its agent was not trained on a TradingEnv, so it cannot trade bars")
    bars = bars_to_replay(run, where)
    panel = bars.panel(agent.spec.accounts)
    agent.spec.check_fits(panel)
    needed = bars_needed(agent) + EXTRA_LEAD_IN
    if panel.rows <= needed:
        raise ConfigError(
            f"{panel.rows:,} bars, and the agent needs {needed:,} before it decides; replay more (--data)"
        )
    start_ms = int(panel.time[needed])
    if bars.first is not None:
        start_ms = max(start_ms, round(bars.first.timestamp() * 1000))
    config = ExchangeConfig(options.speed, rates=rates, bar_rates=bar_rates, seed=options.seed)
    return PaperExchange(panel, agent.spec.market, start_ms, config, store=options.books or layout.exchange_books_path)


def fault_rates(given: Mapping[str, float]) -> tuple[FaultRates, BarFaultRates]:
    """Those of a call, and those of a bar."""
    calls, of_bars = ({item.name for item in fields(each)} for each in (FaultRates, BarFaultRates))
    for name, rate in given.items():
        if name not in calls | of_bars:
            near = get_close_matches(name, calls | of_bars, n=3, cutoff=0.4) or sorted(calls | of_bars)
            raise ConfigError(f"--fault {name}: unknown; similar names: {', '.join(near)}")
        check_range(f"--fault {name}", rate, low=0, high=1)
    return (
        FaultRates(**{name: rate for name, rate in given.items() if name in calls}),
        BarFaultRates(**{name: rate for name, rate in given.items() if name in of_bars}),
    )
