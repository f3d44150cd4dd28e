"""Decisions of population based training, as pure functions of the standings (Jaderberg et al. 2017).

A round's decision depends on the settings, the seed, the number of the round and the standings, and on nothing else:
it can be replayed from its record. Several frequencies at once follow Doulazmi et al. 2025 (MF-PBT, arXiv 2506.03225).
Random search and successive halving (Jamieson & Talwalkar 2016) are the controls that a population must beat.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from tailguard.errors import RunError
from tailguard.population.executor import Hyper
from tailguard.population.options import PopulationSettings
from tailguard.population.space import SearchSpace

SMALLEST_GROUP = 4
"""Members of a group of one frequency: the worst quarter exploits, the third one takes members from outside."""
FIRST_VALUES = 2**31
"""Number of the random stream of the first values; rounds are counted from 1."""


@dataclass(frozen=True)
class Standing:
    """A member when a round ends."""

    member: int
    hyper: Hyper
    score: float
    """−inf where its training failed."""
    age: int
    """Rounds since it began or last took over a state."""

    @property
    def failed(self) -> bool:
        return self.score == -math.inf


@dataclass(frozen=True)
class Move:
    """A member goes on from another's state, with other values."""

    member: int
    parent: int
    hyper: Hyper
    reason: str
    """exploit: a better member's state and its values, explored; migrate: those of a member of another frequency;
    replace: training had failed."""


@dataclass(frozen=True)
class RoundDecision:
    """What changes after a round; members that are not named go on as they are."""

    moves: tuple[Move, ...] = ()
    stopped: tuple[int, ...] = ()
    """Members that train no further."""


def first_values(settings: PopulationSettings, space: SearchSpace) -> list[dict[str, float | int | str | bool]]:
    """The values that each member begins with."""
    return [
        space.first(np.random.default_rng([settings.seed, FIRST_VALUES, member])) for member in range(settings.members)
    ]


def decide(
    settings: PopulationSettings, space: SearchSpace, number: int, standings: Sequence[Standing]
) -> RoundDecision:
    """The decision after round `number`, counted from 1, on the members that still train."""
    if all(each.failed for each in standings):
        raise RunError(
            f"round {number}: the training of every member failed with numbers that are not finite. Narrow the search "
            "space, above all learning rates and clips"
        )
    random = np.random.default_rng([settings.seed, number])
    if settings.strategy == "random":
        return RoundDecision(stopped=tuple(each.member for each in standings if each.failed))
    if settings.strategy == "halving":
        return RoundDecision(stopped=halve(settings, number, standings))
    if settings.strategy == "mf_pbt" and len(settings.frequencies_used) > 1:
        return RoundDecision(_several_frequencies(settings, space, number, standings, random))
    return RoundDecision(_evolve(settings, space, standings, random))


def ranked(standings: Sequence[Standing]) -> list[Standing]:
    """Best first; of equal ones the lower number."""
    return sorted(standings, key=lambda each: (-each.score, each.member))


# --- selection --------------------------------------------------------------------------------------------------------


