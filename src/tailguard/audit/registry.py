"""The table of checks. A check measures one number on the real objects and compares it with a bound.

A check of one's own is a function under the decorator, in the package or in a plugin:

    @register_check("desk.turnover", "Does the agent trade less than the desk allows?", why="…", remedy="…")
    def turnover(subject: Subject) -> Measurement:
        return at_most("turnover a day on the validation bars", 0.8, bound=2.0)
"""

from __future__ import annotations

import inspect
import math
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from tailguard.errors import ConfigError

if TYPE_CHECKING:
    from tailguard.audit.subject import Subject

CheckVerdict = Literal["ok", "fail", "info", "skipped"]
"""info: a number without a bound; skipped: the check does not apply, and its measurement says why."""
_ID = re.compile(r"[A-Z]{1,2}\d{1,2}|[a-z][a-z0-9_]*(\.[a-z][a-z0-9_]*)+")


@dataclass(frozen=True)
class Measurement:
    """What a check measured, and the bounds that it must keep."""

    measured: str
    """What the number is, and on what it was measured."""
    number: float = math.nan
    low: float | None = None
    """The number must not be below it."""
    high: float | None = None
    """The number must not be above it."""
    detail: str = ""
    """What was found where the number is out of its bounds: names, rows, values."""
    applies: bool = True

    @property
    def verdict(self) -> CheckVerdict:
        if not self.applies:
            return "skipped"
        if self.low is None and self.high is None:
            return "info"
        # A NaN keeps no bound: the comparisons are written so that it fails.
        kept = (self.low is None or self.number >= self.low) and (self.high is None or self.number <= self.high)
        return "ok" if kept else "fail"

    @property
    def bound(self) -> str:
        """The bounds in words."""
        if self.low is None and self.high is None:
            return "–"
        if self.low is not None and self.high is not None:
            return f"{self.low:.6g}" if self.low == self.high else f"{self.low:.4g} to {self.high:.4g}"
        return f"≥ {self.low:.4g}" if self.low is not None else f"≤ {self.high:.4g}"


def at_most(measured: str, number: float, bound: float, detail: str = "") -> Measurement:
    """A number that may not be above its bound."""
    return Measurement(measured, float(number), high=bound, detail=detail)


def at_least(measured: str, number: float, bound: float, detail: str = "") -> Measurement:
    """A number that may not be below its bound."""
    return Measurement(measured, float(number), low=bound, detail=detail)


def within(measured: str, number: float, low: float, high: float, detail: str = "") -> Measurement:
    """A number with two bounds."""
    return Measurement(measured, float(number), low, high, detail)


def none_of(measured: str, wrong: Iterable[str]) -> Measurement:
    """The number of cases that are wrong, which must be 0; the first of them are named."""
    cases = list(wrong)
    shown = "; ".join(cases[:4]) + ("; …" if len(cases) > 4 else "")
    return Measurement(measured, len(cases), high=0, detail=shown)


def information(measured: str, number: float, detail: str = "") -> Measurement:
    """A number to know, without a bound."""
    return Measurement(measured, float(number), detail=detail)


def not_applicable(reason: str) -> Measurement:
    """Nothing was measured, for this reason."""
    return Measurement(reason, applies=False)


def worst(measurements: Sequence[Measurement]) -> Measurement:
    """Of several measurements with bounds the one that fails, else the one nearest to its bound."""
    return max(measurements, key=_strain)


def _strain(one: Measurement) -> tuple[bool, float]:
    """Whether a measurement fails, and the share of its bound that it uses up."""
    used = [0.0]
    if one.high is not None:
        used.append(abs(one.number) / one.high if one.high > 0 else float(one.number > one.high))
    if one.low is not None:
        used.append(one.low / one.number if one.number > 0 else 1.0)
    return one.verdict == "fail", math.inf if math.isnan(one.number) else max(used)


@dataclass(frozen=True)
class AuditCheck:
    """One question about the installed code or about a run, and how it is answered."""

    id: str
    question: str
    why: str
    """What goes wrong where the answer is no."""
    remedy: str
    """What to do then."""
    measure: Callable[[Subject], Measurement]
    fast: bool = False
    """Whether `--fast` includes it."""
    of_run: bool = False
    """Whether it needs a run: its settings, bars, agent and record."""
    reads_run: bool = False
    """Whether it measures the run itself where there is one, and the installed code alone where there is none."""
    place: str = ""
    """File and line of the function."""


CHECKS: dict[str, AuditCheck] = {}
"""All checks by id, in the order in which they are reported."""


def register_check(
    id: str,
    question: str,
    *,
    why: str,
    remedy: str,
    fast: bool = False,
    of_run: bool = False,
    reads_run: bool = False,
    replaces: bool = False,
) -> Callable[[Callable[[Subject], Measurement]], Callable[[Subject], Measurement]]:
    """Decorator: make a function of the `Subject` a check of `tailguard audit`.

    `id`: for one of your own a name with a dot, as desk.turnover.
    `question`: what it answers; yes is good.
    `why`, `remedy`: what goes wrong where the answer is no, and what to do then.
    `fast`: part of `tailguard audit --fast`, which `tailguard train` runs first; for checks of less than a second.
    `of_run`: needs a run, so that it is left out of an audit of the installed code alone.
    `reads_run`: measures the run itself where there is one, through `subject.run`; for what the report says.
    `replaces`: takes the place of a check with this id.
    """
    if not _ID.fullmatch(id):
        raise ConfigError(f"check {id!r}: give an id of your own a dot, in lower case, as desk.turnover")
    if id in CHECKS and not replaces:
        raise ConfigError(f"check {id!r}: this id is taken by {CHECKS[id].place}; choose another, or replaces=True")
    for name, text in (("question", question), ("why", why), ("remedy", remedy)):
        if not text.strip():
            raise ConfigError(f"check {id!r}: its {name} is empty; the report shows it")

    def register(measure: Callable[[Subject], Measurement]) -> Callable[[Subject], Measurement]:
        CHECKS[id] = AuditCheck(id, question, why, remedy, measure, fast, of_run, reads_run, _place(measure))
        return measure

    return register


def _place(function: Callable[[Subject], Measurement]) -> str:
    code = inspect.unwrap(function).__code__
    path = Path(code.co_filename)
    package = Path(__file__).parents[2]
    shown = path.relative_to(package) if path.is_relative_to(package) else path
    return f"{shown.as_posix()}:{code.co_firstlineno}"


def in_order(checks: Iterable[AuditCheck]) -> list[AuditCheck]:
    """Checks by group and number, those of plugins last."""

    def key(check: AuditCheck) -> tuple[bool, str, int]:
        match = re.fullmatch(r"([A-Z]+)(\d+)", check.id)
        return (match is None, match[1] if match else check.id, int(match[2]) if match else 0)

    return sorted(checks, key=key)
