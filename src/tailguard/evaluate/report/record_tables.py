"""The report's tables as data: trades, months, drawdowns, exposures and a benchmark, as rows to show and files to work
with."""

from __future__ import annotations

import csv
import io
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import astuple, dataclass
from datetime import timedelta
from pathlib import Path
from typing import Literal

import numpy as np
import polars as pl

from tailguard.data.storage import write_frame
from tailguard.errors import ConfigError
from tailguard.evaluate.backtest import BacktestResult
from tailguard.evaluate.benchmark import BenchmarkPath, OverRate, Relative, finite_values
from tailguard.evaluate.formatting import percent
from tailguard.evaluate.metrics import monthly_returns, worst_drawdowns, year_return
from tailguard.evaluate.report.charts import DAY_MS, close_times
from tailguard.evaluate.report.collect import ReportData
from tailguard.evaluate.trades import FLAT, Trade
from tailguard.places import replace_synced

MONTHS = ("Jan", "Feb", "Mar", "Apr", "May", "Jun", "Jul", "Aug", "Sep", "Oct", "Nov", "Dec")
TIME = pl.Datetime("ms", "UTC")
TRADE_HEADINGS = ("entry", "exit", "symbol", "side", "held", "entry price", "exit price", "size", "costs", "net P&L")
TRADE_COLUMNS = {
    "entry_time": TIME,
    "exit_time": TIME,
    "symbol": pl.String(),
    "side": pl.String(),
    "bars": pl.Int64(),
    "entry_price": pl.Float64(),
    "exit_price": pl.Float64(),
    "size": pl.Float64(),
    "costs": pl.Float64(),
    "pnl": pl.Float64(),
    "return": pl.Float64(),
}
DRAWDOWN_HEADINGS = ("depth", "from", "trough", "recovered", "days below the high")


@dataclass(frozen=True)
class RecordTable:
    """A table of the record. Times are milliseconds UTC."""

    columns: Mapping[str, pl.DataType]
    rows: Sequence[Sequence[object]]

    def csv(self) -> str:
        """As text: times in ISO 8601, nothing where there is no value."""
        times = [dtype == TIME for dtype in self.columns.values()]
        return csv_text(
            tuple(self.columns),
            (
                [
                    "" if cell is None else iso(int(str(cell))) if is_time else cell
                    for cell, is_time in zip(row, times, strict=True)
                ]
                for row in self.rows
            ),
        )

    def frame(self) -> pl.DataFrame:
        """With its types, whatever the values look like: a symbol 000001 is no number."""
        counted = {name: pl.Int64() if dtype == TIME else dtype for name, dtype in self.columns.items()}
        table = pl.DataFrame([tuple(row) for row in self.rows], schema=counted, orient="row")
        return table.cast(dict(self.columns))  # type: ignore[arg-type]  # a mapping of names to types


def trade_row(trade: Trade, bar: timedelta) -> tuple[str, ...]:
    """Cells by `TRADE_HEADINGS`; P&L and costs as shares of the starting capital."""
    return (
        moment(trade.entry_time),
        "open" if trade.exit_time is None else moment(trade.exit_time),
        trade.symbol,
        trade.side,
        duration(trade.bars * bar),
        f"{trade.entry_price:,.6g}",
        f"{trade.exit_price:,.6g}",
        percent(trade.size, sign=False),
        f"{100 * trade.costs:.3f} %",
        f"{100 * trade.pnl:+.3f} %",
    )


def drawdown_rows(result: BacktestResult) -> list[tuple[str, ...]]:
    """Cells by `DRAWDOWN_HEADINGS`, the deepest drawdown first."""
    when = close_times(result)
    rows: list[tuple[str, ...]] = []
    for fall in worst_drawdowns(result.equity):
        last = len(when) - 1 if fall.recovery is None else fall.recovery
        begun, trough, end = (int(when[place]) for place in (fall.peak, fall.trough, last))
        recovered = "not yet" if fall.recovery is None else moment(end)
        days = f"{(end - begun) / DAY_MS:,.1f}"
        rows.append((percent(fall.depth), moment(begun), moment(trough), recovered, days))
    return rows


