"""The money that a session may trade with, and what a person agrees to before it does."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from tailguard.errors import ConfigError
from tailguard.live.credentials import Credentials
from tailguard.live.venue import Venue
from tailguard.validate import check_range


@dataclass(frozen=True)
class LiveTerms:
    """What live trading needs besides a run and an exchange."""

    budget: float
    """Money of the account that the session may use, in the currency that its symbols settle in."""
    credentials: Credentials

    def __post_init__(self) -> None:
        check_range("--budget", self.budget, low=0, low_open=True)


@dataclass(frozen=True)
class Stake:
    """A session's capital. What else is in the account is set aside: its equity is capital, gains and losses."""

    capital: float
    reserve: float = 0.0
    """Equity of the account beyond the capital, at the session's first start."""
    ceiling: float = math.inf
    """Largest equity that positions are sized by: gains are not put to work, losses make positions smaller."""
    about: Mapping[str, Any] = field(default_factory=dict)
    """For the journal's first record."""


def describe(terms: Mapping[str, Any]) -> str:
    """The terms in one line."""
    return ", ".join(f"{name} {', '.join(each) if isinstance(each, list) else each}" for name, each in terms.items())


def stake_of(terms: LiveTerms, venue: Venue, first: Mapping[str, Any] | None) -> Stake:
    """The budget of a session that begins, or that goes on from its first record."""
    if first is not None:
        if first["budget"] != terms.budget:
            raise ConfigError(
                f"--budget {terms.budget:g}: this session began with {first['budget']:g}. Keep it, or move the "
                "session's folder away to begin a new one"
            )
        reserve = float(first["reserve"])
    else:
        equity = venue.account().equity(venue.prices())
        if equity < terms.budget:
            raise ConfigError(f"--budget {terms.budget:g}: the account holds {equity:,.2f}; the budget is part of it")
        reserve = equity - terms.budget
    return Stake(terms.budget, reserve, terms.budget, {"budget": terms.budget, "reserve": reserve})
