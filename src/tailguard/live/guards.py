"""Guards: limits that no decision of an agent can pass. All are on by default.

A guard that trips on an order or a bar blocks every increase of a position until a person releases it; reductions stay
possible. A guard on the account trips the kill switch.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import NamedTuple

import torch

from tailguard.live.bar_history import LiveBar
from tailguard.live.session_state import DAY_MS, HOUR_MS, LiveState
from tailguard.risk.cvar import cvar_from_samples
from tailguard.validate import check_range


class Breach(NamedTuple):
    """A limit that was passed."""

    guard: str
    message: str


@dataclass(frozen=True)
class GuardConfig:
    """Limits of a session. Notionals are multiples of the starting capital times the allowed leverage."""

    order_notional: float = 2.1
    """Largest order; a full reversal at the starting capital is 2."""
    hour_notional: float = 6.0
    """Most that is traded within an hour."""
    day_notional: float = 24.0
    """Most that is traded within 24 hours."""
    turnover: float = 24.0
    """Most that is traded within 24 hours, as a multiple of the equity now times the leverage."""
    drawdown: float = 0.25
    """Largest fall of equity from its peak, as a share of it. Trips the kill switch."""
    cvar_limit: float = 0.0
    """Smallest mean return of the worst windows, as −0.04; 0: the limit that the agent was calibrated to, if any.
    It counts once there are 1/alpha windows. Trips the kill switch."""
    cvar_alpha: float = 0.05
    """Share of worst windows; the agent's own where its limit is used."""
    bar_age: float = 0.1
    """Oldest bar that is traded on, in bar lengths after its close."""
    jump: float = 0.3
    """Largest move from one close to the next, as a share of it, beyond which a bar is not believed."""
    price_difference: float = 0.03
    """Largest difference between the price of the decision and the venue's price when the order is sent."""
    slippage: float = 0.01
    """Limit price of every order, from the venue's price, and largest difference of a fill from it."""
    errors_per_hour: int = 30
    """Errors of the venue within an hour. Trips the kill switch."""

    def __post_init__(self) -> None:
        for item in fields(self):
            if item.name != "cvar_limit":
                check_range(f"guards.{item.name}", getattr(self, item.name), low=0, low_open=True)
        check_range("guards.cvar_limit", self.cvar_limit, low=-1, high=0)
        check_range("guards.cvar_alpha", self.cvar_alpha, low=0, low_open=True, high=1)
        check_range("guards.slippage", self.slippage, low=0, low_open=True, high=0.5)


