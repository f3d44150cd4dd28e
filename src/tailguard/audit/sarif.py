"""An audit in SARIF 2.1.0, which code hosts and editors show beside the code."""

from __future__ import annotations

from pathlib import Path
from typing import Any
from urllib.parse import quote

from tailguard._version import __version__
from tailguard.audit.auditor import AuditReport, AuditResult

SCHEMA = "https://docs.oasis-open.org/sarif/sarif/v2.1.0/errata01/os/schemas/sarif-schema-2.1.0.json"
KINDS = {"ok": ("pass", "none"), "fail": ("fail", "error"), "info": ("informational", "none")}
"""SARIF's kind and level of a verdict."""
NOT_APPLICABLE = ("notApplicable", "none")
SOURCE_ROOT = "%SRCROOT%"
"""What code hosts replace by the root of the repository."""


def to_sarif(report: AuditReport, settings: Path | None = None) -> dict[str, Any]:
    """The report as a SARIF log. `settings`: the run's config.yaml, where results about a run are shown."""
    rules = [
        {
            "id": result.check.id,
            "shortDescription": {"text": result.check.question},
            "fullDescription": {"text": result.check.why},
            "help": {"text": result.check.remedy},
            "defaultConfiguration": {"level": "error"},
        }
        for result in report.results
    ]
    return {
        "$schema": SCHEMA,
        "version": "2.1.0",
        "runs": [
            {
                "tool": {"driver": {"name": "tailguard audit", "version": __version__, "rules": rules}},
                "invocations": [
                    {"executionSuccessful": True, "endTimeUtc": report.when.strftime("%Y-%m-%dT%H:%M:%SZ")}
                ],
                "results": [_result(index, result, settings) for index, result in enumerate(report.results)],
            }
        ],
    }


def _result(index: int, result: AuditResult, settings: Path | None) -> dict[str, Any]:
    kind, level = KINDS.get(result.verdict, NOT_APPLICABLE)
    place, _, line = result.check.place.rpartition(":")
    of_run = settings is not None and result.check.of_run
    if settings is not None and of_run:
        where = artifact(settings)
    elif Path(place).is_absolute():  # a check of a plugin
        where = artifact(Path(place))
    else:
        where = {"uri": f"src/{place}", "uriBaseId": SOURCE_ROOT}
    return {
        "ruleId": result.check.id,
        "ruleIndex": index,
        "kind": kind,
        "level": level,
        "message": {"text": sentence(result)},
        "locations": [
            {"physicalLocation": {"artifactLocation": where, "region": {"startLine": 1 if of_run else int(line)}}}
        ],
        "properties": {"number": result.to_json()["number"], "bound": result.measurement.bound},
    }


def artifact(path: Path) -> dict[str, str]:
    """Where a file is: below the current folder, or elsewhere on this machine."""
    path, here = path.resolve(), Path.cwd().resolve()
    if path.is_relative_to(here):
        return {"uri": quote(path.relative_to(here).as_posix()), "uriBaseId": SOURCE_ROOT}
    return {"uri": path.as_uri()}


def sentence(result: AuditResult) -> str:
    """A result in one line."""
    measured = result.measurement
    if result.verdict == "skipped":
        return f"Does not apply: {measured.measured}."
    text = f"{measured.measured}: {measured.number:.4g}"
    if result.verdict != "info":
        text += f", bound {measured.bound}"
    text += f". {measured.detail}." if measured.detail else "."
    return f"{text} {result.check.remedy}" if result.verdict == "fail" else text
