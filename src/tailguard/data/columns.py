"""Recognise the columns of a file and convert them to times and floats."""

from __future__ import annotations

import re
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from pathlib import Path

import polars as pl

from tailguard.data.bars import REQUIRED, TIME_TYPE
from tailguard.errors import BarsError

ACCEPTED: dict[str, tuple[str, ...]] = {
    "time": (
        *("ts_ms", "open_time", "open_datetime", "timestamp", "timestamp_ms", "datetime", "date", "time", "unix", "ts"),
        *("ts_event", "t"),
        *("index", "", "Unnamed: 0", "__index_level_0__"),
    ),
    "symbol": ("symbol", "ticker", "pair", "instrument", "tic"),
    "open": ("open", "o", "open_price"),
    "high": ("high", "h", "high_price"),
    "low": ("low", "l", "low_price"),
    "close": ("close", "c", "close_price", "close/last"),
    "volume": ("volume", "v", "vol", "base_volume"),
    "quote_volume": ("quote_volume", "quote_asset_volume"),
    "trades": ("trades", "number_of_trades", "trade_count", "count", "num_trades", "bar_count", "transactions", "n"),
    "taker_buy_base": (
        *("taker_buy_base", "taker_buy_base_asset_volume", "taker_buy_base_volume", "taker_buy_volume"),
        "taker_base_asset_volume",
    ),
    "taker_buy_quote": (
        *("taker_buy_quote", "taker_buy_quote_asset_volume", "taker_buy_quote_volume"),
        "taker_quote_asset_volume",
    ),
    "funding_rate": ("funding_rate", "funding"),
}
"""Accepted names of each field, the preferred first. Case, spaces, dots, dashes and underscores do not matter."""

TIME_TYPE_NAIVE = pl.Datetime("ms")

BINANCE_KLINES = (
    *("open_time", "open", "high", "low", "close", "volume", "close_time", "quote_asset_volume", "number_of_trades"),
    *("taker_buy_base_asset_volume", "taker_buy_quote_asset_volume", "ignore"),
)
CCXT_CANDLES = ("timestamp", "open", "high", "low", "close", "volume")
POSITIONAL = {len(names): names for names in (CCXT_CANDLES, BINANCE_KLINES)}
"""Names of the columns of a table that has none, by its width."""

RESERVED = ("file", "row", "unreadable", "context", "segment", "close_time", "ignore", "row index 0", "row index 1")
"""Names that no extra column can have: those of Tailguard's own columns, and the fillers of Binance's klines."""

# Seconds, milliseconds, microseconds, nanoseconds: the smallest count taken for the unit (a day in 1973) and the
# microseconds in one. A range ends where the next begins, so that a count belongs to one unit only.
_EPOCH_UNITS = ((1e8, 1e6), (1e11, 1e3), (1e14, 1.0), (1e17, 1e-3))


@dataclass(frozen=True)
class Recognised:
    """Which column of a table holds which field."""

    fields: dict[str, str]
    """Field to the column that holds it."""
    ignored: tuple[str, ...]
    """Columns that are not bars' fields."""
    filled: tuple[str, ...] = ()
    """Fields that the table need not have: without volume it is 0; with closes only, every price is the close."""


def recognise(columns: Sequence[str], file: str, symbol: str = "") -> Recognised:
    """Find the bars' fields among `columns`; a missing required field is an error that lists the accepted names.

    `symbol`: one of the table's symbols. `Volume BTC` and `Volume USDT` of BTCUSDT are its base and quote volume.
    """
    by_key: dict[str, str] = {}
    for column in columns:
        by_key.setdefault(column_key(column), column)
    fields = {}
    letters = _letters_are_fields(columns)
    for field, names in ACCEPTED.items():
        allowed = [name for name in names if letters or field == "time" or len(name) != 1]
        match = next((by_key[column_key(name)] for name in allowed if column_key(name) in by_key), None)
        if match is not None:
            fields[field] = match
    for field, column in _volumes(columns, symbol).items():
        fields.setdefault(field, column)
    filled = _filled(fields, columns)
    missing = [field for field in ("time", *REQUIRED) if field not in fields and field not in filled]
    if missing:
        wanted = "; ".join(f"{field} (accepted: {', '.join(filter(None, ACCEPTED[field]))})" for field in missing)
        raise BarsError(f"{file}: no column for {wanted}. Columns found: {', '.join(map(column_label, columns))}")
    used = set(fields.values())
    return Recognised(fields, tuple(column for column in columns if column not in used), filled)


def _letters_are_fields(columns: Sequence[str]) -> bool:
    """Whether o, h, l, c and v are prices and volume: all prices are there, or the closes or symbols are named.

    Otherwise they are symbols too: in a table of closes C is Citigroup, and V is Visa.
    """
    keys = {column_key(name) for name in columns}
    named = any(column_key(name) in keys for name in ACCEPTED["close"] if len(name) > 1)
    return set("ohlc") <= keys or named or symbol_column(columns) is not None


