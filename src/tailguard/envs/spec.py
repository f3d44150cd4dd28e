"""Specification of an agent's inputs: features, their scaling, and the rules of its episodes."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray

from tailguard.data.panel import Panel
from tailguard.data.prepare import prepare
from tailguard.data.scaling import Scaler
from tailguard.envs.episodes import Reward, TradingTask
from tailguard.envs.shield import Shield
from tailguard.envs.trading import TradingEnv
from tailguard.errors import BarsError
from tailguard.market import MarketConfig, build_market

if TYPE_CHECKING:
    from tailguard.data.bars import Accounts, Bars


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
                f"the agent trades one symbol an account; choose one of {', '.join(panel.symbols)} with "
                f"bars.select({panel.symbols[0]!r})"
            )

    @classmethod
    def from_dict(cls, state: dict[str, Any]) -> TradingSpec:
        shield = None if state["shield"] is None else Shield(**state["shield"])
        scaler, market = Scaler.from_dict(state["scaler"]), MarketConfig(**state["market"])
        return cls(**{**state, "scaler": scaler, "market": market, "shield": shield})


def task_for(
    spec: TradingSpec, bars: Bars, config: MarketConfig | None, dtype: torch.dtype
) -> tuple[TradingTask, NDArray[np.bool_], Panel]:
    """The agent's task on new bars, the rows on which its features are defined, and the bars' arrays."""
    prepared = prepare(bars, scaler=spec.scaler, accounts=spec.accounts)
    spec.check_fits(prepared.panel)
    market = build_market(prepared.panel, config or spec.market, dtype=dtype)
    features = torch.as_tensor(prepared.features)
    task = TradingTask(market, features, prepared.names, spec.episode_length, spec.reward, spec.shield)
    return task, prepared.usable, prepared.panel
