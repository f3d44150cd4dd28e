"""Advantages in hindsight: the effect of an action, separated from that of the market.

An account of ordinary size does not move the market. Had the policy traded its mean action, the same bars would have
followed, so the simulator can say what that would have brought. An action here is a target: the one after it brings
both accounts to the same weights, and from then on they go alike. Two rows tell all:

    A_t = [r_t + γ·r_{t+1}](a_t, a_{t+1}) − [r_t + γ·r_{t+1}](μ_t, a_{t+1})

The second row holds what it costs to leave the position again. The mean action is a baseline that knows the future
(an input-driven one, Mao et al. 2019): it does not depend on a_t, so it adds no bias, and with it goes what the market
did to the position that was held anyway, nearly all of the noise where positions are large against the exploration.
Left out is what a_t does to later actions through the observation (weights, the episode's P&L).
"""

from __future__ import annotations

import dataclasses
import math
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from tailguard.algorithm.rollout import Rollout
from tailguard.envs.protocol import FunctionalEnv
from tailguard.envs.trading import TradingEnv
from tailguard.errors import ConfigError
from tailguard.market.tables import COLUMNS, Market
from tailguard.models.actions import ActionHead

CAPPED_SHARE = 0.01
"""Share of bars in which the cap on participation may bind before hindsight is refused."""
MEASURED = ("pnl", "drawdown", "net")
"""Outcomes that a risk budget may be made of."""


@dataclass(frozen=True)
class Track:
    """Where the environment stood before each row of a rollout, and the chance in the row."""

    states: list[Any] = field(default_factory=list)
    chances: list[Tensor] = field(default_factory=list)


@dataclass(frozen=True)
class TwoRows:
    """What came of an action in its row and in the row after it."""

    reward: tuple[Tensor, Tensor]
    """[T, N] each; 0 in the second where there is no second row."""
    outcome: tuple[dict[str, Tensor], dict[str, Tensor]]
    """[T, N] each, of `MEASURED`; in the second as in the first where there is no second row."""
    alone: Tensor
    """Whether the first row is all there is, [T, N] bool."""
    ended: Tensor
    """Whether the account's episode is over after these rows, [T, N] bool."""

    def total(self, gamma: float) -> Tensor:
        return self.reward[0] + gamma * self.reward[1]


@dataclass(frozen=True)
class Hindsight:
    """Each action of a rollout beside the mean action that it was drawn around."""

    taken: TwoRows
    instead: TwoRows

    def advantages(self, gamma: float) -> Tensor:
        """What each action earned more than the mean action would have, [T, N]."""
        return self.taken.total(gamma) - self.instead.total(gamma)


def check_hindsight(env: Any) -> None:
    """Raise unless the action after an action brings the account to the same weights whatever the first one was.

    That is so where actions are target weights (orders would add up) which are filled whole (what a bar's volume does
    not allow stays open) and as they are given (a shield's cap depends on what the account has earned). A cap on
    participation may bind in a few bars: up to 1 % of them is a warning.
    """
    way_out = "set ppo.advantages to gae"
    if not isinstance(env, TradingEnv):
        raise ConfigError(
            f"ppo.advantages: hindsight asks what another target weight would have brought in the same market, and "
            f"{type(env).__name__} cannot tell. Train on a TradingEnv, or {way_out}"
        )
    if env.task.shield is not None:
        raise ConfigError(
            f"ppo.advantages: hindsight takes targets to be traded as they are, and the shield (shock "
            f"{env.task.shield.shock:g}, budget {env.task.shield.budget:g}) scales them by what the account has "
            f"earned. Leave the shield out in training, or {way_out}"
        )
    share = capped_share(env.task.market)
    if share == 0:
        return
    config = env.task.market.config
    found = (
        f"ppo.advantages: hindsight takes every order to be filled whole, and with market.participation "
        f"{config.participation:g}, market.capital {config.capital:g} and market.leverage {config.leverage:g} the "
        f"volume of {100 * share:.2g} % of the bars does not allow the largest one"
    )
    if share > CAPPED_SHARE:
        raise ConfigError(
            f"{found}. It would learn the wrong sign. Raise market.participation (inf: no cap), lower market.capital, "
            f"or {way_out}"
        )
    warnings.warn(f"{found}; its advantages are wrong there", stacklevel=2)


