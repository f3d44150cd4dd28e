"""The verdict says what the figures say, also when that is nothing good."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest

from tailguard.evaluate.bootstrap import Interval
from tailguard.evaluate.budget import BudgetCheck
from tailguard.evaluate.budget import BudgetVerdict as Budgeted
from tailguard.evaluate.report.collect import ReportData
from tailguard.evaluate.report.training_record import AlarmRaised
from tailguard.evaluate.report.verdict import Judgement, budget_in_words, judge, verdict, window_in_words
from tailguard.evaluate.stress import Scenario


def grown(evidence: ReportData, total: float = 1.5, **changes: object) -> ReportData:
    """The evidence with an agent whose equity ends at this multiple."""
    result = evidence.agent
    equity = np.geomspace(1.0, total, len(result.equity))
    own = replace(result, equity=equity, net=equity[1:] / equity[:-1] - 1, **changes)
    return replace(evidence, results=evidence.results | {"agent": own}, stress=(Scenario("costs ×2", own),))


def with_tests(evidence: ReportData, deflated: float, timing: float) -> ReportData:
    skill = replace(evidence.skill, deflated=deflated, years=1.0, needed_years=3.5)
    return replace(evidence, skill=skill, timing=replace(evidence.timing, p_value=timing))


@pytest.mark.parametrize(
    ("deflated", "timing", "judgement", "words"),
    [
        (0.99, 0.01, Judgement.SKILL, "exceeds what luck explains is 99 %, and its positions at other times"),
        (0.99, 0.20, Judgement.EXPOSURE, "would have paid as much in 20 % of all cases, so it is paid for exposure"),
        (
            0.80,
            0.01,
            Judgement.NO_SKILL,
            "is only 80 %, below the required 95 %. A ratio like this takes",
        ),
        (math.nan, 0.01, Judgement.NO_SKILL, "no evidence of skill"),
    ],
)
def test_skill_needs_both_a_ratio_beyond_luck_and_timing(
    evidence: ReportData, deflated: float, timing: float, judgement: Judgement, words: str
) -> None:
    found = verdict(with_tests(grown(evidence), deflated, timing))
    assert found.judgement is judgement
    assert words in str(found)


def test_growth_is_a_years_only_where_there_is_a_year(evidence: ReportData) -> None:
    short = verdict(grown(evidence)).sentences[0]
    assert "days it never saw, the agent made +50.0 % in all net of costs" in short
    long = grown(evidence, bars_per_year=float(len(evidence.agent.net)))
    long = replace(long, skill=replace(long.skill, years=1.0))
    assert "Over 12 months it never saw, the agent made +50.0 % a year net of costs" in verdict(long).sentences[0]


def test_losses_ruin_and_idleness_are_called_by_their_names(evidence: ReportData) -> None:
    lost = verdict(with_tests(grown(evidence, 0.9), 0.99, 0.01))
    assert lost.judgement is Judgement.LOSS
    assert lost.sentences[-1] == "Do not trade it."
    ruined = grown(evidence, 0.9, liquidated=True)
    assert judge(ruined) is Judgement.RUIN
    assert "was liquidated" in str(verdict(ruined))
    idle = verdict(grown(evidence, 1.0, turnover=np.zeros_like(evidence.agent.turnover)))
    assert idle.judgement is Judgement.IDLE
    assert "nothing to judge" in str(idle)


def test_what_breaks_it_and_what_went_wrong_in_training_is_said(evidence: ReportData) -> None:
    good, bad = grown(evidence), grown(evidence, 0.8).agent
    stress = (Scenario("costs ×2", good.agent), Scenario("costs ×3", bad), Scenario("fills 1 bar later", bad))
    alarms = (AlarmRaised("lstm_dead", 10, 2, "…"),)
    words = str(verdict(replace(good, stress=stress, alarms=alarms)))
    assert "It does not survive costs ×3 and fills 1 bar later." in words
    assert "1 kind of alarm went off in training" in words


@pytest.mark.parametrize(
    ("kind", "probability", "words"),
    [
        ("kept", 0.984, "the risk budget was kept (probability that the limit holds: 98.4 %)."),
        ("kept", 0.9974, "the risk budget was kept (probability that the limit holds: more than 99 %)."),
        ("broken", 0.0026, "the risk budget was broken (probability that the limit holds: less than 1 %)."),
        ("undecided", 0.38, "the record cannot decide; the limit holds with a probability of 38 %."),
        ("undecided", 0.06, "the risk budget was probably broken; the limit holds with a probability of 6.0 %."),
        ("undecided", 0.93, "the risk budget was probably kept; the limit holds with a probability of 93.0 %."),
        ("undecided", math.nan, "the record cannot decide whether the risk budget holds."),
        ("kept", math.nan, "the risk budget was kept."),
    ],
)
def test_the_budget_is_judged_in_words(evidence: ReportData, kind: str, probability: float, words: str) -> None:
    found = Interval(-0.031, -0.05, -0.02, 0.95, 1.0, 10, 2000)
    budget = BudgetCheck(Budgeted(kind), found, -0.04, 0.05, 168, 2.6, probability=probability)
    text = str(verdict(replace(grown(evidence), budgets={"agent": budget})))
    assert (
        "With a limit of -4.0 %, the worst 5 % of weeks made -3.1 % on average (95 % interval -5.0 % to -2.0 %, "
        f"from 2.6 tail windows without overlap): {words}"
    ) in text


@pytest.mark.parametrize(("windows", "words"), [(432.4, "432"), (2.25, "2.2"), (0.371, "0.37"), (0.012, "0.012")])
def test_the_tail_windows_behind_a_verdict_are_counted(windows: float, words: str) -> None:
    found = Interval(-0.031, -0.05, -0.02, 0.95, 1.0, 10, 2000)
    budget = BudgetCheck(Budgeted.KEPT, found, -0.06, 0.05, 168, windows, probability=0.98)
    assert f"from {words} tail windows without overlap" in budget_in_words(budget, 8_766.0)


def test_windows_are_called_by_the_time_they_take() -> None:
    hourly = 365.25 * 24
    assert window_in_words(168, hourly) == "weeks"
    assert window_in_words(48, hourly) == "windows of 2 days"
    assert window_in_words(5, hourly) == "windows of 5 hours"
    assert window_in_words(1, 365.25 * 24 * 4) == "windows of 1 bars"
