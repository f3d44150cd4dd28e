"""The score prefers growth within the limit, and the best evaluation is remembered with its age."""

from __future__ import annotations

import pytest
import torch

from tailguard.risk.exposure import MOST_EXPOSURE
from tailguard.runs.selection import Best, Evaluation, budget_score, calibrated_score


@pytest.mark.parametrize(
    ("growth", "cvar", "limit", "expected"),
    [
        (1.2, -0.03, -0.04, 1.2),  # kept
        (1.2, -0.04, -0.04, 1.2),  # just kept
        (1.2, -0.05, -0.04, 1.2 - 5 * 0.25),  # 5 % where 4 % were allowed: a quarter too much
        (3.0, -0.12, -0.04, 3.0 - 5 * 2.0),
        (1.2, 0.01, -0.04, 1.2),  # even the worst episodes gain
        (1.2, -0.9, None, 1.2),
        (1.2, None, -0.04, 1.2),
    ],
)
def test_growth_counts_within_the_limit_and_a_breach_costs_more_than_growth(
    growth: float, cvar: float | None, limit: float | None, expected: float
) -> None:
    assert budget_score(growth, cvar, limit) == pytest.approx(expected)


def test_where_exposure_is_calibrated_growth_counts_in_proportion_to_the_tail() -> None:
    """Normal outcomes: ES = 2.0627 σ − μ; twice the exposure has the same score, and losses are not scaled."""
    outcomes = 0.01 + 0.02 * torch.tensor([-1.0, 1.0]).repeat(50)
    shortfall = 2.0627128 * 0.02 - 0.01
    assert calibrated_score(1.5, outcomes, 0.05, -0.04) == pytest.approx(1.5 * 0.04 / shortfall)
    assert calibrated_score(3.0, 2 * outcomes, 0.05, -0.04) == pytest.approx(1.5 * 0.04 / shortfall)
    assert calibrated_score(-0.3, outcomes, 0.05, -0.04) == -0.3
    assert calibrated_score(1.5, outcomes, 0.05, -0.9) == 1.5 * MOST_EXPOSURE


def test_the_best_stays_until_a_better_one_comes() -> None:
    best = Best()
    seen = []
    for score in (-2.0, -1.0, -1.0, float("nan"), -3.0, -0.5):
        best = best.after(score)
        seen.append((best.score, best.since))
    assert seen == [(-2.0, 0), (-1.0, 0), (-1.0, 1), (-1.0, 2), (-1.0, 3), (-0.5, 0)]


def test_an_evaluation_is_told_in_a_few_words() -> None:
    assert Evaluation(3.14, -0.0344, 3.14).describe() == "+3.1 a year, CVaR −3.4 %"
    assert Evaluation(-0.25, None, -0.25).describe() == "−0.2 a year"
