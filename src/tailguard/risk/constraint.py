"""A CVaR constraint with a Lagrange multiplier that follows realised outcomes.

    max E[R]  subject to  ES_α(L) ≤ d,   L = −(an episode's P&L as a fraction of its first equity)

By Rockafellar & Uryasev (2000), ES_α(L) = min over ν of ν + E[(L − ν)₊]/α, and the best ν is the VaR. So with ν at the
VaR of recent outcomes, an episode's share in the tail's loss is (L − ν)₊/α, a cost like any other: its advantages are
subtracted from those of the reward with the weight λ, the Lagrange multiplier (Chow & Ghavamzadeh 2014). A PID rule
updates λ from the **realised** ES (Stooke et al. 2020), never from a critic's prediction: its gradient would only make
the prediction more optimistic.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from tailguard.deprecated import renamed_method
from tailguard.risk.config import TAIL_EPISODES, RiskConfig
from tailguard.risk.cvar import cvar_from_samples, var_from_samples

INTEGRATION_ZONE = 0.5
"""A violation beyond this share of the limit adds to the integral only while it is not shrinking."""
WINDUP = 0.1
"""Beyond that zone the integral also grows by this share of itself per update: a gain that is too small for the market
cannot leave a large violation standing. From 0 to a cap of 10 takes 41 updates at Ki 0.02."""
TREND_MEMORY = 0.9
"""Decay of the violation's running average per update."""
FALLING = 0.98
"""A violation below this share of its running average is shrinking."""


@dataclass(frozen=True)
class Dual:
    """The Lagrange multiplier and the state of its controller, 0-dim float64."""

    multiplier: Tensor
    """λ"""
    integral: Tensor
    trend: Tensor
    """Running average of the violation."""


def dual_step(dual: Dual, violation: Tensor, config: RiskConfig) -> Dual:
    """One update of the multiplier from the relative violation v = (ES − target)/d, with e = v within ±1.

    λ = Kp·e + I within [0, λ_max], where I integrates Ki·e, and a tenth of itself while e is large. Against windup, I
    is frozen while λ is at its cap and while a large violation is already shrinking. It always decreases when the
    budget is kept.
    """
    kp, ki = config.gains
    # Relative to the limit, so that the gains do not depend on its size; bounded, so that one crash in the window does
    # not set λ by itself.
    error = violation.clamp(-1.0, 1.0)
    # Conditional integration against windup (Åström & Hägglund 2006): at the cap, or while a large violation already
    # shrinks, a growing integral would only delay the way down.
    at_cap = kp * error + dual.integral >= config.lambda_max
    shrinking = (error > INTEGRATION_ZONE) & (violation < FALLING * dual.trend)
    integrates = ~(at_cap | shrinking) | (error < 0)
    # Geometric while far from the limit: by Ki = 0.02 alone, a multiplier of 10 would take 500 rollouts.
    growth = WINDUP * torch.where(error > INTEGRATION_ZONE, dual.integral * error, 0.0)
    moved = (dual.integral + ki * error + growth).clamp(0.0, config.lambda_max)
    integral = torch.where(integrates, moved, dual.integral)
    trend = TREND_MEMORY * dual.trend + (1 - TREND_MEMORY) * violation
    return Dual((kp * error + integral).clamp(0.0, config.lambda_max), integral, trend)


