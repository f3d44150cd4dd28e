"""Would it survive a bad feed? The same agent on the same bars, clean and disturbed, side by side."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import product
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from tailguard.data.registry import FeatureError
from tailguard.errors import ConfigError
from tailguard.evaluate.accounts import pooled, separate
from tailguard.evaluate.backtest import BacktestAgent, BacktestResult, backtest
from tailguard.evaluate.budget import Budget, BudgetCheck, check_budget
from tailguard.evaluate.trades import FLAT
from tailguard.experiment.faulty_feed import seen_bars
from tailguard.robust.attacked_policy import AttackableAgent, AttackedPolicy
from tailguard.robust.attacks import Attack, AttackKind, Norm, Target
from tailguard.robust.feed import KINDS, Feed, parse_feed, price_error_bp

if TYPE_CHECKING:
    from tailguard.data.bars import Bars
    from tailguard.market import MarketConfig

Float = NDArray[np.float64]

CLEAN = "clean"
ONE_OF_EACH = ("late:2", *(kind for kind in KINDS if kind != "late"))
"""A feed of every kind at its default size."""
EVERY_FAULT = ("late:1", "late:2", "late:3", *ONE_OF_EACH[1:])
"""The same with every delay."""


@dataclass(frozen=True)
class Disturbed:
    """An agent under one disturbance, compared with the same agent without it."""

    name: str
    """The feed's faults, or the attack."""
    result: BacktestResult
    budget: BudgetCheck | None
    """The run's risk budget under the disturbance; None without one, or where the record is too short."""
    position_change: float
    """Mean absolute difference between the target weights and the clean ones, all assets together."""
    flips: float
    """Share of positions that are on the other side of the market than the clean ones."""
    lost_per_year: float
    """Money earned less than without the disturbance, per year and unit of starting capital, without compounding."""
    price_error_bp: float = math.nan
    """Mean error of the closes that the agent saw, in basis points; NaN for an attack, which acts on features."""
    attack: str = ""
    """Kind of the attack; empty for a feed."""
    epsilon: float = math.nan
    """Size of the attack."""

    @property
    def lost_per_bp(self) -> float:
        """`lost_per_year` for each basis point of error in the prices; NaN where the prices that it saw were right."""
        return self.lost_per_year / self.price_error_bp if self.price_error_bp > 0 else math.nan

    def to_json(self) -> dict[str, Any]:
        """Everything as JSON values; NaN becomes null."""
        figures = {
            "position_change": self.position_change,
            "flips": self.flips,
            "lost_per_year": self.lost_per_year,
            "price_error_bp": self.price_error_bp,
            "lost_per_bp": self.lost_per_bp,
            "epsilon": self.epsilon,
        }
        budget = (
            {} if self.budget is None else {"cvar": self.budget.cvar.estimate, "probability": self.budget.probability}
        )
        return {
            "name": self.name,
            "attack": self.attack or None,
            "budget": None if self.budget is None else str(self.budget.verdict),
            **{name: _finite(value) for name, value in (figures | budget).items()},
            "metrics": {name: _finite(value) for name, value in self.result.metrics.items()},
        }


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None


@dataclass(frozen=True)
class Disturbance:
    """What to do to an agent: a feed with faults, or another agent that acts on attacked observations."""

    name: str
    feed: Feed | None = None
    agent: BacktestAgent | None = None
    """The attacked agent; None for a feed."""
    attack: str = ""
    epsilon: float = math.nan


def feed_disturbances(texts: Sequence[str], seed: int = 0) -> list[Disturbance]:
    """Of these feeds; `all` stands for one of every kind and every delay. `seed`: of their random numbers."""
    named = [text for given in texts for text in (EVERY_FAULT if given == "all" else (given,))]
    return [Disturbance(str(feed), feed) for feed in (parse_feed(text, seed) for text in dict.fromkeys(named))]