def month_rows(result: BacktestResult) -> list[tuple[str, list[float | None]]]:
    """A year, the net returns of its twelve months (None where nothing was traded), and the year's."""
    years = monthly_returns(result.time, result.net)
    return [
        (str(year), [*(months.get(number) for number in range(1, 13)), year_return(months)])
        for year, months in years.items()
    ]


def trades_table(trades: Sequence[Trade]) -> RecordTable:
    """Every trade, a row each; money in multiples of the starting capital."""
    return RecordTable(
        TRADE_COLUMNS,
        [
            (
                trade.entry_time,
                trade.exit_time,
                trade.symbol,
                trade.side,
                trade.bars,
                trade.entry_price,
                trade.exit_price,
                trade.size,
                trade.costs,
                trade.pnl,
                trade.return_,
            )
            for trade in trades
        ],
    )


def months_table(result: BacktestResult) -> RecordTable:
    """Net returns by month, a row a month."""
    years = monthly_returns(result.time, result.net)
    rows = [(f"{year}-{month:02d}", value) for year, months in years.items() for month, value in months.items()]
    return RecordTable({"month": pl.String(), "net_return": pl.Float64()}, rows)


def drawdowns_table(result: BacktestResult) -> RecordTable:
    """Every drawdown, the deepest first."""
    when = close_times(result)
    rows = [
        (
            fall.depth,
            int(when[fall.peak]),
            int(when[fall.trough]),
            None if fall.recovery is None else int(when[fall.recovery]),
            fall.bars,
        )
        for fall in worst_drawdowns(result.equity, count=len(result.equity))
    ]
    columns = {"depth": pl.Float64(), "start": TIME, "trough": TIME, "recovery": TIME, "bars": pl.Int64()}
    return RecordTable(columns, rows)


def benchmark_table(result: BacktestResult, benchmark: BenchmarkPath) -> RecordTable:
    """The benchmark beside the agent, a bar a row; returns are those of the bar, none for the first."""
    moves = [None, *(benchmark.prices[1:] / benchmark.prices[:-1] - 1).tolist()]
    columns = {"time": TIME, "price": pl.Float64(), "benchmark_return": pl.Float64(), "net": pl.Float64()}
    rows = list(zip(result.time.tolist(), benchmark.prices.tolist(), moves, result.net.tolist(), strict=True))
    return RecordTable(columns, rows)


def relative_table(relative: Relative | OverRate) -> RecordTable:
    """The figures of a comparison with a benchmark or a risk-free rate, a row each."""
    figures = finite_values(relative)
    rows = [(name, value) for name, value in figures.items() if not isinstance(value, str)]
    return RecordTable({"figure": pl.String(), "value": pl.Float64()}, rows)


def exposures_of(result: BacktestResult, trades: Sequence[Trade]) -> list[tuple[str, float, float, float, float]]:
    """Of each asset: mean weight, mean absolute weight, share of bars held, and net P&L in starting capitals."""
    earned = dict.fromkeys(result.symbols, 0.0)
    for trade in trades:
        earned[trade.symbol] += trade.pnl
    weights = result.weights
    means = zip(weights.mean(0), np.abs(weights).mean(0), (np.abs(weights) > FLAT).mean(0), strict=True)
    return [
        (symbol, float(net), float(gross), float(held), earned[symbol])
        for symbol, (net, gross, held) in zip(result.symbols, means, strict=True)
    ]


@dataclass(frozen=True)
class GroupExposure:
    """What a group of assets holds and earns. Weights are shares of equity at the closes."""

    name: str
    assets: int
    net: float
    """Mean sum of its weights."""
    gross: float
    """Mean sum of its absolute weights."""
    largest: float
    """Largest sum of its absolute weights."""
    held: float
    """Share of bars at which it holds anything."""
    earned: float
    """Net P&L in starting capitals."""