class OutcomeWindow:
    """The last W losses, written in place without reading a value, so there is no device synchronisation."""

    def __init__(self, size: int, device: torch.device) -> None:
        self.size = size
        # One slot more than the window: losses that are not kept are written there.
        self.losses = torch.zeros(size + 1, dtype=torch.float64, device=device)
        self.count = torch.zeros((), dtype=torch.int64, device=device)
        """Losses recorded so far."""

    @torch.no_grad()
    def add(self, losses: Tensor, counted: Tensor) -> None:
        """Record the losses [...] where `counted` [...] holds, in their order; of too many, the last ones."""
        flags = counted.flatten()
        # A masked append at fixed shapes: the k-th counted loss goes to slot (count + k − 1) mod W, the others to the
        # extra slot. `losses[counted]` would have a shape that depends on data, which is a host sync.
        number = flags.cumsum(0)
        kept = flags & (number > number[-1] - self.size)
        place = torch.where(kept, (self.count + number - 1) % self.size, self.size)
        self.losses.scatter_(0, place, losses.flatten().double())
        self.losses[-1].zero_()  # the order of writes to the extra slot does not matter
        self.count += number[-1]

    @property
    def filled(self) -> Tensor:
        return self.count.clamp(max=self.size)

    @property
    def weights(self) -> Tensor:
        """1 for slots that hold a loss, else 0, [W]."""
        return (torch.arange(self.size, device=self.losses.device) < self.filled).double()

    def mean(self) -> Tensor:
        """Mean loss; NaN while there is none."""
        return (self.losses[:-1] * self.weights).sum() / self.filled

    def tail(self, alpha: float) -> tuple[Tensor, Tensor]:
        """VaR and ES of the losses at level α; NaN while there are none."""
        gains, weights = -self.losses[:-1], self.weights
        return -var_from_samples(gains, alpha, weights), -cvar_from_samples(gains, alpha, weights)

    def tail_error(self, alpha: float) -> Tensor:
        """Standard error of the ES for independent losses; NaN while there are none.

        √[(Var(L | tail) + (1 − α)(ES − VaR)²) / (n α)] (Manistre & Hancock 2005), as `cvar_standard_error`.
        """
        var, es = self.tail(alpha)
        weights = self.weights / self.filled
        beyond = weights * (self.losses[:-1] > var)
        # The loss at the VaR itself fills the tail up to α.
        rest = (alpha - beyond.sum()).clamp(min=0.0)
        variance = ((beyond * (self.losses[:-1] - es).square()).sum() + rest * (var - es).square()) / alpha
        return ((variance + (1 - alpha) * (es - var).square()) / (self.filled * alpha)).sqrt()