def _filled(fields: Collection[str], columns: Sequence[str]) -> tuple[str, ...]:
    """`Recognised.filled`. A column of volume in an unknown unit is no reason to go without."""
    prices = tuple(name for name in ("open", "high", "low") if name not in fields)
    if "close" not in fields or len(prices) not in (0, 3):
        return ()
    some_volume = "volume" in fields or any("vol" in column_key(name) for name in columns)
    return (*prices, *(() if some_volume else ("volume",)))


def _volumes(columns: Sequence[str], symbol: str) -> dict[str, str]:
    """Columns named after the currency they count, where the symbol gives base and quote currency."""
    pair, volumes = column_key(symbol), {}
    for column in columns:
        currency = column_key(column).removeprefix("volume") if column_key(column).startswith("volume") else ""
        if not currency or currency == pair:
            continue
        if pair.startswith(currency):
            volumes["volume"] = column
        elif pair.endswith(currency):
            volumes["quote_volume"] = column
    return volumes


def symbol_column(columns: Sequence[str]) -> str | None:
    """The column that names the symbols, if there is one."""
    names = set(map(column_key, ACCEPTED["symbol"]))
    return next((column for column in columns if column_key(column) in names), None)


def is_time_name(name: str) -> bool:
    """Whether a column of this name holds the times."""
    return column_key(name) in map(column_key, ACCEPTED["time"])


def extra_columns(raw: pl.DataFrame, ignored: Sequence[str]) -> dict[str, pl.Series]:
    """Numeric columns that are not fields of bars, as Float64, for custom features.

    Alternative names of a field and columns without information are left out.
    """
    known = {column_key(name) for names in ACCEPTED.values() for name in names} | set(map(column_key, RESERVED))
    extra = {}
    for column in ignored:
        numbers = read_numbers(raw[column])
        is_numeric = numbers.count() > 0 and numbers.null_count() == raw[column].null_count()
        if is_numeric and column_key(column) not in known:
            extra[column] = numbers
    return extra


def column_label(column: str) -> str:
    """The column's name in a message; a data frame's unnamed index has none."""
    return column or "(unnamed)"


def positional_names(columns: Sequence[str]) -> tuple[str, ...] | None:
    """Names for columns called 0, 1, 2 … (lists saved as a table), with or without a row index before them."""
    named = [column for column in columns if column not in ("", "Unnamed: 0", "__index_level_0__")]
    if named != [str(place) for place in range(len(named))] or len(named) not in POSITIONAL:
        return None
    index = tuple(f"row index {place}" for place in range(len(columns) - len(named)))
    return index + POSITIONAL[len(named)]


def symbol_of(path: Path) -> str:
    """The symbol a file is named after, less time frame and dates: `BTCUSDT-1h-2021-01.csv.gz` → `BTCUSDT`."""
    stem = re.sub(r"(\.csv|\.parquet|\.feather|\.arrow|\.ipc)?(\.gz|\.zip)?$", "", path.name, flags=re.IGNORECASE)
    stem = re.sub(r"(?i)(?<=.)[-_. ]\d+(s|m|min|h|d|w|mo)([-_. ].*)?$", "", stem)
    # Dates begin with a year: a delivery contract such as BTCUSDT_240628 keeps its number.
    return re.sub(r"(?<=.)([-_. ](19|20)\d\d([-_. ]?(0[1-9]|1[0-2])([-_. ]?[0-3]\d)?)?)+$", "", stem)


def read_numbers(column: pl.Series) -> pl.Series:
    """`column` as Float64; text that is not a number becomes null."""
    if isinstance(column.dtype, (pl.String, pl.Categorical, pl.Enum)):
        text = column.cast(pl.String).str.strip_chars()
        numbers = text.cast(pl.Float64, strict=False)
        if numbers.null_count() == column.null_count():
            return numbers
        # Prices like $1,234.50. A comma of 46,800 alone may be a decimal one.
        money = text.str.replace(r"^\$ ?", "")
        grouped = money.str.contains(r"^\d{1,3}(,\d{3})+\.\d+$|^\d{1,3}(,\d{3}){2,}$")
        grouped |= text.str.contains(r"^\$ ?\d{1,3}(,\d{3})+$")
        plain = pl.select(pl.when(grouped).then(money.str.replace_all(",", "")).otherwise(money)).to_series()
        return plain.cast(pl.Float64, strict=False).rename(column.name)
    if column.dtype.is_numeric() or column.dtype == pl.Null:
        return column.cast(pl.Float64)
    return pl.Series(column.name, [None] * len(column), dtype=pl.Float64)


