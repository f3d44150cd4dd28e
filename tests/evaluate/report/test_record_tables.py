"""The report's tables as data: every number of a CSV file is one of the record's."""

from __future__ import annotations

from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path

import numpy as np
import polars as pl
import pytest

from tailguard.data.sources import load_bars
from tailguard.errors import ConfigError
from tailguard.evaluate import metrics
from tailguard.evaluate.benchmark import compare_with, compare_with_rate
from tailguard.evaluate.report.charts import equity_chart
from tailguard.evaluate.report.collect import ReportData
from tailguard.evaluate.report.record_tables import (
    csv_text,
    drawdown_rows,
    duration,
    groups_of,
    moment,
    month_rows,
    trades_table,
    write_tables,
)
from tailguard.evaluate.report.sections import report_page


def test_the_files_hold_the_record(evidence: ReportData, tmp_path: Path) -> None:
    write_tables(evidence, tmp_path / "data")
    write_tables(evidence, tmp_path / "data")  # replaced, not refused
    own = evidence.agent
    found = {path.name: pl.read_csv(path) for path in (tmp_path / "data").iterdir()}
    assert sorted(found) == ["bars.csv", "drawdowns.csv", "exposures.csv", "months.csv", "trades.csv"]
    exposures = found["exposures.csv"]
    assert exposures["net_pnl"].sum() == pytest.approx(own.equity[-1] - 1, abs=1e-12)
    np.testing.assert_allclose(exposures["mean_absolute_weight"], np.abs(own.weights).mean(0), rtol=1e-12)
    np.testing.assert_allclose(found["bars.csv"]["equity"], own.equity[1:], rtol=1e-12)
    assert found["trades.csv"]["pnl"].sum() == pytest.approx(own.equity[-1] - 1, abs=1e-12)
    assert np.prod(1 + found["months.csv"]["net_return"].to_numpy()) == pytest.approx(own.equity[-1], rel=1e-12)
    assert found["drawdowns.csv"]["depth"].min() == pytest.approx(metrics.max_drawdown(own.equity), rel=1e-12)


def test_the_same_tables_are_written_as_parquet(evidence: ReportData, tmp_path: Path) -> None:
    write_tables(evidence, tmp_path / "data", "parquet")
    found = {path.stem: pl.read_parquet(path) for path in (tmp_path / "data").iterdir()}
    assert sorted(found) == ["bars", "drawdowns", "exposures", "months", "trades"]
    assert found["bars"].equals(evidence.agent.frame())
    assert found["trades"]["pnl"].sum() == pytest.approx(evidence.agent.equity[-1] - 1, abs=1e-12)
    assert found["trades"].schema["entry_time"].is_temporal()


def test_symbols_stay_text_in_parquet(evidence: ReportData, tmp_path: Path) -> None:
    """Numbers for names, and the name of another kind only after more rows than a reader looks at."""
    first, own = evidence.trades[0], evidence.agent
    names = ["000001"] * 150 + ["AAPL"]
    trades = tuple(replace(first, symbol=name, exit_time=None) for name in names)
    data = replace(
        evidence,
        results={"agent": replace(own, symbols=("000001",))},
        trades=trades[:150],
        groups={"007": ("000001",)},
    )
    write_tables(data, tmp_path / "data", "parquet")
    assert pl.read_parquet(tmp_path / "data" / "trades.parquet")["symbol"].to_list() == names[:150]
    assert pl.read_parquet(tmp_path / "data" / "exposures.parquet")["symbol"].to_list() == ["000001"]
    assert pl.read_parquet(tmp_path / "data" / "groups.parquet")["group"].to_list() == ["007"]
    table = trades_table(trades)
    assert table.frame()["symbol"].to_list() == names
    assert table.frame()["exit_time"].null_count() == 151
    entry = datetime.fromtimestamp(first.entry_time / 1000, UTC)
    assert table.frame().schema["entry_time"] == pl.Datetime("ms", "UTC")
    assert table.frame()["entry_time"][0] == entry
    assert table.csv().splitlines()[1].startswith(f"{entry:%Y-%m-%dT%H:%M:%S}Z,,000001,")