def groups_of(
    result: BacktestResult, trades: Sequence[Trade], groups: Mapping[str, Sequence[str]]
) -> list[GroupExposure]:
    """Exposure by group, and of the assets in none as `others`; symbols that are not in the result are left out."""
    grouped = {symbol for members in groups.values() for symbol in members}
    all_groups = {**groups, "others": [symbol for symbol in result.symbols if symbol not in grouped]}
    earned = {symbol: pnl for symbol, *_, pnl in exposures_of(result, trades)}
    found = []
    for name, members in all_groups.items():
        columns = [number for number, symbol in enumerate(result.symbols) if symbol in members]
        if columns:
            weights = result.weights[:, columns]
            gross = np.abs(weights).sum(1)
            found.append(
                GroupExposure(
                    name=name,
                    assets=len(columns),
                    net=float(weights.sum(1).mean()),
                    gross=float(gross.mean()),
                    largest=float(gross.max()),
                    held=float((gross > FLAT).mean()),
                    earned=sum(earned[result.symbols[column]] for column in columns),
                )
            )
    return found


def groups_table(data: ReportData) -> RecordTable:
    """Exposures by group, a group a row."""
    numbers = ("mean_weight", "mean_absolute_weight", "largest_absolute_weight", "time_held", "net_pnl")
    columns = {"group": pl.String(), "assets": pl.Int64(), **{name: pl.Float64() for name in numbers}}
    return RecordTable(columns, [astuple(each) for each in groups_of(data.agent, data.trades, data.groups)])


def exposures_table(result: BacktestResult, trades: Sequence[Trade]) -> RecordTable:
    """Exposures by asset, an asset a row."""
    numbers = ("mean_weight", "mean_absolute_weight", "time_held", "net_pnl")
    columns = {"symbol": pl.String(), **{name: pl.Float64() for name in numbers}}
    return RecordTable(columns, exposures_of(result, trades))


def write_tables(data: ReportData, folder: Path, suffix: Literal["csv", "parquet"] = "csv") -> None:
    """The agent's bars, trades, months, drawdowns and exposures by asset, each a file in a folder; exposures by group
    where the settings name groups; a benchmark beside the agent, and the figures relative to it or to a rate, where
    they were asked for.

    The folder is created if needed.
    """
    own = data.agent
    path = data.benchmark_path
    tables = {
        "trades": trades_table(data.trades),
        "months": months_table(own),
        "drawdowns": drawdowns_table(own),
        "exposures": exposures_table(own, data.trades),
        **({"groups": groups_table(data)} if data.groups else {}),
        **({} if path is None else {"benchmark": benchmark_table(own, path)}),
        **({} if data.relative is None else {"relative": relative_table(data.relative)}),
    }
    try:
        folder.mkdir(exist_ok=True)
        write_frame(own.frame(), folder / f"bars.{suffix}")
        for name, table in tables.items():
            if suffix == "csv":
                replace_synced(folder / f"{name}.csv", table.csv().encode())
            else:
                write_frame(table.frame(), folder / f"{name}.parquet")
    except OSError as error:
        raise ConfigError(f"{error.filename or folder}: cannot be written: {error.strerror}") from error


def csv_text(headings: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    """A table as CSV; numbers keep all their digits."""
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(headings)
    writer.writerows(rows)
    return text.getvalue()


def moment(milliseconds: int) -> str:
    """A time to read, UTC."""
    return iso(milliseconds)[:16].replace("T", " ")


def iso(milliseconds: int) -> str:
    """A time in ISO 8601, UTC."""
    return f"{np.datetime64(milliseconds, 'ms').astype('datetime64[s]')}Z"


def duration(span: timedelta) -> str:
    """How long something lasted, in its largest fitting unit."""
    hours = span.total_seconds() / 3600
    if hours >= 48:
        return f"{hours / 24:,.1f} d"
    return f"{hours:,.1f} h" if hours >= 2 else f"{60 * hours:,.0f} min"
