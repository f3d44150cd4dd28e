"""How long the audit takes on one thread: every check's CPU time, and the sums of the fast ones and of all.

python benchmarks/audit_times.py                 the installed code
python benchmarks/audit_times.py --run runs/btc  with a run
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path

import torch

from tailguard.audit.auditor import chosen_checks, run_check
from tailguard.audit.subject import Subject
from tailguard.experiment.trained_run import open_run

FAST_LIMIT, WHOLE_LIMIT = 20.0, 120.0
"""Seconds that the audit may take."""


def times(subject: Subject, *, fast: bool = False) -> dict[str, tuple[bool, float]]:
    """Of every check, whether it is fast, and its CPU seconds."""
    found = {}
    for check in chosen_checks(fast=fast, of_run=subject.run is not None):
        began = time.process_time()
        run_check(check, subject)
        found[check.id] = check.fast, time.process_time() - began
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--run", type=Path)
    given = parser.parse_args()
    torch.set_num_threads(1)
    subject = Subject() if given.run is None else Subject.of_run(open_run(given.run))
    found = times(subject)
    for name, (fast, seconds) in sorted(found.items(), key=lambda item: -item[1][1]):
        print(f"{name:6} {seconds:6.2f} s{'  fast' if fast else ''}")
    quick = sum(seconds for fast, seconds in found.values() if fast)
    whole = sum(seconds for _, seconds in found.values())
    print(f"fast {quick:.1f} s (at most {FAST_LIMIT:.0f}), all {whole:.1f} s (at most {WHOLE_LIMIT:.0f})")


if __name__ == "__main__":
    main()
