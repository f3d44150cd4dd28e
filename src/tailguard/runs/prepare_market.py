"""Preparing a market: from files of bars of any size to a folder that training maps, a window at a time."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from tailguard._version import __version__
from tailguard.config import RunConfig
from tailguard.data.bars import REQUIRED
from tailguard.data.disk.arrays import MANIFEST, ArrayWriter, map_array
from tailguard.data.disk.bar_store import BarStore, Times
from tailguard.data.disk.feature_stream import Part, Window, count_rows, stream_features
from tailguard.data.disk.import_bars import ROWS, import_bars
from tailguard.data.disk.order_statistics import streamed_statistics
from tailguard.data.features import longest_warmup
from tailguard.data.prepare import PreparedBars
from tailguard.data.scaling import QUARTILES, Scaler, too_few_rows
from tailguard.data.splits import describe_periods, split_times
from tailguard.data.stored_features import stored
from tailguard.data.windows import Windows, parse_size
from tailguard.envs.prepared_market import (
    BARS,
    PRICES,
    TRAIN,
    PreparedMarket,
    is_prepared_market,
    market_settings,
    open_market,
    panel_of,
    seal,
)
from tailguard.errors import BarsError, ConfigError, RunError
from tailguard.evaluate.trials import hash_of
from tailguard.experiment.build import bound_settings
from tailguard.market.tables import TableStream, check_table, table_columns
from tailguard.places import new_folder, put_in_place, recover, sync_folder, write_synced
from tailguard.runs.checkpoint import prepared_hashes


def prepare_market(
    config: RunConfig,
    out: Path,
    *,
    rows: int = ROWS,
    replace: bool = False,
    say: Callable[[str], None] = lambda _: None,
) -> PreparedMarket:
    """Check the bars of `data.path`, split them, compute features and tables, and write everything to the folder `out`.

    At most about `rows` bars are in memory at a time; validation and test parts are read when a run needs them. The
    folder is renamed into place when it is complete. `replace`: replace an earlier prepared market.
    """
    if config.data.path is None:
        raise ConfigError("data.path: names no bars to prepare; give a file or folder, as --data bars.parquet")
    if is_prepared_market(Path(config.data.path)):
        raise ConfigError(f"data.path: {config.data.path} is a prepared market already")
    if config.data.universe == "ragged":
        raise ConfigError("data.universe: ragged universes are traded from memory only; train on the files themselves")
    if config.data.published is not None:
        raise ConfigError("data.published: a prepared market keeps no columns beyond those of bars; train on the files")
    if config.data.adjust != "none":
        raise ConfigError(
            f"data.adjust: {config.data.adjust!r}: prices are adjusted in memory only; prepare bars that are adjusted"
        )
    recover(out)
    if out.exists() and not (replace and is_prepared_market(out)):
        hint = "replace it with --yes" if is_prepared_market(out) else "choose another name"
        raise ConfigError(f"{out}: already exists; {hint}")
    try:
        with new_folder(out) as partial:
            about, files = _write(config, partial, rows, say)
            write_synced(partial / MANIFEST, seal(about, files))
            for place in (partial / BARS, partial / TRAIN, partial):
                sync_folder(place)
            put_in_place(partial, out)
    except OSError as error:
        raise RunError(
            f"{error.filename or out}: {error.strerror}. No partial output is left; free disk space, or "
            "choose another folder"
        ) from error
    return open_market(out)


def _write(
    config: RunConfig, folder: Path, rows: int, say: Callable[[str], None]
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Write everything but the manifest; returns its content."""
    data = config.data
    scratch = folder / "scratch"
    for place in (folder / BARS, folder / TRAIN, scratch):
        place.mkdir()
    store, bar_files = import_bars(
        str(data.path),
        folder / BARS,
        scratch,
        symbols=data.symbols,
        calendar=data.calendar,
        gaps=data.gaps,
        volume_unit=data.volume_unit,
        rows=rows,
        say=say,
    )
    common = _common_times(store, scratch, rows)
    times = Times(common)
    windows = split_times(
        times,
        store.frequency,
        validation=parse_size(data.validation),
        test=parse_size(data.test),
        embargo=data.embargo,
    )
    parts = _parts(store, common, windows)
    split = describe_periods(
        (name, times[window[0]], times[window[-1]] + store.frequency, len(window))
        for name, window in (("train", windows.train), ("validation", windows.validation), ("test", windows.test))
    )
    say(f"split    {split}")
    train_files, scaler = _write_training(config, store, common, parts[TRAIN], folder / TRAIN, scratch, rows, say)
    shutil.rmtree(scratch)
    say("hashing")
    arrays = {name: map_array(folder / TRAIN / name, entry) for name, entry in train_files.items()}
    panel = panel_of(arrays, store.symbols, store.step)
    training = PreparedBars(panel, arrays["features"], scaler.names, arrays["usable"], scaler)
    about = {
        "tailguard": __version__,
        "source": store.source,
        "symbols": list(store.symbols),
        "frequency_ms": store.step,
        "settings": bound_settings(config),
        "market": market_settings(config.market),
        "accounts": config.env.accounts,
        "split": split,
        "parts": {
            name: {"start": part.start, "first": part.first, "stop": part.stop, "last": part.stop - store.step}
            for name, part in parts.items()
        },
        "scaler": scaler.to_dict(),
        "hashes": prepared_hashes(training),
        "bars": {"sha256": _hash_of_all(store), "rows": sum(len(one.time) for one in store.series)},
    }
    return about, {BARS: bar_files, TRAIN: train_files}