def capped_share(market: Market) -> float:
    """Share of bars whose capacity is below the largest order of an account with its starting capital.

    That is a change from one end of the allowed weights to the other: twice the leverage, or once without shorts.
    """
    largest = market.config.leverage * (2 if market.config.allow_short else 1)
    if math.isinf(market.config.participation):
        return 0.0
    # Orders fill in the bar after a decision: a segment's first bar is never one of them.
    fills = market.segment[1:] == market.segment[:-1]
    capacity = market.table[COLUMNS.index("capacity"), 1:][fills]
    return float((capacity < largest).float().mean()) if capacity.numel() else 0.0


@torch.no_grad()
def weigh(head: ActionHead, env: FunctionalEnv, rollout: Rollout, track: Track) -> Hindsight:
    """Let the mean actions be traded beside those that were. The environment stands after the rollout, and stays so.

    The action after the last row is not known yet; both sides go on with the last mean.
    """
    steps, envs = rollout.rewards.shape
    mean = head.to_env(head.mode(rollout.parameters))
    following = torch.cat((head.to_env(rollout.actions[1:]), mean[-1:]))
    later = [*track.chances[1:], env.draw()]
    aside, first = env.transition(stacked(track.states), mean.flatten(0, 1), torch.cat(track.chances))
    _, second = env.transition(aside, following.flatten(0, 1), torch.cat(later))
    _, last = env.transition(env.state, following[-1], later[-1])

    def rows(value: Tensor) -> Tensor:
        return value.view(steps, envs)

    def after(values: Tensor, final: Tensor) -> Tensor:
        return torch.cat((values[1:], final.unsqueeze(0)))

    measured = [name for name in MEASURED if name in rollout.outcome]
    taken = _together(
        _Row(rollout.rewards, {name: rollout.outcome[name] for name in measured}, rollout.ended),
        _Row(
            after(rollout.rewards, last.reward),
            {name: after(rollout.outcome[name], last.outcome[name]) for name in measured},
            after(rollout.ended, last.ended),
        ),
        rollout.ended,
    )
    own, following_one = (
        _Row(rows(step.reward), {name: rows(step.outcome[name]) for name in measured}, rows(step.ended))
        for step in (first, second)
    )
    return Hindsight(taken, _together(own, following_one, rollout.ended | own.ended))


@dataclass(frozen=True)
class _Row:
    reward: Tensor
    outcome: dict[str, Tensor]
    ended: Tensor


def _together(first: _Row, second: _Row, alone: Tensor) -> TwoRows:
    """Two rows, of which the second is left out where the first is `alone`."""
    outcome = {name: torch.where(alone, first.outcome[name], value) for name, value in second.outcome.items()}
    return TwoRows(
        (first.reward, torch.where(alone, 0.0, second.reward)),
        (first.outcome, outcome),
        alone,
        first.ended | (second.ended & ~alone),
    )


def stacked(rows: Sequence[Any]) -> Any:
    """Structures of tensors [N, ...], one a row, as one structure of [T·N, ...]."""
    first = rows[0]
    if isinstance(first, Tensor):
        return torch.cat(list(rows))
    if dataclasses.is_dataclass(first) and not isinstance(first, type):
        names = [item.name for item in dataclasses.fields(first)]
        return dataclasses.replace(first, **{name: stacked([getattr(row, name) for row in rows]) for name in names})
    if isinstance(first, Mapping):
        return {name: stacked([row[name] for row in rows]) for name in first}
    return tuple(stacked(parts) for parts in zip(*rows, strict=True))