def read_times(column: pl.Series) -> pl.Series:
    """`column` as UTC milliseconds; unreadable values, and those finer than a millisecond, become null.

    Numbers count from 1970 in a unit inferred from their size (s, ms, µs or ns; one unit per file). Text is ISO 8601,
    or dates like 1/31/1999 or 31.1.1999 where the days show which number is the month. Times without a zone are UTC.
    """
    dtype = column.dtype
    if dtype.is_integer() or isinstance(dtype, (pl.String, pl.Categorical, pl.Enum)):
        # 20210131 is a date, as Stooq and Interactive Brokers write it, and no count of anything since 1970.
        compact = column.cast(pl.String).str.strip_chars()
        if compact.count() and compact.drop_nulls().str.contains(r"^(19|20)\d\d(0[1-9]|1[0-2])[0-3]\d$").all():
            return compact.str.to_date("%Y%m%d", strict=False).cast(TIME_TYPE_NAIVE).dt.replace_time_zone("UTC")
    if isinstance(dtype, (pl.String, pl.Categorical, pl.Enum)):
        text = column.cast(pl.String).str.strip_chars()
        numbers = text.cast(pl.Float64, strict=False)
        times = _from_epoch(numbers) if 2 * numbers.count() > len(text) else _from_text(text)
    elif dtype.is_numeric():
        times = _from_epoch(column.cast(pl.Float64))
    elif dtype == pl.Date:
        times = column.cast(pl.Datetime("us"))
    elif isinstance(dtype, pl.Datetime):
        times = column.cast(pl.Datetime("us", dtype.time_zone))
    else:
        times = _unreadable_times(column)
    utc = times.dt.convert_time_zone("UTC")
    finer = utc.to_physical() % 1_000 != 0
    return utc.set(finer, None).cast(TIME_TYPE)


def column_key(name: str) -> str:
    """A column's name without case, spaces and punctuation."""
    return re.sub(r"[^a-z0-9]", "", name.lower())


def _unreadable_times(column: pl.Series) -> pl.Series:
    return pl.Series(column.name, [None] * len(column), dtype=pl.Datetime("us"))


def _from_epoch(numbers: pl.Series) -> pl.Series:
    """Times from counts since 1970; the median decides the unit, and counts of another unit become null."""
    middle = numbers.median()
    for lowest, microseconds in _EPOCH_UNITS:
        if isinstance(middle, float) and lowest <= middle < 1_000 * lowest:
            inside = (numbers >= lowest) & (numbers < 1_000 * lowest)
            counts = (numbers.set(~inside, None) * microseconds).round()
            return counts.cast(pl.Int64).cast(pl.Datetime("us"))
    return _unreadable_times(numbers)


def _from_text(text: pl.Series) -> pl.Series:
    """Times from ISO 8601 text, `T` or a space between date and time, with or without a zone, all rows alike."""
    text = text.str.replace(r"^(\d{4})[./](\d\d)[./](\d\d)", "${1}-${2}-${3}")
    tidy = text.str.replace(r"^(\d{4}-\d\d-\d\d) +", "${1}T").str.replace(r" *(Z|UTC)$", "+00:00")
    iso = r"^\d{4}-\d\d-\d\d(T\d\d:\d\d(:\d\d(\.\d+)?)?)?([+-]\d\d:?\d\d)?$"
    example = tidy.filter(tidy.str.contains(iso)).first() if tidy.count() else None
    shape = re.match(iso, example) if isinstance(example, str) else None
    if shape is None:
        return _from_dates(text)
    clock, seconds, _, zone = shape.groups()
    if not clock:
        return tidy.str.to_date("%Y-%m-%d", strict=False).cast(pl.Datetime("us"))
    layout = "%Y-%m-%dT%H:%M" + (":%S%.f" if seconds else "") + ("%#z" if zone else "")
    return tidy.str.to_datetime(layout, time_unit="us", strict=False)


def _from_dates(text: pl.Series) -> pl.Series:
    """Times from dates with the year last: month first if some second number is above 12, day first if some first is.

    A column that can be read both ways is an error: a year of daily bars would be read in a wrong order.
    """
    layout = r"^(\d{1,2})[/.](\d{1,2})[/.](\d{4})(?:[ T]+(\d{1,2}:\d\d)(:\d\d)?( ?[AaPp][Mm])?)?$"
    dates = text.filter(text.str.contains(layout))
    if dates.is_empty():
        return _unreadable_times(text)
    one, two = (dates.str.extract(layout, group).cast(pl.Int64).max() for group in (1, 2))
    assert isinstance(one, int)
    assert isinstance(two, int)
    if max(one, two) <= 12:
        raise BarsError(
            f"column {column_label(text.name)!r}: {dates[0]!r} is ambiguous (month/day or day/month), and so are all "
            "the others; write ISO dates like 1999-01-31"
        )
    order = "%m/%d/%Y" if two > 12 else "%d/%m/%Y"
    example = re.match(layout, dates[0])
    assert example is not None
    _, _, _, clock, seconds, half = example.groups()
    tidy = (
        text.str.replace_all(r"^(\d)[/.]", "0${1}/").str.replace(r"[/.](\d)[/.]", "/0${1}/").str.replace_all(r"\.", "/")
    )
    if not clock:
        return tidy.str.to_date(order, strict=False).cast(pl.Datetime("us"))
    tidy = tidy.str.replace(r"[ T]+(\d):", " 0${1}:").str.replace(r"[ T]+(\d\d):", " ${1}:")
    tidy = tidy.str.replace(r" ?([AaPp][Mm])$", " ${1}")
    time = ("%I:%M" if half else "%H:%M") + (":%S" if seconds else "") + (" %p" if half else "")
    return tidy.str.to_datetime(f"{order} {time}", time_unit="us", strict=False)
