"""A prepared market: a folder of memory-mapped arrays, so bars may be larger than memory.

`tailguard data prepare` writes it (`runs/prepare_market.py`). `market.json` holds its settings, and type, shape and
SHA-256 of every file. Opening it reads only that manifest and the files' sizes: a page of bars is loaded when an
episode reaches it.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from datetime import UTC, datetime, timedelta
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, get_args

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from tailguard.data.disk.arrays import MANIFEST, map_array, verify_array
from tailguard.data.pace import Pace
from tailguard.data.panel import Panel
from tailguard.data.prepare import PreparedBars
from tailguard.data.scaling import Scaler
from tailguard.errors import BarsError, ConfigError
from tailguard.market import MarketConfig
from tailguard.market.tables import TABLE_SETTINGS, Market, as_tensor, market_of_table, table_columns
from tailguard.places import recover

if TYPE_CHECKING:
    from tailguard.data.bars import Accounts, Bars
    from tailguard.data.disk.bar_store import BarStore

BARS = "bars"
TRAIN: Literal["train"] = "train"
FORMAT = 2
READABLE = (1, 2)
"""Formats that can be opened; the first one knew no markets that close."""
LARGEST_MANIFEST = 16 * 2**20
LATEST_MS = 253_402_300_800_000
"""The year 10,000 in milliseconds: no time of a bar is beyond it."""
PRICES = ("open", "high", "low", "close", "volume", "funding")
PartName = Literal["train", "validation", "test"]


@dataclass(frozen=True, kw_only=True)
class MappedBars(PreparedBars):
    """Training bars on disk, with the precomputed table of the market."""

    table: NDArray[np.float32]
    """[K, R, A], as `Market.table`."""
    stretches: NDArray[np.int64]
    """First row on which an episode may start and last row of each usable, unbroken stretch, [S, 2]."""
    config: MarketConfig
    """The settings that the table was computed with."""
    accounts: Accounts
    hashes: Mapping[str, str]
    """SHA-256 of bars and features, for checkpoints."""
    folder: Path
    period: tuple[datetime, datetime]
    """Open times of the first tradeable bar and of the last."""

    @property
    def start(self) -> datetime:
        return self.period[0]

    @property
    def end_points(self) -> tuple[datetime, datetime]:
        return self.period

    @property
    def frequency(self) -> timedelta:
        return timedelta(milliseconds=self.panel.frequency_ms)

    def market(self, config: MarketConfig | None, device: torch.device, dtype: torch.dtype) -> Market:
        """The market as a simulator reads it; settings that the table depends on must be those it was computed with."""
        config = config or self.config
        for name in TABLE_SETTINGS:
            check_same_setting(self.folder, f"market.{name}", getattr(self.config, name), getattr(config, name))
        if dtype != torch.float32:
            raise ConfigError(f"dtype: {dtype} is requested; the prepared market {self.folder} holds float32")
        return market_of_table(self.panel, as_tensor(self.table).to(device), config)

    def starts(self, episode_length: int) -> RowRanges:
        """Rows from which a whole episode can run, in rising order."""
        begin = as_tensor(self.stretches[:, 0]).clone()
        count = (as_tensor(self.stretches[:, 1]) - episode_length - begin + 1).clamp(min=0)
        return RowRanges(begin[count > 0], count[count > 0])


class RowRanges:
    """The rows begin[k], begin[k] + 1, …, count[k] of them, for k = 0, 1, …: a tensor of rows without storage."""

    def __init__(self, begin: Tensor, count: Tensor) -> None:
        self._begin = begin
        self._stop = count.cumsum(0)
        self._offset = begin - (self._stop - count)

    @property
    def shape(self) -> tuple[int]:
        return (int(self._stop[-1]) if self._stop.numel() else 0,)

    def numel(self) -> int:
        return self.shape[0]

    def to(self, device: torch.device) -> RowRanges:
        moved = RowRanges.__new__(RowRanges)
        moved._begin, moved._stop, moved._offset = (
            tensor.to(device) for tensor in (self._begin, self._stop, self._offset)
        )
        return moved

    def ranges(self) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """begin and count, [K] each."""
        count = torch.diff(self._stop, prepend=self._stop.new_zeros(1))
        return (self._offset + self._stop - count).cpu().numpy(), count.cpu().numpy()

    def index_select(self, dim: int, index: Tensor) -> Tensor:  # noqa: ARG002 (a tensor's signature; there is one dim)
        """The rows at these positions, [N]."""
        return self._offset[torch.searchsorted(self._stop, index, right=True)] + index


def check_same_setting(folder: Path, name: str, there: Any, here: Any) -> None:
    """Refuse a setting that differs from that of the prepared market."""
    if there != here:
        raise ConfigError(
            f"{name}: {here!r} is requested; the market in {folder} was prepared with {there!r}. Use that, or prepare "
            "the bars again: tailguard data prepare"
        )


@dataclass(frozen=True)
class PreparedMarket:
    """A prepared market, opened: training bars mapped, the other parts read on demand."""

    folder: Path
    manifest: Mapping[str, Any]

    @cached_property
    def train(self) -> MappedBars:
        """The training part."""
        about, files, place = self.manifest["about"], self.manifest["files"], self.folder / TRAIN
        arrays = {name: map_array(place / name, entry) for name, entry in files[TRAIN].items()}
        try:
            panel = panel_of(arrays, about["symbols"], int(about["frequency_ms"]), self.sessions)
            scaler = Scaler.from_dict(about["scaler"])
            columns = about.get("columns", scaler.names)
            if not isinstance(columns, list | tuple) or not all(isinstance(name, str) for name in columns):
                raise TypeError("columns must be names")
            mapped = MappedBars(
                panel=panel,
                features=arrays["features"],
                names=tuple(columns),
                usable=arrays["usable"],
                scaler=scaler,
                table=arrays["table"],
                stretches=arrays["stretches"],
                config=MarketConfig(**about["market"]),
                accounts=about["accounts"],
                hashes=dict(about["hashes"]),
                folder=self.folder,
                period=self._period(TRAIN),
            )
        except (KeyError, TypeError, ValueError) as error:
            raise BarsError(f"{self.folder / MANIFEST}: not the description of a market: {error!r}") from error
        _check_shapes(self.folder, mapped)
        return mapped

    @cached_property
    def validation(self) -> Bars:
        """The validation part, in memory."""
        return self.bars("validation")

    @cached_property
    def test(self) -> Bars:
        """The test part, in memory."""
        return self.bars("test")

    def bars(self, part: PartName) -> Bars:
        """A part's bars, read into memory."""
        place = self.manifest["about"]["parts"][part]
        return self.store.bars(place["start"], place["stop"], place["first"])

    @cached_property
    def store(self) -> BarStore:
        """All bars, mapped."""
        from tailguard.data.disk.bar_store import BarStore  # Polars is not needed to train

        about = self.manifest["about"]
        frequency = timedelta(milliseconds=about["frequency_ms"])
        files = self.manifest["files"][BARS]
        return BarStore.open(self.folder / BARS, about["symbols"], files, frequency, str(self.folder), self.sessions)

    @cached_property
    def sessions(self) -> Pace | None:
        """Bars of a day, a week and a year where the market closes; None: it trades around the clock."""
        given = self.manifest["about"].get("sessions")
        try:
            return None if given is None else Pace.from_dict(given)
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            raise BarsError(f"{self.folder / MANIFEST}: sessions: {given!r}: {error!r}") from error

    @property
    def pace(self) -> Pace:
        """Bars of a day, a week and a year."""
        return self.sessions or Pace.of_frequency(int(self.manifest["about"]["frequency_ms"]))

    @property
    def settings(self) -> Mapping[str, Any]:
        """Settings of the run that it was prepared for, by their names."""
        settings: Mapping[str, Any] = self.manifest["about"]["settings"]
        return settings

    @property
    def source(self) -> str:
        return str(self.folder)

    @property
    def symbols(self) -> tuple[str, ...]:
        return tuple(self.manifest["about"]["symbols"])

    @property
    def end_points(self) -> tuple[datetime, datetime]:
        """Open times of the first bar to learn from and of the very last."""
        return self._period("train")[0], self._period("test")[1]

    def __len__(self) -> int:
        """Number of bars, over all symbols."""
        return int(self.manifest["about"]["bars"]["rows"])

    @property
    def sha256(self) -> str:
        """Of all bars; the same as of these bars in memory."""
        return str(self.manifest["about"]["bars"]["sha256"])

    def describe(self) -> str:
        """The split in one line."""
        return str(self.manifest["about"]["split"])

    def verify(self) -> None:
        """Raise `BarsError` unless every byte is as it was written; reads everything."""
        for place, entries in self.manifest["files"].items():
            for name, entry in entries.items():
                verify_array(self.folder / place / name, entry)

    def _period(self, part: PartName) -> tuple[datetime, datetime]:
        place = self.manifest["about"]["parts"][part]
        first, last = (datetime.fromtimestamp(ms / 1000, UTC) for ms in (place["first"], place["last"]))
        return first, last


