"""The report's tables as data: trades, months and drawdowns, as rows to show and as CSV to work with."""

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
from tailguard.evaluate.formatting import percent
from tailguard.evaluate.metrics import monthly_returns, worst_drawdowns, year_return
from tailguard.evaluate.report.charts import DAY_MS, close_times
from tailguard.evaluate.report.collect import ReportData
from tailguard.evaluate.trades import FLAT, Trade
from tailguard.places import replace_synced

MONTHS = ("Jan", "Feb", "Mar", "Apr", "May", "Jun", "Jul", "Aug", "Sep", "Oct", "Nov", "Dec")
TRADE_HEADINGS = ("entry", "exit", "symbol", "side", "held", "entry price", "exit price", "size", "costs", "net P&L")
TRADE_COLUMNS = (
    "entry_time",
    "exit_time",
    "symbol",
    "side",
    "bars",
    "entry_price",
    "exit_price",
    "size",
    "costs",
    "pnl",
    "return",
)
DRAWDOWN_HEADINGS = ("depth", "from", "trough", "recovered", "days below the high")


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


def trades_csv(trades: Sequence[Trade]) -> str:
    """Every trade, a row each; money in multiples of the starting capital, times in ISO 8601 UTC."""
    return csv_text(
        TRADE_COLUMNS,
        (
            (
                iso(trade.entry_time),
                "" if trade.exit_time is None else iso(trade.exit_time),
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
        ),
    )


def months_csv(result: BacktestResult) -> str:
    """Net returns by month, a row a month."""
    years = monthly_returns(result.time, result.net)
    rows = ((f"{year}-{month:02d}", value) for year, months in years.items() for month, value in months.items())
    return csv_text(("month", "net_return"), rows)


def drawdowns_csv(result: BacktestResult) -> str:
    """Every drawdown, the deepest first."""
    when = close_times(result)
    rows = (
        (
            fall.depth,
            iso(int(when[fall.peak])),
            iso(int(when[fall.trough])),
            "" if fall.recovery is None else iso(int(when[fall.recovery])),
            fall.bars,
        )
        for fall in worst_drawdowns(result.equity, count=len(result.equity))
    )
    return csv_text(("depth", "start", "trough", "recovery", "bars"), rows)


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


def groups_csv(data: ReportData) -> str:
    """Exposures by group, a group a row."""
    headings = (
        *("group", "assets", "mean_weight", "mean_absolute_weight", "largest_absolute_weight"),
        *("time_held", "net_pnl"),
    )
    return csv_text(headings, [astuple(each) for each in groups_of(data.agent, data.trades, data.groups)])


def exposures_csv(result: BacktestResult, trades: Sequence[Trade]) -> str:
    """Exposures by asset, an asset a row."""
    headings = ("symbol", "mean_weight", "mean_absolute_weight", "time_held", "net_pnl")
    return csv_text(headings, exposures_of(result, trades))


def write_tables(data: ReportData, folder: Path, suffix: Literal["csv", "parquet"] = "csv") -> None:
    """The agent's bars, trades, months, drawdowns and exposures by asset, each a file in a folder; where the settings
    name groups, exposures by group too.

    The folder is created if needed.
    """
    own = data.agent
    tables = {
        "bars": own.frame().write_csv(),
        "trades": trades_csv(data.trades),
        "months": months_csv(own),
        "drawdowns": drawdowns_csv(own),
        "exposures": exposures_csv(own, data.trades),
        **({"groups": groups_csv(data)} if data.groups else {}),
    }
    try:
        folder.mkdir(exist_ok=True)
        for name, text in tables.items():
            if suffix == "csv":
                replace_synced(folder / f"{name}.csv", text.encode())
            else:
                typed = own.frame() if name == "bars" else pl.read_csv(io.StringIO(text), try_parse_dates=True)
                write_frame(typed, folder / f"{name}.parquet")
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
