"""Charts of a disturbed agent: growth, tail and positions under each fault, and against the size of attacks."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import plotly.graph_objects as go
from plotly.subplots import make_subplots

from tailguard.evaluate import metrics
from tailguard.evaluate.report.style import BLUE, DASHES, GREY, PALETTE, VERMILLION, dress, label
from tailguard.evaluate.results_table import growth_column
from tailguard.evaluate.robustness import CLEAN, Disturbed

Figure = Callable[[Disturbed], float]


def fault_chart(cases: Sequence[Disturbed]) -> go.Figure:
    """Bars for every feed below each other: growth, tail and changed positions; the clean agent's as dashed lines."""
    faults = [case for case in cases[1:] if not case.attack]
    chart = _three_rows(cases)
    names = [label(case.name) for case in faults]
    for row, (_, figure) in enumerate(_figures(cases), start=1):
        values = [figure(case) for case in faults]
        broken = [case.budget is not None and case.budget.verdict == "broken" for case in faults]
        colours = [VERMILLION if bad and row == 2 else BLUE for bad in broken]
        chart.add_bar(
            x=names, y=values, marker_color=colours, hovertemplate="%{y:.2f} %<extra></extra>", row=row, col=1
        )
        _mark_clean(chart, figure(cases[0]), row)
    _mark_limit(chart, cases)
    chart.update_layout(showlegend=False, hovermode="closest")
    chart.update_xaxes(tickangle=-35)
    return dress(chart, 640)


def attack_chart(cases: Sequence[Disturbed]) -> go.Figure:
    """Lines for every kind of attack against its size, which begins at the clean agent."""
    attacks = [case for case in cases[1:] if case.attack]
    chart = _three_rows(cases)
    for position, kind in enumerate(dict.fromkeys(case.attack for case in attacks)):
        own = [case for case in attacks if case.attack == kind]
        for row, (_, figure) in enumerate(_figures(cases), start=1):
            chart.add_scatter(
                x=[0.0, *(case.epsilon for case in own)],
                y=[figure(cases[0]), *(figure(case) for case in own)],
                mode="lines+markers",
                name=label(kind),
                legendgroup=kind,
                showlegend=row == 1,
                line={"color": PALETTE[position % len(PALETTE)], "dash": DASHES[position % len(DASHES)], "width": 2},
                hovertemplate="%{y:.2f} %",
                row=row,
                col=1,
            )
    _mark_limit(chart, cases)
    chart.update_xaxes(title_text="ε, standard deviations of a feature", row=3, col=1)
    return dress(chart, 640)


def _three_rows(cases: Sequence[Disturbed]) -> go.Figure:
    chart = make_subplots(rows=3, cols=1, shared_xaxes=True, vertical_spacing=0.06)
    for row, (title, _) in enumerate(_figures(cases), start=1):
        chart.update_yaxes(title_text=title, row=row, col=1)
    return chart


def _figures(cases: Sequence[Disturbed]) -> list[tuple[str, Figure]]:
    """Titles and values of the three charts, in percent."""
    heading, _ = growth_column({CLEAN: cases[0].result})
    metric = "growth_per_year" if heading == "growth/yr" else "total_return"

    def tail(case: Disturbed) -> float:
        if case.budget is not None:
            return 100 * case.budget.cvar.estimate
        week = case.result.metrics.get("cvar_5_week", np.nan)
        return 100 * (week if np.isfinite(week) else metrics.cvar(case.result.net, 0.05))

    return [
        (
            "growth, %" + (" a year" if metric == "growth_per_year" else ""),
            lambda case: 100 * case.result.metrics[metric],
        ),
        ("CVaR, %", tail),
        ("moved, % of equity", lambda case: 100 * case.position_change),
    ]


def _mark_clean(chart: go.Figure, value: float, row: int) -> None:
    if np.isfinite(value):
        chart.add_hline(y=value, line={"color": GREY, "dash": "dash", "width": 1.5}, row=row, col=1)


def _mark_limit(chart: go.Figure, cases: Sequence[Disturbed]) -> None:
    """The budget's limit across the chart of the tail."""
    budget = cases[0].budget
    if budget is not None:
        chart.add_hline(y=100 * budget.limit, line={"color": VERMILLION, "dash": "dot", "width": 2}, row=2, col=1)
