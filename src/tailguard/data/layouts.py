"""Tables in other layouts as rows of bars: wide frames with a column for each symbol, and closes without the rest."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
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
"""Names of a bar's fields in words."""
OTHER_FIELDS = {
    *("price", "last", "lastprice", "adjclose", "bid", "ask", "mid"),
    *("size", "amount", "value", "qty", "quantity"),
    *map(column_key, ACCEPTED["symbol"]),
}
"""Names that are rather fields of a table that lacks its closes than symbols."""
MOST_WORDS = 0.1
"""Share of columns with a field's name up to which a table is wide: LOW is a share among the members of an index."""
HIGHEST_PRICE = 1e7
"""Above it a number is a date (20210131) or a time since 1970, below it a price."""


def rows_of_wide(table: pl.DataFrame, source: str) -> pl.DataFrame:
    """A table with a time and one column of closes for each symbol as rows of (time, symbol, close).

    Any other table is returned as it is: one with a column of closes, or of symbols, is not wide. A table whose names
    may be both is an error: the prices of a symbol must not be taken for the volume of another.
    """
    if table.height == 0 or _has_closes(table, {column_key(name) for name in table.columns}):
        return table
    time = _time_of(table)
    if time is None:
        return table
    others = [name for name in table.columns if name != time and not _is_second_time(table, name)]
    prices = {name: read_numbers(table[name]) for name in others}
    words = [name for name in others if column_key(name) in FIELDS or column_key(name) in OTHER_FIELDS]
    letters = [name for name in others if _is_letter(name) and name.islower()]
    rest = [name for name in others if name not in words and name not in letters]
    if not others or any(series.count() == 0 for series in prices.values()):
        return table
    if letters or (words and not _are_symbols(words, rest)):
        if not rest and not letters:
            return table
        doubtful = ", ".join(map(repr, words + letters))
        raise BarsError(
            f"{source}: no column close, and the columns {doubtful} may be fields of a bar or symbols. If every column "
            "is the closes of a symbol, give rows of symbol, time and close instead (melt in pandas, unpivot in "
            "Polars), or add to the names, as in 'OPEN.US'; if not, name the column of closes 'close'"
        )
    long = table.select(time, *prices.values()).unpivot(index=time, variable_name="symbol", value_name="close")
    # A symbol that is not listed yet, or not any more, has no price.
    return long.filter(pl.col("close").is_not_null())


def _has_closes(table: pl.DataFrame, keys: set[str]) -> bool:
    """Whether a column is the closes of its rows: it is called so, or `c` beside o, h and l that are its range."""
    if any(FIELDS.get(key) == "close" for key in keys):
        return True
    symbols = symbol_column(table.columns)
    if symbols is not None and read_numbers(table[symbols]).count() == 0:
        return True
    if not set("ohlc") <= keys:
        return False
    opened, high, low, close = (
        read_numbers(table[next(name for name in table.columns if column_key(name) == key)]) for key in "ohlc"
    )
    inside = (low <= opened) & (low <= close) & (high >= opened) & (high >= close)
    return 2 * int(inside.sum()) >= table.height


def _is_letter(name: str) -> bool:
    return column_key(name) in set("ohlcv")


def _are_symbols(words: Sequence[str], rest: Sequence[str]) -> bool:
    """Whether names that are also those of fields are symbols: in capitals among many others in capitals."""
    return len(words) <= MOST_WORDS * len(rest) and all(name == name.upper() for name in (*words, *rest))


def _time_of(table: pl.DataFrame) -> str | None:
    """The column of the times: the most usual name of those whose values are not prices."""
    named = [name for name in table.columns if is_time_name(name)]
    order = list(map(column_key, ACCEPTED["time"]))
    named.sort(key=lambda name: order.index(column_key(name)))
    return next((name for name in named if not _are_prices(table[name])), None)


def _is_second_time(table: pl.DataFrame, name: str) -> bool:
    return is_time_name(name) and not _are_prices(table[name])


def _are_prices(column: pl.Series) -> bool:
    """Whether a column with the name of times holds prices: T, TS and INDEX are symbols too."""
    if column.dtype.is_temporal():
        return False
    highest = read_numbers(column).max()
    return isinstance(highest, float) and highest < HIGHEST_PRICE


def has_fields(names: Sequence[str]) -> bool:
    """Whether prices or volume of a bar are among the names."""
    return any(column_key(name) in FIELDS for name in names)


def rows_of_levels(columns: Mapping[tuple[str, ...], pl.Series], index: Mapping[str, pl.Series]) -> pl.DataFrame | None:
    """Columns of two levels, (Close, AAPL) or (AAPL, Close), as rows with a column `symbol`; None if they are not."""
    if not all(len(name) == 2 for name in columns):
        return None
    keys = [{column_key(name[place]) for name in columns} for place in (0, 1)]
    shares = [len(names & set(FIELDS)) / len(names) for names in keys]
    if not any(shares):
        return None
    field = 0 if shares[0] >= shares[1] else 1
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
    if date is None or clock is None or table.height == 0:
        return table
    if table[clock].dtype == pl.Time:
        table = table.with_columns(pl.col(clock).dt.to_string("%H:%M:%S"))
    if table[clock].dtype != pl.String:
        return table
    if table[clock].drop_nulls().str.contains(r"^\d{6}$").all():  # 093000
        table = table.with_columns(pl.col(clock).str.replace(r"^(\d\d)(\d\d)(\d\d)$", "$1:$2:$3"))
    if not table[clock].drop_nulls().str.contains(r"^\d{1,2}:\d\d(:\d\d)?$").all():
        return table
    dates = pl.col(date).dt.to_string("%Y-%m-%d") if table[date].dtype.is_temporal() else pl.col(date).cast(pl.String)
    day = dates.str.replace(r"^(\d{4})(\d\d)(\d\d)$", "$1-$2-$3")
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
