"""Small charts of the training, one for each main metric, with alarms."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import plotly.graph_objects as go

from tailguard.evaluate.report.style import BLUE, VERMILLION, figure, label, thin
from tailguard.evaluate.report.training_record import AlarmRaised
from tailguard.monitor.writers import STEP

CURVES = {
    "rollout/ep_pnl_mean": ("profit of an episode, %", 100.0),
    "rollout/ep_rew_mean": ("reward of an episode", 1.0),
    "eval/growth": ("validation: log-growth a year", 1.0),
    "risk/cvar_realised": ("realised CVaR of episodes, %", 100.0),
    "risk/lambda": ("Lagrange multiplier λ", 1.0),
    "risk/calibration": ("distance between predicted and realised returns, 0 to 1", 1.0),
    "train/explained_variance": ("explained variance", 1.0),
    "train/approx_kl": ("approximate KL of an update", 1.0),
    "train/entropy": ("entropy of the policy", 1.0),
    "train/grad_norm": ("gradient norm", 1.0),
    "data/turnover": ("turnover, % of equity a bar", 100.0),
}
"""Metrics shown, with their title and a factor for their unit."""


def training_charts(iterations: Sequence[Mapping[str, float]], alarms: Sequence[AlarmRaised]) -> dict[str, go.Figure]:
    """A chart by title for every recorded metric; an alarm is a dashed line at its first step."""
    charts = {}
    for name, (title, factor) in CURVES.items():
        points = [(line[STEP], factor * line[name]) for line in iterations if name in line and STEP in line]
        values = np.array([point for point in points if np.isfinite(point[1])])
        if len(values) < 2:
            continue
        shown = thin(values[:, 1], 600)
        chart = figure(220)
        chart.add_scatter(
            x=values[shown, 0],
            y=values[shown, 1],
            mode="lines+markers" if len(values) < 40 else "lines",
            line={"color": BLUE, "width": 2},
            marker={"size": 5},
            hovertemplate="%{y:.4g}<extra></extra>",
        )
        for alarm in alarms:
            chart.add_vline(x=alarm.step, line={"color": VERMILLION, "dash": "dash", "width": 1.5})
        chart.update_layout(showlegend=False, margin={"l": 52, "r": 10, "t": 8, "b": 40})
        chart.update_xaxes(title_text="environment steps", nticks=5)
        charts[label(title)] = chart
    return charts
