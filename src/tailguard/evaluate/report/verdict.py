"""The verdict in words: the result, its significance, the risk budget, and the stress tests."""

from __future__ import annotations

import math
from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING

from tailguard.data.pace import Pace
from tailguard.evaluate.formatting import growth_of, number, p_value, percent, whole_units, years_in_words

if TYPE_CHECKING:
    from tailguard.evaluate.bootstrap import Interval
    from tailguard.evaluate.budget import BudgetCheck
    from tailguard.evaluate.report.collect import ReportData
    from tailguard.evaluate.significance import Overfitting

CONFIDENCE = 0.95
LIKELY = 0.1
"""Where the record cannot decide on a budget, it is called probably kept or probably broken up to this probability of
the contrary."""


class Judgement(StrEnum):
    """The verdict in a few words."""

    SKILL = "evidence of skill"
    EXPOSURE = "return from exposure, no evidence of timing"
    NO_SKILL = "no evidence of skill"
    LOSS = "lost money"
    RUIN = "liquidated"
    IDLE = "never traded"


@dataclass(frozen=True)
class Verdict:
    """A headline, and the sentences that support it."""

    judgement: Judgement
    sentences: tuple[str, ...]

    def __str__(self) -> str:
        return f"{self.judgement}. {' '.join(self.sentences)}"


def judge(data: ReportData) -> Judgement:
    """Skill needs both: a Sharpe ratio that luck does not explain, and evidence of timing."""
    agent = data.agent
    if agent.liquidated:
        return Judgement.RUIN
    if not agent.turnover.any():
        return Judgement.IDLE
    if not agent.equity[-1] > 1:
        return Judgement.LOSS
    if not data.skill.deflated >= CONFIDENCE:
        return Judgement.NO_SKILL
    return Judgement.SKILL if data.timing.p_value <= 1 - CONFIDENCE else Judgement.EXPOSURE


def verdict(data: ReportData) -> Verdict:
    """The verdict on the test period, in the order of a sceptical reader's questions."""
    judgement = judge(data)
    sentences = [_outcome(data)]
    if judgement not in (Judgement.RUIN, Judgement.IDLE):
        sentences += [_luck(data, judgement), *_against_holding(data)]
    if data.budget is not None:
        sentences.append(budget_in_words(data.budget, data.agent.pace))
    sentences += [*_fragile(data), *_known_optimum(data)]
    if judgement in (Judgement.LOSS, Judgement.RUIN):
        sentences.append("Do not trade it.")
    if data.alarms:
        kinds = len(data.alarms)
        sentences.append(f"{kinds} kind{'s' * (kinds > 1)} of alarm went off in training; see below.")
    return Verdict(judgement, tuple(sentences))


def _outcome(data: ReportData) -> str:
    agent, held = data.agent, data.results["buy & hold"]
    if not data.agent.turnover.any():
        return "The agent never traded in the test period, so there is nothing to judge."
    ruin = " Its account was liquidated." if data.agent.liquidated else ""
    return (
        f"Over {years_in_words(data.skill.years)} it never saw, the agent made {growth_of(agent, 'in all')} net of "
        f"costs, with a maximum drawdown of {percent(-agent.metrics['max_drawdown'], sign=False)}; buy & hold made "
        f"{growth_of(held, 'in all')} with {percent(-held.metrics['max_drawdown'], sign=False)}.{ruin}"
    )


def _luck(data: ReportData, judgement: Judgement) -> str:
    skill, timing = data.skill, data.timing
    ratio = f"Its Sharpe ratio is {sharpe_in_words(data.sharpes['agent'])}"
    tried = "" if skill.trials == 1 else f", after {skill.trials} trials"
    if judgement is Judgement.SKILL:
        return (
            f"{ratio}; the probability that it exceeds what luck explains{tried} is {probability(skill.deflated)}, "
            f"and its positions at other times would have paid as much in {share(timing.p_value)} of all cases."
        )
    if judgement is Judgement.EXPOSURE:
        return (
            f"{ratio}, which luck does not explain{tried}; but the same positions at other times would have paid as "
            f"much in {share(timing.p_value)} of all cases, so it is paid for exposure, not for timing."
        )
    needed = "" if not math.isfinite(skill.needed_years) else _needed(skill.needed_years, skill.years)
    return (
        f"{ratio}; the probability that it exceeds what luck explains{tried} is only {probability(skill.deflated)}, "
        f"below the required {100 * CONFIDENCE:.0f} %.{needed}"
    )


def _needed(needed: float, years: float) -> str:
    if needed <= years:
        return ""
    shown = years_in_words(needed), years_in_words(years)
    return f" A ratio like this takes {shown[0]} to distinguish from zero; there are {shown[1]}."


def _against_holding(data: ReportData) -> list[str]:
    difference = data.beaten["buy & hold"]
    return [] if math.isnan(difference.p_value) else [f"{ratio_against(difference, 'buy & hold')}."]