def _hash_of_all(store: BarStore) -> str:
    """The value of `bars_hash` for all bars, without loading them."""
    columns = (one.columns[name] for name in ("time", *REQUIRED) for one in store.series)
    return hash_of(store.symbols, store.frequency.total_seconds(), columns)


def _common_times(store: BarStore, scratch: Path, rows: int) -> NDArray[np.int64]:
    """The times that every symbol has, mapped."""
    if len(store.series) == 1:
        return store.series[0].time
    writer = ArrayWriter(scratch / "common", "<i8")
    for times in store.common_times(rows):
        writer.append(times)
    if not writer.rows:
        raise BarsError(f"{store.source}: the symbols {', '.join(store.symbols)} have no time in common")
    return map_array(writer.path, writer.close())


def _parts(store: BarStore, common: NDArray[np.int64], windows: Windows) -> dict[str, Part]:
    lead_in = longest_warmup(store.sample()) * store.step
    parts = {}
    for name in ("train", "validation", "test"):
        window: range = getattr(windows, name)
        first, last = int(common[window[0]]), int(common[window[-1]])
        parts[name] = Part(first - lead_in, first, last + store.step)
    return parts


def _write_training(
    config: RunConfig,
    store: BarStore,
    common: NDArray[np.int64],
    part: Part,
    folder: Path,
    scratch: Path,
    rows: int,
    say: Callable[[str], None],
) -> tuple[dict[str, Any], Scaler]:
    """The training part's arrays: prices, the market's table, scaled features, and where episodes may start."""
    names, accounts = config.data.features or None, config.env.accounts
    total = count_rows(store, part, accounts, common)
    assets = len(store.series) if accounts == "portfolio" else 1
    funded = "funding_rate" in store.series[0].columns
    types = {"time": "<i8", "segment": "<i4", "tradeable": "|b1", "usable": "|b1"}
    writers = {name: ArrayWriter(folder / name, kind) for name, kind in types.items()}
    for name in PRICES[: 6 if funded else 5]:
        writers[name] = ArrayWriter(folder / name, "<f8", (assets,))
    planes = len(table_columns(config.market))
    writers["table"] = ArrayWriter(folder / "table", "<f4", (assets,), planes=planes, rows=total)
    raw: ArrayWriter | None = None
    stream, stretches = TableStream(config.market), _Stretches()
    window: Window | None = None
    for window in stream_features(store, common, part, names, accounts, rows):
        panel, table = window.panel, window.table
        raw = raw or ArrayWriter(scratch / "raw", "<f8", (len(table.names),))
        columns = stream.extend(panel).astype(np.float32)
        check_table(torch.from_numpy(columns), panel, writers["table"].rows)
        stretches.extend(panel.segment, table.valid, panel.tradeable)
        raw.append(table.values)
        given: dict[str, NDArray[Any]] = {"usable": table.valid, "table": columns}
        for name, writer in writers.items():
            writer.append(given[name] if name in given else getattr(panel, name))
        say(f"features {writers['time'].rows:,} of {total:,} bars")
    if window is None or raw is None:
        raise BarsError(f"{store.source}: no bars in the training part")
    stream.check_volume()
    files = {name: writer.close() for name, writer in writers.items()}
    raw_values = map_array(raw.path, raw.close())
    usable, tradeable = (map_array(folder / name, files[name]) for name in ("usable", "tradeable"))
    say("scaling features")
    scaler = _fit(window, raw_values, usable, tradeable, rows)
    precision = config.data.feature_precision
    scaled = ArrayWriter(folder / "features", "<f4" if precision == "float32" else "<u2", (len(scaler.names),))
    for start in range(0, total, rows):
        scaled.append(stored(scaler.transform(np.array(raw_values[start : start + rows])), precision))
    files["features"] = scaled.close()
    ranges = ArrayWriter(folder / "stretches", "<i8", (2,))
    ranges.append(stretches.ranges())
    files["stretches"] = ranges.close()
    return files, scaler


