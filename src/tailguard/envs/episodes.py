"""Trading episodes as pure functions: observations, actions, rewards and the end of an episode.

Training, the Gymnasium environments and backtests all go through here, so they see and trade the same numbers.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from tailguard import market as simulator
from tailguard.data.panel import Panel
from tailguard.device_ops import may_hold_any
from tailguard.envs.projection import Limits, constrain
from tailguard.envs.shield import Shield
from tailguard.errors import ConfigError
from tailguard.market import Market, MarketState, Transition
from tailguard.market.state import where as market_where
from tailguard.market.tables import as_tensor

Reward = Literal["log", "simple", "pnl"]
REWARDS: tuple[Reward, ...] = ("log", "simple", "pnl")

GROWTH_FLOOR = 0.01
"""A bar that leaves less than this share of equity is rewarded as if it left this share: log(0) has no value."""

ACCOUNT_FIELDS = ("pnl", "drawdown", "time_left")
"""Account inputs besides the weights: gain since the start and drawdown as fractions of
equity, and the remaining share of the episode. They make a budget on the episode's loss Markov."""


@dataclass(frozen=True)
class EpisodeState:
    """State of N episodes."""

    market: MarketState
    start_equity: Tensor
    """Equity at the start of the episode, [N]."""
    peak_equity: Tensor
    """Largest equity since then, [N]."""
    age: Tensor
    """Bars traded since then, [N] int64."""
    cost_factor: Tensor | None = None
    """Factor on the costs of orders in this episode, [N]; None: 1 for all."""


Amount = TypeVar("Amount", float, Tensor)


def account_fields(
    equity: Amount, start_equity: Amount, peak_equity: Amount, age: Amount, episode_length: int
) -> tuple[Amount, Amount, Amount]:
    """`ACCOUNT_FIELDS`, of many accounts as tensors or of one as plain numbers."""
    return equity / start_equity - 1, equity / peak_equity - 1, 1 - age / episode_length


def where(condition: Tensor, chosen: EpisodeState, other: EpisodeState) -> EpisodeState:
    """`chosen` where the condition [N] holds, `other` elsewhere."""
    return EpisodeState(
        market_where(condition, chosen.market, other.market),
        torch.where(condition, chosen.start_equity, other.start_equity),
        torch.where(condition, chosen.peak_equity, other.peak_equity),
        torch.where(condition, chosen.age, other.age),
        None
        if chosen.cost_factor is None or other.cost_factor is None
        else torch.where(condition, chosen.cost_factor, other.cost_factor),
    )


