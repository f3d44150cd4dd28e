"""Specification of an agent's inputs: features, their scaling, and the rules of its episodes."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray

from tailguard.data.pace import Pace
from tailguard.data.panel import Panel
from tailguard.data.prepare import PreparedBars, prepare
from tailguard.data.scaling import Scaler
from tailguard.envs.constraints import Constraints, limits_of
from tailguard.envs.episodes import Reward, TradingTask, holdable_assets, rows_before_session_ends
from tailguard.envs.prepared_market import MappedBars
from tailguard.envs.shield import Shield
from tailguard.envs.trading import TradingEnv
from tailguard.envs.volatility import VolatilityScaling, volatility_factors
from tailguard.errors import BarsError
from tailguard.market import MarketConfig, build_market
from tailguard.validate import check_count

if TYPE_CHECKING:
    from tailguard.data.bars import Accounts, Bars


@dataclass(frozen=True)
class TrainingBars:
    """Which bars an environment trades: symbols, and open times in milliseconds of the first and the last of them."""

    symbols: tuple[str, ...]
    first_ms: int
    last_ms: int

    @classmethod
    def of(cls, prepared: PreparedBars) -> TrainingBars:
        if isinstance(prepared, MappedBars):  # its times are on disk, and need not be read
            first, last = (round(moment.timestamp() * 1000) for moment in prepared.period)
        else:
            times = prepared.panel.time[prepared.panel.tradeable]
            first, last = int(times.min()), int(times.max())
        return cls(prepared.panel.symbols, first, last)

    @classmethod
    def from_dict(cls, state: dict[str, Any]) -> TrainingBars:
        symbols, times = state["symbols"], (state["first_ms"], state["last_ms"])
        texts = isinstance(symbols, list | tuple) and all(isinstance(symbol, str) for symbol in symbols)
        if not texts or any(type(moment) is not int for moment in times):
            raise TypeError(f"not the training bars' symbols and times: {state}")
        return cls(tuple(symbols), *times)


@dataclass(frozen=True)
class TradingSpec:
    """A trading environment without its bars: saved with the agent, so it can trade new bars with the same inputs."""

    scaler: Scaler
    market: MarketConfig
    accounts: Accounts
    episode_length: int
    reward: Reward
    frequency_ms: int
    shield: Shield | None = None
    training_bars: TrainingBars | None = None
    """None: not known, as for agents that were saved before it was kept."""
    volatility: VolatilityScaling | None = None
    flat_by_close: bool = False
    sessions: Pace | None = None
    """Bars of a day, a week and a year where the market closes; None: it trades around the clock."""
    constraints: Constraints = field(default_factory=Constraints)

    @property
    def pace(self) -> Pace:
        """Bars of a day, a week and a year."""
        return self.sessions or Pace.of_frequency(self.frequency_ms)

    @classmethod
    def of(cls, env: TradingEnv) -> TradingSpec:
        return cls(
            scaler=env.prepared.scaler,
            market=env.task.market.config,
            accounts=env.accounts,
            episode_length=env.task.episode_length,
            reward=env.task.reward,
            frequency_ms=env.prepared.panel.frequency_ms,
            shield=env.task.shield,
            training_bars=TrainingBars.of(env.prepared),
            volatility=env.volatility,
            flat_by_close=env.task.flat_rows is not None,
            sessions=env.prepared.panel.sessions,
            constraints=env.constraints,
        )

    def to_dict(self) -> dict[str, Any]:
        """JSON-serialisable; `from_dict` returns an equal spec."""
        return {
            "scaler": self.scaler.to_dict(),
            "market": asdict(self.market),
            "accounts": self.accounts,
            "episode_length": self.episode_length,
            "reward": self.reward,
            "frequency_ms": self.frequency_ms,
            "shield": None if self.shield is None else asdict(self.shield),
            "training_bars": None if self.training_bars is None else asdict(self.training_bars),
            "volatility": None if self.volatility is None else asdict(self.volatility),
            "flat_by_close": self.flat_by_close,
            "sessions": None if self.sessions is None else asdict(self.sessions),
            "constraints": asdict(self.constraints),
        }

    def check_fits(self, panel: Panel) -> None:
        """Refuse bars of another frequency, and several symbols where the agent trades one account per symbol."""
        if panel.frequency_ms != self.frequency_ms:
            raise BarsError(
                f"{', '.join(panel.symbols)}: bars of {panel.frequency_ms / 60_000:g} minutes; the agent was trained "
                f"on bars of {self.frequency_ms / 60_000:g} minutes"
            )
        if self.accounts == "per_symbol" and len(panel.symbols) > 1:
            raise BarsError(
                f"the agent trades one symbol per account; choose one of {', '.join(panel.symbols)} with "
                f"bars.select({panel.symbols[0]!r})"
            )

    @classmethod
    def from_dict(cls, state: dict[str, Any]) -> TradingSpec:
        check_count("frequency_ms", state["frequency_ms"])
        check_count("episode_length", state["episode_length"])
        shield = None if state["shield"] is None else Shield(**state["shield"])
        scaler, market = Scaler.from_dict(state["scaler"]), MarketConfig(**state["market"])
        seen = state.get("training_bars")
        bars = None if seen is None else TrainingBars.from_dict(seen)
        scaled = state.get("volatility")
        volatility = None if scaled is None else VolatilityScaling(scaled["half_life"], tuple(scaled["reference"]))
        pace, limited = state.get("sessions"), state.get("constraints")
        parts = {"scaler": scaler, "market": market, "shield": shield, "training_bars": bars, "volatility": volatility}
        parts["constraints"] = Constraints() if limited is None else Constraints.from_dict(limited)
        return cls(**{**state, **parts, "sessions": None if pace is None else Pace.from_dict(pace)})


def task_for(
    spec: TradingSpec, bars: Bars, config: MarketConfig | None, dtype: torch.dtype
) -> tuple[TradingTask, NDArray[np.bool_], Panel]:
    """The agent's task on new bars, the rows on which its features are defined, and the bars' arrays."""
    prepared = prepare(bars, scaler=spec.scaler, accounts=spec.accounts)
    return task_on(spec, prepared, config, dtype), prepared.usable, prepared.panel


def task_on(spec: TradingSpec, prepared: PreparedBars, config: MarketConfig | None, dtype: torch.dtype) -> TradingTask:
    """The agent's task on new bars whose features are computed and scaled by the agent's scaler."""
    spec.check_fits(prepared.panel)
    features = torch.as_tensor(prepared.features)
    market = build_market(prepared.panel, config or spec.market, dtype=dtype)
    return TradingTask(
        market=market,
        features=features,
        feature_names=prepared.names,
        episode_length=spec.episode_length,
        reward=spec.reward,
        shield=spec.shield,
        volatility_factors=volatility_factors(spec.volatility, prepared.seen_panel, features.device),
        holdable=holdable_assets(prepared.panel, prepared.available),
        flat_rows=rows_before_session_ends(prepared.panel) if spec.flat_by_close else None,
        limits=limits_of(spec.constraints, market),
    )
