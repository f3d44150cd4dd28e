"""A population as ask and tell: what to train next, and what came of it. Who trains, and where, is left open.

    pbt = PBT(SearchSpace.parse({"learning_rate": {"log": [1e-5, 1e-1]}}), PopulationSettings(members=8, rounds=20))
    while (trial := pbt.ask()) is not None:
        state = states[trial.parent].copy() if trial.round > 1 else fresh()
        …                                     # train with trial.hyper, keep the state for the next round
        pbt.tell(trial, score)

As in Optuna, `ask` gives a trial and `tell` its value. Unlike there, a trial goes on from the state of an earlier one.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path

from tailguard.errors import RunError
from tailguard.population.executor import Hyper
from tailguard.population.lineage import Lineage, Round
from tailguard.population.options import PopulationSettings
from tailguard.population.pbt import RoundDecision, Standing, decide, first_values, ranked
from tailguard.population.space import SearchSpace


@dataclass(frozen=True)
class MemberTrial:
    """A member's part in a round."""

    member: int
    round: int
    """Counted from 1."""
    hyper: Hyper
    parent: int
    """The member from whose state at the end of the round before it goes on; in round 1 there is none yet."""
    age: int
    """Rounds since it began or last took over a state, this one included."""

    @property
    def takes_over(self) -> bool:
        """Whether it goes on from another member's state."""
        return self.parent != self.member


def plan(lineage: Lineage) -> list[MemberTrial]:
    """The trials of the round after the last one of the lineage."""
    settings = lineage.settings
    if not lineage.rounds:
        values = first_values(settings, lineage.space)
        return [MemberTrial(member, 1, hyper, member, 1) for member, hyper in enumerate(values)]
    last = lineage.rounds[-1]
    if last.number >= settings.rounds:
        return []
    moves = {move.member: move for move in last.decision.moves}
    trials = []
    for each in last.standings:
        if each.member in last.decision.stopped:
            continue
        move = moves.get(each.member)
        if move is None:
            trials.append(MemberTrial(each.member, last.number + 1, each.hyper, each.member, each.age + 1))
        else:
            trials.append(MemberTrial(each.member, last.number + 1, move.hyper, move.parent, 1))
    return trials


class PBT:
    """The decisions of a population, from its first values to its last round.

    `lineage`: rounds that are finished already, to go on after them. `log`: file that every finished round is written
    to. A metric that is not a number, or the same for all members, raises `RunError`: selection would be by chance.
    """

    def __init__(
        self,
        space: SearchSpace,
        settings: PopulationSettings | None = None,
        *,
        lineage: Lineage | None = None,
        log: Path | None = None,
    ) -> None:
        self.lineage = Lineage(settings or PopulationSettings(), space) if lineage is None else lineage
        self.settings, self.space, self.log = self.lineage.settings, self.lineage.space, log
        self._begin()

    def _begin(self) -> None:
        self.trials = plan(self.lineage)
        """Of the round under way; none when all rounds are finished."""
        self._asked = 0
        self._scores: dict[int, float] = {}
        self._step = 0

    @property
    def finished(self) -> bool:
        """Whether no member trains any more."""
        return not self.trials

    @property
    def round(self) -> int:
        """The round under way, or the last one."""
        return self.trials[0].round if self.trials else self.settings.rounds

    def ask(self) -> MemberTrial | None:
        """The next trial; None when all are finished. Raises `RunError` while the round waits for its last scores."""
        if self.finished:
            return None
        if self._asked == len(self.trials):
            waiting = [str(each.member) for each in self.trials if each.member not in self._scores]
            raise RunError(
                f"round {self.round}: all its trials have been asked for; tell the scores of member "
                f"{', '.join(waiting)} first"
            )
        self._asked += 1
        return self.trials[self._asked - 1]

    def tell(self, trial: MemberTrial, score: float | None, *, step: int = 0) -> None:
        """The metric that the trial reached, higher is better; None: its training failed and left no state.

        `step`: environment steps of its state, for the record. After the last score of a round the next is planned.
        """
        if trial.round != self.round or trial.member in self._scores or trial not in self.trials:
            raise RunError(f"member {trial.member}, round {trial.round}: not a trial that waits for its score")
        if score is not None and (math.isnan(score) or math.isinf(score)):
            raise RunError(
                f"metric {self.settings.metric} of member {trial.member} in round {trial.round} is {score}; members "
                "cannot be compared by it. Check what it computes, or choose another metric"
            )
        self._scores[trial.member] = -math.inf if score is None else float(score)
        self._step = max(self._step, step)
        if len(self._scores) == len(self.trials):
            self._finish()

    def _finish(self) -> None:
        standings = tuple(
            Standing(each.member, dict(each.hyper), self._scores[each.member], each.age) for each in self.trials
        )
        number = self.round
        self._check_differ(standings)
        # After the last round nobody trains with what would be decided.
        last = number >= self.settings.rounds
        decision = RoundDecision() if last else decide(self.settings, self.space, number, standings)
        self.lineage = self.lineage.with_round(Round(number, self._step or number, standings, decision))
        if self.log is not None:
            self.lineage.write(self.log)
        self._begin()

    def _check_differ(self, standings: tuple[Standing, ...]) -> None:
        scores = {each.score for each in standings if not each.failed}
        if len(scores) == 1 and sum(not each.failed for each in standings) > 1:
            raise RunError(
                f"metric {self.settings.metric} is {scores.pop():g} for all members in round {self.round}"
                ": it does not tell them apart, and selection would be by chance. Choose another metric"
            )

    @property
    def best(self) -> list[Standing]:
        """The members of the last finished round, best first; those that stopped or failed are not among them."""
        rounds = self.lineage.rounds
        return [each for each in ranked(rounds[-1].standings) if not each.failed] if rounds else []
