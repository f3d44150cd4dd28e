"""The table of a disturbed agent beside the clean one, for terminals and pages."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from tailguard.evaluate.formatting import number, percent
from tailguard.evaluate.results_table import budget_cell, growth_column, tail_column
from tailguard.evaluate.robustness import Disturbed

NO_PRICE = "–"
"""Shown where a disturbance leaves the prices that an agent sees as they are."""


def robustness_rows(cases: Sequence[Disturbed], capital: float) -> tuple[list[str], list[list[str]]]:
    """Headings and rows, the clean agent first. Money is per year, in units of the market's quote currency.

    `capital`: what the account begins with.
    """
    results = {case.name: case.result for case in cases}
    budgets = {case.name: case.budget for case in cases if case.budget is not None}
    how_long, grown = growth_column(results)
    tail, tails = tail_column(results, budgets)
    columns: dict[str, Mapping[str, str]] = {how_long: grown}
    columns["Sharpe"] = {case.name: number(case.result.metrics["sharpe"]) for case in cases}
    columns[tail] = tails
    if budgets:
        columns["budget"] = {name: budget_cell(check) for name, check in budgets.items()}
    columns["moved"] = {case.name: percent(case.position_change, sign=False) for case in cases}
    columns["flips"] = {case.name: percent(case.flips, sign=False) for case in cases}
    if any(not case.attack for case in cases[1:]):
        columns["error, bp"] = {case.name: _error(case) for case in cases}
        columns["lost/bp"] = {case.name: _money(capital * case.lost_per_bp) for case in cases}
    columns["lost/yr"] = {case.name: _money(capital * case.lost_per_year) for case in cases[1:]}
    rows = [[case.name, *(cells.get(case.name, "–") for cells in columns.values())] for case in cases]
    return ["", *columns], rows


def _error(case: Disturbed) -> str:
    return f"{case.price_error_bp:.1f}" if case.price_error_bp > 0 else NO_PRICE


def _money(amount: float) -> str:
    """12,345; 1.23 for a small amount; – where there is none."""
    if math.isnan(amount):
        return "–"
    return f"{amount:,.0f}" if abs(amount) >= 100 else f"{amount:,.2f}"
