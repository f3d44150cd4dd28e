"""The table a person reads after a run: the agent beside what it has to beat."""

from __future__ import annotations

import math
from collections.abc import Mapping

from rich.console import Console
from rich.table import Table

from tailguard.evaluate.backtest import BacktestResult


def print_table(results: Mapping[str, BacktestResult], title: str, console: Console) -> None:
    """One row a policy; returns net of all costs."""
    table = Table(box=None, pad_edge=False, header_style="bold")
    table.add_column(title, min_width=26)
    for heading in ("growth/yr", "volatility", "Sharpe", "max drawdown", "CVaR 5 % (week)", "costs/yr", "turnover/day"):
        table.add_column(heading, justify="right")
    for name, result in results.items():
        figures = result.metrics
        costs = sum(value for key, value in figures.items() if key.startswith("cost_"))
        table.add_row(
            name,
            percent(figures["growth_per_year"]),
            percent(figures["volatility"], sign=False),
            "–" if math.isnan(figures["sharpe"]) else f"{figures['sharpe']:.2f}",
            percent(figures["max_drawdown"]),
            percent(figures.get("cvar_5_week", math.nan)),
            percent(costs, sign=False),
            f"{figures['turnover_per_day']:.2f}",
        )
    console.print(table)


def percent(value: float, sign: bool = True) -> str:
    """0.1234 as +12.3 %; – where there is no number."""
    if math.isnan(value):
        return "–"
    return f"{100 * value:+,.1f} %" if sign and value else f"{100 * value:,.1f} %"