def panel_of(
    arrays: Mapping[str, NDArray[Any]], symbols: Sequence[str], frequency_ms: int, sessions: Pace | None
) -> Panel:
    """The panel of these arrays by name."""
    prices: dict[str, Any] = {name: arrays[name] for name in PRICES if name in arrays}
    return Panel(
        time=arrays["time"],
        segment=arrays["segment"],
        tradeable=arrays["tradeable"],
        symbols=tuple(symbols),
        frequency_ms=frequency_ms,
        sessions=sessions,
        held_ms=arrays.get("held_ms"),
        **prices,
    )


def is_prepared_market(path: Path) -> bool:
    """Whether this is the folder of a prepared market; one that a killed process left aside is restored first."""
    if not path.exists():
        recover(path)
    return (path / MANIFEST).is_file()


def open_market(path: str | Path) -> PreparedMarket:
    """Open a prepared market; reads its manifest only."""
    folder = Path(path)
    if not is_prepared_market(folder):
        raise BarsError(f"{folder}: no prepared market here: {MANIFEST} is missing. Make one: tailguard data prepare")
    where = folder / MANIFEST
    if where.is_symlink() or where.stat().st_size > LARGEST_MANIFEST:
        raise BarsError(f"{where}: a link, or larger than {LARGEST_MANIFEST:,} bytes")
    try:
        manifest = json.loads(where.read_bytes())
    except (ValueError, RecursionError) as error:
        raise BarsError(f"{where}: not readable as JSON: {error}") from error
    version = manifest.get("format") if isinstance(manifest, dict) else None
    if version not in READABLE or isinstance(version, bool):
        known = " and ".join(map(str, READABLE))
        raise BarsError(f"{where}: format {version!r}; this version of Tailguard reads formats {known}")
    if manifest.pop("sha256", None) != digest_of(manifest):
        raise BarsError(f"{where}: its content does not match its own SHA-256; the file has been changed")
    _check_described(where, manifest)
    for place in (BARS, TRAIN):
        names = manifest["files"][place]
        if any(Path(name).name != name or name in (".", "..") for name in names):
            raise BarsError(f"{where}: names files outside the folder")
        if (folder / place).is_symlink():
            raise BarsError(f"{folder / place}: a symbolic link; links are not followed")
    return PreparedMarket(folder, manifest)


