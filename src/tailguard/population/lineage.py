"""The lineage: every judgement and every decision, one line of JSON a round, from which both can be replayed."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tailguard.errors import CheckpointError
from tailguard.places import read_plain, replace_synced
from tailguard.population.executor import Hyper
from tailguard.population.options import PopulationSettings
from tailguard.population.pbt import Move, RoundDecision, Standing, decide
from tailguard.population.space import SearchSpace

FAILED = "failed"
"""In place of the score of a member whose training failed: JSON has no infinity."""


@dataclass(frozen=True)
class Round:
    """A finished round."""

    number: int
    """Counted from 1."""
    step: int
    """Environment step of the members that trained."""
    standings: tuple[Standing, ...]
    decision: RoundDecision

    def to_dict(self) -> dict[str, Any]:
        """One line of the lineage."""
        return {
            "round": self.number,
            "step": self.step,
            "standings": [
                {
                    "member": each.member,
                    "score": FAILED if each.failed else each.score,
                    "age": each.age,
                    "hyper": dict(each.hyper),
                }
                for each in self.standings
            ],
            "moves": [
                {"member": move.member, "parent": move.parent, "reason": move.reason, "hyper": dict(move.hyper)}
                for move in self.decision.moves
            ],
            "stopped": list(self.decision.stopped),
        }

    @classmethod
    def from_dict(cls, line: Mapping[str, Any]) -> Round:
        """The round that `to_dict` wrote."""
        standings = tuple(
            Standing(
                each["member"],
                each["hyper"],
                float("-inf") if each["score"] == FAILED else float(each["score"]),
                each["age"],
            )
            for each in line["standings"]
        )
        moves = tuple(Move(each["member"], each["parent"], each["hyper"], each["reason"]) for each in line["moves"])
        return cls(line["round"], line["step"], standings, RoundDecision(moves, tuple(line["stopped"])))


@dataclass(frozen=True)
class Lineage:
    """A population's settings, its space and its finished rounds."""

    settings: PopulationSettings
    space: SearchSpace
    rounds: tuple[Round, ...] = ()

    def with_round(self, finished: Round) -> Lineage:
        """With one round more."""
        return Lineage(self.settings, self.space, (*self.rounds, finished))

    def lines(self) -> list[str]:
        """The file, line by line."""
        head = {"population": self.settings.to_dict(), "space": self.space.to_dict()}
        return [json.dumps(each) for each in (head, *(finished.to_dict() for finished in self.rounds))]

    def write(self, path: Path) -> None:
        """Replace the file; a kill leaves the one from before."""
        replace_synced(path, ("\n".join(self.lines()) + "\n").encode())

    def replay(self) -> None:
        """Make every decision again; raises `CheckpointError` where one differs from its record."""
        for finished in self.rounds:
            if finished.number >= self.settings.rounds:
                continue  # after the last round nothing is decided
            again = decide(self.settings, self.space, finished.number, finished.standings)
            if again != finished.decision:
                raise CheckpointError(
                    f"lineage: round {finished.number}: its recorded decision does not follow from its standings: "
                    f"{_short(finished.decision)} is recorded, and {_short(again)} follows"
                )

    def last_standings(self) -> dict[int, tuple[int, Standing]]:
        """The last round of every member, and how it ended it, by the member's number."""
        return {each.member: (finished.number, each) for finished in self.rounds for each in finished.standings}

    def values_of(self, member: int) -> list[tuple[int, Hyper]]:
        """(step, values): those that the member's state was trained with up to each step, along its ancestors."""
        found: list[tuple[int, Hyper]] = []
        for number in range(len(self.rounds) - 1, -1, -1):
            finished = self.rounds[number]
            standing = next((each for each in finished.standings if each.member == member), None)
            if standing is not None:  # else it had stopped by then
                found.append((finished.step, standing.hyper))
            before = self.rounds[number - 1].decision.moves if number else ()
            member = next((move.parent for move in before if move.member == member), member)
        return found[::-1]

    def ancestors(self, member: int) -> list[int]:
        """The member whose state it was at the end of each round, oldest first."""
        found = [member]
        for finished in reversed(self.rounds[:-1]):
            moves = finished.decision.moves
            found.append(next((move.parent for move in moves if move.member == found[-1]), found[-1]))
        return found[::-1]


def read_lineage(path: Path) -> Lineage:
    """The lineage in a file; a line that a kill cut off is left out."""
    lines: Sequence[bytes] = read_plain(path).splitlines(keepends=True)
    try:
        head = json.loads(lines[0])
        settings, space = PopulationSettings.from_dict(head["population"]), SearchSpace.parse(head["space"], str(path))
        rounds = tuple(Round.from_dict(json.loads(line)) for line in lines[1:] if line.endswith(b"\n"))
    except (ValueError, KeyError, TypeError, IndexError, RecursionError) as error:
        raise CheckpointError(f"{path}: not the lineage of a population: {error!r}") from error
    if [finished.number for finished in rounds] != list(range(1, len(rounds) + 1)):
        raise CheckpointError(f"{path}: its rounds are not 1, 2, 3, …; the file has been changed")
    return Lineage(settings, space, rounds)


def _short(decision: RoundDecision) -> str:
    moves = ", ".join(f"{move.member} ← {move.parent}" for move in decision.moves) or "no move"
    return f"{moves}{f', stop {list(decision.stopped)}' if decision.stopped else ''}"
