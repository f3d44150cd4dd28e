"""Measures what docs/audit.md shows: `python docs/_build/audit_tables.py`, or with ids, or `missing`, those alone.

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
    """Measure the checks with these ids, all by default, and say which failed; a number stays until it is measured."""
    before = json.loads(MEASURED.read_text(encoding="utf-8"))["checks"] if MEASURED.is_file() else {}
    checks = [check for check in all_checks() if not check.of_run and "." not in check.id]
    found = {check.id: before[check.id] for check in checks if check.id in before}
    for check in checks:
        if wanted and check.id not in wanted and not (wanted == ["missing"] and check.id not in before):
            continue
        result = run_check(check, Subject())
        one = result.measurement
        found[check.id] = {"measured": one.measured, "number": number(one.number), "bound": one.bound}
        print(check.id, result.verdict, f"{result.seconds:.1f} s", one.detail if result.verdict == "fail" else "")
        ordered = {each.id: found[each.id] for each in checks if each.id in found}
        MEASURED.write_text(json.dumps({"checks": ordered}, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main(sys.argv[1:])
