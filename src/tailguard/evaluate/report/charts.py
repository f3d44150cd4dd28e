"""The charts of a report, each a pure function of a report's data. Every axis has its unit."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import plotly.graph_objects as go
from numpy.typing import NDArray
from plotly.subplots import make_subplots

from tailguard.evaluate import metrics
from tailguard.evaluate.backtest import BacktestResult
from tailguard.evaluate.benchmark import BenchmarkPath
from tailguard.evaluate.bootstrap import Interval
from tailguard.evaluate.budget import BudgetCheck
from tailguard.evaluate.prediction_calibration import Calibration
from tailguard.evaluate.report.style import (
    BENCHMARK,
    BLUE,
    GREY,
    ORANGE,
    PALETTE,
    VERMILLION,
    dress,
    figure,
    label,
    line_of,
    spaced,
    thin,
    times,
)
from tailguard.evaluate.report.training_record import AlarmRaised
from tailguard.evaluate.report.verdict import window_in_words
from tailguard.evaluate.stress import Scenario
from tailguard.monitor.writers import STEP

Float = NDArray[np.float64]

LOG_RATIO = 4.0
"""Highest over lowest equity beyond which equal steps of growth need a logarithmic axis."""
ROLLING_DAYS = 30
TAIL = 0.05
MARKED_TRADES = 300
"""Number of largest trades marked on the price; more would hide it."""
DAY_MS = 86_400_000
TRAINING_CURVES = {
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


def equity_chart(
    results: Mapping[str, BacktestResult],
    falls: Sequence[str] = ("agent", "buy & hold"),
    hidden: Sequence[str] = ("flat",),
    filled: str = "agent",
    beside: BenchmarkPath | None = None,
) -> go.Figure:
    """Equity of each policy and, below, the drawdowns of `falls`, one of them `filled`.

    `beside`: a benchmark over the same bars, 1 at the close of the first.
    """
    chart = make_subplots(rows=2, cols=1, shared_xaxes=True, row_heights=[0.68, 0.32], vertical_spacing=0.05)
    for position, (name, result) in enumerate(results.items()):
        line, when = line_of(name, position), close_times(result)
        visible = "legendonly" if name in hidden else True
        rows = [(1, result.equity)]
        rows += [(2, 100 * metrics.drawdowns(result.equity))] if name in falls else []
        for row, values in rows:
            shown = thin(values)
            chart.add_scatter(
                x=times(when[shown]),
                y=values[shown],
                name=label(name),
                legendgroup=label(name),
                showlegend=row == 1,
                visible=visible,
                line=line,
                fill="tozeroy" if row == 2 and name == filled else None,
                fillcolor="rgba(0, 114, 178, 0.15)",
                hovertemplate="%{y:.3f}" if row == 1 else "%{y:.1f} %",
                row=row,
                col=1,
            )
    curves = [result.equity for result in results.values()]
    if beside is not None:
        when, growth = close_times(next(iter(results.values())))[1:], beside.prices / beside.prices[0]
        curves.append(growth)
        shown = thin(growth)
        chart.add_scatter(
            x=times(when[shown]),
            y=growth[shown],
            name=label(f"{beside.name} (benchmark)"),
            line=line_of(BENCHMARK),
            hovertemplate="%{y:.3f}",
            row=1,
            col=1,
        )
    lowest, highest = min(each.min() for each in curves), max(each.max() for each in curves)
    logarithmic = lowest > 0 and highest / lowest > LOG_RATIO
    title = "equity, start = 1" + (", log scale" if logarithmic else "")
    chart.update_yaxes(title_text=title, type="log" if logarithmic else "linear", row=1, col=1)
    chart.update_yaxes(title_text="drawdown, %", row=2, col=1)
    if logarithmic:
        chart.update_yaxes(dtick="D2" if highest / lowest < 300 else 1, row=1, col=1)
    return dress(chart, 560)


def returns_chart(results: Mapping[str, BacktestResult], horizon: int, budget: BudgetCheck | None) -> go.Figure:
    """Histogram of the agent's returns over windows of `horizon` bars, with VaR, CVaR and the limit.

    Of its maximum drawdowns within the windows where the budget limits drawdowns.
    """
    own, held = results["agent"], results["buy & hold"]
    alpha = TAIL if budget is None else budget.alpha
    falls = budget is not None and budget.outcome == "drawdown"
    outcomes = metrics.horizon_drawdowns if falls else metrics.horizon_returns
    returns, others = (100 * outcomes(result.equity, horizon) for result in (own, held))
    everything = np.concatenate([returns, others])
    low, high = (float(value) for value in np.quantile(everything, (0.001, 0.999)))
    edges = np.linspace(low, high, 61) if high > low else np.linspace(-1.0, 1.0, 61)
    middles = (edges[1:] + edges[:-1]) / 2
    inside = (np.clip(each, edges[0], edges[-1]) for each in (returns, others))
    shares = [100 * np.histogram(each, edges)[0] / len(each) for each in inside]
    chart = figure(380, bargap=0, barmode="overlay")
    chart.add_bar(x=middles, y=shares[0], name="agent", marker_color=BLUE, hovertemplate="%{y:.1f} %")
    step = {"color": ORANGE, "shape": "hvh"}
    chart.add_scatter(x=middles, y=shares[1], name=label("buy & hold"), line=step, hovertemplate="%{y:.1f} %")
    marks = [
        (f"VaR {100 * alpha:g} %", metrics.value_at_risk(returns, alpha), GREY, "dot"),
        (f"CVaR {100 * alpha:g} %", metrics.cvar(returns, alpha), VERMILLION, "solid"),
    ]
    if budget is not None:
        marks.append(("limit", 100 * budget.limit, PALETTE[2], "dash"))
    top = float(max(shares[0].max(), shares[1].max()))
    for name, value, colour, dash in marks:
        # Lines as traces, so they appear in the legend with their values.
        chart.add_scatter(
            x=[value, value],
            y=[0, top],
            mode="lines",
            name=f"{name}: {value:+.1f} %",
            line={"color": colour, "dash": dash, "width": 2.5},
            hoverinfo="skip",
        )
    windows = window_in_words(horizon, own.pace)
    chart.update_xaxes(title_text=f"{'maximum drawdown within' if falls else 'return over'} {windows}, %")
    chart.update_yaxes(title_text="share of windows, %")
    return chart


def rolling_chart(results: Mapping[str, BacktestResult]) -> go.Figure | None:
    """Volatility and CVaR of a bar over the last 30 days; none for a record that is not longer."""
    own = results["agent"]
    window = round(ROLLING_DAYS / own.pace.bar_days)
    if window < 20 or len(own.net) <= window:
        return None
    chart = make_subplots(rows=2, cols=1, shared_xaxes=True, vertical_spacing=0.07)
    for name in ("agent", "buy & hold"):
        result = results[name]
        ends = spaced(len(result.net) - window + 1, 400) + window
        pieces = [result.net[end - window : end] for end in ends]
        volatility = [100 * metrics.volatility(piece, result.bars_per_year) for piece in pieces]
        tail = [100 * metrics.cvar(piece, TAIL) for piece in pieces]
        for row, values in ((1, volatility), (2, tail)):
            chart.add_scatter(
                x=times(close_times(result)[ends]),
                y=values,
                name=label(name),
                legendgroup=name,
                showlegend=row == 1,
                line=line_of(name),
                hovertemplate="%{y:.2f} %",
                row=row,
                col=1,
            )
    chart.update_yaxes(title_text="volatility, % a year", row=1, col=1)
    chart.update_yaxes(title_text="CVaR 5 % of a bar, %", row=2, col=1)
    return dress(chart, 420)


def stress_chart(scenarios: Sequence[Scenario], own: Interval) -> go.Figure:
    """Sharpe ratio under each stress, and the interval of the unstressed one to read the differences by."""
    chart = figure(60 + 44 * len(scenarios))
    names = [label(scenario.name) for scenario in scenarios]
    ratios = [scenario.result.metrics["sharpe"] for scenario in scenarios]
    colours = [VERMILLION if ratio < 0 else BLUE for ratio in ratios]
    chart.add_bar(x=ratios, y=names, orientation="h", marker_color=colours, hovertemplate="%{x:.2f}<extra></extra>")
    if np.isfinite([own.low, own.high]).all():
        chart.add_vrect(x0=own.low, x1=own.high, fillcolor=GREY, opacity=0.2, line_width=0)
    chart.update_yaxes(autorange="reversed")
    chart.update_xaxes(title_text="Sharpe ratio, a year")
    chart.update_layout(hovermode="closest", showlegend=False)
    return chart


def price_chart(result: BacktestResult, prices: Float, asset: int) -> go.Figure:
    """Price of an asset with the largest trades on it, and the position below."""
    when, price, weight = times(close_times(result)[1:]), prices[:, asset], result.weights[:, asset]
    chart = make_subplots(rows=2, cols=1, shared_xaxes=True, row_heights=[0.62, 0.38], vertical_spacing=0.05)
    shown = thin(price)
    chart.add_scatter(
        x=when[shown], y=price[shown], name="price", line={"color": GREY, "width": 1.6}, hovertemplate="%{y:,.6~g}"
    )
    change = np.diff(weight, prepend=0.0)
    largest = np.argsort(-np.abs(change))[:MARKED_TRADES]
    for name, side, symbol, colour in (("bought", 1, "triangle-up", BLUE), ("sold", -1, "triangle-down", ORANGE)):
        rows = np.sort(largest[side * change[largest] > 0.05])
        chart.add_scatter(
            x=when[rows],
            y=price[rows],
            mode="markers",
            name=name,
            marker={"symbol": symbol, "size": 7, "color": colour},
            customdata=100 * change[rows],
            hovertemplate="%{customdata:+.0f} % of equity",
            row=1,
            col=1,
        )
    for name, part, colour in (("long", np.maximum(weight, 0), BLUE), ("short", np.minimum(weight, 0), ORANGE)):
        shown = thin(weight)
        chart.add_scatter(
            x=when[shown],
            y=100 * part[shown],
            name=name,
            fill="tozeroy",
            line={"color": colour, "width": 1.5, "shape": "vh"},
            hovertemplate="%{y:.0f} %",
            row=2,
            col=1,
        )
    chart.update_xaxes(range=[when[0], when[-1]])
    chart.update_yaxes(title_text=f"{label(result.symbols[asset])}, price", row=1, col=1)
    chart.update_yaxes(title_text="position, % of equity", row=2, col=1)
    return dress(chart, 480)


def activity_chart(result: BacktestResult) -> go.Figure:
    """Exposure, turnover a day, and cumulative costs by kind."""
    chart = make_subplots(rows=3, cols=1, shared_xaxes=True, row_heights=[0.3, 0.3, 0.4], vertical_spacing=0.05)
    day = result.time // DAY_MS
    begins = np.flatnonzero(np.diff(day, prepend=day[0] - 1))
    counts = np.diff(begins, append=len(day))
    when = times(day[begins] * DAY_MS)
    gross = np.add.reduceat(np.abs(result.weights).sum(1), begins) / counts
    traded = np.add.reduceat(result.turnover, begins)
    kept = spaced(len(when))
    for row, name, values in ((1, "exposure", gross), (2, "turnover", traded)):
        chart.add_scatter(
            x=when[kept],
            y=100 * values[kept],
            name=name,
            showlegend=False,
            line={"color": BLUE, "width": 1.8},
            fill="tozeroy",
            fillcolor="rgba(0, 114, 178, 0.2)",
            hovertemplate="%{y:.1f} %",
            row=row,
            col=1,
        )
    paid = {kind: np.cumsum(cost) for kind, cost in result.costs.items() if cost.any()}
    rows = spaced(len(result.time))
    for position, (kind, total) in enumerate(paid.items()):
        chart.add_scatter(
            x=times(result.time[rows]),
            y=100 * total[rows],
            name=kind,
            stackgroup="costs" if (total >= 0).all() else None,
            line={"color": PALETTE[position % len(PALETTE)], "width": 1.5},
            hovertemplate="%{y:.2f} %",
            row=3,
            col=1,
        )
    chart.update_yaxes(title_text="exposure, %", row=1, col=1)
    chart.update_yaxes(title_text="turnover, %/day", row=2, col=1)
    chart.update_yaxes(title_text="cumulative costs, %", row=3, col=1)
    return dress(chart, 560)


def pit_chart(calibration: Calibration) -> go.Figure:
    """PIT histogram: ranks of outcomes in their predictions; flat if calibrated."""
    bins = len(calibration.histogram)
    chart = figure(300, bargap=0.05)
    middles = 100 * (np.arange(bins) + 0.5) / bins
    chart.add_bar(
        x=middles, y=100 * calibration.histogram, marker_color=BLUE, hovertemplate="%{y:.1f} %<extra></extra>"
    )
    chart.add_hline(y=100 / bins, line={"color": VERMILLION, "dash": "dash", "width": 2})
    chart.update_layout(showlegend=False)
    chart.update_xaxes(title_text="rank of the outcome in its prediction, %")
    chart.update_yaxes(title_text="share of outcomes, %")
    return chart


def coverage_chart(calibration: Calibration) -> go.Figure:
    """Share of outcomes at or below each predicted quantile; on the diagonal where predictions are right."""
    chart = figure(300)
    chart.add_scatter(
        x=100 * calibration.levels,
        y=100 * calibration.coverage,
        mode="lines+markers",
        line={"color": BLUE, "width": 1.5},
        marker={"size": 5},
        hovertemplate="%{y:.1f} %<extra></extra>",
    )
    chart.add_scatter(
        x=[0, 100], y=[0, 100], mode="lines", line={"color": VERMILLION, "dash": "dash", "width": 2}, hoverinfo="skip"
    )
    chart.update_layout(showlegend=False)
    chart.update_xaxes(title_text="predicted quantile, %")
    chart.update_yaxes(title_text="outcomes at or below it, %")
    return chart


def close_times(result: BacktestResult) -> NDArray[np.int64]:
    """When each point of the equity curve was known: the first open, then every close, milliseconds UTC, [T + 1]."""
    length = round(result.pace.bar_days * DAY_MS)
    if result.sessions is not None and len(result.time) > 1:
        length = int(np.diff(result.time).min())  # from bar to bar of a session
    return np.concatenate([result.time[:1], result.time + length])


def training_charts(iterations: Sequence[Mapping[str, float]], alarms: Sequence[AlarmRaised]) -> dict[str, go.Figure]:
    """A chart by title for every recorded metric; an alarm is a dashed line at its first step."""
    charts = {}
    for name, (title, factor) in TRAINING_CURVES.items():
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
