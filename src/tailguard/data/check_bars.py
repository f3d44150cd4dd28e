"""Run every check on every symbol and return one report; nothing is repaired."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime, timedelta

import polars as pl

from tailguard.data.calendars import AUTO, CalendarSource, Timetable, timetable_of
from tailguard.data.checks import (
    Gaps,
    check_prices,
    check_ranges,
    check_times,
    check_values,
    check_volume,
    most_common_step,
)
from tailguard.data.findings import Check, Report, Span, merge, skipped
from tailguard.data.suspicions import check_empty, check_spikes, check_stale
from tailguard.data.universe import shared_gaps
from tailguard.data.volume_unit import VolumeUnit, check_volume_unit
from tailguard.errors import BarsError


def validate(
    frame: pl.DataFrame,
    source: str,
    *,
    frequency: timedelta | None = None,
    calendar: CalendarSource = AUTO,
    timetable: Timetable | None = None,
    gaps: Gaps = "error",
    volume_unit: VolumeUnit = "base",
    times_only: bool = False,
    ragged: bool = False,
    ignored: Sequence[str] = (),
    extra: Sequence[str] = (),
) -> Report:
    """Check the bars of `frame`, laid out as `tailguard.data.checks` says.

    `frequency`: the one the bars must have; None: the most common difference between neighbouring times.
    `calendar`: when the market trades; `timetable`: the same for a whole source, where `frame` is a piece of it.
    `volume_unit`: the declared unit of the volume column. `times_only` runs only the checks of the times.
    """
    parts = frame.partition_by("symbol", maintain_order=True)
    pace = frequency or most_common_step(*(part["time"] for part in parts))
    if pace is None:
        raise BarsError(f"{source}: one bar is too few to infer the frequency; give it, as in frequency='1h'")
    if timetable is None:
        times = (part["time"].drop_nulls().dt.epoch("ms").to_numpy() for part in parts)
        timetable = timetable_of(calendar, times, pace // timedelta(milliseconds=1))
    known = [part["time"].drop_nulls().dt.epoch("ms").to_numpy() for part in parts]
    holes = shared_gaps(known, timetable) if ragged else timetable
    outcomes = [_check_symbol(part, timetable, holes, gaps, volume_unit, times_only) for part in parts]
    checks = tuple(merge(same) for same in zip(*outcomes, strict=True))
    spans = tuple(_span(part, timetable) for part in parts)
    return Report(source, pace, spans, checks, tuple(ignored), tuple(extra), timetable=timetable)


def _check_symbol(
    bars: pl.DataFrame, timetable: Timetable, holes: Timetable, gaps: Gaps, volume_unit: VolumeUnit, times_only: bool
) -> list[Check]:
    """`holes`: the timetable that says which bars are missing."""
    frequency = timedelta(milliseconds=timetable.step)
    times = check_times(bars, timetable, gaps, holes)
    if times_only:
        return [check_values(bars.select("file", "row", "unreadable", "symbol", "time")), *times]
    checks = [check_values(bars), *times, check_prices(bars), check_ranges(bars), check_volume(bars)]
    if any(check.level == "error" for check in times[:2]):
        return checks + [skipped(name) for name in ("volume unit", "stale", "zero volume", "spikes", "returns")]
    return [
        *checks,
        check_volume_unit(bars, frequency, volume_unit),
        check_stale(bars, holes),
        check_empty(bars),
        *check_spikes(bars, holes),
    ]


def _span(bars: pl.DataFrame, timetable: Timetable) -> Span:
    first, last = bars["time"].min(), bars["time"].max()
    if not isinstance(first, datetime) or not isinstance(last, datetime):
        return Span(bars["symbol"][0], None, None, bars.height, 0)
    times = bars["time"].drop_nulls().unique().sort().dt.epoch("ms").to_numpy()
    return Span(bars["symbol"][0], first, last, bars.height, int(timetable.missing_before(times).sum()))
