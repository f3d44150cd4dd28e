"""Ask and tell, the record of what came of it, its replay, and metrics that cannot be used."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest

from tailguard.errors import CheckpointError, RunError
from tailguard.population import PBT, PopulationSettings, SearchSpace, read_lineage

SPACE = SearchSpace.parse({"rate": {"log": [1e-3, 1.0]}})
SETTINGS = PopulationSettings(members=4, rounds=6, fraction=0.5, seed=1)


def play(pbt: PBT, rounds: int = 99) -> PBT:
    """Members whose score is their rate, and a little of their number."""
    while pbt.round <= rounds and (trial := pbt.ask()) is not None:
        pbt.tell(trial, float(trial.hyper["rate"]) + 1e-6 * trial.member, step=10 * trial.round)
    return pbt


def test_every_round_asks_for_every_member_and_ends_with_the_best_first() -> None:
    pbt = play(PBT(SPACE, SETTINGS))
    assert pbt.finished
    assert pbt.ask() is None
    assert [(each.number, each.step) for each in pbt.lineage.rounds] == [(n, 10 * n) for n in range(1, 7)]
    assert pbt.lineage.rounds[-1].decision.moves == ()
    assert [each.score for each in pbt.best] == sorted((each.score for each in pbt.best), reverse=True)
    first = max(float(each.hyper["rate"]) for each in pbt.lineage.rounds[0].standings)
    assert float(pbt.best[0].hyper["rate"]) > first


def test_asking_for_more_than_a_round_waits_for_its_scores() -> None:
    pbt = PBT(SPACE, SETTINGS)
    trials = [pbt.ask() for _ in range(4)]
    assert trials[1] is not None
    pbt.tell(trials[1], 1.0)
    with pytest.raises(RunError, match="member 0, 2, 3"):
        pbt.ask()
    with pytest.raises(RunError, match="not a trial that waits"):
        pbt.tell(trials[1], 1.0)


@pytest.mark.parametrize("interrupted", [1, 3, 5])
def test_a_population_goes_on_from_its_record_as_if_nothing_had_happened(tmp_path: Path, interrupted: int) -> None:
    whole, path = play(PBT(SPACE, SETTINGS)), tmp_path / "lineage.jsonl"
    play(PBT(SPACE, SETTINGS, log=path), interrupted)
    with path.open("ab") as file:
        file.write(b'{"round": 99, "st')  # what a kill leaves of a line
    resumed = play(PBT(SPACE, lineage=read_lineage(path), log=path))
    assert resumed.lineage == whole.lineage
    assert read_lineage(path) == whole.lineage
    read_lineage(path).replay()


def test_a_changed_record_does_not_replay(tmp_path: Path) -> None:
    lineage = play(PBT(SPACE, SETTINGS)).lineage
    finished = lineage.rounds[1]
    standings = tuple(dataclasses.replace(each, score=-each.score) for each in finished.standings)
    changed = dataclasses.replace(
        lineage, rounds=(lineage.rounds[0], dataclasses.replace(finished, standings=standings), *lineage.rounds[2:])
    )
    with pytest.raises(CheckpointError, match="round 2: its recorded decision does not follow"):
        changed.replay()
    path = tmp_path / "lineage.jsonl"
    path.write_text("\n".join([*lineage.lines()[:2], lineage.lines()[3]]) + "\n")
    with pytest.raises(CheckpointError, match="not 1, 2, 3"):
        read_lineage(path)


def test_the_values_of_a_member_follow_its_ancestors() -> None:
    pbt = play(PBT(SPACE, SETTINGS))
    winner = pbt.best[0].member
    values, line = pbt.lineage.values_of(winner), pbt.lineage.ancestors(winner)
    assert [step for step, _ in values] == [10, 20, 30, 40, 50, 60]
    for number, (member, (_, hyper)) in enumerate(zip(line, values, strict=True)):
        standing = next(each for each in pbt.lineage.rounds[number].standings if each.member == member)
        assert standing.hyper == hyper
    assert len(set(line)) > 1


@pytest.mark.parametrize("score", [float("nan"), float("inf")])
def test_a_score_that_is_not_a_number_is_an_error(score: float) -> None:
    pbt = PBT(SPACE, SETTINGS)
    trial = pbt.ask()
    assert trial is not None
    with pytest.raises(RunError, match=r"metric score of member 0 in round 1 is (nan|inf)"):
        pbt.tell(trial, score)


def test_a_constant_metric_is_an_error() -> None:
    pbt = PBT(SPACE, SETTINGS)
    for trial in pbt.trials[:3]:
        pbt.tell(trial, 0.25)
    with pytest.raises(RunError, match=r"is 0\.25 for all members in round 1: it does not tell them apart"):
        pbt.tell(pbt.trials[3], 0.25)


def test_a_trial_without_a_state_is_replaced() -> None:
    pbt = PBT(SPACE, SETTINGS)
    for score in (1.0, None, 3.0, 2.0):
        trial = pbt.ask()
        assert trial is not None
        pbt.tell(trial, score)
    assert pbt.trials[1].takes_over
    assert pbt.trials[1].parent in (2, 3)