def truncation(
    standings: Sequence[Standing], fraction: float, random: np.random.Generator
) -> list[tuple[Standing, Standing]]:
    """(exploiter, parent): each of the worst share goes on from one of the best share, drawn uniformly."""
    order = ranked(standings)
    count = min(max(1, int(fraction * len(order))), len(order) // 2)
    best = order[:count]
    return [(worse, best[int(random.integers(count))]) for worse in order[len(order) - count :]] if count else []


def tournament(standings: Sequence[Standing], random: np.random.Generator) -> list[tuple[Standing, Standing]]:
    """(exploiter, parent): each member meets one other, drawn uniformly, and goes on from it if that one is better."""
    pairs = []
    for place, each in enumerate(standings):
        if len(standings) < 2:
            break
        other = int(random.integers(len(standings) - 1))
        opponent = standings[other + (other >= place)]
        if opponent.score > each.score:
            pairs.append((each, opponent))
    return pairs


def halve(settings: PopulationSettings, number: int, standings: Sequence[Standing]) -> tuple[int, ...]:
    """Members to stop after this round: all but the best 1/η, at rounds 1·r, η·r, η²·r, … of r = `ready`."""
    power, last = settings.ready, max(settings.rounds, 1)
    rungs = []
    while power < last:
        rungs.append(power)
        power *= settings.eta
    failed = tuple(each.member for each in standings if each.failed)
    if number not in rungs:
        return failed
    keep = math.ceil(len(standings) / settings.eta)
    return tuple(sorted({*failed, *(each.member for each in ranked(standings)[keep:])}))


# --- exploration ------------------------------------------------------------------------------------------------------


def explored(
    settings: PopulationSettings, space: SearchSpace, hyper: Hyper, random: np.random.Generator
) -> dict[str, float | int | str | bool]:
    """The values that a member which takes over a state goes on with."""
    if settings.explore == "resample":
        return space.resample(hyper, settings.resample, random)
    share = settings.resample if settings.explore == "both" else 0.0
    return space.perturb(hyper, settings.factors, share, random)


def _evolve(
    settings: PopulationSettings,
    space: SearchSpace,
    standings: Sequence[Standing],
    random: np.random.Generator,
    elsewhere: Sequence[Standing] = (),
) -> tuple[Move, ...]:
    """One selection with exploration; members that are not ready wait, and failed ones are replaced at once.

    `elsewhere`: where a replacement comes from if all of these have failed.
    """
    alive = [each for each in standings if not each.failed]
    by_choice = truncation(standings, settings.fraction, random)
    pairs = by_choice if settings.selection == "truncation" else tournament(standings, random)
    moves = {
        worse.member: Move(worse.member, better.member, explored(settings, space, better.hyper, random), "exploit")
        for worse, better in pairs
        if worse.age >= settings.ready and not worse.failed and better.score > worse.score
    }
    return (*moves.values(), *_replacements(settings, space, standings, alive or elsewhere, random))


def _replacements(
    settings: PopulationSettings,
    space: SearchSpace,
    standings: Sequence[Standing],
    alive: Sequence[Standing],
    random: np.random.Generator,
) -> list[Move]:
    """New states for members whose training failed: from the best half of those that live."""
    best = ranked([each for each in alive if not each.failed])
    best = best[: max(1, len(best) // 2)]
    moves = []
    for each in standings:
        if each.failed:
            parent = best[int(random.integers(len(best)))]
            values = explored(settings, space, parent.hyper, random)
            moves.append(Move(each.member, parent.member, values, "replace"))
    return moves


# --- several frequencies ----------------------------------------------------------------------------------------------


def group_of(member: int, members: int, groups: int) -> int:
    """The group of a member: equal parts of the members in the order of their numbers."""
    return member * groups // members


def _several_frequencies(
    settings: PopulationSettings,
    space: SearchSpace,
    number: int,
    standings: Sequence[Standing],
    random: np.random.Generator,
) -> tuple[Move, ...]:
    """Groups that evolve every δ-th round, with a migration that keeps greedy values out of the slow ones.

    In a group that evolves, the worst quarter exploits the best one. A member of the third quarter is replaced by the
    best member outside that is better. From a slower group it brings its values. From a faster group it brings its
    state alone, and goes on with the values of the best member here: values that win in the short run must not spread
    to where the long run is judged.
    """
    frequencies = settings.frequencies_used
    groups: list[list[Standing]] = [[] for _ in frequencies]
    for each in standings:
        groups[group_of(each.member, settings.members, len(groups))].append(each)
    moves: list[Move] = []
    for place, (group, frequency) in enumerate(zip(groups, frequencies, strict=True)):
        outside = [each for other, members in enumerate(groups) if other != place for each in members]
        alive = [each for each in group if not each.failed]
        if number % frequency:
            moves += _replacements(settings, space, group, alive or outside, random)
            continue
        own = _evolve(settings, space, group, random, outside)
        moves += own
        taken = {move.member for move in own}
        order, share = ranked(group), max(1, len(group) // 4)
        third = [each for each in order[-2 * share : -share] if each.member not in taken and each.age >= settings.ready]
        candidates = [each for each in ranked(outside) if not each.failed]
        for each in third:
            if not candidates or candidates[0].score <= each.score:
                break
            migrant = candidates.pop(0)
            slower = frequencies[group_of(migrant.member, settings.members, len(groups))] > frequency
            hyper = migrant.hyper if slower else order[0].hyper
            moves.append(Move(each.member, migrant.member, dict(hyper), "migrate"))
    return tuple(moves)
