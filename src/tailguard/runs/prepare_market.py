"""Preparing a market: from files of bars of any size to a folder that training maps, a window at a time."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from dataclasses import asdict, dataclass
from dataclasses import replace as changed
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tailguard._version import __version__
from tailguard.config import RunConfig
from tailguard.data.bars import REQUIRED, held_times
from tailguard.data.calendars import Timetable
from tailguard.data.disk.arrays import MANIFEST, ArrayWriter, map_array, read_rows
from tailguard.data.disk.bar_store import BarStore, Times
from tailguard.data.disk.feature_stream import Part
from tailguard.data.disk.import_bars import ROWS, import_bars
from tailguard.data.disk.stretches import Stretches
from tailguard.data.disk.workers import Workers
from tailguard.data.features import longest_warmup
from tailguard.data.prepare import PreparedBars
from tailguard.data.scaling import Scaler, too_few_rows
from tailguard.data.splits import describe_periods, split_times
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
from tailguard.market.per_symbol import check_known
from tailguard.market.tables import check_traded, table_columns
from tailguard.places import new_folder, put_in_place, recover, sync_folder, write_synced
from tailguard.runs.checkpoint import prepared_hashes
from tailguard.runs.prepare_symbol import (
    PRECISIONS,
    ArrayTask,
    Lane,
    ScalingTask,
    StatisticsTask,
    SymbolColumns,
    SymbolTask,
    find_statistics,
    put_together,
    scale_symbol,
    write_symbol,
)

Say = Callable[[str], None]


def prepare_market(
    config: RunConfig,
    out: Path,
    *,
    rows: int = ROWS,
    jobs: int = 1,
    replace: bool = False,
    say: Say = lambda _: None,
) -> PreparedMarket:
    """Check the bars of `data.path`, split them, compute features and tables, and write everything to the folder `out`.

    `jobs` processes work on a symbol each; the files they write are those of one process, byte for byte. At most about
    `rows` bars are in the memory of each at a time; validation and test parts are read when a run needs them. The
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
        with new_folder(out) as partial, Workers(jobs, config.plugins) as workers:
            about, files = _write(config, partial, rows, workers, say)
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
    config: RunConfig, folder: Path, rows: int, workers: Workers, say: Say
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Write everything but the manifest; returns its content."""
    data = config.data
    scratch = folder / "scratch"
    for place in (folder / BARS, folder / TRAIN, scratch):
        place.mkdir()
    store, timetable, bar_files = import_bars(
        str(data.path),
        folder / BARS,
        scratch,
        symbols=data.symbols,
        calendar=data.calendar,
        gaps=data.gaps,
        volume_unit=data.volume_unit,
        rows=rows,
        workers=workers,
        say=say,
    )
    check_known(config.market, store.symbols, store.source)
    common = store.write_common_times(scratch / "common", rows)
    if not len(common):
        raise BarsError(f"{store.source}: the symbols {', '.join(store.symbols)} have no time in common")
    times = Times(common)
    windows = split_times(
        times,
        store.frequency,
        validation=parse_size(data.validation),
        test=parse_size(data.test),
        embargo=data.embargo,
        sessions=store.sessions,
    )
    parts = _parts(store, common, windows)
    split = describe_periods(
        (name, times[window[0]], times[window[-1]] + store.frequency, len(window))
        for name, window in (("train", windows.train), ("validation", windows.validation), ("test", windows.test))
    )
    say(f"split    {split}")
    training = _Training(config, store, timetable, common, parts[TRAIN], folder / TRAIN, scratch, rows, workers, say)
    train_files, names, scaler = training.write()
    shutil.rmtree(scratch)
    say("hashing")
    arrays = {name: map_array(folder / TRAIN / name, entry) for name, entry in train_files.items()}
    panel = panel_of(arrays, store.symbols, store.step, store.sessions)
    about = {
        "tailguard": __version__,
        "source": store.source,
        "symbols": list(store.symbols),
        "frequency_ms": store.step,
        "sessions": None if store.sessions is None else asdict(store.sessions),
        "settings": bound_settings(config),
        "market": market_settings(config.market),
        "accounts": config.env.accounts,
        "split": split,
        "parts": {
            name: {"start": part.start, "first": part.first, "stop": part.stop, "last": part.stop - store.step}
            for name, part in parts.items()
        },
        "scaler": scaler.to_dict(),
        "columns": list(names),
        "hashes": prepared_hashes(PreparedBars(panel, arrays["features"], names, arrays["usable"], scaler)),
        "bars": {"sha256": _hash_of_all(store), "rows": sum(len(one.time) for one in store.series)},
    }
    return about, {BARS: bar_files, TRAIN: train_files}


def _hash_of_all(store: BarStore) -> str:
    """The value of `bars_hash` for all bars, without loading them."""
    columns = (one.columns[name] for name in ("time", *REQUIRED) for one in store.series)
    return hash_of(store.symbols, store.frequency.total_seconds(), columns)


def _parts(store: BarStore, common: NDArray[np.int64], windows: Windows) -> dict[str, Part]:
    warmup = longest_warmup(store.sample())
    parts = {}
    for name in ("train", "validation", "test"):
        window: range = getattr(windows, name)
        first, last = int(common[window[0]]), int(common[window[-1]])
        parts[name] = Part(store.lead_in(first, warmup), first, last + store.step)
    return parts


@dataclass(frozen=True)
class _Training:
    """The training part, and how its arrays are written: each symbol on its own, then all together."""

    config: RunConfig
    store: BarStore
    timetable: Timetable
    common: NDArray[np.int64]
    """The times that every symbol has."""
    part: Part
    folder: Path
    scratch: Path
    rows: int
    workers: Workers
    say: Say

    def write(self) -> tuple[dict[str, Any], tuple[str, ...], Scaler]:
        """Prices, the market's table, scaled features, and where episodes may start; their entries, the names of the
        features' columns, and their scaling."""
        lanes = self._lanes()
        files = self._write_rows(lanes)
        columns = self._write_symbols(lanes, files)
        silent = [lane for lane, one in zip(lanes, columns, strict=True) if not one.traded]
        if self.portfolio or len(silent) == len(lanes):
            check_traded(self.config.market, [self.store.symbols[lane.index] for lane in silent])
        files |= self._write_usable(lanes, files)
        self.say("scaling features")
        names, definitions, widths = self._columns(columns)
        scaler = self._fit(lanes, columns, names, definitions)
        scalers = self._scalers(scaler, widths)
        tasks = [
            ScalingTask(lane, one, self.config.data.feature_precision, self.rows)
            for lane, one in zip(lanes, scalers, strict=True)
        ]
        for _ in self.workers.map("scaling features", scale_symbol, tasks):
            pass
        self.say("putting the symbols together")
        arrays = self._arrays(lanes, widths)
        for array, entry in zip(arrays, self.workers.map("writing arrays", put_together, arrays), strict=True):
            files[array.target.name] = entry
        if scaler.market_wide is not None:
            listed = self.store.symbols if self.portfolio else ("each",)
            names = (*names, *(f"listed:{symbol}" for symbol in listed))
        return files, names, scaler

    @property
    def portfolio(self) -> bool:
        return self.config.env.accounts == "portfolio"

    @property
    def shared(self) -> bool:
        """Whether a feature is scaled alike for all symbols."""
        return self.config.chosen.network.encoder != "flat"

    def _lanes(self) -> list[Lane]:
        """The rows of each symbol: in a portfolio all of them, else those after the symbol before."""
        lanes: list[Lane] = []
        for index, _ in enumerate(self.store.series):
            count = len(self._times(index))
            first = lanes[-1].first + lanes[-1].count if lanes and not self.portfolio else 0
            lanes.append(Lane(index, first, count, self.scratch / f"{index:05d}"))
        if not any(lane.count for lane in lanes):
            raise BarsError(f"{self.store.source}: no bars in the training part")
        return [lane for lane in lanes if lane.count]

    def _times(self, index: int) -> NDArray[np.int64]:
        times = self.common if self.portfolio else self.store.series[index].time
        low, high = np.searchsorted(times, (self.part.start, self.part.stop))
        return times[low:high]

    def _write_rows(self, lanes: list[Lane]) -> dict[str, Any]:
        """What follows from the times alone: times, segments, what can be traded and for how long a bar is held."""
        closes, step = self.timetable.has_sessions, self.store.step
        types = {"time": "<i8", "segment": "<i4", "tradeable": "|b1"} | ({"held_ms": "<i8"} if closes else {})
        writers = {name: ArrayWriter(self.folder / name, kind) for name, kind in types.items()}
        segment = -1
        for lane in lanes[:1] if self.portfolio else lanes:
            times = self._times(lane.index)
            for start in range(0, len(times), self.rows):
                own = np.array(times[max(0, start - 1) : start + self.rows + 1])
                breaks = self.timetable.breaks(own)
                breaks[0] = start == 0
                after = int(start + self.rows < len(times))
                marks = segment + np.cumsum(breaks)
                rows = slice(min(1, start), len(own) - after)
                values = {"time": own[rows], "segment": marks[rows], "tradeable": own[rows] >= self.part.first}
                if closes:
                    values["held_ms"] = held_times(own, marks.astype(np.int32), step)[rows]
                for name, writer in writers.items():
                    writer.append(values[name])
                segment = int(marks[rows][-1])
        return {name: writer.close() for name, writer in writers.items()}

    def _write_symbols(self, lanes: list[Lane], entries: dict[str, Any]) -> list[SymbolColumns]:
        funded = "funding_rate" in self.store.series[0].columns
        tasks = [
            SymbolTask(
                lane,
                self.store.only(lane.index),
                (self.store.symbols[lane.index],) if self.portfolio else self.store.symbols,
                self.part,
                tuple(self.config.data.features) or None,
                self.config.market,
                self.folder,
                dict(entries),
                PRICES[: 6 if funded else 5],
                self.rows,
            )
            for lane in lanes
        ]
        found: list[SymbolColumns] = []
        for task, columns in zip(tasks, self.workers.map("computing features", write_symbol, tasks), strict=True):
            self.say(f"features {task.store.symbols[0]}, {task.lane.count:,} bars, {len(found) + 1} of {len(tasks)}")
            found.append(columns)
        return found

    def _write_usable(self, lanes: list[Lane], files: dict[str, Any]) -> dict[str, Any]:
        """Rows on which every feature is defined, and the stretches of them."""
        usable, stretches = ArrayWriter(self.folder / "usable", "|b1"), Stretches()
        segment, tradeable = (map_array(self.folder / name, files[name]) for name in ("segment", "tradeable"))
        for group in [lanes] if self.portfolio else [[lane] for lane in lanes]:
            for start in range(0, group[0].count, self.rows):
                count = min(self.rows, group[0].count - start)
                valid = np.ones(count, bool)
                for lane in group:
                    valid &= read_rows(lane.file("valid"), "|b1", start, count)
                rows = slice(group[0].first + start, group[0].first + start + count)
                stretches.extend(segment[rows], valid, np.array(tradeable[rows]))
                usable.append(valid)
        writer = ArrayWriter(self.folder / "stretches", "<i8", (2,))
        writer.append(stretches.ranges())
        return {"usable": usable.close(), "stretches": writer.close()}

    def _columns(self, columns: list[SymbolColumns]) -> tuple[tuple[str, ...], tuple[str, ...], list[int]]:
        """Names and definitions of the features' columns, and how many each lane has: market-wide ones come once."""
        if not self.portfolio:
            return columns[0].names, columns[0].definitions, [len(one.names) for one in columns]
        names: list[str] = []
        definitions: list[str] = []
        widths: list[int] = []
        for place, (one, symbol) in enumerate(zip(columns, self.store.symbols, strict=True)):
            width = len(one.names) - (one.market_wide if place < len(columns) - 1 else 0)
            local = len(one.names) - one.market_wide if len(columns) > 1 else 0
            names += [f"{name}:{symbol}" if at < local else name for at, name in enumerate(one.names[:width])]
            definitions += one.definitions[:width]
            widths.append(width)
        return tuple(names), tuple(definitions), widths

    def _fit(
        self, lanes: list[Lane], columns: list[SymbolColumns], names: tuple[str, ...], definitions: tuple[str, ...]
    ) -> Scaler:
        """The scaler that `Scaler.fit` gives for these rows; standard deviations to rounding."""
        own, market_wide = columns[0].names, columns[0].market_wide
        pooled = self.shared or not self.portfolio
        if pooled:
            # A feature of all symbols is one column; a market-wide one of a portfolio is the last symbol's.
            once = market_wide if self.portfolio else 0
            groups = [
                tuple((lane, place) for lane in (lanes if place < len(own) - once else lanes[-1:]))
                for place in range(len(own))
            ]
            names, definitions = own, columns[0].definitions
            tasks = [StatisticsTask((group,), self.folder, self.rows) for group in groups]
        else:
            counts = [len(one.names) - one.market_wide for one in columns]
            counts[-1] = len(columns[-1].names)
            tasks = [
                StatisticsTask(tuple(((lane, place),) for place in range(count)), self.folder, self.rows)
                for lane, count in zip(lanes, counts, strict=True)
            ]
        found = [one for each in self.workers.map("scaling features", find_statistics, tasks) for one in each]
        if min(one.count for one in found) < 2:
            rows = int(np.count_nonzero(np.fromfile(self.folder / "tradeable", bool)))
            raise too_few_rows(found[0].count, rows)
        scaler = Scaler.of_statistics(
            names,
            definitions,
            np.concatenate([one.quantiles for one in found], axis=1),
            np.concatenate([one.deviation for one in found]),
            np.concatenate([one.smallest == one.largest for one in found]),
        )
        return changed(scaler, market_wide=market_wide) if self.shared else scaler

    def _scalers(self, scaler: Scaler, widths: list[int]) -> list[Scaler]:
        """The part of the scaling that each lane's columns need."""
        first = np.cumsum([0, *widths])
        entries = [
            range(width) if self.shared or not self.portfolio else range(start, start + width)
            for start, width in zip(first[:-1].tolist(), widths, strict=True)
        ]
        return [
            Scaler(
                tuple(scaler.names[entry] for entry in one),
                tuple(scaler.definitions[entry] for entry in one),
                scaler.center[list(one)],
                scaler.scale[list(one)],
                scaler.clip,
            )
            for one in entries
        ]

    def _arrays(self, lanes: list[Lane], widths: list[int]) -> list[ArrayTask]:
        """The arrays that are put together from those of the lanes, the largest first."""
        funded = "funding_rate" in self.store.series[0].columns
        planes = len(table_columns(self.config.market, self.timetable.has_sessions))
        ones = (len(lanes) if self.portfolio else 1) if self.shared else 0
        single = tuple(1 for _ in lanes)

        def task(
            name: str, dtype: str, source: str, wide: tuple[int, ...], planes: int = 1, ones: int = 0
        ) -> ArrayTask:
            return ArrayTask(
                self.folder / name, dtype, source, tuple(lanes), wide, planes, self.portfolio, self.rows, ones
            )

        return [
            task("features", PRECISIONS[self.config.data.feature_precision], "scaled", tuple(widths), 1, ones),
            task("table", "<f4", "table", single, planes),
            *(task(name, "<f8", name, single) for name in PRICES[: 6 if funded else 5]),
        ]
