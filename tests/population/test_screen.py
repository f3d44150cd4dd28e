"""The live table of a population, and the lines where there is no terminal."""

from __future__ import annotations

import io
import math

from rich.console import Console

from tailguard.population.evolution import RoundReport
from tailguard.population.executor import JobOutcome
from tailguard.population.lineage import Lineage, Round
from tailguard.population.options import PopulationSettings
from tailguard.population.pbt import Move, RoundDecision, Standing
from tailguard.population.population_screen import shown_population
from tailguard.population.space import SearchSpace

SPACE = SearchSpace.parse({"pathwise.learning_rate": {"log": [1e-4, 1e-1]}})
RATES = (0.001, 0.002, 0.004)


def standings(scores: tuple[float, ...], ages: tuple[int, ...]) -> tuple[Standing, ...]:
    members = zip(RATES, scores, ages, strict=True)
    return tuple(
        Standing(member, {"pathwise.learning_rate": rate}, score, age)
        for member, (rate, score, age) in enumerate(members)
    )


FIRST = Round(
    1,
    1024,
    standings((0.5, -0.25, -math.inf), (1, 1, 1)),
    RoundDecision((Move(1, 0, {}, "exploit"), Move(2, 0, {}, "replace"))),
)
SECOND = Round(2, 2048, standings((0.125, 0.75, -math.inf), (2, 1, 1)), RoundDecision((Move(2, 1, {}, "replace"),)))
EMPTY = Lineage(PopulationSettings(members=3, rounds=9), SPACE)


def shown(terminal: bool, limit: float | None) -> list[str]:
    """What two rounds write to a terminal, or to a file."""
    screen = io.StringIO()
    console = Console(file=screen, force_terminal=terminal, width=110, color_system=None, _environ={"TERM": "xterm"})
    with shown_population(EMPTY, console, limit) as population:
        for number, tails in enumerate(((-0.01, -0.02, None), (-0.031, -0.045, None)), start=1):
            outcomes = [
                JobOutcome(member, 1024, 0.0, ({"eval/cvar": tail},) if tail is not None else ())
                for member, tail in enumerate(tails)
            ]
            lineage = Lineage(EMPTY.settings, SPACE, (FIRST, SECOND)[:number])
            population.show(RoundReport(number, outcomes, lineage))
    return screen.getvalue().splitlines()


def cells(line: str) -> list[str]:
    return [cell.strip() for cell in line.strip("│┃ ").replace("┃", "│").split("│")]


def test_a_terminal_shows_step_score_tail_beside_the_limit_origin_and_values() -> None:
    lines = shown(True, -0.04)
    assert any("the first round is under way" in line for line in lines)
    titles = [line.split("round ")[1].strip() for line in lines if "round " in line and " of 9" in line]
    assert titles[0] == "0 of 9 · 3 members · pbt"
    assert titles[-1] == "2 of 9 · step 2,048 · 3 members · pbt"
    headings = [cells(line) for line in lines if "from" in line][-1]
    assert headings == ["member", "score on validation", "CVaR, limit −4.0 %", "from", "rounds", "learning_rate"]
    rows = [cells(line) for line in lines if line.startswith("│")][-3:]
    assert rows == [
        ["1", "+0.750", "−4.5 %", "0", "1", "0.002"],
        ["0", "+0.125", "−3.1 %", "–", "2", "0.001"],
        ["2", "failed", "–", "0, restarted", "1", "0.004"],
    ]


def test_without_a_budget_there_is_no_column_for_its_tail() -> None:
    headings = [cells(line) for line in shown(True, None) if "from" in line][-1]
    assert headings == ["member", "score on validation", "from", "rounds", "learning_rate"]


def test_without_a_terminal_a_round_is_a_line() -> None:
    assert shown(False, -0.04) == [
        "round    1 of 9 · best +0.500 (member 0) · median -0.250 · 2 take over another's state · 1 failed",
        "round    2 of 9 · best +0.750 (member 1) · median +0.125 · 1 take over another's state · 1 failed",
    ]