def _check_described(where: Path, manifest: Mapping[str, Any]) -> None:
    """Refuse a manifest whose tables, numbers or texts have other types than `seal` writes."""

    def at(*path: str) -> Any:
        value: Any = manifest
        for name in path:
            value = value.get(name) if isinstance(value, dict) else None
        return value

    ends = ("start", "first", "stop", "last")
    moments = [("about", "parts", part, end) for part in get_args(PartName) for end in ends]
    sizes = [("about", "frequency_ms"), ("about", "bars", "rows")]
    wrong: list[tuple[str, ...]] = [
        path for path in (*moments, *sizes) if type(at(*path)) is not int or abs(at(*path)) > LATEST_MS
    ]
    wrong += [path for path in sizes if path not in wrong and at(*path) < 1]
    tables = [("about", name) for name in ("settings", "market", "scaler", "hashes")]
    files = [("files", place) for place in (BARS, TRAIN)]
    entries = [(*path, name) for path in files for name in (at(*path) if isinstance(at(*path), dict) else ())]
    wrong += [path for path in (*tables, *files, *entries) if not isinstance(at(*path), dict)]
    symbols = at("about", "symbols")
    if not isinstance(symbols, list) or not symbols or not all(isinstance(symbol, str) for symbol in symbols):
        wrong.append(("about", "symbols"))
    if not wrong:  # each part has bars, and its lead-in is before them
        parts = [("about", "parts", part) for part in get_args(PartName)]
        wrong += [path for path in parts if not at(*path, "start") <= at(*path, "first") <= at(*path, "last")]
        wrong += [path for path in parts if not at(*path, "last") < at(*path, "stop")]
    if wrong:
        path = wrong[0]
        raise BarsError(f"{where}: not the description of a market: {'.'.join(path)} is {str(at(*path))[:80]!r}")


