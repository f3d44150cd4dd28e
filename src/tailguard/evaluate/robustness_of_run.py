"""A saved run under faults of the feed and attacks on its observations: table, lines, figures and a page."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, get_args

from tailguard.errors import ConfigError
from tailguard.evaluate.budget import own_budget
from tailguard.evaluate.overlap import Overlap
from tailguard.evaluate.report.page import Page, escape
from tailguard.evaluate.report.robustness_charts import attack_chart, fault_chart
from tailguard.evaluate.robustness import (
    CLEAN,
    Disturbed,
    DisturbedBacktests,
    attack_disturbances,
    feed_disturbances,
)
from tailguard.evaluate.robustness_table import robustness_rows
from tailguard.evaluate.stress import scaled_costs
from tailguard.evaluate.stressed_backtest import Stress, choose_bars
from tailguard.experiment.trained_run import SplitPart
from tailguard.robust.attacks import AttackKind, Norm
from tailguard.validate import check_choice, check_count, check_range

if TYPE_CHECKING:
    from contextlib import AbstractContextManager

SWEEP = (0.02, 0.05, 0.1, 0.2)
"""Sizes of an attack where none is given."""
COLUMNS = (
    "moved: mean distance of the target positions from the clean ones, of equity; flips: positions on the other side; "
    "error: of the closes that were seen; lost: money that was earned less"
)


@dataclass(frozen=True)
class Disturbances:
    """What `tailguard backtest` is asked to do to an agent."""

    feeds: tuple[str, ...] = ()
    attacks: tuple[str, ...] = ()
    epsilons: tuple[float, ...] = ()
    """Sizes of every attack; `SWEEP` where there are none."""
    norm: Norm = "linf"
    steps: int = 10
    """Gradient steps of pgd and sgld at each bar."""
    target: Literal["action", "reverse", "kl", "critic"] = "action"
    """What an attack spoils: how far a position moves, its side, the policy's distribution, or the value."""
    feed_seed: int = 0
    """Of the feeds' random numbers; 0 is that of reports."""

    def __post_init__(self) -> None:
        for kind in self.attacks:
            check_choice("--attack", kind, get_args(AttackKind))
        if self.epsilons and not self.attacks:
            raise ConfigError("--epsilon: is the size of an attack; name one, as --attack pgd")
        for epsilon in self.epsilons:
            check_range("--epsilon", epsilon, low=0)
        check_choice("--norm", self.norm, get_args(Norm))
        check_count("--attack-steps", self.steps)
        check_count("--feed-seed", self.feed_seed, low=0)
        feed_disturbances(self.feeds)  # an unknown fault is an error before the work

    def __bool__(self) -> bool:
        return bool(self.feeds or self.attacks)

    @property
    def count(self) -> int:
        """Backtests that they take."""
        return len(feed_disturbances(self.feeds)) + len(self.attacks) * len(self.epsilons or SWEEP)


def parse_epsilons(texts: Sequence[str]) -> tuple[float, ...]:
    """0.05, or several as 0.02,0.05,0.1."""
    try:
        return tuple(float(part) for text in texts for part in text.split(","))
    except ValueError:
        raise ConfigError(f"--epsilon {','.join(texts)}: give numbers, as 0.05 or 0.02,0.05,0.1") from None


