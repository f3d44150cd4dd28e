"""A throttle on exposure that follows realised losses: a bound on the realised tail that holds on every path.

After each window of the budget's length the account has lost L_t (a gain is negative), at the exposure m_t that the
throttle allowed. With d, a twentieth inside the limit, a fixed threshold ν in [0, d] and a step η,

    c_t = ν + (L_t − ν)₊ / α,    s_{t+1} = min(S, s_t − η (c_t − d)),    m_t = s_t within [0, 1].

At m = 0 nothing is lost, so c = ν ≤ d and s rises again; hence s never falls below −η·c_max, and the costs add up to
Σ (c_t − d) ≤ (S + η c_max) / η. By Rockafellar & Uryasev the CVaR of the realised losses is at most the mean of c_t:

    ES_α(L_1 … L_T) ≤ d + (S/η + c_max) / T    for every path, without an assumption about the market.

The bound is loose until T is large, and a tight one is expensive: after a loss far beyond the limit the throttle would
stop trading for years. It is a backstop for a market that has changed. The credit S above 1 lets an agent that keeps
its limit pay for ordinary bad windows without being throttled.
"""

from __future__ import annotations

from dataclasses import dataclass

from tailguard.validate import check_range

MARGIN = 0.05
"""The throttle aims inside the limit by this share of it, because the bound is reached from above."""
STEP = 0.1
"""A window that loses exactly d costs a tenth of the exposure."""
CREDIT = 0.3
"""What can be paid for bad windows before exposure falls: three windows that lose d."""


@dataclass
class Throttle:
    """The factor on exposure, and the state behind it."""

    limit: float
    """Smallest allowed CVaR of the windows: −0.04 is a loss of 4 %."""
    alpha: float
    standing: float = 1.0 + CREDIT
    """s: exposure 1 at 1 and above, none at 0 and below."""

    def __post_init__(self) -> None:
        check_range("throttle.limit", self.limit, low=-1, high=0, high_open=True)
        check_range("throttle.alpha", self.alpha, low=0, low_open=True, high=1)
        check_range("throttle.standing", self.standing)

    @property
    def aim(self) -> float:
        """d: the mean loss of the tail that is aimed at."""
        return -(1 - MARGIN) * self.limit

    @property
    def threshold(self) -> float:
        """ν"""
        return self.aim / 2

    @property
    def step(self) -> float:
        """η"""
        return STEP / (self.cost(-self.aim) - self.aim)

    @property
    def factor(self) -> float:
        """Factor on the exposure of the next window, 0 to 1."""
        return min(1.0, max(0.0, self.standing))

    def cost(self, outcome: float) -> float:
        """c of a window with this return."""
        return self.threshold + max(0.0, -outcome - self.threshold) / self.alpha

    def observe(self, outcome: float) -> None:
        """Record the return of a window that was traded at `factor`."""
        self.standing = min(1.0 + CREDIT, self.standing - self.step * (self.cost(outcome) - self.aim))

    def bound(self, windows: int, largest_loss: float) -> float:
        """Largest ES_α that so many windows can have had, none of which lost more than `largest_loss`."""
        return self.aim + ((1.0 + CREDIT) / self.step + self.cost(-largest_loss)) / windows
