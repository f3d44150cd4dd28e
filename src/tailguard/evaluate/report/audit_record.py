"""The audit of a run as its report shows it: read from the `audit.json` in the run's folder."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tailguard.errors import ConfigError
from tailguard.evaluate.report.page import Page, escape

WORDS = {
    "measured": "measured", "number": "number", "bound": "bound", "found": "detail", "why it matters": "why",
    "what to do": "remedy",
}  # fmt: skip
"""What is shown of a failed check, and its name in the record."""


@dataclass(frozen=True)
class AuditRecord:
    """What an audit found."""

    subject: str
    """What was audited, in words."""
    when: str
    fast: bool
    """Whether it was the fast audit of the code alone, which comes before training."""
    counts: Mapping[str, int]
    """Checks by verdict: ok, fail, info, skipped."""
    failed: tuple[Mapping[str, Any], ...]
    """The checks that failed."""
    of_run: int
    """Checks that measured this run, and not the installed code alone."""

    @property
    def in_words(self) -> str:
        """The result in one or two sentences."""
        run = sum(self.counts.values())
        kind = "the fast checks of the installed code, before training" if self.fast else "the audit"
        if self.failed:
            names = ", ".join(str(one["id"]) for one in self.failed)
            words = f"{len(self.failed)} of {run} checks failed in {kind}: {names}."
        else:
            skipped = self.counts.get("skipped", 0)
            words = f"All {run - skipped} checks that apply passed in {kind}."
        if self.of_run:
            words += (
                f" {self.of_run} of them measured this run itself: its settings, bars, agent and record; the others "
                "the installed code, with learners that have the parts of its own."
            )
        return f"{words} Made on {self.when[:10]}: {self.subject}."


def read_audit(path: Path) -> AuditRecord | None:
    """The record in this file; None where the run was not audited."""
    if not path.is_file():
        return None
    try:
        record = json.loads(path.read_text(encoding="utf-8"))
        checks = record["checks"]
        return AuditRecord(
            subject=str(record["subject"]),
            when=str(record["when"]),
            fast=bool(record["fast"]),
            counts={str(name): int(count) for name, count in record["counts"].items()},
            failed=tuple(one for one in checks if one["verdict"] == "fail"),
            of_run=sum(bool(one.get("of_run")) for one in checks),
        )
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ConfigError(f"{path}: not the record of an audit ({error}); remove it, or run the audit again") from error


def add_audit(page: Page, record: AuditRecord) -> None:
    """The result in words, and of every check that failed what was found and what to do."""
    page.paragraph(record.in_words)
    for one in record.failed:
        page.add(f"<h3>{escape(str(one['id']))} · {escape(str(one['question']))}</h3>")
        page.facts((name, str(one[key])) for name, key in WORDS.items() if one.get(key) not in (None, ""))
    page.paragraph(
        "Every check with its number, bound and remedy: tailguard audit RUN, and its page audit.html.", "soft"
    )
