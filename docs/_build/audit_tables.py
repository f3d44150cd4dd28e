"""Measures what docs/audit.md shows: `python docs/_build/audit_tables.py`, or with ids, those checks alone.

The numbers of the checks of the installed code, on the machine that runs this, go to `audit_measured.json` beside it.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

from tailguard.audit.audit_page import number
from tailguard.audit.auditor import all_checks, run_check
from tailguard.audit.subject import Subject

MEASURED = Path(__file__).with_name("audit_measured.json")


def main(wanted: list[str]) -> None:
    """Measure, and say which checks failed."""
    before = json.loads(MEASURED.read_text(encoding="utf-8"))["checks"] if MEASURED.is_file() else {}
    found = {}
    for check in all_checks():
        if check.of_run or "." in check.id:
            continue
        if wanted and check.id not in wanted and check.id in before:
            found[check.id] = before[check.id]
            continue
        result = run_check(check, Subject())
        one = result.measurement
        found[check.id] = {"measured": one.measured, "number": number(one.number), "bound": one.bound}
        print(check.id, result.verdict, f"{result.seconds:.1f} s", one.detail if result.verdict == "fail" else "")
    MEASURED.write_text(json.dumps({"checks": found}, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main(sys.argv[1:])
