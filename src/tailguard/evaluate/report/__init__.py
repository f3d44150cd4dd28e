"""The report: out-of-sample results of a run as one self-contained HTML page."""

from __future__ import annotations

from pathlib import Path

from tailguard.errors import ConfigError
from tailguard.evaluate.report.collect import ReportData
from tailguard.evaluate.report.sections import report_page
from tailguard.places import replace_synced


def write_report(data: ReportData, path: Path) -> None:
    """Write the page; an existing report is replaced atomically."""
    write_page(report_page(data).html(f"{data.name} · Tailguard report"), path)


def check_place(path: Path) -> None:
    """Raise before the work unless a page can be written there."""
    if not path.parent.is_dir():
        raise ConfigError(f"{path}: the folder {path.parent} does not exist; create it first")


def write_page(text: str, path: Path) -> None:
    """Write an HTML file atomically."""
    try:
        replace_synced(path, text.encode())
    except OSError as error:
        raise ConfigError(f"{path}: cannot be written: {error.strerror}") from error