@dataclass(frozen=True)
class TradingTask:
    """A market, the features that describe it, and the rules of an episode."""

    market: Market
    features: Tensor
    """Scaled features known at each bar's close, [R, F] float32, or bfloat16 where they were rounded to it."""
    feature_names: tuple[str, ...]
    episode_length: int
    reward: Reward = "log"
    shield: Shield | None = None
    volatility_factors: Tensor | None = None
    """Factor on each asset's weight by recent volatility, [R, A] float32; None: no scaling."""
    holdable: Tensor | None = None
    """Assets that a decision at each row may hold, [R, A] bool; None: all, always."""
    flat_rows: Tensor | None = None
    """Rows at whose close all positions are sold: the next bar is the last of its session, [R] bool; None: positions
    are carried over nights and weekends."""
    limits: Limits | None = None
    """Limits on target weights, in the market's precision; None: the leverage alone."""

    @property
    def observation_names(self) -> tuple[str, ...]:
        assets = self.market.assets
        labels = self.market.symbols if assets > 1 else ("",)
        weights = tuple(f"weight:{label}" if label else "weight" for label in labels)
        return (*self.feature_names, *weights, *ACCOUNT_FIELDS)

    @property
    def observation_size(self) -> int:
        return self.features.shape[1] + self.market.assets + len(ACCOUNT_FIELDS)

    def begin(self, state: MarketState) -> EpisodeState:
        """Episodes that start here, with whatever the accounts hold."""
        return EpisodeState(state, state.equity, state.equity, torch.zeros_like(state.row))

    def account(self, state: EpisodeState) -> tuple[Tensor, Tensor, Tensor]:
        """`ACCOUNT_FIELDS` of every account, [N] each."""
        equity = state.market.equity
        age = state.age.to(equity.dtype)
        return account_fields(equity, state.start_equity, state.peak_equity, age, self.episode_length)

    def observe(self, state: EpisodeState, account: Sequence[Tensor] | None = None) -> Tensor:
        """The agent's observation at the close of the current bar, [N, O] float32; `account`: its fields, if known."""
        fields = torch.stack(tuple(self.account(state) if account is None else account), dim=1)
        known = self.features.index_select(0, state.market.row)
        if known.dtype == torch.bfloat16:
            known = known.float()
        return torch.cat((known, state.market.weights.to(known.dtype), fields.to(known.dtype)), dim=1)

    def to_weights(self, action: Tensor) -> Tensor:
        """Target weights for actions in [-1, 1] (or [0, 1] without shorts), [N, A].

        An action is a share of the allowed leverage. Actions that together exceed it are scaled down
        together, so no action can exceed the leverage.
        """
        config = self.market.config
        if not config.allow_short:
            action = action.clamp(min=0)
        gross = action.abs()
        gross = gross if gross.shape[1] == 1 else gross.sum(-1, keepdim=True)
        if action.requires_grad and not may_hold_any(gross >= 1):
            return action * config.leverage  # the same numbers and slopes, with a shorter graph
        return action * (config.leverage / gross.clamp(min=1))

    def weights_of_one(self, action: Sequence[float], row: int) -> list[float]:
        """The weights of one account before its shield, in plain numbers, [A]: a backtest calls it at every bar."""
        config = self.market.config
        if self.holdable is not None:
            there = self.holdable[row].tolist()
            action = [share if held else 0.0 for share, held in zip(action, there, strict=True)]
        if not config.allow_short:
            action = [max(share, 0.0) for share in action]
        gross = sum([abs(share) for share in action])
        # As a tensor divides a number: by its reciprocal.
        factor = (1 / max(gross, 1.0)) * config.leverage
        weights = [share * factor for share in action]
        if self.volatility_factors is None:
            return weights
        return [weight * scale for weight, scale in zip(weights, self.volatility_factors[row].tolist(), strict=True)]

    def decide(self, action: Tensor, state: EpisodeState) -> tuple[Tensor, Tensor]:
        """Target weights [N, A] for actions in this state, and where the shield reduced them, [N] bool.

        The limits come after all that shapes a wish. A session's end and the shield come last: they only reduce.
        """
        present = None if self.holdable is None else self.holdable.index_select(0, state.market.row)
        if present is not None:
            # Before they are scaled down together: an absent asset takes no share of the leverage.
            action = action * present
        weights = self.to_weights(action)
        if self.volatility_factors is not None:
            weights = weights * self.volatility_factors.index_select(0, state.market.row)
        if self.limits is not None:
            weights = constrain(weights.to(self.market.dtype), state.market.weights, self.limits, present)
        if self.flat_rows is not None:
            weights = weights.masked_fill(self.flat_rows.index_select(0, state.market.row).unsqueeze(1), 0)
        if self.shield is None:
            return weights, torch.zeros_like(state.age, dtype=torch.bool)
        return self.shield.apply(weights, state.market.equity, state.start_equity)

    def limit_one(self, target: Sequence[float], held: Sequence[float], row: int) -> list[float]:
        """Target weights of one account [A] within the limits; NaN still holds a position that they leave alone."""
        if self.limits is None:
            return list(target)
        wanted, present_weights = (torch.tensor([list(each)], dtype=self.market.dtype) for each in (target, held))
        holds = wanted.isnan()
        wanted = torch.where(holds, present_weights, wanted)
        present = None if self.holdable is None else self.holdable[row].unsqueeze(0)
        within = constrain(wanted, present_weights, self.limits, present)
        limited: list[float] = within.masked_fill(holds & (within == present_weights), torch.nan)[0].tolist()
        return limited

    def advance(
        self, state: EpisodeState, target: Tensor, hold: Tensor | None = None
    ) -> tuple[EpisodeState, Transition]:
        """Trade one bar towards target weights [N, A]."""
        market, transition = simulator.step(
            self.market, state.market, target.to(self.market.dtype), hold, state.cost_factor
        )
        peak = torch.maximum(state.peak_equity, market.equity)
        return EpisodeState(market, state.start_equity, peak, state.age + 1, state.cost_factor), transition

    def reward_of(self, transition: Transition, state: EpisodeState) -> Tensor:
        """Reward of a bar, [N] float32; `state` is the one before it.

        log: log of net equity growth. simple: net growth. pnl: change of equity as a share of the episode's start.
        """
        if self.reward == "log":
            reward = torch.log1p(transition.net.clamp(min=GROWTH_FLOOR - 1))
        elif self.reward == "simple":
            reward = transition.net
        else:
            reward = transition.net * (state.market.equity / state.start_equity)
        return reward.float()


def feature_tensor(features: NDArray[np.float32] | NDArray[np.uint16]) -> Tensor:
    """Features as a tensor on the same memory, also of a read-only map; 16 bits are a bfloat16."""
    if features.dtype == np.uint16:
        return as_tensor(features.view(np.int16)).view(torch.bfloat16)
    return as_tensor(features)


def holdable_assets(panel: Panel, available: NDArray[np.bool_] | None = None) -> Tensor | None:
    """Assets that a decision at each row may hold, [R, A] bool: listed at this close and at the next open.

    `available`: further limits them to those whose features are known. None where all assets are always listed.
    """
    if panel.listed is None:
        return None
    now = panel.listed if available is None else panel.listed & available
    return torch.from_numpy(now & np.vstack([panel.listed[1:], panel.listed[-1:]]))


def rows_before_session_ends(panel: Panel) -> Tensor:
    """Rows at whose close an account that is flat by the close sells everything, [R] bool.

    Orders fill at the next open, so positions are sold at the open of the session's last bar and never carried over a
    closure. What the volume cap leaves unfilled is carried.
    """
    if panel.sessions is None or panel.sessions.per_day <= 1:
        kind = "trades around the clock" if panel.sessions is None else "has daily bars"
        raise ConfigError(f"flat_by_close: {', '.join(panel.symbols)} {kind}, so there is no close to be flat by")
    ends = torch.from_numpy(panel.session_ends)
    return torch.cat((ends[1:], ends.new_zeros(1)))


def episode_starts(task_rows: Tensor, usable: Tensor, segment: Tensor, episode_length: int) -> Tensor:
    """Rows from which a whole episode can run: [S] int64.

    The episode observes `episode_length + 1` rows, all of them usable and in one segment; `task_rows` [R] bool marks
    where it may start.
    """
    rows = segment.shape[0]
    if rows <= episode_length:
        return torch.empty(0, dtype=torch.int64)
    # Length of the usable, unbroken stretch that ends at each row.
    breaks = torch.ones(rows, dtype=torch.bool)
    breaks[1:] = segment[1:] != segment[:-1]
    index = torch.arange(rows)
    begin = torch.where(usable, torch.where(breaks, index, 0), index + 1).cummax(0).values
    unbroken = index - begin >= episode_length
    starts = index[unbroken & usable] - episode_length
    return starts[task_rows[starts]]
