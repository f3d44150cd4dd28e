"""Tables in other layouts as rows of bars: wide frames with a column for each symbol, and closes without the rest."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import polars as pl

from tailguard.data.columns import ACCEPTED, column_key, is_time_name, read_numbers, symbol_column
from tailguard.errors import BarsError

FIELDS = {
    column_key(name): field
    for field in ("open", "high", "low", "close", "volume")
    for name in ACCEPTED[field]
    if len(name) > 1
}
"""Names of a bar's fields; single letters are names of shares too."""
NO_SYMBOLS = {
    *("price", "last", "lastprice", "adjclose", "bid", "ask", "mid"),
    *("size", "amount", "value", "qty", "quantity"),
}
"""Names that are rather fields of a table that lacks its closes than symbols."""


def rows_of_wide(table: pl.DataFrame) -> pl.DataFrame:
    """A table with a time and one column of closes for each symbol as rows of (time, symbol, close).

    Any other table is returned as it is: one with a column of closes, or of symbols, is not wide.
    """
    times = [name for name in table.columns if is_time_name(name)]
    others = [name for name in table.columns if name not in times]
    fields = {column_key(name) for name in ACCEPTED["close"]}
    if len(times) != 1 or not others or symbol_column(table.columns) is not None:
        return table
    if any(column_key(name) in {*fields, *FIELDS, *NO_SYMBOLS} for name in others) or table.height == 0:
        return table
    prices = {name: read_numbers(table[name]) for name in others}
    if any(series.count() == 0 for series in prices.values()):
        return table
    long = table.select(times[0], *prices.values()).unpivot(index=times[0], variable_name="symbol", value_name="close")
    # A symbol that is not listed yet, or not any more, has no price.
    return long.filter(pl.col("close").is_not_null())


def rows_of_levels(columns: Mapping[tuple[str, ...], pl.Series], index: Mapping[str, pl.Series]) -> pl.DataFrame | None:
    """Columns of two levels, (Close, AAPL) or (AAPL, Close), as rows with a column `symbol`; None if they are not."""
    places = [
        place
        for place in (0, 1)
        if all(len(name) == 2 for name in columns) and any(column_key(name[place]) in FIELDS for name in columns)
    ]
    if not places:
        return None
    field = places[0]
    symbols = list(dict.fromkeys(name[1 - field] for name in columns))
    parts = []
    for symbol in symbols:
        own: dict[str, Any] = {name[field]: series for name, series in columns.items() if name[1 - field] == symbol}
        part = pl.DataFrame({**index, **own}).with_columns(symbol=pl.lit(symbol))
        prices = [name for name in own if FIELDS.get(column_key(name)) == "close"]
        parts.append(part.filter(pl.any_horizontal(pl.col(prices).is_not_null())) if prices else part)
    # A symbol that is not listed from the start has missing values, and so numbers of another type.
    return pl.concat(parts, how="diagonal_relaxed")


def with_one_time(table: pl.DataFrame) -> pl.DataFrame:
    """A table with a date in one column and the time of day in another, as MetaTrader and Stooq write it, with both in
    one."""
    keys = {column_key(name): name for name in table.columns}
    date, clock = keys.get("date"), keys.get("time")
    if date is None or clock is None or table.height == 0 or table[clock].dtype != pl.String:
        return table
    if table[clock].drop_nulls().str.contains(r"^\d{6}$").all():  # 093000
        table = table.with_columns(pl.col(clock).str.replace(r"^(\d\d)(\d\d)(\d\d)$", "$1:$2:$3"))
    if not table[clock].drop_nulls().str.contains(r"^\d{1,2}:\d\d(:\d\d)?$").all():
        return table
    day = pl.col(date).cast(pl.String).str.replace(r"^(\d{4})(\d\d)(\d\d)$", "$1-$2-$3")
    return table.with_columns(pl.concat_str(day, pl.lit(" "), pl.col(clock)).alias(date)).drop(clock)


FIXED_POINT = {"rtype", "publisherid"}
"""Columns of a table of Databento, whose prices are whole billionths unless they were converted."""
SMALLEST_FIXED = 1e6
"""A price of a thousandth in billionths."""


def check_prices_scaled(table: pl.DataFrame, close: str, path: str) -> None:
    """Refuse prices in whole billionths: every amount of money that follows from them would be wrong."""
    if not {column_key(name) for name in table.columns} >= FIXED_POINT:
        return
    prices = read_numbers(table[close]).drop_nulls()
    if len(prices) and ((prices >= SMALLEST_FIXED) & (prices == prices.floor())).all():
        raise BarsError(
            f"{path}: the prices are whole numbers like {prices[0]:,.0f}, in billionths as Databento stores them. "
            "Divide open, high, low and close by 1,000,000,000, or export with pretty_px=True (to_df does it)"
        )
