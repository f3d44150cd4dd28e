"""The validation report as a table for the terminal."""

from __future__ import annotations

import os
import textwrap
from collections.abc import Iterator

from rich.console import Console
from rich.text import Text

from tailguard.data.findings import Check, Level, Report, Span
from tailguard.data.frequency import frequency_label

_MARKS: dict[Level, tuple[str, str]] = {
    "ok": ("✓", "green"),
    "skipped": ("–", "dim"),
    "warning": ("!", "yellow"),
    "error": ("✗", "bold red"),
}


def print_report(report: Report, console: Console) -> None:
    """Print the table, wrapped to the terminal's width; in a file or a pipe each finding stays on one line."""
    for line in report_lines(report, console.width if console.is_terminal else None):
        console.print(line, soft_wrap=True)


def report_lines(report: Report, width: int | None = None) -> Iterator[Text]:
    """The table: extent of the bars, failed checks, passed checks, and the next step."""
    yield from _title(report)
    name_width = max(len(check.name) for check in report.checks)
    several_files = len({offender.file for check in report.checks for offender in check.offenders}) > 1
    for check in (*report.errors, *report.warnings):
        first, *rest = _fold(_finding(check, several_files), width, name_width + 5)
        yield Text.assemble(_mark(check.level), f"{check.name:{name_width}}  {first}")
        for line in rest:
            yield Text(" " * (name_width + 5) + line)
    yield from _passed(report, name_width)
    notes = list(report.notes)
    if report.extra:
        notes.append(f"additional columns, for custom features: {', '.join(report.extra)}")
    if report.ignored:
        notes.append(f"columns not used: {', '.join(report.ignored)}")
    for note in notes:
        yield from (Text(line) for line in _fold(note, width, 0))
    yield from (Text(line, style="bold") for line in _fold(_conclusion(report), width, 0))


def _title(report: Report) -> Iterator[Text]:
    label = frequency_label(report.frequency)
    if len(report.spans) == 1:
        span = report.spans[0]
        yield Text(f"{report.source} · {span.symbol} · {label} · {_extent(span)}", style="bold")
        return
    bars = sum(span.bars for span in report.spans)
    yield Text(f"{report.source} · {len(report.spans)} symbols · {label} · {bars:,} bars", style="bold")
    for span in report.spans:
        yield Text(f"   {span.symbol} · {_extent(span)}")


def _extent(span: Span) -> str:
    dates = f"{span.first:%Y-%m-%d} → {span.last:%Y-%m-%d}" if span.first and span.last else "no times"
    share = span.missing / max(1, span.bars + span.missing)
    missing = "none" if not span.missing else "< 0.01 %" if share < 0.0001 else f"{100 * share:.2f} %"
    return f"{dates} · {span.bars:,} bars · {missing} missing"


def _finding(check: Check, several_files: bool) -> str:
    places = [
        (f"{os.path.basename(offender.file)} " if several_files else "") + f"{offender.place} {offender.text}"
        for offender in check.offenders
    ]
    if not places:
        return check.summary
    return f"{check.summary}: {'; '.join(places)}" + ("; …" if check.count > len(places) else "")


def _passed(report: Report, name_width: int) -> Iterator[Text]:
    """The checks that found nothing, two on a line."""
    quiet = [check for check in report.checks if check.level in ("ok", "skipped")]
    said = [check.summary if check.count else check.promise for check in quiet]
    left_width = max((len(text) for text in said[::2]), default=0)
    for place in range(0, len(quiet), 2):
        line = Text.assemble(_mark(quiet[place].level), f"{quiet[place].name:{name_width}}  {said[place]:{left_width}}")
        if place + 1 < len(quiet):
            right = quiet[place + 1]
            line.append_text(Text.assemble("  ", _mark(right.level), f"{right.name:{name_width}}  {said[place + 1]}"))
        line.rstrip()
        yield line


def _mark(level: Level) -> tuple[str, str]:
    mark, style = _MARKS[level]
    return f" {mark} ", style


def _fold(text: str, width: int | None, indent: int) -> list[str]:
    return (
        [text]
        if width is None
        else textwrap.wrap(text, max(20, width - indent), break_long_words=False, break_on_hyphens=False)
    )


def _conclusion(report: Report) -> str:
    errors, warnings = len(report.errors), len(report.warnings)
    counts = f"{errors} error{'' if errors == 1 else 's'}, {warnings} warning{'' if warnings == 1 else 's'}."
    if errors:
        return f"{counts} {' '.join(dict.fromkeys(check.remedy for check in report.errors))}"
    return f"{counts} The bars can be used" + ("; look at the warnings first." if warnings else ".")