def test_a_benchmark_is_a_table_and_a_line_and_its_figures_another(evidence: ReportData, tmp_path: Path) -> None:
    own = evidence.agent
    times = np.datetime64(int(own.time[0]), "ms") + np.arange(len(own.time)) * np.timedelta64(1, "h")
    prices = 100 + np.sin(np.arange(len(own.time)))
    index = load_bars(pl.DataFrame({"time": times, "INDEX<": prices}), calendar="24/7")
    relative = compare_with(own, index, risk_free=0.03)
    data = replace(evidence, relative=relative)
    for suffix, read in (("csv", pl.read_csv), ("parquet", pl.read_parquet)):
        write_tables(data, tmp_path / "data", suffix)  # type: ignore[arg-type]
        series = read(tmp_path / "data" / f"benchmark.{suffix}")  # type: ignore[operator]
        assert series["price"].to_list() == prices.tolist()
        np.testing.assert_allclose(series["benchmark_return"][1:], np.diff(prices) / prices[:-1], atol=1e-15)
        assert series["net"].to_list() == own.net.tolist()
        figures = dict(read(tmp_path / "data" / f"relative.{suffix}").iter_rows())  # type: ignore[operator]
        assert figures["beta"] == pytest.approx(relative.beta, rel=1e-12)
        assert figures["risk_free"] == 0.03
    chart = equity_chart(data.results, beside=data.benchmark_path)
    line = next(trace for trace in chart.data if trace.name == "INDEX&lt; (benchmark)")
    assert line.y[0] == 1
    assert line.y[-1] == pytest.approx(prices[-1] / prices[0], rel=1e-12)
    assert line.x[0] == times[0] + np.timedelta64(1, "h")
    assert "(benchmark)" in report_page(data).html("a run")


def test_over_a_rate_alone_there_are_figures_and_no_series(evidence: ReportData, tmp_path: Path) -> None:
    own = evidence.agent
    data = replace(evidence, relative=compare_with_rate(own, 0.04))
    write_tables(data, tmp_path / "data")
    excess = own.net - (1.04 ** (1 / own.bars_per_year) - 1)
    expected = excess.mean() / excess.std(ddof=1) * np.sqrt(own.bars_per_year)
    figures = dict(pl.read_csv(tmp_path / "data" / "relative.csv").iter_rows())
    assert figures == pytest.approx({"risk_free": 0.04, "own_sharpe": expected}, rel=1e-9)
    assert not (tmp_path / "data" / "benchmark.csv").exists()
    assert f"Sharpe {expected:.2f}" in report_page(data).html("a run")


def test_a_folder_that_cannot_be_made_is_named(evidence: ReportData, tmp_path: Path) -> None:
    (tmp_path / "data").write_text("a file")
    with pytest.raises(ConfigError, match=r"data: cannot be written"):
        write_tables(evidence, tmp_path / "data")


def test_rows_to_read(evidence: ReportData) -> None:
    own = evidence.agent
    worst = drawdown_rows(own)[0]
    assert worst[0] == f"{100 * metrics.max_drawdown(own.equity):+.1f} %"
    total = 1.0
    for _, values in month_rows(own):
        *months, year = values
        assert len(months) == 12
        assert year is not None
        total *= 1 + year
    assert total == pytest.approx(own.equity[-1], rel=1e-12)
    assert moment(1_612_134_000_000) == "2021-01-31 23:00"
    spans = [timedelta(minutes=45), timedelta(hours=7), timedelta(days=3)]
    assert [duration(span) for span in spans] == ["45 min", "7.0 h", "3.0 d"]


def test_exposures_by_group_are_sums_over_their_assets(evidence: ReportData, tmp_path: Path) -> None:
    """Three assets, two of them in a group: worked out by hand; the page and the files have them."""
    weights = np.array([[0.0, 0.0, 0.0], [0.2, -0.1, 0.3], [0.4, -0.3, 0.0], [0.0, 0.0, -0.4]])
    own = replace(evidence.agent, weights=weights, symbols=("A", "B", "C"))
    first = replace(evidence.trades[0], symbol="A", pnl=0.02)
    trades = (first, replace(first, symbol="B", pnl=-0.005), replace(first, symbol="C"))
    groups = {"pair": ("A", "B"), "gone": ("X",)}
    pair, others = groups_of(own, trades, groups)
    assert (pair.name, pair.assets, others.name, others.assets) == ("pair", 2, "others", 1)
    np.testing.assert_allclose(
        (pair.net, pair.gross, pair.largest, pair.held, pair.earned), (0.05, 0.25, 0.7, 0.5, 0.015), rtol=1e-12
    )
    np.testing.assert_allclose((others.net, others.gross, others.held, others.earned), (-0.025, 0.175, 0.5, 0.02))
    symbol = evidence.agent.symbols[0]
    data = replace(evidence, groups={"all <of> them": (symbol,)})
    write_tables(data, tmp_path / "data")
    found = pl.read_csv(tmp_path / "data" / "groups.csv").row(0, named=True)
    assert found["group"] == "all <of> them"
    assert found["mean_absolute_weight"] == pytest.approx(np.abs(evidence.agent.weights).mean(), rel=1e-12)
    page = report_page(data).html("a run")
    assert "exposure by group" in page
    assert "all &lt;of&gt; them" in page
    assert "exposure by group" not in report_page(evidence).html("a run")


def test_text_in_a_csv_file_is_quoted() -> None:
    assert csv_text(("a", "b"), [('x,"y', 1.5)]) == 'a,b\n"x,""y",1.5\n'