class CVaRConstraint:
    """Holds the window, the threshold ν and the multiplier λ, and converts losses into costs.

    In units of the user: fractions of equity. `limit` is a tensor of the state, so it may change during training.
    """

    def __init__(self, config: RiskConfig, device: torch.device | str = "cpu") -> None:
        """config: its window is the number of outcomes to keep; 0 keeps the minimum that the tail needs."""
        self.config = config
        where = torch.device(device)
        self.window = OutcomeWindow(config.window or config.needed, where)

        def number(value: float) -> Tensor:
            return torch.tensor(value, dtype=torch.float64, device=where)

        self.limit = number(config.limit if config.limit is not None else -1.0)
        self.multiplier = number(config.penalty)
        self.integral = number(0.0)
        self.trend = number(torch.inf)
        """Running average of the violation; infinite before the first."""
        self.threshold = number(0.0)
        """ν: the VaR of the window's losses."""
        self.shortfall = number(torch.nan)
        """ES of the window's losses."""

    @property
    def scale(self) -> Tensor:
        """Unit of the costs: the loss that the limit allows, so that costs are of the order of one."""
        return -self.limit

    @property
    def ready(self) -> Tensor:
        """Whether the tail holds enough outcomes for its mean to count, bool."""
        return self.window.filled * self.config.alpha >= TAIL_EPISODES - 1e-9

    @torch.no_grad()
    def observe(self, losses: Tensor, counted: Tensor) -> None:
        """Record realised losses [...] where `counted` holds, and update ν and λ.

        λ is constant until the tail holds enough of them.
        """
        self.window.add(losses, counted)
        # ν minimises Rockafellar & Uryasev's formula at the VaR: a rollout's costs are taken at the VaR of a window
        # that includes its own outcomes.
        threshold, shortfall = self.window.tail(self.config.alpha)
        self.threshold.copy_(threshold.nan_to_num())
        self.shortfall.copy_(shortfall)
        if self.config.limit is None:
            return
        target = self.scale * (1 - self.config.margin)
        # torch.where and not `if`: whether the tail is ready is a value on the device.
        violation = torch.where(self.ready, (shortfall - target) / self.scale, 0.0).nan_to_num()
        before = Dual(self.multiplier, self.integral, torch.where(self.trend.isinf(), violation, self.trend))
        moved = dual_step(before, violation, self.config)
        self.multiplier.copy_(torch.where(self.ready, moved.multiplier, self.multiplier))
        self.integral.copy_(torch.where(self.ready, moved.integral, self.integral))
        self.trend.copy_(torch.where(self.ready, moved.trend, self.trend))

    def excess(self, losses: Tensor) -> Tensor:
        """(L − ν)₊/α in units of the limit, [...] float32: an outcome's part in the tail's mean loss beyond ν."""
        beyond = (losses.double() - self.threshold).clamp(min=0.0)
        return (beyond / (self.config.alpha * self.scale)).float()

    def expected_excess(self, losses: Tensor, mean: Tensor, deviation: Tensor) -> Tensor:
        """Expected `excess` of losses with a remaining change of N(mean, deviation²), in closed form, [...] float32.

        E[(L + X − ν)₊] = k·Φ(k/s) + s·φ(k/s) with k = L + mean − ν (Bachelier's formula); with s = 0 it is the
        excess itself.

        losses: [...]; mean, deviation: broadcastable to them
        """
        # In float64: for losses far below ν the two terms cancel.
        distance = losses.double() + mean - self.threshold
        # On the last row nothing is left to change; the limit s → 0 is the excess itself, without 0/0.
        spread = deviation.clamp(min=1e-12)
        ratio = distance / spread
        density = torch.exp(-0.5 * ratio.square()) / math.sqrt(2 * math.pi)
        beyond: Tensor = distance * torch.special.ndtr(ratio) + spread * density
        return (beyond / (self.config.alpha * self.scale)).float()

    def combine(self, reward_advantages: Tensor, cost_advantages: Tensor) -> Tensor:
        """(A_r − λ·A_c)/(1 + λ), both in raw units; cost advantages come in units of the limit."""
        # Weights 1/(1 + λ) and λ/(1 + λ): a large λ changes the direction of the update, not its size (Stooke et al.
        # 2020).
        multiplier = self.multiplier.float()
        return (reward_advantages - multiplier * self.scale.float() * cost_advantages) / (1 + multiplier)

    def metrics(self) -> dict[str, Tensor]:
        """`risk/*` as 0-dim tensors; returns, not losses: a CVaR of −0.04 is a loss of 4 %."""
        violation = ((self.shortfall - self.scale) / self.scale).clamp(min=0.0)
        metrics = {
            "risk/cvar_realised": -self.shortfall,
            "risk/cvar_error": self.window.tail_error(self.config.alpha),
            "risk/mean_realised": -self.window.mean(),
            "risk/var_threshold": -self.threshold,
            "risk/lambda": self.multiplier.clone(),
            "risk/alpha": torch.full_like(self.multiplier, self.config.alpha),
            "risk/window_filled": self.window.filled.double() / self.window.size,
        }
        if self.config.limit is not None:
            metrics |= {
                "risk/limit": self.limit.clone(),
                "risk/violation": violation,
                "risk/at_cap": (self.multiplier >= self.config.lambda_max).double(),
            }
        return metrics

    figures = renamed_method("figures", "metrics")

    def _state(self) -> dict[str, Tensor]:
        return {
            "losses": self.window.losses,
            "count": self.window.count,
            "limit": self.limit,
            "price": self.multiplier,
            "integral": self.integral,
            "trend": self.trend,
            "threshold": self.threshold,
            "shortfall": self.shortfall,
        }

    def state_dict(self) -> dict[str, Tensor]:
        """Copies of the complete state."""
        return {name: value.clone() for name, value in self._state().items()}

    @torch.no_grad()
    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Restore a saved state, in the same storage."""
        for name, value in self._state().items():
            value.copy_(state[name])