@dataclass(frozen=True)
class RobustnessOfRun:
    """A run's agent, clean and disturbed, on some bars."""

    name: str
    title: str
    """The bars in words."""
    cases: tuple[Disturbed, ...]
    """The clean agent first."""
    capital: float
    seen: Overlap
    """Which of the bars the run has seen."""
    notes: tuple[str, ...] = ()
    """Disturbances that could not be shown, and why."""

    def rows(self) -> tuple[list[str], list[list[str]]]:
        """Headings and rows of the table."""
        headings, rows = robustness_rows(self.cases, self.capital)
        return [self.title, *headings[1:]], rows

    def lines(self) -> list[str]:
        """The lines below the table."""
        return [
            *(f"missing  {note}" for note in self.notes),
            *([] if self.cases[0].budget is None else [f"budget   {budget_under(self.cases)}"]),
            f"columns  {COLUMNS} in a year, on {self.capital:,.0f}",
        ]

    def to_json(self) -> dict[str, Any]:
        """Everything as JSON values; money is a fraction of the starting capital, NaN is null."""
        return {
            "seen_in_training_or_validation": None if self.seen.unknown else self.seen.share,
            "warnings": [line.removeprefix("WARNING  ") for line in self.seen.lines()],
            "capital": self.capital,
            "not_shown": list(self.notes),
            "cases": [case.to_json() for case in self.cases],
        }

    def page(self) -> str:
        """One self-contained HTML file."""
        page = Page()
        page.add(f"<h1>{escape(self.name)}</h1>")
        page.paragraph(f"The same agent on the same bars ({self.title}), clean and disturbed.", "soft")
        for line in (*self.seen.lines(), *self.lines()):
            kind, _, text = line.partition(" ")
            page.paragraph(text.strip() if kind in ("budget", "columns") else line)
        headings, rows = self.rows()
        page.table(headings, rows, own=self.cases[0].name)
        add_charts(page, self.cases)
        return page.html(f"{self.name} · Tailguard robustness")


def add_charts(page: Page, cases: Sequence[Disturbed]) -> None:
    """The charts of the faults and of the attacks, as far as there are any."""
    limit = "" if cases[0].budget is None else " The dotted line is the limit of the risk budget."
    if any(not case.attack for case in cases[1:]):
        page.chart(
            fault_chart(cases),
            f"Growth, mean of the worst windows and changed positions under each feed; dashed: the clean feed.{limit}",
        )
    if any(case.attack for case in cases[1:]):
        page.chart(
            attack_chart(cases),
            f"The same against the size of an attack; random is noise of the same size as a control.{limit}",
        )


def budget_under(cases: Sequence[Disturbed]) -> str:
    """Under which disturbances the budget was kept, broken, or neither can be said."""
    verdicts: dict[str, list[str]] = {"kept": [], "undecided": [], "broken": []}
    for case in cases:
        if case.budget is not None:
            verdicts[str(case.budget.verdict)].append(case.name)
    words = {"kept": "kept: ", "undecided": "neither kept nor broken for certain: ", "broken": "BROKEN: "}
    return "; ".join(words[verdict] + ", ".join(names) for verdict, names in verdicts.items() if names)


def disturb_saved_run(
    folder: Path,
    data: Path | None,
    split: SplitPart | None,
    symbol: str | None,
    stress: Stress,
    asked: Disturbances,
    progress: Callable[[], AbstractContextManager[Callable[[str], None]]],
) -> RobustnessOfRun:
    """The run's agent, clean and under every disturbance, and the budget that it was trained with.

    Arguments as of `backtest_saved_run`; costs, delay and noise of `stress` are the same for all.
    """
    chosen = choose_bars(folder, data, split, symbol)
    market = scaled_costs(chosen.config.market, stress.costs)
    cases = feed_disturbances(asked.feeds, asked.feed_seed)
    if asked.attacks:
        kinds: list[Any] = list(asked.attacks)
        cases += attack_disturbances(
            chosen.agent, kinds, asked.epsilons or SWEEP, norm=asked.norm, steps=asked.steps, target=asked.target
        )
    with progress() as begin:
        begin(CLEAN)
        budget = own_budget(chosen.config)
        backtests = DisturbedBacktests(
            chosen.agent, chosen.bars, market, budget, delay=stress.delay, noise=stress.noise
        )
        found, notes = backtests.under_each(cases, begin)
    if notes and len(found) == 1:
        raise ConfigError(f"feed: {notes[0]}")
    capital = chosen.config.market.capital
    return RobustnessOfRun(folder.resolve().name, chosen.title, tuple(found), capital, chosen.seen, tuple(notes))
