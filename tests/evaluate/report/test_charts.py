"""Charts show the numbers they are given, thinned without losing an extreme."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from tailguard.evaluate import metrics
from tailguard.evaluate.report import charts
from tailguard.evaluate.report.charts import training_charts
from tailguard.evaluate.report.collect import ReportData
from tailguard.evaluate.report.style import spaced, thin
from tailguard.evaluate.report.training_record import AlarmRaised


def test_thinning_keeps_every_extreme_and_both_ends() -> None:
    values = np.random.default_rng(0).normal(size=50_000)
    values[[12_345, 40_000]] = 9.0, -9.0
    rows = thin(values, 500)
    assert len(rows) <= 502
    assert {0, 12_345, 40_000, len(values) - 1} <= set(rows.tolist())
    assert (np.diff(rows) > 0).all()
    np.testing.assert_array_equal(thin(values[:300], 500), np.arange(300))
    assert spaced(10_001, 101).tolist() == list(range(0, 10_001, 100))


def test_equity_is_shown_from_one_and_in_logarithms_when_it_needs_to_be(evidence: ReportData) -> None:
    chart = charts.equity_chart(evidence.results)
    own = chart.data[0]
    np.testing.assert_allclose(np.asarray(own.y, float), evidence.agent.equity)
    assert own.x[0] == evidence.agent.time[0].astype("datetime64[ms]")
    assert chart.data[1].y[-1] == pytest.approx(100 * metrics.drawdowns(evidence.agent.equity)[-1])
    many = np.geomspace(1, 40, len(evidence.agent.equity))
    for equity, kind in (
        (many, "log"),
        (np.linspace(1, 2, len(many)), "linear"),
        (np.linspace(5, 0, len(many)), "linear"),
    ):
        only = charts.equity_chart({"agent": replace(evidence.agent, equity=equity)})
        assert only.layout.yaxis.type == kind


def test_the_histogram_holds_every_window_and_marks_the_tail(evidence: ReportData) -> None:
    chart = charts.returns_chart(evidence.results, 24, evidence.budget)
    assert np.sum(chart.data[0].y) == pytest.approx(100)
    assert np.sum(chart.data[1].y) == pytest.approx(100)
    marks = {trace.name.split(":")[0]: trace.x[0] for trace in chart.data[2:]}
    windows = metrics.horizon_returns(evidence.agent.equity, 24)
    worst = np.sort(windows)[: int(np.ceil(0.05 * len(windows)))]
    assert marks["CVaR 5 %"] == pytest.approx(100 * worst.mean(), rel=0.05)
    assert marks["limit"] == pytest.approx(-5.0)
    assert "limit" not in {trace.name.split(":")[0] for trace in charts.returns_chart(evidence.results, 24, None).data}


def test_costs_add_up_to_what_was_paid(evidence: ReportData) -> None:
    chart = charts.activity_chart(evidence.agent)
    shown = {trace.name: trace.y[-1] for trace in chart.data[2:]}
    for kind, total in shown.items():
        assert total == pytest.approx(100 * evidence.agent.costs[kind].sum())
    assert set(shown) == {kind for kind, cost in evidence.agent.costs.items() if cost.any()}
    assert np.sum(chart.data[1].y) == pytest.approx(100 * evidence.agent.turnover.sum())


def test_rolling_risk_is_that_of_the_last_thirty_days(evidence: ReportData) -> None:
    result = replace(evidence.agent, net=np.resize(evidence.agent.net, 2_000), time=3_600_000 * np.arange(2_000))
    chart = charts.rolling_chart({"agent": result, "buy & hold": result})
    assert chart is not None
    assert chart.data[0].y[-1] == pytest.approx(100 * result.net[-720:].std(ddof=1) * np.sqrt(24 * 365.25))
    assert chart.data[1].y[0] == pytest.approx(100 * metrics.cvar(result.net[:720], 0.05))
    assert charts.rolling_chart(evidence.results) is None  # a test part of less than thirty days


def test_calibration_is_shown_beside_what_right_predictions_give(evidence: ReportData) -> None:
    found = evidence.calibration
    assert found is not None
    assert np.sum(charts.pit_chart(found).data[0].y) == pytest.approx(100)
    coverage = charts.coverage_chart(found)
    np.testing.assert_allclose(np.asarray(coverage.data[0].y, float), 100 * found.coverage)
    assert list(coverage.data[1].y) == [0, 100]


def test_training_curves_have_their_alarms() -> None:
    lines = [{"time/total_timesteps": 10.0 * step, "train/approx_kl": 0.1 * step} for step in range(5)]
    (chart,) = training_charts(lines, [AlarmRaised("lstm_dead", 20, 1, "")]).values()
    np.testing.assert_allclose(np.asarray(chart.data[0].y, float), [0, 0.1, 0.2, 0.3, 0.4])
    assert [shape.x0 for shape in chart.layout.shapes] == [20]
    assert training_charts(lines[:1], []) == {}
