"""The fast audit that `tailguard train` runs first, once for each version of the installed code on a machine.

Its result is a property of the code, of the libraries under it and of the machine, so it is kept in the user's cache
folder under a hash of all three. A changed line of the package makes a new audit; a failed one is never kept.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import platform
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from tailguard.audit.auditor import audit, chosen_checks
from tailguard.audit.subject import Subject
from tailguard.errors import RunError
from tailguard.places import replace_synced

PACKAGE = Path(__file__).parents[1]


@dataclass(frozen=True)
class FastAudit:
    """A passed fast audit of the installed code."""

    record: Mapping[str, Any]
    """As `AuditReport.to_json`."""
    kept: bool
    """Whether it was made earlier."""

    @property
    def in_words(self) -> str:
        """One line."""
        count, seconds = len(self.record["checks"]), self.record["seconds"]
        if self.kept:
            return f"{count} fast checks of this code passed on {self.record['when'][:10]}, kept from then"
        return f"{count} fast checks of this code passed in {seconds:.0f} s; kept until it changes"


def cache_folder() -> Path:
    """The user's cache folder of this package."""
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base and Path(base).is_absolute() else Path.home() / ".cache") / "tailguard"


def installed_key() -> str:
    """SHA-256 of the package's source, the checks of plugins, the libraries and the machine."""
    digest = hashlib.sha256()
    for path in sorted(PACKAGE.rglob("*.py")):
        digest.update(f"{path.relative_to(PACKAGE).as_posix()}\0".encode() + path.read_bytes())
    for check in chosen_checks(fast=True):
        source = Path(check.place.rpartition(":")[0])
        digest.update(f"{check.id}\0".encode() + (source.read_bytes() if source.is_file() else b""))
    machine = (platform.machine(), platform.node(), platform.python_version(), torch.__version__, np.__version__)
    digest.update("\0".join((*machine, torch.backends.cpu.get_cpu_capability())).encode())
    return digest.hexdigest()


def fast_audit(before_each: Callable[[str], None] = lambda _: None) -> FastAudit:
    """The kept result for the installed code, or a new one. Raises `RunError` where a check fails."""
    path = cache_folder() / f"audit-{installed_key()[:32]}.json"
    kept = _read(path)
    if kept is not None:
        return FastAudit(kept, kept=True)
    report = audit(Subject(), fast=True, before_each=before_each)
    if report.failed:
        lines = "\n".join(
            f"  {one.check.id}  {one.check.question} {one.measurement.measured}: {one.measurement.number:.4g}, bound "
            f"{one.measurement.bound}. {one.measurement.detail}"
            for one in report.failed
        )
        raise RunError(
            f"the audit of the installed code failed, so nothing was trained:\n{lines}\nWhat to do: tailguard audit "
            "--fast --verbose. To train all the same: --no-audit"
        )
    record = report.to_json()
    # A cache that cannot be written costs the next run some seconds, and nothing else.
    with contextlib.suppress(OSError):
        path.parent.mkdir(parents=True, exist_ok=True)
        replace_synced(path, (json.dumps(record, ensure_ascii=False) + "\n").encode())
    return FastAudit(record, kept=False)


def _read(path: Path) -> dict[str, Any] | None:
    """A kept result that can be used; None where there is none, or where it is damaged."""
    try:
        record = json.loads(path.read_text(encoding="utf-8"))
        usable = record["passed"] is True and record["fast"] is True and len(record["checks"]) > 0
        usable = usable and isinstance(record["when"], str) and record["seconds"] >= 0
    except (OSError, ValueError, KeyError, TypeError):
        return None
    return record if usable else None
