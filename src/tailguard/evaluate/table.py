"""The table a person reads after a run: the agent beside what it has to beat."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from rich.console import Console
from rich.table import Table

from tailguard.evaluate.backtest import BacktestResult


def print_table(results: Mapping[str, BacktestResult], title: str, console: Console) -> None:
    """One row a policy, returns net of all costs; CVaR/wk is the mean of the worst 5 % of weeks."""
    table = Table(box=None, pad_edge=False, header_style="bold")
    table.add_column(title, no_wrap=True)
    for heading in ("growth/yr", "Sharpe", "max fall", "CVaR/wk", "costs/yr", "turnover/d"):
        table.add_column(heading, justify="right", no_wrap=True)
    for name, result in results.items():
        figures = result.metrics
        costs = sum(value for key, value in figures.items() if key.startswith("cost_"))
        table.add_row(
            name,
            growth(figures["growth_per_year"]),
            "–" if math.isnan(figures["sharpe"]) else f"{figures['sharpe']:.2f}",
            percent(figures["max_drawdown"]),
            percent(figures.get("cvar_5_week", math.nan)),
            percent(costs, sign=False),
            f"{figures['turnover_per_day']:.2f}",
        )
    console.print(table)


def print_rows(headings: Sequence[str], rows: Sequence[Sequence[str]], console: Console) -> None:
    """A plain table of texts that are shown as they are: [5.78, 9.31] is no markup."""
    table = Table(box=None, pad_edge=False, header_style="bold")
    for position, heading in enumerate(headings):
        table.add_column(
            heading.replace("[", "\\["), justify="right" if position else "left", no_wrap=position == 0, overflow="fold"
        )
    for row in rows:
        table.add_row(*(cell.replace("[", "\\[") for cell in row))
    console.print(table)


def growth(value: float) -> str:
    """A year's growth in percent; as a multiple of equity where percents stop meaning anything."""
    return f"×{1 + value:,.1f}" if value >= 9.995 else percent(value)


def percent(value: float, sign: bool = True) -> str:
    """0.1234 as +12.3 %; – where there is no number."""
    if math.isnan(value):
        return "–"
    return f"{100 * value:+,.1f} %" if sign and value else f"{100 * value:,.1f} %"
