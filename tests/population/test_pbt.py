"""Decisions: who exploits whom, with which values, and when."""

from __future__ import annotations

import math
from collections import Counter
from typing import Any

import numpy as np
import pytest

from tailguard.errors import ConfigError, RunError
from tailguard.population.options import PopulationSettings
from tailguard.population.pbt import RoundDecision, Standing, decide, first_values, group_of, tournament, truncation
from tailguard.population.space import SearchSpace

SPACE = SearchSpace.parse({"a": {"log": [1e-3, 1e3]}, "b": {"log": [1e-3, 1e3]}})


def standings(scores: list[float], age: int = 1) -> list[Standing]:
    return [Standing(member, {"a": 1.0 + member, "b": 2.0}, score, age) for member, score in enumerate(scores)]


def decided(scores: list[float], number: int = 1, age: int = 1, **settings: Any) -> RoundDecision:
    given = PopulationSettings(members=len(scores), **({"strategy": "pbt", "explore": "perturb"} | settings))
    return decide(given, SPACE, number, standings(scores, age))


def test_the_worst_quarter_exploits_the_best_quarter() -> None:
    parents: Counter[int] = Counter()
    for number in range(1, 401):
        decision = decided([3, 1, 8, 2, 7, 4, 5, 6], number)
        assert [move.member for move in decision.moves] == [3, 1]
        parents.update(move.parent for move in decision.moves)
    assert set(parents) == {2, 4}
    assert parents[2] / 800 == pytest.approx(0.5, abs=0.06)


def test_only_exploiters_explore_and_by_the_factors_alone() -> None:
    seen = set()
    for number in range(1, 100):
        for move in decided([1, 2, 3, 4], number).moves:
            parent = standings([0] * 4)[move.parent].hyper
            seen |= {(name, round(float(value) / float(parent[name]), 12)) for name, value in move.hyper.items()}
    assert seen == {("a", 0.8), ("a", 1.25), ("b", 0.8), ("b", 1.25)}


def test_resampling_changes_the_share_of_values_that_it_should() -> None:
    kept = [
        move.hyper["b"] == 2.0
        for number in range(1, 1001)
        for move in decided([1, 2, 3, 4], number, explore="resample", resample=0.3).moves
    ]
    assert np.mean(kept) == pytest.approx(0.7, abs=0.05)
    both = [
        round(float(move.hyper["b"]) / 2, 9) in (0.8, 1.25)
        for number in range(1, 1001)
        for move in decided([1, 2, 3, 4], number, explore="both", resample=0.3).moves
    ]
    assert np.mean(both) == pytest.approx(0.7, abs=0.05)


def test_a_tournament_is_lost_with_the_share_of_better_opponents() -> None:
    random, lost, count = np.random.default_rng(0), Counter[int](), 3000
    for _ in range(count):
        pairs = tournament(standings([1, 2, 3, 4]), random)
        assert all(winner.score > loser.score for loser, winner in pairs)
        lost.update(loser.member for loser, _ in pairs)
    shares = [lost[member] / count for member in range(4)]
    assert shares == pytest.approx([1, 2 / 3, 1 / 3, 0], abs=0.03)


def test_a_member_is_not_ready_before_its_rounds_are_over() -> None:
    assert decided([1, 2, 3, 4], age=1, ready=2).moves == ()
    assert len(decided([1, 2, 3, 4], age=2, ready=2).moves) == 1


def test_equal_ones_do_not_exploit_each_other() -> None:
    assert decided([1, 1, 1, 1]).moves == ()
    assert truncation(standings([5.0]), 0.25, np.random.default_rng(0)) == []


def test_decisions_depend_on_seed_and_round_and_on_nothing_else() -> None:
    scores = [3.0, 1, 8, 2, 7, 4, 5, 6]
    assert decided(scores, 3) == decided(scores, 3)
    assert decided(scores, 3) != decided(scores, 4)
    assert decided(scores, 3, seed=1) != decided(scores, 3)
    first = first_values(PopulationSettings(members=3), SPACE)
    # A larger population begins with the same members.
    assert first_values(PopulationSettings(members=5), SPACE)[:3] == first


def test_a_failed_member_is_replaced_at_once_and_nobody_exploits_it() -> None:
    decision = decided([1, -math.inf, 3, 4], ready=5)
    assert [(move.member, move.reason) for move in decision.moves] == [(1, "replace")]
    assert decision.moves[0].parent in (2, 3)
    assert decided([1, -math.inf], strategy="random").stopped == (1,)
    with pytest.raises(RunError, match="every member failed"):
        decided([-math.inf, -math.inf])


def test_halving_keeps_a_third_at_powers_of_three() -> None:
    settings = PopulationSettings(members=9, rounds=20, strategy="halving")
    alive = standings([float(member) for member in range(9)])
    left = []
    for number in range(1, 21):
        stopped = decide(settings, SPACE, number, alive).stopped
        alive = [each for each in alive if each.member not in stopped]
        left.append([each.member for each in alive])
    assert left[0] == [6, 7, 8]
    assert left[1] == [6, 7, 8]
    assert left[2] == [8]
    assert left[19] == [8]


def test_random_search_changes_nobody() -> None:
    assert decided([1, 2, 3, 4], strategy="random") == RoundDecision()


def test_groups_evolve_at_their_own_frequencies() -> None:
    scores = [float(member % 4) for member in range(8)]
    assert [group_of(member, 8, 2) for member in range(8)] == [0] * 4 + [1] * 4
    for number in range(1, 9):
        own = {move.member for move in decided(scores, number, strategy="mf_pbt").moves if move.reason == "exploit"}
        assert own == ({0, 4} if number % 4 == 0 else {0})


def test_migrants_from_a_slow_group_bring_their_values_and_those_from_a_fast_one_do_not() -> None:
    from_slow = decided([0, 1, 2, 3, 14, 15, 16, 17], 1, strategy="mf_pbt").moves
    migration = next(move for move in from_slow if move.reason == "migrate")
    assert (migration.member, migration.parent, migration.hyper["a"]) == (1, 7, 8.0)
    from_fast = decided([14, 15, 16, 17, 0, 1, 2, 3], 4, strategy="mf_pbt").moves
    migration = next(move for move in from_fast if move.reason == "migrate" and move.member >= 4)
    # The state of member 3, with the values of member 7, the best of the slow group.
    assert (migration.member, migration.parent, migration.hyper["a"]) == (5, 3, 8.0)


def test_no_worse_migrant_is_taken() -> None:
    moves = decided([10, 11, 12, 13, 0, 1, 2, 3], 1, strategy="mf_pbt").moves
    assert [move.reason for move in moves] == ["exploit"]


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"strategy": "genetic"}, "population.strategy: 'genetic'"),
        ({"fraction": 0.6}, "population.fraction: 0.6"),
        ({"members": 6, "strategy": "mf_pbt"}, "Raise members to 8"),
        ({"frequencies": (1, 4)}, "only strategy mf_pbt"),
        ({"factors": ()}, "population.factors: none given"),
        ({"factors": (0.8, 0.0)}, "population.factors"),
        ({"eta": 1}, "population.eta"),
    ],
)
def test_settings_out_of_range_are_refused(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        PopulationSettings(**settings)
    assert message in str(caught.value)
