"""The parameters of the synthetic market's returns: how volatile, how heavy-tailed, how often in crisis."""

from __future__ import annotations

from dataclasses import dataclass, fields

from tailguard.validate import check_range

LONGEST_REGIME = 1e6
"""Hours; 114 years."""


@dataclass(frozen=True)
class MarketLaw:
    """Volatility, tails and regimes of a synthetic market. The defaults resemble Bitcoin."""

    volatility: float = 0.65
    """Standard deviation of the return per year, calm and crisis together; more than 0, at most 5."""
    tail_index: float = 5.0
    """Degrees of freedom of the Student-t shocks: more than 2, at most 1,000; smaller means heavier tails.

    Below 2.5 the bound of 50 % on a bar's move cuts a large part of the variance.
    """
    crisis_factor: float = 2.0
    """Volatility in a crisis relative to calm, 1 to 20; 1 means no crises."""
    calm_hours: float = 480.0
    """Mean duration of the calm regime."""
    crisis_hours: float = 48.0
    """Mean duration of the crisis regime."""

    def __post_init__(self) -> None:
        check_range("volatility", self.volatility, low=0, high=5, low_open=True)
        check_range("tail_index", self.tail_index, low=2, high=1_000, low_open=True)
        check_range("crisis_factor", self.crisis_factor, low=1, high=20)
        check_range("calm_hours", self.calm_hours, low=0, high=LONGEST_REGIME, low_open=True)
        check_range("crisis_hours", self.crisis_hours, low=0, high=LONGEST_REGIME, low_open=True)

    @property
    def crisis_share(self) -> float:
        """Long-run share of time in crisis."""
        return self.crisis_hours / (self.calm_hours + self.crisis_hours)

    def describe(self) -> str:
        """The parameters that differ from the defaults: "volatility 0.3, tail_index 3"; empty when none does."""
        changed = (field for field in fields(self) if getattr(self, field.name) != field.default)
        return ", ".join(f"{field.name} {getattr(self, field.name):g}" for field in changed)
