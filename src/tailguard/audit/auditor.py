"""Runs checks one after the other and collects their answers."""

from __future__ import annotations

import pkgutil
import platform
import time
import traceback
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from importlib import import_module
from typing import Any, get_args

import numpy as np
import torch

from tailguard import audit as room
from tailguard._version import __version__
from tailguard.audit.registry import CHECKS, AuditCheck, CheckVerdict, Measurement, in_order
from tailguard.audit.subject import Subject
from tailguard.errors import ConfigError


@dataclass(frozen=True)
class AuditResult:
    """A check and its answer."""

    check: AuditCheck
    measurement: Measurement
    seconds: float
    of_run: bool = False
    """Whether a run was measured, and not the installed code alone."""

    @property
    def verdict(self) -> CheckVerdict:
        return self.measurement.verdict

    def to_json(self) -> dict[str, Any]:
        """Plain values; a number that is not finite becomes null."""
        check, measured = self.check, self.measurement

        def finite(value: float | None) -> float | None:
            return value if value is not None and np.isfinite(value) else None

        return {
            "id": check.id,
            "question": check.question,
            "verdict": self.verdict,
            "measured": measured.measured,
            "number": finite(measured.number),
            "low": finite(measured.low),
            "high": finite(measured.high),
            "bound": measured.bound,
            "detail": measured.detail,
            "why": check.why,
            "remedy": check.remedy,
            "of_run": self.of_run,
            "place": check.place,
            "seconds": round(self.seconds, 3),
        }


@dataclass(frozen=True)
class AuditReport:
    """All answers of one audit."""

    results: tuple[AuditResult, ...]
    subject: str
    """What was audited, in words."""
    fast: bool
    seconds: float
    when: datetime

    def count(self, verdict: CheckVerdict) -> int:
        return sum(result.verdict == verdict for result in self.results)

    @property
    def failed(self) -> tuple[AuditResult, ...]:
        return tuple(result for result in self.results if result.verdict == "fail")

    @property
    def summary(self) -> str:
        """The counts in one line."""
        parts = [f"{len(self.results)} checks", f"{self.count('ok')} ok"]
        parts += [f"{self.count('fail')} failed"] if self.failed else []
        parts += [f"{self.count('info')} for information"] if self.count("info") else []
        parts += [f"{self.count('skipped')} do not apply"] if self.count("skipped") else []
        return f"{', '.join(parts)} · {self.seconds:.0f} s"

    def to_json(self) -> dict[str, Any]:
        """The content of audit.json."""
        return {
            "tailguard": __version__,
            "torch": torch.__version__,
            "python": platform.python_version(),
            "subject": self.subject,
            "fast": self.fast,
            "when": self.when.isoformat(timespec="seconds"),
            "seconds": round(self.seconds, 1),
            "passed": not self.failed,
            "counts": {verdict: self.count(verdict) for verdict in get_args(CheckVerdict)},
            "checks": [result.to_json() for result in self.results],
        }


def all_checks() -> list[AuditCheck]:
    """Every registered check, those of plugins included, in the order of a report."""
    for module in pkgutil.iter_modules(room.__path__):
        import_module(f"{room.__name__}.{module.name}")
    return in_order(CHECKS.values())


def chosen_checks(*, fast: bool = False, of_run: bool = False, only: Sequence[str] = ()) -> list[AuditCheck]:
    """The checks of an audit. `only`: ids, or beginnings of ids such as T, of those wanted."""
    checks = all_checks()
    if only:
        checks = in_order({check.id: check for name in only for check in _named(checks, name)}.values())
    return [check for check in checks if (check.fast or not fast) and (of_run or not check.of_run)]


def _named(checks: Sequence[AuditCheck], name: str) -> list[AuditCheck]:
    """The check of this id, or all whose ids begin so."""
    found = [check for check in checks if check.id == name] or [check for check in checks if check.id.startswith(name)]
    if not found:
        raise ConfigError(f"--only {name}: no check has this id; there are {', '.join(one.id for one in checks)}")
    return found


def audit(
    subject: Subject,
    *,
    fast: bool = False,
    only: Sequence[str] = (),
    before_each: Callable[[str], None] = lambda _: None,
) -> AuditReport:
    """Answer every question about the subject. The process's random streams are left as they were."""
    began = time.perf_counter()
    results = []
    for check in chosen_checks(fast=fast, of_run=subject.run is not None, only=only):
        before_each(f"{check.id}  {check.question}")
        results.append(run_check(check, subject))
    about = f"tailguard {__version__}, torch {torch.__version__}, {platform.machine()}"
    if subject.run is not None:
        about = f"{subject.run.folder} · {about}"
    return AuditReport(tuple(results), about, fast, time.perf_counter() - began, datetime.now(UTC))


def run_check(check: AuditCheck, subject: Subject) -> AuditResult:
    """One check's answer. A check that raises has failed, and says what it raised."""
    began = time.perf_counter()
    with _own_streams(subject.seed), _one_thread(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            measurement = check.measure(subject)
        except Exception as error:
            frame = traceback.extract_tb(error.__traceback__)[-1]
            detail = f"{type(error).__name__}: {error} ({frame.filename}:{frame.lineno})"
            measurement = Measurement("the measurement itself, which raised an error", low=0.0, detail=detail)
    of_run = check.of_run or (check.reads_run and subject.run is not None)
    return AuditResult(check, measurement, time.perf_counter() - began, of_run)


@contextmanager
def _own_streams(seed: int) -> Iterator[None]:
    """Random streams of the check's own, so that its answer does not depend on what ran before it."""
    state = np.random.get_state()  # noqa: NPY002 - the stream of the process, to be left as it was
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        np.random.seed(seed % 2**32)  # noqa: NPY002
        try:
            yield
        finally:
            np.random.set_state(state)  # noqa: NPY002


@contextmanager
def _one_thread() -> Iterator[None]:
    """The networks of checks are tiny: threads would mostly wait for each other, on a busy machine for minutes."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)
