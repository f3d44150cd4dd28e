"""A CVaR budget as a price on losses in the tail, moved by what really happened.

    max E[R]  subject to  ES_α(L) ≤ d,   L = −(an episode's P&L as a fraction of its first equity)

By Rockafellar & Uryasev (2000), ES_α(L) = min over ν of ν + E[(L − ν)₊]/α, and the best ν is the VaR. So with ν at the
VaR of recent outcomes, an episode's share in the tail's loss is (L − ν)₊/α, a cost like any other: it has advantages,
and they are subtracted from those of the reward at a price λ (Chow & Ghavamzadeh 2014). A PID rule moves λ by the
**realised** ES (Stooke et al. 2020), never by what a critic believes: a critic's gradient would only make it rosier.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from tailguard.risk.config import TAIL_EPISODES, RiskConfig
from tailguard.risk.cvar import cvar_from_samples, var_from_samples

INTEGRATION_ZONE = 0.5
"""A violation beyond this share of the limit does not add to the integral: it would have to be unlearned later."""


@dataclass(frozen=True)
class Dual:
    """The price of risk and what it is made of, 0-dim float64."""

    price: Tensor
    """λ"""
    integral: Tensor


def dual_step(dual: Dual, violation: Tensor, config: RiskConfig) -> Dual:
    """One move of the price by the relative violation e = (ES − target)/d.

    λ = Kp·e + I within [0, λ_max], where I gathers Ki·e. It does not gather while a violation is so large that it says
    nothing but "more", nor while λ is at its cap (anti-windup); it always gives way when the budget is kept.
    """
    error = violation.clamp(-1.0, 1.0)
    at_cap = config.kp * error + dual.integral >= config.lambda_max
    gathers = ((error <= INTEGRATION_ZONE) & ~at_cap) | (error < 0)
    moved = (dual.integral + config.ki * error).clamp(0.0, config.lambda_max)
    integral = torch.where(gathers, moved, dual.integral)
    return Dual((config.kp * error + integral).clamp(0.0, config.lambda_max), integral)


class OutcomeWindow:
    """The last W losses, written in place and without looking at a value, so that nothing waits for the device."""

    def __init__(self, size: int, device: torch.device) -> None:
        self.size = size
        # One place more than the window holds: what is not to be kept is written there.
        self.losses = torch.zeros(size + 1, dtype=torch.float64, device=device)
        self.count = torch.zeros((), dtype=torch.int64, device=device)
        """Losses taken in so far."""

    @torch.no_grad()
    def add(self, losses: Tensor, counted: Tensor) -> None:
        """Take in the losses [...] where `counted` [...] holds, in their order; of too many, the last ones."""
        flags = counted.flatten()
        number = flags.cumsum(0)
        kept = flags & (number > number[-1] - self.size)
        place = torch.where(kept, (self.count + number - 1) % self.size, self.size)
        self.losses.scatter_(0, place, losses.flatten().double())
        self.count += number[-1]

    @property
    def filled(self) -> Tensor:
        return self.count.clamp(max=self.size)

    @property
    def weights(self) -> Tensor:
        """1 for places that hold a loss, else 0, [W]."""
        return (torch.arange(self.size, device=self.losses.device) < self.filled).double()

    def mean(self) -> Tensor:
        """Mean loss; NaN while there is none."""
        return (self.losses[:-1] * self.weights).sum() / self.filled

    def tail(self, alpha: float) -> tuple[Tensor, Tensor]:
        """VaR and ES of the losses at level α; NaN while there are none."""
        gains, weights = -self.losses[:-1], self.weights
        return -var_from_samples(gains, alpha, weights), -cvar_from_samples(gains, alpha, weights)


class CVaRConstraint:
    """Keeps the window, the threshold ν and the price λ, and turns losses into costs.

    In units of the user: fractions of equity. `limit` is a tensor of the state, so that it may be changed in training.
    """

    def __init__(self, config: RiskConfig, device: torch.device | str = "cpu") -> None:
        """config: its window is the number of outcomes to keep; 0 keeps as few as the tail needs."""
        self.config = config
        where = torch.device(device)
        self.window = OutcomeWindow(config.window or config.needed, where)

        def number(value: float) -> Tensor:
            return torch.tensor(value, dtype=torch.float64, device=where)

        self.limit = number(config.limit if config.limit is not None else -1.0)
        self.price = number(config.penalty)
        self.integral = number(0.0)
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
        """Take in realised losses [...] where `counted` holds, and move ν and λ by them.

        Before the tail holds enough of them λ stands still.
        """
        self.window.add(losses, counted)
        threshold, shortfall = self.window.tail(self.config.alpha)
        self.threshold.copy_(threshold.nan_to_num())
        self.shortfall.copy_(shortfall)
        if self.config.limit is None:
            return
        target = self.scale * (1 - self.config.margin)
        violation = torch.where(self.ready, (shortfall - target) / self.scale, 0.0).nan_to_num()
        moved = dual_step(Dual(self.price, self.integral), violation, self.config)
        self.price.copy_(torch.where(self.ready, moved.price, self.price))
        self.integral.copy_(torch.where(self.ready, moved.integral, self.integral))

    def costs(self, losses: Tensor, counted: Tensor) -> Tensor:
        """(L − ν)₊/α in units of the limit where `counted` holds, 0 elsewhere, [...] float32."""
        excess = (losses.double() - self.threshold).clamp(min=0.0) / (self.config.alpha * self.scale)
        return torch.where(counted, excess, 0.0).float()

    def combine(self, reward_advantages: Tensor, cost_advantages: Tensor) -> Tensor:
        """(A_r − λ·A_c)/(1 + λ), both in raw units; cost advantages come in units of the limit."""
        price = self.price.float()
        return (reward_advantages - price * self.scale.float() * cost_advantages) / (1 + price)

    def figures(self) -> dict[str, Tensor]:
        """`risk/*` as 0-dim tensors; returns, not losses: a CVaR of −0.04 is a loss of 4 %."""
        violation = ((self.shortfall - self.scale) / self.scale).clamp(min=0.0)
        figures = {
            "risk/cvar_realised": -self.shortfall,
            "risk/mean_realised": -self.window.mean(),
            "risk/var_threshold": -self.threshold,
            "risk/lambda": self.price.clone(),
            "risk/window_filled": self.window.filled.double() / self.window.size,
        }
        if self.config.limit is not None:
            figures |= {
                "risk/limit": self.limit.clone(),
                "risk/violation": violation,
                "risk/integral": self.integral.clone(),
            }
        return figures

    def _state(self) -> dict[str, Tensor]:
        return {
            "losses": self.window.losses,
            "count": self.window.count,
            "limit": self.limit,
            "price": self.price,
            "integral": self.integral,
            "threshold": self.threshold,
            "shortfall": self.shortfall,
        }

    def state_dict(self) -> dict[str, Tensor]:
        """Copies of all that is needed to go on from here."""
        return {name: value.clone() for name, value in self._state().items()}

    @torch.no_grad()
    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Go on from a saved state, in the present storage."""
        for name, value in self._state().items():
            value.copy_(state[name])
