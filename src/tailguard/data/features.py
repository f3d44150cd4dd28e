"""Causal features: one row of numbers for every row of the panel, and a test that none of them leaks the future.

A feature is a function that returns a Polars expression, registered under a name:

    @feature("drawdown_week", warmup=167)
    def drawdown_week() -> pl.Expr:
        return pl.col("close") / pl.col("high").rolling_max(168) - 1
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from functools import cache

import numpy as np
import polars as pl
from numpy.typing import NDArray

from tailguard.data.bars import OPTIONAL, REQUIRED, TIME_TYPE, Accounts, Bars
from tailguard.data.indicators import ratio
from tailguard.data.panel import FeatureTable
from tailguard.data.registry import FEATURES, Feature, FeatureError, feature, find_features
from tailguard.data.session_columns import feature_frame, session_columns
from tailguard.data.universe import Rows, carried_forward
from tailguard.errors import ConfigError

__all__ = [
    "FEATURES",
    "Feature",
    "FeatureError",
    "FeatureTable",
    "Leak",
    "available_features",
    "compute_features",
    "feature",
    "leaking_features",
    "longest_warmup",
    "ratio",
]

Float = NDArray[np.float64]


def available_features(bars: Bars) -> tuple[str, ...]:
    """Names of all registered features whose columns these bars have."""
    columns = {*bars.frame.columns, *session_columns(bars)}
    return tuple(name for name, entry in FEATURES.items() if columns.issuperset(entry.needs))


def longest_warmup(bars: Bars, names: Sequence[str] | None = None) -> int:
    """Bars of history before the first traded bar that define all its features."""
    return max(entry.warmup for entry in _chosen(bars, names))


def compute_features(bars: Bars, names: Sequence[str] | None = None, accounts: Accounts = "portfolio") -> FeatureTable:
    """The features of these bars, aligned with `bars.panel(accounts)`.

    Columns come symbol by symbol in the order of `names`, market-wide ones once at the end. Nothing is filled in: rows
    with a missing value are marked in `valid`, and a missing value after the declared warm-up is an error.

    Args:
        bars: a lead-in of `longest_warmup` bars before the first traded one makes all traded rows valid.
        names: which features; None takes every registered one whose columns the bars have.
        accounts: `portfolio` puts the symbols side by side, `per_symbol` one after the other, as in the panel.
    """
    chosen = _chosen(bars, names)
    table = _evaluate(feature_frame(bars), chosen)
    _check_defined(bars, table, chosen)
    if accounts == "portfolio" and bars.universe is not None:
        return _ragged_table(bars, table, chosen)
    symbols = bars.symbols
    side_by_side = accounts == "portfolio" and len(symbols) > 1
    if side_by_side:
        table = table.filter(bars.frame["time"].is_in(common_times(bars).implode()))
    assets = len(symbols) if side_by_side else 1
    rows = table.height // assets

    columns: list[Float] = []
    labels: list[str] = []
    entries: list[Feature] = []
    local = [entry for entry in chosen if not entry.market_wide]
    shared = [entry for entry in chosen if entry.market_wide]
    for asset in range(assets):
        for entry in local + (shared if asset == assets - 1 else []):
            columns.append(table[entry.name].slice(asset * rows, rows).to_numpy())
            labels.append(f"{entry.name}:{symbols[asset]}" if side_by_side and not entry.market_wide else entry.name)
            entries.append(entry)
    values = np.stack(columns, axis=1)
    definitions = tuple(_fingerprint(entry) for entry in entries)
    valid = np.asarray(np.isfinite(values).all(axis=1))
    return FeatureTable(values, tuple(labels), valid, definitions, market_wide=len(shared))


def _ragged_table(bars: Bars, table: pl.DataFrame, chosen: Sequence[Feature]) -> FeatureTable:
    """Features on the rows of a ragged panel: the last known ones in a halt, NaN where a symbol is not listed."""
    rows = Rows.of(bars)
    local = [entry for entry in chosen if not entry.market_wide]
    shared = [entry for entry in chosen if entry.market_wide]
    wide = {}
    for entry in local:
        values = rows.spread(table[entry.name].to_numpy(), rows.counts)
        wide[entry.name] = np.where(rows.listed, carried_forward(values), np.nan)
    columns = [wide[entry.name][:, asset] for asset in range(len(bars.symbols)) for entry in local]
    for entry in shared:
        # The same for every symbol that has a bar: the first of them.
        values = rows.spread(table[entry.name].to_numpy(), rows.counts)
        place = np.isfinite(values).argmax(axis=1)
        columns.append(np.take_along_axis(values, place[:, None], axis=1)[:, 0])
    labels = [f"{entry.name}:{symbol}" for symbol in bars.symbols for entry in local]
    entries = [*(entry for _ in bars.symbols for entry in local), *shared]
    available = rows.listed & np.all([np.isfinite(values) for values in wide.values()], axis=0) if wide else rows.listed
    values = np.stack(columns, axis=1)
    known = np.isfinite(values[:, len(labels) :]).all(axis=1)
    return FeatureTable(
        values,
        (*labels, *(entry.name for entry in shared)),
        np.asarray(available.any(axis=1) & known),
        tuple(_fingerprint(entry) for entry in entries),
        available,
        len(shared),
    )


def common_times(bars: Bars) -> pl.Series:
    """The times that every symbol has, or any in a ragged universe, sorted."""
    if bars.universe is not None:
        return bars.frame["time"].unique().sort()
    counted = bars.frame.group_by("time").len().filter(pl.col("len") == len(bars.symbols))
    return counted["time"].sort()


@dataclass(frozen=True)
class Leak:
    """A value that changed although only later bars were modified."""

    feature: str
    cut: datetime
    """Bars after this time were changed or removed."""
    symbol: str
    time: datetime
    """Bar whose value changed, at or before the cut."""
    before: float
    after: float

    def __str__(self) -> str:
        return (
            f"feature {self.feature!r} sees the future: {self.symbol} at {self.time:%Y-%m-%d %H:%M} went from "
            f"{self.before:.9g} to {self.after:.9g} when only bars after {self.cut:%Y-%m-%d %H:%M} changed"
        )


def leaking_features(bars: Bars, names: Sequence[str] | None = None, probes: int = 20, seed: int = 0) -> list[Leak]:
    """Find features that look ahead: modify later bars and compare earlier values, bit for bit.

    A probe picks a bar and computes the features twice more: with extreme values in every column of every later bar,
    and without the later bars. No value at or before the picked bar may differ. Returns the first leak of each feature.
    """
    chosen = _chosen(bars, names)
    frame = feature_frame(bars)
    truth = _evaluate(frame, chosen)
    position = pl.int_range(pl.len()).over("segment")
    # A cut inside a warm-up, or with nothing after it in its stretch, would compare nothing.
    telling = (position >= max(entry.warmup for entry in chosen)) & (position < pl.len().over("segment") - 1)
    cuts = frame.filter(telling)["time"].unique().sort()
    if cuts.is_empty():
        needed = max(entry.warmup for entry in chosen) + 2
        raise ConfigError(f"{bars.source}: the look-ahead check needs {needed:,} bars without a gap; there are fewer")
    generator = np.random.default_rng(seed)
    leaks: dict[str, Leak] = {}
    for cut in cuts.gather(generator.integers(len(cuts), size=probes)):
        for future in (_corrupted_after(frame, cut, generator), frame.filter(pl.col("time") <= cut)):
            for leak in _moved(frame, truth, future, _evaluate(future, chosen), cut):
                leaks.setdefault(leak.feature, leak)
    return [leaks[entry.name] for entry in chosen if entry.name in leaks]


def _chosen(bars: Bars, names: Sequence[str] | None) -> tuple[Feature, ...]:
    if isinstance(names, str):
        raise ConfigError(f"names={names!r} must be a list of feature names: [{names!r}]")
    chosen = find_features(available_features(bars) if names is None else names)
    there = {*bars.frame.columns, *session_columns(bars)}
    for entry in chosen:
        for column in entry.needs:
            if column not in there:
                hint = "" if column in OPTIONAL else ". A prepared market keeps no columns beyond those of bars"
                raise ConfigError(
                    f"feature {entry.name!r} needs the column {column!r}, which {bars.source} does not have{hint}"
                )
    return chosen


def _evaluate(frame: pl.DataFrame, chosen: Sequence[Feature]) -> pl.DataFrame:
    """One Float64 column a feature, null during warm-up, aligned with `frame`."""
    position = pl.int_range(pl.len())

    def column(entry: Feature) -> pl.Expr:
        known = pl.when(position >= entry.warmup).then(entry.expression())
        return known.over("segment").cast(pl.Float64).alias(entry.name)

    try:
        return frame.select(column(entry) for entry in chosen)
    except pl.exceptions.PolarsError:
        for entry in chosen:
            try:
                frame.select(column(entry))
            except pl.exceptions.PolarsError as error:
                reason = str(error).strip().splitlines()[0]
                raise FeatureError(f"feature {entry.name!r} cannot be computed: {reason}") from error
        raise


def _check_defined(bars: Bars, table: pl.DataFrame, chosen: Sequence[Feature]) -> None:
    position = bars.frame.select(pl.int_range(pl.len()).over("segment")).to_series()
    for entry in chosen:
        values = table[entry.name]
        undefined = ((position >= entry.warmup) & ~values.is_finite().fill_null(False)).arg_true()
        if undefined.is_empty():
            continue
        row = int(undefined[0])
        symbol, time = bars.frame.select("symbol", "time").row(row)
        empty = [name for name in entry.needs if name in bars.frame.columns and bars.frame[name][row] is None]
        if empty:
            raise FeatureError(
                f"{bars.source}: the column {empty[0]!r}, which feature {entry.name!r} needs, has no value for "
                f"{symbol} at {time:%Y-%m-%d %H:%M}; bars without one: {bars.frame[empty[0]].null_count():,}. Fill the "
                "column, or, where nothing was published by then, give the value before the first publication: "
                "data.published_before, with_published(before=)"
            )
        raise FeatureError(
            f"{bars.source}: feature {entry.name!r} is {values[row]} for {symbol} at {time:%Y-%m-%d %H:%M}, bar "
            f"{position[row] + 1:,} of its stretch, and on {len(undefined):,} bars in all, although its warm-up is "
            f"{entry.warmup}. Raise warmup=, or define the result of a division by zero: ratio(a, b, otherwise=0.0)"
        )


def _corrupted_after(frame: pl.DataFrame, cut: datetime, generator: np.random.Generator) -> pl.DataFrame:
    """The bars with every number after `cut` replaced: prices and sizes off by orders of magnitude, some zero."""
    later = pl.col("time") > cut
    replaced = []
    for name in frame.columns:
        if name in ("symbol", "time", "segment"):
            continue
        values = frame[name].cast(pl.Float64).to_numpy() * np.exp(generator.normal(0.0, 3.0, frame.height))
        if name == "funding_rate":
            values = generator.normal(0.0, 0.01, frame.height)
        elif name not in (*REQUIRED, *OPTIONAL):
            values = values + generator.normal(0.0, 1.0, frame.height)
        elif name not in REQUIRED or name == "volume":
            values = np.where(generator.random(frame.height) < 0.2, 0.0, values)
        wild = pl.lit(pl.Series(name, values)).cast(frame.schema[name])
        replaced.append(pl.when(later).then(wild).otherwise(pl.col(name)).alias(name))
    return frame.with_columns(replaced)


def _moved(
    frame: pl.DataFrame, truth: pl.DataFrame, other_frame: pl.DataFrame, other: pl.DataFrame, cut: datetime
) -> list[Leak]:
    """The first value of each feature, at or before `cut`, whose bits differ between two computations."""
    past, other_past = frame["time"] <= cut, other_frame["time"] <= cut
    rows = past.arg_true()
    leaks = []
    for name in truth.columns:
        before, after = truth[name].filter(past).to_numpy(), other[name].filter(other_past).to_numpy()
        differs = np.flatnonzero(before.view(np.int64) != after.view(np.int64))
        if len(differs):
            at = int(differs[0])
            symbol, time = frame.select("symbol", "time").row(int(rows[at]))
            leaks.append(Leak(name, cut, symbol, time, float(before[at]), float(after[at])))
    return leaks


@cache
def _fingerprint(entry: Feature) -> str:
    """A short hash of the feature's values on fixed reference bars.

    The numbers are hashed rather than the code: rewriting a feature, or a new version of Python or Polars, keeps the
    hash as long as the values stay, and a changed window, helper or constant alters it. They are quantised to a
    millionth of the column's largest value, far above rounding.
    """
    values = _evaluate(_reference_frame(entry.warmup + 256, entry.needs), [entry]).to_series().to_numpy()
    defined = np.isfinite(values)
    known = np.where(defined, values, 0.0)
    peak = float(np.abs(known).max()) or 1.0
    grid = np.rint(known / peak * 1e6).astype(np.int64)
    content = f"{entry.warmup} {peak:.6g} ".encode() + defined.tobytes() + grid.tobytes()
    return hashlib.sha256(content).hexdigest()[:16]


def _reference_frame(count: int, needs: Sequence[str] = ()) -> pl.DataFrame:
    """Bars of an hour with every column, the same on every machine: moving, then flat and empty, then moving.

    Columns among `needs` that bars do not usually have are spread like uniform draws around 0.
    """
    step = np.arange(count, dtype=np.float64)
    # Multiples of irrational numbers modulo one: spread like uniform draws, yet no generator is involved.
    uniform = [np.modf(step * np.sqrt(prime))[0] for prime in (2.0, 3.0, 5.0, 7.0, 11.0, 13.0)]
    moving = ~((step >= count - 96) & (step < count - 64))
    close = 100.0 * np.exp(np.cumsum(0.02 * (uniform[0] - 0.48) * moving))
    before = np.concatenate([[100.0], close[:-1]])
    open_ = before * np.exp(0.002 * (uniform[1] - 0.5) * moving)
    volume = np.exp(3.0 * uniform[4]) * moving
    return pl.DataFrame(
        {
            "symbol": ["REFERENCE"] * count,
            "time": [datetime(2020, 1, 1, tzinfo=UTC) + timedelta(hours=int(hour)) for hour in step],
            "open": open_,
            "high": np.maximum(open_, close) * np.exp(0.01 * uniform[2] * moving),
            "low": np.minimum(open_, close) * np.exp(-0.01 * uniform[3] * moving),
            "close": close,
            "volume": volume,
            "quote_volume": volume * close,
            "trades": np.floor(100.0 * volume),
            "taker_buy_base": volume * uniform[5],
            "taker_buy_quote": volume * close * uniform[5],
            "funding_rate": 1e-4 * (uniform[5] - 0.3),
            "segment": np.zeros(count, dtype=np.int32),
            **{
                name: np.modf(step * np.sqrt(17.0 + place))[0] - 0.5
                for place, name in enumerate(name for name in needs if name not in OPTIONAL)
            },
            # Sessions of seven bars; every fifth follows a weekend.
            "session_start": (step % 7 == 0).astype(np.float64),
            "session_bar": step % 7,
            "closed_hours": np.where(step // 7 % 5 == 0, 65.0, 17.0),
        },
        schema_overrides={"time": TIME_TYPE},
    )
