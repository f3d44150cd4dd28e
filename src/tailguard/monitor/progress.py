"""The live line while an agent trains, and plain lines where there is no terminal."""

from __future__ import annotations

import logging
import math
import time
from typing import Any, Self

PLAIN_LINE_SECONDS = 10.0
"""Minimum time between two plain lines in a log."""


BAR_SECONDS = 2.0
"""Time before a bar appears: shorter work needs none."""


class Progress:
    """Shows steps, rate, reward, tail risk, KL, alarms and time left. With `shown=False` it prints nothing."""

    def __init__(self, total: int, shown: bool = True, label: str = "training") -> None:
        self.total, self.shown, self.label = total, shown, label
        self.bar: Any = None
        self.task: Any = None
        self.console: Any = None
        self.last_line = 0.0

    def __enter__(self) -> Self:
        if not self.shown:
            return self
        # rich is for people; the numeric core runs without it.
        from rich.console import Console
        from rich.progress import BarColumn, MofNCompleteColumn, TaskProgressColumn, TextColumn, TimeRemainingColumn
        from rich.progress import Progress as Bar

        self.console = Console()
        if self.console.is_terminal:
            self.bar = Bar(
                TextColumn("{task.description}"),
                BarColumn(bar_width=24),
                TaskProgressColumn(),
                MofNCompleteColumn(),
                TimeRemainingColumn(),
                TextColumn("{task.fields[metrics]}"),
                console=self.console,
            )
            self.bar.start()
            self.task = self.bar.add_task(self.label, total=self.total, metrics="")
        return self

    def show(self, done: int, metrics: dict[str, float]) -> None:
        """Update the line."""
        if not self.shown:
            return
        shown = describe(metrics)
        if self.bar is not None:
            self.bar.update(self.task, completed=min(done, self.total), metrics=shown)
        elif time.monotonic() - self.last_line >= PLAIN_LINE_SECONDS or done >= self.total:
            self.last_line = time.monotonic()
            self.console.print(f"{self.label} {done:,} / {self.total:,} steps  {shown}", soft_wrap=True)

    def say(self, text: str) -> None:
        """Print a message above the progress line; without a progress line, log it as a warning."""
        if self.shown:
            self.console.print(f"! {text}", style="yellow", soft_wrap=True, highlight=False, markup=False)
        else:
            logging.getLogger("tailguard").warning("%s", text)

    def __exit__(self, *_: object) -> None:
        if self.bar is not None:
            self.bar.stop()


class DelayedBar:
    """A plain bar for work that is usually quick: it appears in a terminal or a notebook after `BAR_SECONDS`."""

    def __init__(self, label: str, total: int, shown: bool = True) -> None:
        self.label, self.total, self.shown = label, total, shown
        self.begun = time.monotonic()
        self.bar: Any = None
        self.task: Any = None

    def __enter__(self) -> Self:
        return self

    def show(self, done: int) -> None:
        """Update the bar; nothing is shown before `BAR_SECONDS`."""
        if self.bar is not None:
            self.bar.update(self.task, completed=done)
        elif self.shown and time.monotonic() - self.begun > BAR_SECONDS:
            self._start(done)

    def _start(self, done: int) -> None:
        from rich.console import Console
        from rich.progress import Progress as Bar

        console = Console()
        self.shown = console.is_terminal or console.is_jupyter
        if self.shown:
            self.bar = Bar(console=console, transient=True)
            self.bar.start()
            self.task = self.bar.add_task(self.label, total=self.total, completed=done)

    def __exit__(self, *_: object) -> None:
        if self.bar is not None:
            self.bar.stop()


def describe(metrics: dict[str, float]) -> str:
    """The most important metrics as a short text."""
    parts = []
    rate = metrics.get("time/fps", math.nan)
    if math.isfinite(rate):
        parts.append(f"{rate / 1000:.1f} k/s" if rate >= 1000 else f"{rate:.0f}/s")
    pnl = metrics.get("rollout/ep_pnl_mean", math.nan)
    reward = metrics.get("rollout/ep_rew_mean", math.nan)
    if math.isfinite(pnl):
        parts.append(f"P&L {100 * pnl:+.2f} %/episode")
    elif math.isfinite(reward):
        parts.append(f"reward {reward:.4g}")
    tail = metrics.get("risk/cvar_realised", math.nan)
    if math.isfinite(tail):
        parts.append(f"CVaR {100 * tail:+.2f} %")
    price = metrics.get("risk/lambda", math.nan)
    if math.isfinite(price):
        parts.append(f"λ {price:.2f}")
    kl = metrics.get("train/approx_kl", math.nan)
    if math.isfinite(kl):
        parts.append(f"KL {kl:.3f}")
    counts = [value for name, value in metrics.items() if name.startswith("warn/")]
    if counts:
        # Kinds, as many as messages were printed: their counts grow with every bad iteration.
        kinds = sum(value > 0 for value in counts)
        parts.append(f"{kinds} alarm{'' if kinds == 1 else 's'}")
    return "  ".join(parts)
