"""What members are judged by: the validation part, by the user's metric; never the reward of training."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TypeVar

from tailguard.algorithm.learner import Learner
from tailguard.errors import ConfigError
from tailguard.runs.validation import Validation, ValidationResult
from tailguard.validate import check_registered

Measure = Callable[[Learner, ValidationResult], float]
Function = TypeVar("Function", bound=Measure)


def _cvar(_: Learner, result: ValidationResult) -> float:
    return math.nan if result.cvar is None else result.cvar


MEASURES: dict[str, Measure] = {
    "score": lambda _, result: result.score,
    "growth": lambda _, result: result.growth,
    "cvar": _cvar,
}
"""Metrics on validation by name; higher is better."""


def measure(name: str) -> Callable[[Function], Function]:
    """Register a metric of one's own: a function of the agent and its result on validation; higher is better."""
    if name in MEASURES:
        raise ConfigError(f"metric {name!r}: exists already; choose another name")

    def register(function: Function) -> Function:
        MEASURES[name] = function
        return function

    return register


@dataclass(frozen=True)
class MemberScore:
    """A member on the validation part."""

    score: float
    metrics: Mapping[str, float]
    """Under the names that a single run's evaluations have, and `eval/judged`."""


class Judge:
    """Judges agents by one metric on one validation part, all by the same budget whatever theirs is."""

    def __init__(self, validation: Validation, metric: str) -> None:
        check_registered("population.metric", metric, MEASURES, "tailguard.population.judge.measure")
        if not validation.episodes:
            raise ConfigError(
                "data.validation: the validation part is shorter than an episode, and members are judged on it; make "
                "it longer, or env.episode_length shorter"
            )
        if metric == "cvar" and (validation.risk is None or validation.risk.limit is None):
            raise ConfigError("population.metric: cvar is that of the budget, and risk.limit is not set")
        self.validation, self.metric = validation, metric

    def judge(self, agent: Learner) -> MemberScore:
        """Score and metrics of the agent as it is now."""
        result = self.validation.evaluate(agent)
        assert result is not None  # there are episodes
        score = float(MEASURES[self.metric](agent, result))
        metrics = {"eval/growth": result.growth, "eval/score": result.score, "eval/judged": score}
        return MemberScore(score, metrics | ({} if result.cvar is None else {"eval/cvar": result.cvar}))
