"""`data check` of files that are too large to be held in memory: in pieces, through a temporary folder."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from datetime import timedelta
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
from numpy.typing import NDArray

from tailguard.data.calendars import Timetable
from tailguard.data.checks import Gaps
from tailguard.data.disk.bar_store import BarStore, Series, Times
from tailguard.data.disk.feature_stream import Part
from tailguard.data.disk.import_bars import ROWS, check_files
from tailguard.data.disk.stretches import Stretches
from tailguard.data.features import longest_warmup
from tailguard.data.findings import Check, Report
from tailguard.data.readers import Paths
from tailguard.data.readiness import (
    TrainingNeeds,
    Usable,
    cannot_be_split,
    check_fills,
    check_history,
    judge_training,
    ready_notes,
)
from tailguard.data.splits import split_times
from tailguard.data.volume_unit import VolumeUnit
from tailguard.errors import ConfigError

IN_PIECES = "checked in pieces: columns beyond those of bars are not looked at"


def check_on_disk(
    path: Paths,
    needs: TrainingNeeds,
    *,
    symbols: Sequence[str] = (),
    frequency: timedelta | None = None,
    calendar: str,
    gaps: Gaps,
    volume_unit: VolumeUnit,
    rows: int = ROWS,
) -> Report:
    """The report of `check_source` and `ready_report`, about `rows` bars in memory at a time."""
    with TemporaryDirectory(prefix="tailguard-") as place:
        folder, scratch = Path(place, "bars"), Path(place, "scratch")
        folder.mkdir()
        scratch.mkdir()
        imported = check_files(
            path,
            folder,
            scratch,
            symbols=symbols,
            frequency=frequency,
            calendar=calendar,
            gaps=gaps,
            volume_unit=volume_unit,
            rows=rows,
            all_errors=True,
        )
        report = replace(imported.report, notes=(IN_PIECES,))
        if imported.store is None:
            return report
        return _ready(report, imported.store, needs, scratch, rows)


def _ready(report: Report, store: BarStore, needs: TrainingNeeds, scratch: Path, rows: int) -> Report:
    """`report` with the checks for training."""
    assert report.timetable is not None
    common = store.write_common_times(scratch / "common", rows)
    checks = [_check_training(store, report.timetable, common, needs, rows)]
    if needs.uses_volume:
        checks.append(check_fills([one.symbol for one in store.series if not _has_volume(one, rows)]))
    if len(store.series) > 1:
        checks.append(check_history(report.spans, len(common)))
    funded = "funding_rate" in store.series[0].columns
    notes = ready_notes(report.spans, None if funded else needs.funding_rate, needs.perpetual)
    return replace(report, checks=(*report.checks, *checks), notes=(*report.notes, *notes))


def _has_volume(series: Series, rows: int) -> bool:
    volume = series.columns["volume"]
    return any((volume[start : start + rows] > 0).any() for start in range(0, len(volume), rows))


def _check_training(
    store: BarStore, timetable: Timetable, common: NDArray[np.int64], needs: TrainingNeeds, rows: int
) -> Check:
    try:
        windows = split_times(
            Times(common),
            store.frequency,
            validation=needs.validation,
            test=needs.test,
            embargo=needs.embargo,
            sessions=store.sessions,
        )
    except ConfigError as error:
        return cannot_be_split(error, sum(len(one.time) for one in store.series))
    lead_in, warmup = longest_warmup(store.sample()), longest_warmup(store.sample(), needs.features)
    found = []
    for window in (windows.train, windows.test):
        first, last = int(common[window[0]]), int(common[window[-1]])
        part = Part(store.lead_in(first, lead_in), first, last + store.step)
        lanes = [(store.series, common)] if needs.accounts == "portfolio" else [((s,), s.time) for s in store.series]
        pieces = (each for lane in lanes for each in _pieces(*lane, timetable, part, warmup, rows))
        found.append(_usable(pieces, needs.episode_length))
    return judge_training(found[0], found[1], warmup, needs.episode_length)


@dataclass(frozen=True)
class _Piece:
    breaks: NDArray[np.bool_]
    """Where a segment begins."""
    defined: NDArray[np.bool_]
    """Where all symbols have warmed up."""
    tradeable: NDArray[np.bool_]


def _pieces(
    series: Sequence[Series], times: NDArray[np.int64], timetable: Timetable, part: Part, warmup: int, rows: int
) -> Iterator[_Piece]:
    """The rows of the part that have these times, piece by piece."""
    low, high = np.searchsorted(times, (part.start, part.stop))
    columns = [(one.time, one.columns["segment"], one.row_at(part.start)) for one in series]
    for start in range(int(low), int(high), rows):
        own = np.array(times[max(int(low), start - 1) : min(start + rows, int(high))])
        breaks = timetable.breaks(own)
        breaks[0] = True
        own, breaks = (own, breaks) if start == low else (own[1:], breaks[1:])
        defined = np.ones(len(own), bool)
        for time, segment, begin in columns:
            at = np.searchsorted(time, own)
            marks, which = np.unique(segment[at], return_inverse=True)
            # Segments rise, so each begins where its number would be inserted.
            defined &= at - np.maximum(np.searchsorted(segment, marks), begin)[which] >= warmup
        yield _Piece(breaks, defined, own >= part.first)


def _usable(pieces: Iterator[_Piece], episode_length: int) -> Usable:
    stretches, segment = Stretches(), -1
    bars = defined = current = longest = 0
    for piece in pieces:
        marks = segment + np.cumsum(piece.breaks)
        stretches.extend(marks, piece.defined, piece.tradeable)
        bars += int(piece.tradeable.sum())
        defined += int((piece.tradeable & piece.defined).sum())
        begins = np.flatnonzero(piece.breaks)
        current += int(begins[0]) if len(begins) else len(marks)
        longest = max(longest, current)
        if len(begins):
            lengths = np.diff(begins, append=len(marks))
            current, longest = int(lengths[-1]), max(longest, int(lengths.max()))
        segment = int(marks[-1])
    ranges = stretches.ranges()
    starts = int(np.maximum(ranges[:, 1] - episode_length - ranges[:, 0] + 1, 0).sum())
    return Usable(bars, defined, starts, segment + 1, longest)