def _fit(window: Window, values: NDArray[Any], usable: NDArray[Any], tradeable: NDArray[Any], rows: int) -> Scaler:
    """The scaler that `Scaler.fit` gives for these rows; standard deviations to rounding."""

    def blocks() -> Iterator[NDArray[np.float64]]:
        for start in range(0, len(values), rows):
            piece = slice(start, start + rows)
            yield np.array(values[piece])[usable[piece] & tradeable[piece]]

    statistics = streamed_statistics(blocks, QUARTILES)
    if statistics.count < 2:
        raise too_few_rows(statistics.count, int(np.count_nonzero(tradeable)))
    constant = statistics.smallest == statistics.largest
    return Scaler.of_statistics(
        window.table.names, window.table.definitions, statistics.quantiles, statistics.deviation, constant
    )


class _Stretches:
    """Usable, unbroken stretches of rows that come piece by piece."""

    def __init__(self) -> None:
        self._closed: list[tuple[int, int]] = []
        self._open: tuple[int, int, int] | None = None
        """First row for a start, last row and segment of the stretch that the next row may continue."""
        self._rows = 0

    def extend(self, segment: NDArray[Any], usable: NDArray[np.bool_], tradeable: NDArray[np.bool_]) -> None:
        ends = np.flatnonzero((np.diff(segment) != 0) | (np.diff(usable.astype(np.int8)) != 0)) + 1
        for low, high in zip([0, *ends.tolist()], [*ends.tolist(), len(segment)], strict=True):
            if not usable[low]:
                self._close()
                continue
            number, last = int(segment[low]), self._rows + high - 1
            begin = np.flatnonzero(tradeable[low:high])
            first = self._rows + low + int(begin[0]) if begin.size else last + 1
            if self._open is not None and self._open[2] == number:
                before = self._open
                # Rows before the first tradeable one only feed features; nothing may start there.
                self._open = (before[0] if before[0] <= before[1] else first, last, number)
            else:
                self._close()
                self._open = (first, last, number)
        self._rows += len(segment)

    def _close(self) -> None:
        if self._open is not None and self._open[0] <= self._open[1]:
            self._closed.append(self._open[:2])
        self._open = None

    def ranges(self) -> NDArray[np.int64]:
        """First row for a start and last row of each stretch, [S, 2]."""
        self._close()
        return np.array(self._closed, np.int64).reshape(-1, 2)