def ratio_against(difference: Interval, other: str) -> str:
    """The agent's Sharpe ratio minus that of another policy, and whether the difference is within noise.

    The p-value is one-sided, for the sign of the difference.
    """
    ahead = difference.estimate > 0
    # Resamples that count against being behind are those that do not count against being ahead.
    p = difference.p_value if ahead else 1 + 1 / (difference.resamples + 1) - difference.p_value
    side = "above" if ahead else "below"
    words = f"Its Sharpe ratio is {number(abs(difference.estimate))} {side} that of {other}"
    if p <= 1 - CONFIDENCE:
        return f"{words} ({p_value(p)})"
    return f"{words}, which is within noise ({p_value(p)})"


def budget_in_words(budget: BudgetCheck, pace: Pace | float) -> str:
    """The budget, the realised CVaR and the tail windows it rests on, and the verdict with its probability."""
    what = f"the worst {100 * budget.alpha:g} % of {window_in_words(budget.horizon, pace)}"
    did = "made" if budget.outcome == "return" else "had a maximum drawdown of"
    cvar = budget.cvar
    known = (
        f"{100 * cvar.level:g} % interval {percent(cvar.low)} to {percent(cvar.high)}, from "
        f"{_count(budget.tail_windows)} tail windows without overlap"
    )
    return (
        f"With a limit of {percent(budget.limit)}, {what} {did} {percent(cvar.estimate)} on average ({known}): "
        f"{_budget_verdict(budget)}."
    )


def _budget_verdict(budget: BudgetCheck) -> str:
    decided, known = budget.verdict != "undecided", not math.isnan(budget.probability)
    if decided:
        holds = f" (probability that the limit holds: {bounded_probability(budget.probability)})" if known else ""
        return f"the risk budget was {budget.verdict}{holds}"
    if not known:
        return "the record cannot decide whether the risk budget holds"
    words = "the record cannot decide"
    if budget.probability <= LIKELY or budget.probability >= 1 - LIKELY:
        words = f"the risk budget was probably {'kept' if budget.probability > 0.5 else 'broken'}"
    return f"{words}; the limit holds with a probability of {bounded_probability(budget.probability)}"


def _count(windows: float) -> str:
    """433, 2.3, 0.37."""
    if windows >= 10:
        return f"{windows:,.0f}"
    return f"{windows:.1f}" if windows >= 1 else f"{windows:.2g}"


def overfitting_in_words(overfitting: Overfitting, what: str) -> str:
    """The probability of backtest overfitting, and its meaning."""
    return (
        f"Probability of backtest overfitting: {100 * overfitting.probability:.0f} %. In this share of "
        f"{len(overfitting.logits):,} splits, the {what} that was best in one half of the record was no better than "
        f"the median in the other half; it lost money there in {100 * overfitting.probability_of_loss:.0f} %."
    )


def window_in_words(bars: int, pace: Pace | float) -> str:
    """A number of bars as a span of time."""
    count, unit = whole_units(bars, pace)
    return unit if count == 1 and unit != "bars" else f"windows of {count} {unit}"


def _fragile(data: ReportData) -> list[str]:
    if not data.agent.equity[-1] > 1:
        return []
    lost = [scenario.name for scenario in data.stress if not scenario.result.equity[-1] > 1]
    lost += [f"the feed {case.name}" for case in data.feeds[1:] if not case.result.equity[-1] > 1]
    return [f"It does not survive {_list(lost)}."] if lost else []


def _known_optimum(data: ReportData) -> list[str]:
    sentences = []
    if not math.isnan(data.captured):
        sentences.append(f"It captures {100 * data.captured:.0f} % of the log-growth that the planted signal allows.")
    if data.synthetic:
        sentences.append("The market is synthetic; real markets differ.")
    return sentences


def sharpe_in_words(ratio: Interval) -> str:
    """1.91 (95 % interval 0.84 to 2.93)."""
    if math.isnan(ratio.estimate):
        return "not defined"
    if math.isnan(ratio.low):
        return f"{ratio.estimate:.2f}"
    return f"{ratio.estimate:.2f} ({100 * ratio.level:.0f} % interval {ratio.low:.2f} to {ratio.high:.2f})"


def share(value: float) -> str:
    """A share in percent, with no more digits than the resamples support."""
    return "less than 0.1 %" if value < 0.001 else f"{100 * value:.2g} %"


def probability(value: float) -> str:
    """A probability in percent; never 100 %."""
    return "more than 99.9 %" if value > 0.999 else f"{100 * value:.3g} %"


def bounded_probability(value: float) -> str:
    """A probability in percent; not nearer to 0 or 100 % than the draws behind a verdict on a budget tell."""
    if not 0.01 <= value <= 0.99:
        return "less than 1 %" if value < 0.5 else "more than 99 %"
    return f"{100 * value:.0f} %" if 0.1 <= value <= 0.9 else f"{100 * value:.1f} %"


def _list(names: list[str]) -> str:
    return names[0] if len(names) == 1 else f"{', '.join(names[:-1])} and {names[-1]}"