@dataclass(frozen=True)
class Guards:
    """The limits of one account in money."""

    config: GuardConfig
    capital: float
    leverage: float
    bar_ms: int

    @property
    def unit(self) -> float:
        return self.capital * self.leverage

    def order(self, notional: float, equity: float, state: LiveState, now: int, planned: float = 0.0) -> Breach | None:
        """Whether an order that increases a position may be sent; `equity` in money. `planned`: notional of the other
        orders of this bar, which have not been sent. What open orders may still trade counts, too."""
        config = self.config
        planned += sum(each.unfilled_notional for each in state.open_intents) + notional
        hour, day = (state.traded_since(now - span) + planned for span in (HOUR_MS, DAY_MS))
        for guard, value, limit in (
            ("order_notional", notional, config.order_notional * self.unit),
            ("hour_notional", hour, config.hour_notional * self.unit),
            ("day_notional", day, config.day_notional * self.unit),
            ("turnover", day, config.turnover * max(equity, 0.0) * self.leverage),
        ):
            if value > limit:
                return Breach(guard, f"{value:,.2f} would be traded; guards.{guard} allows {limit:,.2f}")
        return None

    def account(self, equity: float, state: LiveState) -> Breach | None:
        """Drawdown and tail of the account; `equity` as a multiple of the capital."""
        config = self.config
        if not math.isfinite(equity):
            return Breach("equity", f"it is {equity}; no limit holds for that")
        fall = self.drawdown(equity, state)
        if fall > config.drawdown:
            return Breach("drawdown", f"equity is {fall:.1%} below its peak; guards.drawdown is {config.drawdown:.1%}")
        tail = self.tail(state)
        if config.cvar_limit < 0 and tail is not None and tail < config.cvar_limit:
            return Breach(
                "cvar",
                f"the worst {config.cvar_alpha:.0%} of {len(state.outcomes)} windows returned {tail:.2%} on average; "
                f"the budget is {config.cvar_limit:.2%}",
            )
        return None

    def drawdown(self, equity: float, state: LiveState) -> float:
        peak = max(state.peak_equity, equity)
        return 1 - equity / peak if peak > 0 else 0.0

    def tail(self, state: LiveState) -> float | None:
        """CVaR of the finished windows; None while there are fewer than 1/alpha."""
        outcomes = state.outcomes
        if len(outcomes) < math.ceil(1 / self.config.cvar_alpha):
            return None
        return float(cvar_from_samples(torch.tensor(list(outcomes), dtype=torch.float64), self.config.cvar_alpha))

    def bar(self, bar: LiveBar, before: LiveBar | None) -> Breach | None:
        """Whether the bar can be believed."""
        fault = bar.fault() or self._misfit(bar, before)
        if fault is not None:
            return Breach("inconsistent_bar", fault)
        for symbol, row in bar.values.items() if before is not None else ():
            last, close = float(before.values[symbol]["close"] or 0), float(row["close"] or 0)  # type: ignore[union-attr]
            if abs(close / last - 1) > self.config.jump:
                return Breach(
                    "jump", f"{symbol}: close {close:g} after {last:g}; guards.jump allows {self.config.jump:.0%}"
                )
        return None

    def _misfit(self, bar: LiveBar, before: LiveBar | None) -> str | None:
        """Why a history cannot go on with the bar; in the journal it would end every later start."""
        if before is None:
            return None
        if (bar.time_ms - before.time_ms) % self.bar_ms:
            return f"a bar opens at {bar.time_ms} ms, between the bars that follow the one at {before.time_ms} ms"
        if set(bar.values) != set(before.values):
            return f"a bar of {', '.join(bar.values)} after one of {', '.join(before.values)}"
        return None

    def is_stale(self, bar: LiveBar, now: int) -> bool:
        """Whether the bar is too old to trade on."""
        return now - bar.close_ms(self.bar_ms) > self.longest_age_ms

    @property
    def longest_age_ms(self) -> float:
        return self.config.bar_age * self.bar_ms

    def price(self, symbol: str, decided: float, price: float) -> Breach | None:
        """Whether the venue's price is that of the bars."""
        if abs(price / decided - 1) <= self.config.price_difference:
            return None
        return Breach("price_difference", f"{symbol}: the bar closed at {decided:g}, the venue's price is {price:g}")

    def fill(self, symbol: str, sized: float, filled: float) -> Breach | None:
        """Whether an order was filled near the price it was sized at."""
        if not filled or abs(filled / sized - 1) <= self.config.slippage * (1 + 1e-9):
            return None
        return Breach("slippage", f"{symbol}: filled at {filled:g}, sized at {sized:g}")

    def errors(self, state: LiveState, now: int) -> Breach | None:
        count = sum(moment > now - HOUR_MS for moment in state.errors)
        if count <= self.config.errors_per_hour:
            return None
        return Breach(
            "errors", f"{count} errors within an hour; guards.errors_per_hour is {self.config.errors_per_hour}"
        )

    def distances(self, equity: float, state: LiveState, now: int) -> Mapping[str, float]:
        """Share of each limit that is used, for the screen; 1 is the limit."""
        config, money = self.config, equity * self.capital
        used = {
            "notional, hour": state.traded_since(now - HOUR_MS) / (config.hour_notional * self.unit),
            "notional, day": state.traded_since(now - DAY_MS) / (config.day_notional * self.unit),
            "turnover, day": state.traded_since(now - DAY_MS) / max(config.turnover * money * self.leverage, 1e-12),
            "drawdown": self.drawdown(equity, state) / config.drawdown,
            "errors, hour": len(state.errors) / config.errors_per_hour,
        }
        tail = self.tail(state)
        if config.cvar_limit < 0 and tail is not None:
            used["CVaR budget"] = tail / config.cvar_limit
        return used
