"""Cells of the result table."""

from __future__ import annotations

import math

import pytest

from tailguard.evaluate.bootstrap import Interval
from tailguard.evaluate.budget import BudgetCheck, BudgetVerdict
from tailguard.evaluate.results_table import budget_cell


@pytest.mark.parametrize(
    ("verdict", "probability", "cell"),
    [
        ("kept", 0.98, "kept"),
        ("broken", 0.003, "broken"),
        ("undecided", 0.376, "kept? 38 %"),
        ("undecided", 0.0251, "kept? 3 %"),
        ("undecided", 0.9749, "kept? 97 %"),
        ("undecided", math.nan, "undecided"),
    ],
)
def test_an_open_budget_shows_the_probability_that_it_holds(verdict: str, probability: float, cell: str) -> None:
    found = Interval(-0.031, -0.05, -0.02, 0.95, 1.0, 10, 2000)
    budget = BudgetCheck(BudgetVerdict(verdict), found, -0.04, 0.05, 168, 2.6, probability=probability)
    assert budget_cell(budget) == cell