def attack_disturbances(
    agent: AttackableAgent,
    kinds: Sequence[AttackKind],
    epsilons: Sequence[float],
    *,
    norm: Norm = "linf",
    steps: int = 10,
    target: Target = "action",
    seed: int = 0,
) -> list[Disturbance]:
    """Of these attacks, each at every size, in standard deviations of the features."""
    cases = []
    for kind, epsilon in product(dict.fromkeys(kinds), sorted(set(epsilons))):
        attacked = AttackedPolicy(agent, Attack(kind, epsilon, norm, steps, target=target, seed=seed))
        cases.append(Disturbance(f"{kind} ε {epsilon:g}", None, attacked, kind, epsilon))
    return cases


class DisturbedBacktests:
    """Backtests of an agent on the same bars, clean and disturbed. All take the same path as any backtest.

    `clean`: the agent's own backtest on these bars, where it is known.
    `delay`, `noise`: as of `backtest`, for all.
    """

    def __init__(
        self,
        agent: BacktestAgent,
        bars: Bars,
        config: MarketConfig,
        budget: Budget | None = None,
        *,
        clean: BacktestResult | None = None,
        delay: int = 0,
        noise: float = 0.0,
    ) -> None:
        self.agent, self.config, self.budget, self.delay, self.noise = agent, config, budget, delay, noise
        self.parts = separate(bars, "portfolio" if agent.spec is None else agent.spec.accounts)
        result = self._trade(agent, None) if clean is None else clean
        self.clean = Disturbed(CLEAN, result, self._checked(result), 0.0, 0.0, 0.0, 0.0)

    def under_each(
        self, cases: Sequence[Disturbance], before_each: Callable[[str], None]
    ) -> tuple[list[Disturbed], list[str]]:
        """The clean agent, the agent under each disturbance that can be computed, and why each other one cannot.

        `before_each`: called with the name of each disturbance, to show progress.
        """
        found, notes = [self.clean], []
        for case in cases:
            before_each(case.name)
            try:
                found.append(self.under(case))
            except (FeatureError, ConfigError) as error:
                # A feature of one's own may divide by a volume of 0; a fee may exceed its range; spot has no funding.
                notes.append(f"{case.name}: {str(error).removeprefix('feed: ').removeprefix(f'{case.name}: ')}")
        return found, notes

    def under(self, case: Disturbance) -> Disturbed:
        """The agent under one disturbance."""
        clean, result = self.clean.result, self._trade(case.agent or self.agent, case.feed)
        change, flips = position_changes(clean, result)
        return Disturbed(
            name=case.name,
            result=result,
            budget=self._checked(result),
            position_change=change,
            flips=flips,
            lost_per_year=float(clean.net.mean() - result.net.mean()) * clean.bars_per_year,
            price_error_bp=math.nan if case.feed is None else _price_error(self.parts, case.feed),
            attack=case.attack,
            epsilon=case.epsilon,
        )

    def _trade(self, agent: BacktestAgent, feed: Feed | None) -> BacktestResult:
        trade = partial(backtest, delay=self.delay, noise=self.noise, progress_bar=False, warn_in_sample=False)
        return pooled([trade(agent, part, self.config, feed=feed) for part in self.parts])

    def _checked(self, result: BacktestResult) -> BudgetCheck | None:
        return None if self.budget is None else check_budget(result, self.budget)


def position_changes(clean: BacktestResult, other: BacktestResult) -> tuple[float, float]:
    """Mean over bars of Σ|w' − w| of the target weights, and the share of open positions that changed sides."""
    before, after = clean.targets, other.targets
    moved = np.abs(after - before)
    open_before = np.abs(before) > FLAT
    flipped = open_before & (np.abs(after) > FLAT) & (np.sign(before) != np.sign(after))
    return float(np.nansum(moved, axis=1).mean()), float(flipped.sum() / max(int(open_before.sum()), 1))


def _price_error(parts: Sequence[Bars], feed: Feed) -> float:
    """Mean error in basis points of the closes that the agent saw at the bars that can be traded, all symbols alike."""
    errors = []
    for part in parts:
        panel, seen = part.panel("portfolio"), seen_bars(part, feed).panel("portfolio")
        errors.append(price_error_bp(seen.close[panel.tradeable], panel.close[panel.tradeable]))
    return float(np.mean(errors))
