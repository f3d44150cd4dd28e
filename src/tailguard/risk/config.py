"""Settings of the risk budget."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal, Self, get_args

from tailguard.errors import ConfigError
from tailguard.validate import check_choice, check_count, check_range

RiskMeasure = Literal["episode", "drawdown", "bar"]
BoundKind = Literal["percentile", "pivotal"]

TAIL_EPISODES = 20
"""Outcomes needed in the tail for a useful mean: its error is then about a fifth of the excess."""


@dataclass(frozen=True)
class RiskConfig:
    """A budget for the tail: the mean of the worst share of outcomes may not be lower than a limit."""

    limit: float | None = None
    """Lowest CVaR allowed, as a fraction of equity: -0.04 lets the worst share of episodes lose 4 % on average; null:
    no budget."""
    alpha: float = 0.05
    """The worst share of outcomes, above 0 to 0.5."""
    measure: RiskMeasure = "episode"
    """episode: P&L from start to end; drawdown: its maximum drawdown; bar: net return of each bar."""
    penalty: float = 0.0
    """Instead of a limit: maximise the mean minus this many times the expected loss of the tail; 0 is off."""
    window: int = 0
    """Outcomes on which the tail is measured; 0: those of the last 4 rollouts, and enough for 20 in the tail."""
    margin: float = 0.05
    """Safety margin inside the limit, as a share of it, because the measured tail has an error, 0 to 0.5."""
    confidence: float = 0.9
    """How sure the limit must be on bars that were held out from training, 0.5 to below 1: exposure is scaled so that
    the bound of this confidence keeps the limit; 0: exposure stays as it was learned."""
    bound: BoundKind = "percentile"
    """The bound behind confidence: percentile of a bootstrap, which holds less often than it says with few held-out
    episodes, or pivotal, which is wider and holds nearly as often as it says."""
    volatility_half_life: int = 48
    """With a limit, weights are scaled down while recent volatility, with this half-life in bars, is above its median
    in training; 0: off."""
    throttle: bool = True
    """Whether losses that are realised in backtests and trading reduce the exposure further: a backstop for a market
    that has changed. For a limit on episodes."""
    kp: float | None = None
    """Proportional gain of the Lagrange multiplier λ on a relative violation, 0 to 5; none: 0.5 for ppo, 2 for
    pathwise."""
    ki: float | None = None
    """Integral gain of λ per rollout, 0 to 1; none: 0.02 for ppo, 0.1 for pathwise, which takes far fewer rollouts."""
    lambda_max: float = 10.0
    """Cap of λ; a run that stays there cannot keep its limit."""
    cost_lambda: float = 0.5
    """λ of the cost's advantages, 0 to 1; they are not discounted. Each bar's share is charged at once, so that a
    low value is enough and less noisy."""
    critic_hidden: tuple[int, ...] = (64,)
    """Widths of the layers of the cost critic."""
    critic_learning_rate: float = 1e-3
    """Step size of the cost critic."""
    critic_epochs: int = 2
    """Passes of the cost critic over a rollout."""

    def __post_init__(self) -> None:
        check_range("risk.alpha", self.alpha, low=0, low_open=True, high=0.5)
        check_choice("risk.measure", self.measure, get_args(RiskMeasure))
        check_range("risk.penalty", self.penalty, low=0)
        check_count("risk.window", self.window, low=0)
        check_range("risk.margin", self.margin, low=0, high=0.5)
        check_range("risk.confidence", self.confidence, low=0, high=1, high_open=True)
        if 0 < self.confidence < 0.5:
            raise ConfigError(
                f"risk.confidence: {self.confidence:g} would scale exposure to a tail milder than the estimate; "
                "give 0.5 to below 1, or 0 to leave exposure as it was learned"
            )
        check_choice("risk.bound", self.bound, get_args(BoundKind))
        check_count("risk.volatility_half_life", self.volatility_half_life, low=0)
        for name in ("kp", "ki"):
            if getattr(self, name) is not None:
                check_range(f"risk.{name}", getattr(self, name), low=0)
        check_range("risk.lambda_max", self.lambda_max, low=0, low_open=True, high=1e6)
        check_range("risk.critic_learning_rate", self.critic_learning_rate, low=0, low_open=True)
        check_range("risk.cost_lambda", self.cost_lambda, low=0, high=1)
        check_count("risk.critic_epochs", self.critic_epochs)
        for width in self.critic_hidden:
            check_count("risk.critic_hidden", width)
        if self.limit is not None:
            _check_limit(self.limit)
        if self.limit is not None and self.penalty > 0:
            raise ConfigError("risk.penalty: with a limit the Lagrange multiplier is learned; give one of the two")
        if self.window and self.window < self.needed:
            raise ConfigError(
                f"risk: a {100 * self.alpha:g} % tail over a window of {self.window} outcomes has "
                f"{math.floor(self.window * self.alpha)} in it; at least {TAIL_EPISODES} are needed.\n"
                f"Raise risk.window to {self.needed}, or risk.alpha to "
                f"{math.ceil(100 * TAIL_EPISODES / self.window) / 100:g}."
            )

    @classmethod
    def from_dict(cls, settings: Mapping[str, Any]) -> RiskConfig:
        """The config from the output of `dataclasses.asdict`, also after a JSON round trip."""
        return cls(**{**settings, "critic_hidden": tuple(settings["critic_hidden"])})

    @property
    def gains(self) -> tuple[float, float]:
        """kp and ki, where none are given those of PPO."""
        return 0.5 if self.kp is None else self.kp, 0.02 if self.ki is None else self.ki

    def with_gains(self, kp: float, ki: float) -> Self:
        """These settings with gains for those that are not given."""
        return replace(self, kp=kp if self.kp is None else self.kp, ki=ki if self.ki is None else self.ki)

    @property
    def enabled(self) -> bool:
        return self.limit is not None or self.penalty > 0

    @property
    def needed(self) -> int:
        """Number of outcomes that puts enough of them in the tail."""
        return math.ceil(TAIL_EPISODES / self.alpha - 1e-9)


def _check_limit(limit: float) -> None:
    check_range("risk.limit", limit, low=-1, low_open=True)
    if limit >= 0:
        raise ConfigError(
            f"risk.limit: {limit:g} asks the worst outcomes to gain, which not even cash does. Write the loss that "
            f"they may make on average, as a negative fraction of equity: -0.04 is 4 %"
        )
