"""An audit as one HTML page: what failed and what to do about it first, then every number."""

from __future__ import annotations

from tailguard.audit.auditor import AuditReport, AuditResult
from tailguard.evaluate.report.page import Page, escape, prose

GROUPS = {
    "C": "Connections: does every part get the gradient, the setting and the data meant for it?",
    "T": "Trajectories: boundaries, memory, fills and look-ahead",
    "F": "Formulas: losses, distributions, the tail, optimisers",
    "R": "Runs: resuming, checkpoints, repeatability",
    "P": "Promises: the budget, gradients through the market, the verdict",
    "U": "Your pipeline: bars, features, account and decisions as a black box",
    "B": "Probes: where a fault is",
    "E": "This run: its settings, its record, its evidence",
}
"""Headings of the groups of ids, in the order of the page."""
OWN = "Checks of plugins"
HEADINGS = ("id", "question", "measured", "number", "bound", "verdict")
COLUMNS = ("id", "verdict", "question", "number", "bound", "measured")
"""The same as the page shows them: what matters most is seen on a phone, too."""


def audit_page(report: AuditReport) -> str:
    """The whole document."""
    page = Page()
    page.add("<h1>Audit</h1>")
    page.paragraph(f"{report.subject} · {report.when:%Y-%m-%d %H:%M} UTC", "soft")
    mood, lead = ("good", "Every check passed.") if not report.failed else ("bad", f"{len(report.failed)} failed.")
    page.add(f'<div class="verdict {mood}"><strong>{escape(lead)}</strong> {prose(report.summary)}</div>')
    for result in report.failed:
        add_failure(page, result)
    for heading, results in by_group(report).items():
        page.add(f"<h2>{escape(heading)}</h2>")
        cells = [dict(zip(HEADINGS, row(result), strict=True)) for result in results]
        page.table(COLUMNS, [[one[name] for name in COLUMNS] for one in cells], sentences=True)
        page.add("<details><summary>Why it matters, and what to do</summary>")
        page.facts((f"{one.check.id} {one.check.question}", f"{one.check.why} {one.check.remedy}") for one in results)
        page.add("</details>")
    return page.html("Tailguard audit")


def add_failure(page: Page, result: AuditResult) -> None:
    """One failed check: what was found, why it matters, what to do."""
    check, measured = result.check, result.measurement
    page.add(f"<h3>{escape(check.id)} · {escape(check.question)}</h3>")
    page.facts(
        [
            ("measured", f"{measured.measured}: {number(measured.number)}, bound {measured.bound}"),
            *([("found", measured.detail)] if measured.detail else []),
            ("why it matters", check.why),
            ("what to do", check.remedy),
            ("check", check.place),
        ]
    )


def row(result: AuditResult) -> tuple[str, ...]:
    """The cells of a result, under `HEADINGS`."""
    measured = result.measurement
    shown = "–" if result.verdict == "skipped" else number(measured.number)
    return (
        result.check.id,
        result.check.question,
        measured.measured,
        shown,
        measured.bound,
        "FAIL" if result.verdict == "fail" else result.verdict,
    )


def by_group(report: AuditReport) -> dict[str, list[AuditResult]]:
    """The results under the headings of their groups."""
    groups: dict[str, list[AuditResult]] = {heading: [] for heading in (*GROUPS.values(), OWN)}
    for result in report.results:
        groups[GROUPS.get(result.check.id[0], OWN)].append(result)
    return {heading: results for heading, results in groups.items() if results}


def number(value: float) -> str:
    """A measured number in four digits."""
    return "not a number" if value != value else f"{value:.4g}"
