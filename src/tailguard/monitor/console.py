"""A table of all metrics in the style of Stable-Baselines3."""

from __future__ import annotations

import math
from collections.abc import Mapping
from itertools import groupby
from typing import IO

from tailguard.monitor.recording import STEP, FigureWriter
from tailguard.validate import check_count

DIGITS = 4
"""Significant digits of a value that is not a whole number."""


class ConsoleTable(FigureWriter):
    """Prints the metrics as a table every few iterations, and once more at the end.

    `every`: iterations between two tables. `file`: where to print; standard output by default.
    """

    def __init__(self, every: int = 1, file: IO[str] | None = None) -> None:
        check_count("every", every)
        self.every, self.file = every, file
        self.waiting: dict[str, float] = {}

    def write(self, figures: Mapping[str, float], step: int) -> None:  # noqa: ARG002 (the table names it)
        if self.model.state.iteration % self.every == 0:
            self._show(figures)
            self.waiting = {}
        else:
            self.waiting = dict(figures)

    def add(self, figures: Mapping[str, float], step: int) -> None:
        """Evaluations are rare and awaited: they are always shown at once."""
        self._show({**figures, STEP: step})

    def close(self) -> None:
        if self.waiting:
            self._show(self.waiting)
            self.waiting = {}

    def _show(self, figures: Mapping[str, float]) -> None:
        print(table(figures), file=self.file, flush=True)


def table(figures: Mapping[str, float]) -> str:
    """The metrics grouped by the part of their names before the slash, names on the left, values on the right."""
    rows = []
    for group, names in groupby(sorted(figures), key=lambda name: name.rpartition("/")[0]):
        # Of the alarms, only those that were raised: a dozen zeros would hide them.
        shown = [name for name in names if group != "warn" or figures[name] != 0]
        rows.append((f"{group}/" if group else "", "" if shown else "none"))
        rows += [(f"    {name.removeprefix(f'{group}/')}", number(figures[name])) for name in shown]
    left, right = (max(len(row[side]) for row in rows) for side in (0, 1))
    line = "-" * (left + right + 7)
    return "\n".join([line, *(f"| {name:<{left}} | {value:>{right}} |" for name, value in rows), line])


def number(value: float) -> str:
    """Up to four significant digits; whole numbers in full, very large and very small ones with an exponent."""
    if not math.isfinite(value):
        return str(value)
    if value == round(value) and abs(value) < 1e12:
        return f"{value:,.0f}"
    if not 1e-4 <= abs(value) < 1e6:
        return f"{value:.{DIGITS - 1}e}"
    decimals = max(0, DIGITS - 1 - math.floor(math.log10(abs(value))))
    text = f"{value:,.{decimals}f}"
    return text.rstrip("0").rstrip(".") if "." in text else text