def seal(about: Mapping[str, Any], files: Mapping[str, Mapping[str, Any]]) -> bytes:
    """The manifest's text."""
    manifest = {"format": FORMAT, "about": dict(about), "files": {place: dict(one) for place, one in files.items()}}
    return (json.dumps(manifest | {"sha256": digest_of(manifest)}, indent=1) + "\n").encode()


def digest_of(content: Any) -> str:
    """SHA-256 of a JSON value."""
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


def market_settings(config: MarketConfig) -> dict[str, Any]:
    """The settings that the table depends on, at their names; the others at their defaults, since they may change."""
    kept = {name: getattr(config, name) for name in TABLE_SETTINGS}
    settings = asdict(replace(MarketConfig(leverage=1.0), **kept))
    # The market must open where other costs are registered, or none.
    del settings["extra_costs"]
    return settings


def _check_shapes(folder: Path, mapped: MappedBars) -> None:
    """A row number must be inside every array: a table that is too short would be read beyond its end."""
    rows, assets, held = mapped.panel.rows, mapped.panel.assets, mapped.panel.held_ms
    if (held is None) != (mapped.panel.sessions is None):
        raise BarsError(f"{folder / TRAIN}: held_ms, which a market with sessions has, and no other")
    expected = {
        "features": (mapped.features.shape, (rows, len(mapped.names))),
        "table": (mapped.table.shape, (len(table_columns(mapped.config, held is not None)), rows, assets)),
        "usable": (mapped.usable.shape, (rows,)),
        "segment": (mapped.panel.segment.shape, (rows,)),
        "stretches": (mapped.stretches.shape[1:], (2,)),
    }
    if held is not None:
        expected["held_ms"] = (held.shape, (rows,))
    for name, (shape, wanted) in expected.items():
        if shape != wanted:
            raise BarsError(f"{folder / TRAIN / name}: shape {shape}; expected {wanted}")
    types = [array.dtype.str for array in (mapped.features, mapped.table, mapped.panel.segment, mapped.stretches)]
    if (held is not None and held.dtype.str != "<i8") or types not in (
        ["<f4", "<f4", "<i4", "<i8"],
        ["<u2", "<f4", "<i4", "<i8"],
    ):
        raise BarsError(f"{folder / TRAIN}: its arrays are of the types {', '.join(types)}")
    inside = mapped.stretches.size == 0 or (mapped.stretches.min() >= 0 and mapped.stretches.max() < rows)
    if not inside:
        raise BarsError(f"{folder / TRAIN}/stretches: refers to rows beyond the last of {rows:,}")
